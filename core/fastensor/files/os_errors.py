"""Errors of the operating system as errors of Fastensor, which say what failed, why, and what is at the path now.

A :class:`FastensorError` passes as it is.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastensor.errors import (
    CheckpointReadError,
    CheckpointWriteError,
    CorruptCheckpointError,
    FastensorError,
    caught_as,
)
from fastensor.files import posix


@contextmanager
def write_errors(path: str, what: str, outcome: Callable[[], str] | str = "") -> Iterator[None]:
    """Raise every ``OSError`` of the block as the error that :func:`write_error` makes of it.

    Args:
        path: what is written.
        what: what has failed if the block fails, such as ``"the save failed"``.
        outcome: what is at the path after the failure. A function is called when the block has failed.
    """
    try:
        yield
    except FastensorError:
        raise
    except OSError as error:
        raise write_error(error, path, what, outcome if isinstance(outcome, str) else outcome()) from error


def write_error(error: OSError, path: str, what: str, outcome: str = "") -> CheckpointWriteError:
    """The error for a file that cannot be written. It keeps ``errno``, and its ``filename`` is the path. Like that of
    :func:`read_error`, it is of the type of ``error``, too (``PermissionError``, say)."""
    message = f"{what} ({error.strerror or error})" + (f"; {outcome}" if outcome else "")
    return caught_as(CheckpointWriteError(error.errno or errno.EIO, message, path), type(error))


@contextmanager
def read_errors(path: str, what: str = "cannot read the checkpoint") -> Iterator[None]:
    """Raise every ``OSError`` of the block as the error that :func:`read_error` makes of it, except
    ``FileNotFoundError``."""
    try:
        yield
    except (FastensorError, FileNotFoundError):
        raise
    except OSError as error:
        raise read_error(error, path, what) from error


def read_error(
    error: OSError, path: str, what: str = "cannot read the checkpoint"
) -> CorruptCheckpointError | CheckpointReadError:
    """The error for a file that cannot be read: the file was cut off, or ``what`` failed."""
    if isinstance(error, posix.EndOfFile):
        return CorruptCheckpointError(f"{path}: {error.strerror}; it was cut off")
    message = f"{what} ({error.strerror or error})"
    return caught_as(CheckpointReadError(error.errno or errno.EIO, message, path), type(error))
