"""The command line: ``main`` is the program ``fastensor``. ``commands/`` declares arguments and imports nothing heavy;
a module for each command, such as ``convert.py``, does the work; ``checkup/`` is for ``fastensor doctor``."""

from fastensor.cli.main import main

__all__ = ["main"]
