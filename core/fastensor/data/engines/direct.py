"""The engine ``direct``: threads read with O_DIRECT, around the page cache."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from fastensor.backends.buffers import BUFFER_NBYTES, transfer_buffers
from fastensor.backends.direct import open_direct
from fastensor.backends.threads import Pool, open_pool, shut_down, submit
from fastensor.data.coalescing import Extents, Integers, Merging, coalesce
from fastensor.data.engines.base import Fetch, ReadsFetch
from fastensor.files import posix

_THREADS = 8
_TASK_READS = 16
_TASK_NBYTES = 512 << 10
"""A thread does about this many reads, or bytes, at a time: handing work to a thread takes longer than a small read."""


class DirectEngine:
    """Reads whole pages past the page cache, which keeps what other files have there.

    See :class:`fastensor.data.engines.base.Engine`. Every epoch reads from the disk.

    Args:
        fd: open for reading. The caller keeps ownership.
        merging: what is read together.

    Raises:
        BackendUnavailableError: the file has no direct I/O, or no thread can be started.
    """

    name = "direct"
    reads_ahead = True

    def __init__(self, fd: int, merging: Merging) -> None:
        self._merging = merging
        self._fd, self._alignment = open_direct(fd)
        try:
            self._pool = open_pool(_THREADS, "fastensor-data")
        except BaseException:
            posix.close_read_only(self._fd)
            raise
        self.close = weakref.finalize(self, _close, self._pool, self._fd)

    def fetch(self, extents: Extents) -> Fetch:
        reads = coalesce(extents, self._merging, alignment=self._alignment)
        places = list(zip(reads.offsets.tolist(), reads.lengths.tolist(), strict=True))
        firsts = _first_of_tasks(reads.lengths)
        tasks: dict[int, tuple[int, Future[list[bytes]]]] = {}
        """Task of each read that was begun and not finished, with the number of the task's first read."""

        def begin(read: int) -> None:
            if read in tasks:
                return
            end = firsts[bisect_right(firsts, read)]
            task = submit(self._pool, _read_all, self._fd, self._alignment, places[read:end])
            tasks.update((number, (read, task)) for number in range(read, end))

        def finish(read: int) -> bytes:
            first, task = tasks.pop(read)
            return task.result()[read - first]

        return ReadsFetch(extents, reads, begin, finish)


def _read_all(fd: int, alignment: int, places: list[tuple[int, int]]) -> list[bytes]:
    """A task. It holds no engine: else the thread that does the last one would close it, and wait for itself."""
    with transfer_buffers.lending() as lent:
        buffer = transfer_buffers.take(lent)
        buffer.prepare()
        return [b"".join(_pieces(fd, alignment, buffer.view, *place)) for place in places]


def _pieces(fd: int, alignment: int, buffer: memoryview, offset: int, nbytes: int) -> Iterator[bytes]:
    for begin in range(0, nbytes, BUFFER_NBYTES):
        piece = buffer[: min(BUFFER_NBYTES, nbytes - begin)]
        filled = posix.read_fully(fd, piece, offset + begin, alignment=alignment)
        yield bytes(piece[:filled])


def _close(pool: Pool, fd: int) -> None:
    shut_down(pool)
    posix.close_read_only(fd)


def _first_of_tasks(lengths: Integers) -> list[int]:
    """The number of each task's first read, and then the number of reads. A task is a run of reads."""
    by_count = np.arange(len(lengths)) // _TASK_READS
    by_nbytes = np.cumsum(lengths) // _TASK_NBYTES
    changes = (np.diff(by_count) != 0) | (np.diff(by_nbytes) != 0)
    return [0, *(np.flatnonzero(changes) + 1).tolist(), len(lengths)]
