"""Files that callers have opened: a load takes their position, and leaves it where ``torch.load`` leaves it."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

from fastensor.backends import stream
from fastensor.backends.base import Extent
from fastensor.backends.registry import Fallback
from fastensor.checkpoint.location import NO_LOCAL_FILE, can
from fastensor.checkpoint.reading.opened import LocalFile, OpenedFile, OpenedReader, ReadOptions
from fastensor.errors import CheckpointReadError, caught_as
from fastensor.files import posix
from fastensor.files.os_errors import read_errors

_BUFFERED: tuple[Any, ...] = (io.BufferedReader, io.BufferedRandom)
_OF_ONE_PROCESS = (io.BytesIO, mmap.mmap)
"""Kinds of files whose position no forked process shares."""


class BorrowedFile:
    """A binary file that the caller has opened, at whose position a checkpoint begins.

    While it is borrowed, reading moves its position. :meth:`give_back` leaves it where the checkpoint begins, or where
    torch's reader has stopped, if that is known.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.begin = file.tell()
        """The position at which the checkpoint begins."""
        self.stopped_at: int | None = None
        """Bytes behind ``begin`` at which ``torch.load`` stops; None if it would not have come to a pickle."""
        self._is_moved = False
        self._process = os.getpid()

    def for_reading(self) -> stream.Readable:
        """The file for readers that seek before they read."""
        self._is_moved = True
        return self.file if isinstance(self.file, _OF_ONE_PROCESS) else _SharedPosition(self.file)

    @contextmanager
    def lent_to_torch(self) -> Iterator[BinaryIO]:
        """The file itself, where the checkpoint begins. It is noted where torch stops."""
        self.file.seek(self.begin)
        try:
            yield self.file
        finally:
            self.stopped_at = self.file.tell() - self.begin

    def give_back(self, where: str) -> None:
        """Leave the position. A file that was closed meanwhile stays so; a forked process shares the position with its
        parent, which still needs it.

        Args:
            where: the name of the file, for messages.

        Raises:
            CheckpointReadError: the file cannot seek any more.
        """
        is_open = not getattr(self.file, "closed", False) and self._process == os.getpid()
        if is_open and (self._is_moved or self.stopped_at is not None):
            with read_errors(where):
                self.file.seek(self.begin + (self.stopped_at or 0))


class _SharedPosition:
    """An open file that is not used in forked processes: each would move the position that the others read from."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._process = os.getpid()
        self.read = file.read
        if hasattr(file, "readinto"):
            self.readinto: Any = file.readinto

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> object:
        if self._process != os.getpid():
            raise OSError(errno.EBUSY, "a forked process shares its position; open the checkpoint again in each")
        return self._file.seek(offset, whence)


class StreamFile:
    """An open binary file: a checkpoint begins at its position and ends where it ends."""

    path = None
    resident_fraction = 0.0

    def __init__(self, borrowed: BorrowedFile, where: str) -> None:
        self.borrowed = borrowed
        self._file = borrowed.for_reading()
        self._start = borrowed.begin
        self.where = where
        borrowed.file.seek(0, os.SEEK_END)  # which may return nothing, as that of mmap.mmap does
        self.nbytes = borrowed.file.tell() - self._start

    def readinto(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(self._start + offset)
        return stream.read_block(self._file, buffer)

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        return OpenedReader(stream.NAME, NO_LOCAL_FILE, stream.StreamReader(self._file, self._start))


def borrow(file: BinaryIO, where: str, stack: ExitStack) -> OpenedFile:
    """A file that the caller has opened. It is given back with ``stack``.

    Raises:
        CheckpointReadError: the file cannot be read, or cannot seek.
    """
    can_seek = can(file, "seekable", "seek") and hasattr(file, "tell")
    if isinstance(file, io.TextIOBase) or not (can(file, "readable", "read") and can_seek):
        error = CheckpointReadError(
            errno.EINVAL,
            "cannot load: expected a file opened in mode 'rb' that can seek, found something else; "
            "read a pipe or a network stream into a file or an io.BytesIO first",
            where,
        )
        raise caught_as(error, io.UnsupportedOperation)
    borrowed = BorrowedFile(file)
    stack.callback(borrowed.give_back, where)
    raw: Any = getattr(file, "raw", None) if type(file) in _BUFFERED else file
    if type(raw) is not io.FileIO or borrowed.begin != 0 or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        return StreamFile(borrowed, where)
    if isinstance(file, io.BufferedRandom):
        file.flush()
    fd = os.dup(raw.fileno())  # the user may close the file before we are done
    stack.callback(posix.close_read_only, fd)
    return LocalFile(fd, where, borrowed=borrowed)
