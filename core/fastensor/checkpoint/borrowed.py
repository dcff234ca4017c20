"""Files that callers have opened: a load takes their position, and leaves it where ``torch.load`` leaves it."""

from __future__ import annotations

import errno
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from fastensor.backends import stream
from fastensor.files.os_errors import read_errors

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
        """Bytes behind ``begin`` at which torch's reader has stopped; None if it was not used."""
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
