"""Errors in the words of the command line: flags, where the messages of the library name arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from fastensor.errors import FastensorError

_FLAGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"metadata and checksums=False": "--metadata and --no-checksums",
    r"dtype and rename\b": "--dtype and --rename",
    r"\bmemory_nbytes\b": "--memory",
    r"\bshard_nbytes\b": "--shard-size",
    r"\b(copy_ties|drop)=True": lambda match: f"--{match[1].replace('_', '-')}",
    r"\bchecksums=False": "--no-checksums",
    r"\bverify=False": "--no-verify of fastensor convert",
    r"\broot=(?=')": "--root ",
    r"\bwith root: ": "with --root: ",
    r"\bwith root\b": "with --root",
    r"fastensor\.load\(\.\.\., keys=\.\.\.\) still gives": "in Python, fastensor.load(..., keys=...) still gives",
}
"""Words for what messages say, by patterns. Later patterns see what earlier ones have left."""


def in_flags(message: str) -> str:
    """A message of the library for those who type flags.

    >>> in_flags("pass copy_ties=True to write each; or choose one with root: 'model'")
    "pass --copy-ties to write each; or choose one with --root: 'model'"
    """
    for pattern, flag in _FLAGS.items():
        message = re.sub(pattern, flag, message)
    return message


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Show what the library says about its arguments as it is shown for the arguments of a command."""
    try:
        yield
    except FastensorError:
        raise
    except ValueError as error:
        raise typer.BadParameter(in_flags(str(error))) from error
