"""The ``numpy`` backend: buffered POSIX I/O on views of memory, through the page cache.

For small files, and for files that are in the page cache: resident bytes arrive at the speed of memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.memory import copy_memory, populate
from fastensor.backends.threads import run_each, usable_cores
from fastensor.files import posix

if TYPE_CHECKING:
    from fastensor.stitch.source import Source

_WINDOW_NBYTES = 1 << 20
"""Staged and written at a time: small enough to stay in the processor's cache from one to the other."""
_BLOCK_NBYTES = 512 << 10
"""Populated, filled and checksummed at a time, so that each step finds the bytes in the processor's cache."""
_PARALLEL_NBYTES = 2 << 20
"""Several threads share reads from this size on. For smaller ones, starting threads takes longer than it saves."""
_MAX_THREADS = 4
_ORDERED_NBYTES = 32 << 20
_RESIDENT_FRACTION = 0.5
"""Smaller files, of which less than this fraction is in the page cache, are read by one thread."""


class NumpyBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "numpy"

    def why_unavailable(self) -> str:
        return ""

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        from fastensor.backends.staging import open_stager  # loads need nothing of it

        total = source.nbytes
        with open_stager(source) as stager:
            for offset in range(0, total, _WINDOW_NBYTES):
                window = stager.begin(offset, min(_WINDOW_NBYTES, total - offset))
                stager.finish(window)
                posix.write_fully(fd, window.data, offset)
                stager.release(window)
        posix.truncate(fd, total)
        return stager.checksums

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        return BufferedReader(fd)

    def open_slots(self, fd: int) -> BufferedSlots:
        return BufferedSlots(fd)


class BufferedSlots:
    """See :class:`fastensor.backends.base.Slots`."""

    alignment = 1

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: memoryview, offset: int) -> None:
        posix.write_fully(self._fd, data, offset)
        posix.write_back(self._fd, offset, data.nbytes)

    def read(self, buffer: memoryview, offset: int) -> None:
        posix.check_end(posix.read_fully(self._fd, buffer, offset), buffer.nbytes, offset)

    def close(self) -> None:
        pass


class BufferedReader:
    """Reads through the page cache. See :class:`fastensor.backends.base.BatchReader`.

    Several threads read large pieces. A small file that is not in the page cache is read by one thread, in order, which
    the kernel's read-ahead follows: two threads that read two places take up to 1.4 times as long. With larger files
    they take as long. A reader that was opened before a fork works in the child, too.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @cached_property
    def _threads(self) -> int:
        nbytes = os.fstat(self._fd).st_size
        in_order = nbytes < _ORDERED_NBYTES and posix.resident_fraction(self._fd, nbytes) < _RESIDENT_FRACTION
        return 1 if in_order else usable_cores(_MAX_THREADS)

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        return self.read_batch([(offset, buffer)], checksum=checksum)[0]

    def read_batch(self, pieces: Sequence[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        blocks = [block for number, piece in enumerate(pieces) for block in _blocks_of(number, *piece)]
        threads = self._threads if sum(buffer.nbytes for _, buffer in pieces) >= _PARALLEL_NBYTES else 1
        # Each thread fills memory that lies together: threads that fault in neighbouring pages wait for each other.
        shares = [blocks[len(blocks) * n // threads : len(blocks) * (n + 1) // threads] for n in range(threads)]
        found = run_each(lambda share: [_read_block(self._fd, block, checksum) for block in share], shares)
        crc32s = [0] * len(pieces)
        for block, crc32 in zip(blocks, chain.from_iterable(found), strict=True):
            crc32s[block.number] = isal_zlib.crc32_combine(crc32s[block.number], crc32, block.buffer.nbytes)
        return crc32s

    def close(self) -> None:
        pass


class _Block(NamedTuple):
    """A part of a buffer that one thread fills."""

    number: int
    """Number of the buffer among those that are read together."""
    offset: int
    """Offset in the file."""
    buffer: memoryview
    address: int


def _blocks_of(number: int, offset: int, buffer: memoryview) -> Iterator[_Block]:
    address = np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0
    for at in range(0, buffer.nbytes, _BLOCK_NBYTES):
        yield _Block(number, offset + at, buffer[at : at + _BLOCK_NBYTES], address + at)


def _read_block(fd: int, block: _Block, checksum: bool) -> int:
    nbytes = block.buffer.nbytes
    populate(block.address, nbytes)
    posix.check_end(posix.read_fully(fd, block.buffer, block.offset), nbytes, block.offset)
    return int(isal_zlib.crc32(block.buffer)) if checksum else 0


def copy_with_checksum(target: memoryview, source: memoryview, checksum: bool) -> int:
    """Copy between two pieces of memory of equal size. Returns the CRC32 of the bytes, or 0 without ``checksum``."""
    to = np.frombuffer(target, np.uint8).ctypes.data
    from_ = np.frombuffer(source, np.uint8).ctypes.data
    crc32 = 0
    for at in range(0, target.nbytes, _BLOCK_NBYTES):
        count = min(_BLOCK_NBYTES, target.nbytes - at)
        populate(to + at, count)
        copy_memory(to + at, from_ + at, count)
        if checksum:
            crc32 = isal_zlib.crc32(source[at : at + count], crc32)
    return crc32
