"""The command line: ``fastensor verify``, ``inspect``, ``convert`` and ``dictionary``."""

from fastensor.cli.main import main

__all__ = ["main"]
