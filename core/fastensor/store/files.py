"""The files of a store, opened and removed."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from fastensor.backends import posix
from fastensor.errors import CheckpointReadError, CheckpointWriteError, CorruptCheckpointError, FastensorError
from fastensor.store.ref import Format

_TOKEN_NBYTES = 16


def new_name(container: Format) -> str:
    """A name that no other file has, whoever makes it."""
    return f"{secrets.token_hex(_TOKEN_NBYTES)}.{container}"


class StoredFile:
    """A regular file, open for reading. To be left by ``with``."""

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


def read_exactly(fd: int, offset: int, nbytes: int) -> bytes:
    """These bytes of a file, which it must have.

    Raises:
        fastensor.backends.posix.EndOfFile: it ends before.
    """
    data = bytearray(nbytes)
    if posix.read_fully(fd, memoryview(data), offset) != nbytes:
        raise posix.EndOfFile(f"the file ends before offset {offset + nbytes}")
    return bytes(data)


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Leave no file of that name if the block raises; errors of the operating system as ours."""
    try:
        with _removed_unless_whole(path):
            yield
    except FastensorError:
        raise
    except OSError as error:
        raise CheckpointWriteError(
            error.errno, f"cannot store a tensor ({error.strerror}); nothing of it is left", path
        ) from error


@contextmanager
def _removed_unless_whole(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is not there yet
            os.unlink(path)
        raise


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Errors of the operating system as ours."""
    try:
        yield
    except FastensorError:
        raise
    except FileNotFoundError as error:
        raise _missing(path) from error
    except posix.EndOfFile as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}; it was cut off") from error
    except OSError as error:
        raise CheckpointReadError(error.errno, f"cannot read a stored tensor ({error.strerror})", path) from error


def remove(path: str) -> None:
    """Remove a file of the store.

    Raises:
        FileNotFoundError: there is none.
        CheckpointWriteError: the filesystem refused.
    """
    try:
        os.unlink(path)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        raise CheckpointWriteError(error.errno, f"cannot delete a stored tensor ({error.strerror})", path) from error


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, "no such tensor: it has been deleted, or the ref is one of a store in another directory", path
    )
