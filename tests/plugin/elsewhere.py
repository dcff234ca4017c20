"""A backend as another package would bring it: plain writes and reads, one after the other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from fastensor.backends import Availability, Extent, Reader
from fastensor.backends.staging import open_stager
from fastensor.files import posix
from fastensor.stitch.source import Source

_WINDOW_NBYTES = 4 << 20


class ElsewhereBackend:
    name = "elsewhere"

    def availability(self) -> Availability:
        return Availability(True)

    @property
    def extra_bytes(self) -> int:
        return _WINDOW_NBYTES

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        with open_stager(source) as stager:
            for offset in range(0, source.nbytes, _WINDOW_NBYTES):
                window = stager.begin(offset, min(_WINDOW_NBYTES, source.nbytes - offset))
                stager.finish(window)
                posix.write_fully(fd, window.data, offset)
                stager.release(window)
        posix.truncate(fd, source.nbytes)
        return ()  # whoever needs checksums can compute them

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        return _Reader(fd)


class _Reader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        if posix.read_fully(self._fd, buffer, offset) != buffer.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + buffer.nbytes}")
        return zlib.crc32(buffer) if checksum else 0

    def close(self) -> None:
        pass
