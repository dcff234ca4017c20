"""The command line: ``fastensor verify``, ``inspect``, ``convert``, ``dictionary`` and ``doctor``."""

from fastensor.cli.main import main

__all__ = ["main"]
