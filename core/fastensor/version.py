"""The version of Fastensor."""

VERSION = "0.1.0"
