"""Errors of the operating system as errors of Fastensor, which say what failed, why, and what is at the path now.

A :class:`FastensorError` passes as it is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fastensor.errors import (
    CheckpointReadError,
    CheckpointWriteError,
    CorruptCheckpointError,
    FastensorError,
    caught_as,
)
from fastensor.files import posix
from fastensor.files.words import human_size

_KEPT = "what was there before is kept"
_NOTHING = "nothing was there before, and nothing is left"
PERHAPS_KEPT = "what was there before, if anything, is kept"


def kept_at(path: str) -> str:
    """Words that say what is at a path after a save that failed and changed nothing there."""
    if "://" in path:  # a store is not asked once more after a failure
        return PERHAPS_KEPT
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _NOTHING
    except OSError:
        return PERHAPS_KEPT
    return _KEPT


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
    message = f"{what} ({error.strerror or error}{_room(error, path)})" + (f"; {outcome}" if outcome else "")
    return caught_as(CheckpointWriteError(error.errno or errno.EIO, message, path), type(error))


def _room(error: OSError, path: str) -> str:
    """Words for the free space of a full disk; empty for other errors."""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):  # such as that there is no such folder any more
            found = os.statvfs(os.path.dirname(path) or ".")
            return f"; {human_size(found.f_bavail * found.f_frsize)} are free"
    return ""


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


@contextmanager
def refusals_as_os_errors() -> Iterator[None]:
    """Raise every error of a remote filesystem as ``OSError`` with an ``errno``: libraries raise what they like."""
    try:
        yield
    except (OSError, FastensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, FileNotFoundError):
            code = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
            raise OSError(code, str(error)) from error
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
