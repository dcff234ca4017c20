"""Files that are not on a local filesystem: written from front to back, read through Python's file interface.

Memory beyond the state is one buffer of the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from isal import isal_zlib

from fastensor.backends.memory import BUFFER_NBYTES
from fastensor.backends.staging import Stager, Window, open_stager
from fastensor.errors import StateChangedError
from fastensor.files import posix
from fastensor.stitch.source import Source

NAME = "stream"
"""What reports call this way. It is not chosen but follows from the target, so it is not registered as a backend."""


def write_stream(source: Source, write: Callable[[memoryview], object]) -> None:
    """Pass the whole file to ``write`` in order, in pieces that are the writer's until it returns.

    Where checksums stand in front of what they are of, the state is staged twice, first for them alone.
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


def checksums_of(source: Source) -> tuple[int, ...]:
    """What the source's head needs. Goes through all of it."""
    with open_stager(source) as stager:
        deque(_windows(source, stager), maxlen=0)
        return stager.checksums


def _windows(source: Source, stager: Stager[Window]) -> Iterator[tuple[int, memoryview]]:
    """The file in pieces: where each begins, and its bytes, which are lent until the next one is asked for."""
    for offset in range(0, source.nbytes, BUFFER_NBYTES):
        window = stager.begin(offset, min(BUFFER_NBYTES, source.nbytes - offset))
        stager.finish(window)
        yield offset, window.data
        stager.release(window)


class Readable(Protocol):
    """What of a binary file is used."""

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
    """Fill ``block`` from the file's position; returns the number of bytes read, fewer only at the end."""
    filled = 0
    while filled < block.nbytes:
        data = file.read(block.nbytes - filled)
        if not data:
            break
        block[filled : filled + len(data)] = data
        filled += len(data)
    return filled
