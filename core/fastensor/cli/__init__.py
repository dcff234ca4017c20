"""The command line: ``fastensor verify``, ``inspect`` and ``convert``."""

from fastensor.cli.main import main

__all__ = ["main"]
