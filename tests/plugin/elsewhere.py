"""A backend as another package would bring it: plain writes and reads, one after the other.

It uses only what ``fastensor.backends`` exports.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from fastensor.backends import EndOfFile, Extent, Reader, Slots, Source, open_stager

_WINDOW_NBYTES = 4 << 20


class ElsewhereBackend:
    name = "elsewhere"

    def why_unavailable(self) -> str:
        return ""

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        with open_stager(source) as stager:
            for offset in range(0, source.nbytes, _WINDOW_NBYTES):
                window = stager.begin(offset, min(_WINDOW_NBYTES, source.nbytes - offset))
                stager.finish(window)
                _write(fd, window.data, offset)
                stager.release(window)
        os.ftruncate(fd, source.nbytes)
        return stager.checksums

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        return _Reader(fd)

    def open_slots(self, fd: int) -> Slots:
        return _Slots(fd)


class _Reader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        _read(self._fd, buffer, offset)
        return zlib.crc32(buffer) if checksum else 0

    def close(self) -> None:
        pass


class _Slots:
    alignment = 1

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: memoryview, offset: int) -> None:
        _write(self._fd, data, offset)
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, offset, data.nbytes, os.POSIX_FADV_DONTNEED)

    def read(self, buffer: memoryview, offset: int) -> None:
        _read(self._fd, buffer, offset)

    def close(self) -> None:
        pass


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read(fd: int, buffer: memoryview, offset: int) -> None:
    while buffer.nbytes:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise EndOfFile(f"the file ends before offset {offset + buffer.nbytes}")
        buffer, offset = buffer[count:], offset + count
