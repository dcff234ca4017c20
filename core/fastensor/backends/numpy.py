"""The ``numpy`` backend: buffered POSIX I/O on views of memory, through the page cache.

For small files, and for reading what is in the page cache already: resident bytes arrive at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from isal import isal_zlib

from fastensor.backends import posix
from fastensor.backends.base import Availability, Extent, Reader
from fastensor.backends.memory import BUFFER_NBYTES, copy_memory, populate
from fastensor.backends.staging import open_stager
from fastensor.backends.threads import Pool, finish, open_pool, shut_down, submit, usable_cores
from fastensor.errors import BackendUnavailableError
from fastensor.stitch.source import Source

_WINDOW_NBYTES = 1 << 20
"""Staged and written at a time: small enough to stay in the processor's cache between the two."""
_BLOCK_NBYTES = 512 << 10
"""Populated, filled and checksummed at a time, so that each step finds it in the processor's cache."""
_PARALLEL_NBYTES = 2 << 20
"""Reads from this size on are shared by several threads."""
_PARALLEL_FILE_NBYTES = 16 << 20
"""Of files from this size on. Starting the threads takes longer than they save with smaller ones."""
_MAX_THREADS = 4


class NumpyBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "numpy"

    def availability(self) -> Availability:
        return Availability(True)

    @property
    def extra_nbytes(self) -> int:
        return BUFFER_NBYTES

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
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
        return BufferedReader(fd, _MAX_THREADS if nbytes >= _PARALLEL_FILE_NBYTES else 1)

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
    """Reads through the page cache, large pieces by several threads. See :class:`fastensor.backends.base.Reader`.

    Goes on in a forked child, with threads of its own.
    """

    def __init__(self, fd: int, max_threads: int = _MAX_THREADS) -> None:
        self._fd = fd
        self._threads = usable_cores(max_threads)
        self._pool: Pool | None = None

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        if buffer.nbytes < _PARALLEL_NBYTES or self._threads == 1:
            return _read_with_checksum(self._fd, offset, buffer, checksum)
        try:
            if self._pool is None or self._pool.is_of_parent:
                self._pool = open_pool(self._threads, "fastensor-read")
            return self._read_in_parallel(self._pool, offset, buffer, checksum)
        except BackendUnavailableError:  # the interpreter exits: this thread has to do it alone
            self._threads = 1
            return _read_with_checksum(self._fd, offset, buffer, checksum)

    def close(self) -> None:
        if self._pool is not None:
            shut_down(self._pool)

    def _read_in_parallel(self, pool: Pool, offset: int, buffer: memoryview, checksum: bool) -> int:
        share = -(-buffer.nbytes // self._threads // _BLOCK_NBYTES) * _BLOCK_NBYTES
        parts = [(at, buffer[at : at + share]) for at in range(0, buffer.nbytes, share)]
        futures: list[Future[int]] = []
        try:
            for at, part in parts:
                futures.append(submit(pool, _read_with_checksum, self._fd, offset + at, part, checksum))
        finally:
            finish(futures)  # nobody writes to the buffer any more when its owner hears of a failure
        crc32 = 0
        for (_, part), future in zip(parts, futures, strict=True):
            crc32 = isal_zlib.crc32_combine(crc32, future.result(), part.nbytes)
        return crc32


def _read_with_checksum(fd: int, offset: int, buffer: memoryview, checksum: bool) -> int:
    address = np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0
    crc32 = 0
    for at in range(0, buffer.nbytes, _BLOCK_NBYTES):
        block = buffer[at : at + _BLOCK_NBYTES]
        populate(address + at, block.nbytes)
        posix.check_end(posix.read_fully(fd, block, offset + at), block.nbytes, offset + at)
        if checksum:
            crc32 = isal_zlib.crc32(block, crc32)
    return crc32


def copy_with_checksum(target: memoryview, source: memoryview, checksum: bool) -> int:
    """Copy between two pieces of memory of equal size; returns the CRC32 of the bytes, or 0 without ``checksum``."""
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
