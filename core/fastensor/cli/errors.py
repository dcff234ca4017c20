"""Errors in the words of the command line: flags, where the messages of the library name arguments of Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress

from fastensor.cli.output import FAILED, USAGE, print_json, printable
from fastensor.errors import UnknownBackendError

_FLAGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"metadata and checksums=False": "--metadata and --no-checksums",
    r"dtype and rename\b": "--dtype and --rename",
    r"\bmemory_nbytes\b": "--memory",
    r"\bshard_nbytes\b": "--shard-size",
    r"\b(copy_ties|drop)=True": lambda match: f"--{match[1].replace('_', '-')}",
    r"\bchecksums=False": "--no-checksums",
    r"\bverify=False": "--no-verify of fastensor convert",
    r"\bcache_bytes\b": "--cache",
    r"\bworkers(?= is )": "--workers",
    r"\bengine='(\w+)'": lambda match: f"--engine {match[1]}",
    r"\broot=(?=')": "--root ",
    r"\bwith root: ": "with --root, and leave the rest out with --drop: ",
    r"\bwith root\b": "with --root",
    r"fastensor\.load\(\.\.\., keys=\.\.\.\) still gives": "in Python, fastensor.load(..., keys=...) still gives",
}
"""Words for what messages say, by patterns. Later patterns see what earlier ones have left."""


def in_flags(message: str) -> str:
    """A message of the library for those who type flags.

    >>> in_flags("pass copy_ties=True to write each; or choose one with root: 'model'")
    "pass --copy-ties to write each; or choose one with --root, and leave the rest out with --drop: 'model'"
    """
    for pattern, flag in _FLAGS.items():
        message = re.sub(pattern, flag, message)
    return message


def status_of(error: Exception) -> int:
    """The exit status for an error that ends a command.

    ``ValueError`` itself is about an argument. Its subclasses, such as those of JSON, are about what a file holds.
    """
    return USAGE if isinstance(error, UnknownBackendError) or type(error) is ValueError else FAILED


def print_error(message: str, *, json: bool = False) -> None:
    """Print a message of the library to standard error; and for programs that want JSON, that to standard output."""
    message = in_flags(message)
    lines = map(printable, message.split("\n"))  # names of files may hold what a terminal would act on
    print("fastensor: " + "\n".join(lines), file=sys.stderr)
    if json:
        with suppress(OSError):  # the message may be that standard output cannot be written
            print_json({"error": message})
