"""The command line. ``main`` is the program ``fastensor``; ``fastensor --help`` lists its commands."""

from fastensor.cli.main import main

__all__ = ["main"]
