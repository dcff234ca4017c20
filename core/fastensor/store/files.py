"""The files of a store, opened and removed."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from fastensor.errors import CorruptCheckpointError
from fastensor.files import posix
from fastensor.files.os_errors import read_errors, write_error, write_errors
from fastensor.store.ref import Format

_TOKEN_NBYTES = 16


def new_name(container: Format) -> str:
    """A random name, which no other process or machine gives to a file."""
    return f"{secrets.token_hex(_TOKEN_NBYTES)}.{container}"


class StoredFile:
    """A regular file of a store, open for reading. Use it in ``with``, which closes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpointError(f"{path}: not a regular file, so no store has made it")
            self.nbytes = status.st_size
        except BaseException:
            posix.close_read_only(self.fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        posix.close_read_only(self.fd)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Leave no file of that name if the block raises.

    Raises:
        CheckpointWriteError: the block raised an ``OSError``.
    """
    with write_errors(path, "cannot store a tensor", "nothing of it is left"):
        try:
            yield
        except BaseException:
            with suppress(OSError):  # the file does not exist yet
                os.unlink(path)
            raise


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise errors of the operating system as ours.

    Raises:
        FileNotFoundError: the store has no such tensor.
        CorruptCheckpointError: the file was cut off.
        CheckpointReadError: the block raised another ``OSError``.
    """
    try:
        with read_errors(path, "cannot read a stored tensor"):
            yield
    except FileNotFoundError as error:
        raise _missing(path) from error


def remove(path: str) -> None:
    """Remove a file of the store.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointWriteError: the filesystem refused.
    """
    try:
        os.unlink(path)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        raise write_error(error, path, "cannot delete a stored tensor") from error


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, "no such tensor: it has been deleted, or the ref is one of a store in another directory", path
    )
