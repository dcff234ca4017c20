"""The files of a store: created whole or not at all, and opened."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self

from fastensor.backends import posix
from fastensor.errors import CheckpointReadError, CheckpointWriteError, CorruptCheckpointError, FastensorError
from fastensor.store.ref import Format

LEFTOVER_SECONDS = 3600.0
"""What was written to since then may be of another machine, whose locks are not seen on every filesystem."""
_TOKEN_NBYTES = 16
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""How filesystems, and kernels, say that they do not have them."""


def new_name(container: Format) -> str:
    """A name that no other file has, whoever makes it."""
    return f"{secrets.token_hex(_TOKEN_NBYTES)}.{container}"


class NewFile:
    """An empty file that nobody sees before it is published. Leaving the block without that leaves nothing behind.

    It has no name until then, so nothing is left either if the process is killed; where the filesystem does not have
    such files, it is a hidden one, which is locked, so that another process knows it for a leftover.

    Raises:
        OSError: the directory does not let files be created.
    """

    def __init__(self, directory: str) -> None:
        self._names: list[str] = []
        """By which it may be found."""
        try:
            self.fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
            _remove_leftovers(directory)
            self._names.append(os.path.join(directory, f".{secrets.token_hex(_TOKEN_NBYTES)}{posix.TEMPORARY_SUFFIX}"))
            self.fd = os.open(self._names[0], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._lock()
        self._published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        kept = False
        try:
            os.close(self.fd)
            kept = self._published and kind is None
        finally:
            if not kept:
                self._remove()

    def publish(self, path: str) -> None:
        """Give it its name, which no other file has.

        Raises:
            OSError: the filesystem refused.
        """
        temporary = list(self._names)
        self._names.append(path)
        if temporary:
            os.rename(temporary[0], path)
        else:  # with src_dir_fd Python calls linkat, which can follow the link that /proc shows
            os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd)
        self._published = True

    def _lock(self) -> None:
        try:
            posix.try_lock(self.fd)  # nobody else has: it is too young for a leftover
        except BaseException:
            os.close(self.fd)
            self._remove()
            raise

    def _remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # it is not, or no more, there
                os.unlink(name)


@cache
def _remove_leftovers(directory: str) -> None:
    """Remove temporaries of processes that were killed: nobody locks them. Once for each directory and process."""
    with contextlib.suppress(OSError):  # not ours to look into
        for name in os.listdir(directory):
            if re.fullmatch(rf"\.[0-9a-f]{{{2 * _TOKEN_NBYTES}}}{re.escape(posix.TEMPORARY_SUFFIX)}", name):
                posix.remove_leftover(os.path.join(directory, name), LEFTOVER_SECONDS)


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
    """Errors of the operating system as ours: of a file that is not there."""
    try:
        yield
    except FastensorError:
        raise
    except OSError as error:
        raise CheckpointWriteError(
            error.errno, f"cannot store a tensor ({error.strerror}); nothing of it is left", path
        ) from error


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
