"""Files that are not on a local filesystem: written from front to back, and read through Python's file interface.

Memory beyond the state is one buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from isal import isal_zlib

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.staging import HostStager, open_stager
from fastensor.errors import StateChangedError
from fastensor.files import posix
from fastensor.stitch.source import Source

NAME = "stream"
"""The name of this way in reports. The target decides about it, not a user, so it is no registered backend."""


def write_stream(source: Source, write: Callable[[memoryview], object]) -> tuple[int, ...]:
    """Pass the whole file to ``write`` in order, in pieces that stay unchanged until ``write`` returns.

    Returns the CRC32 of each storage's payload.

    If the file has checksums in front of the bytes that they are of, the state is staged twice, first only for the
    checksums.
    """
    checksums: tuple[int, ...] = ()
    if source.checksums_first:
        checksums = checksums_of(source) if source.known_checksums is None else source.known_checksums
    head = source.head(checksums)
    with open_stager(source) as stager:
        for offset, data in _windows(source, stager):
            known = head[offset : offset + data.nbytes]
            data[: len(known)] = known
            write(data)
        if source.checksums_first and stager.checksums != checksums:
            raise StateChangedError(
                "tensors changed while they were being saved; keep them unchanged until save returns"
            )
        return stager.checksums


def checksums_of(source: Source) -> tuple[int, ...]:
    """The CRC32s that the source's head needs. Stages the whole source."""
    with open_stager(source) as stager:
        stager.progress = lambda done: None  # the file is staged once more
        deque(_windows(source, stager), maxlen=0)
        return stager.checksums


def _windows(source: Source, stager: HostStager) -> Iterator[tuple[int, memoryview]]:
    """The offset and the bytes of each piece of the file. The bytes are lent until the next piece is asked for."""
    for offset in range(0, source.nbytes, BUFFER_NBYTES):
        window = stager.begin(offset, min(BUFFER_NBYTES, source.nbytes - offset))
        stager.finish(window)
        yield offset, window.data
        stager.release(window)


class Readable(Protocol):
    """The methods of a binary file that :class:`StreamReader` calls. A file may also have ``readinto``: that is called
    in place of ``read``, as by ``torch.load``."""

    def seek(self, offset: int, whence: int = ..., /) -> object: ...

    def read(self, size: int = ..., /) -> bytes: ...


class StreamReader:
    """Reads a seekable binary file from ``start`` on. See :class:`fastensor.backends.base.Reader`."""

    def __init__(self, file: Readable, start: int) -> None:
        self._file = file
        self._start = start

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        crc32 = 0
        self._file.seek(self._start + offset)
        for at in range(0, buffer.nbytes, BUFFER_NBYTES):
            block = buffer[at : at + BUFFER_NBYTES]
            if read_block(self._file, block) != block.nbytes:
                raise posix.EndOfFile(f"the file ends before offset {offset + at + block.nbytes}")
            if checksum:
                crc32 = isal_zlib.crc32(block, crc32)
        return crc32

    def close(self) -> None:
        pass


def read_block(file: Readable, block: memoryview) -> int:
    """Fill ``block`` from the file's position. Returns the number of bytes read, fewer only at the end."""
    readinto: Callable[[memoryview], int | None] = getattr(file, "readinto", partial(_read_copy, file))
    filled = 0
    while filled < block.nbytes:
        count = readinto(block[filled : filled + BUFFER_NBYTES])
        if not count:
            break
        filled += count
    return filled


def _read_copy(file: Readable, block: memoryview) -> int:
    """``readinto`` of a file that has none."""
    data = file.read(block.nbytes)
    block[: len(data)] = data
    return len(data)
