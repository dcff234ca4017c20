"""Reading ahead through a ring of buffers, with several reads in flight: for files that answer slowly.

Threads read the file in the order that was announced, and the calling thread copies from the buffers to where the bytes
belong. Memory beyond the state is the buffers: 32 MiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.buffers import (
    BUFFER_COUNT,
    TRANSFERS_IN_FLIGHT,
    Buffer,
    transfer_buffers,
    transfer_nbytes,
)
from fastensor.backends.numpy import copy_with_checksum
from fastensor.backends.threads import NoThreadsError, Pool, finish, open_pool, shut_down, submit, usable_cores
from fastensor.backends.to_device import DeviceTarget, read_through_host

_PARALLEL_COPY_NBYTES = 512 << 10
"""Copies from this size on are handed to another thread. For smaller ones that takes longer than it saves."""
_GAP_NBYTES = 64 << 10
"""Extents with smaller gaps between them are read together."""

ReadInto: TypeAlias = Callable[[memoryview, int], int]
"""``read(buffer, offset)`` fills the buffer. It returns the number of bytes read, fewer only at the end of the file."""


class AlignedRead(NamedTuple):
    """One aligned read of ``[begin, end)``, of which the bytes in ``wanted`` are used."""

    begin: int
    end: int
    wanted: Extent


def plan_reads(order: Sequence[Extent], alignment: int) -> list[AlignedRead]:
    """Cut the extents into aligned reads, in the same order. Extents that lie close together share reads.

    >>> plan_reads([Extent(10, 5000), Extent(5010, 6000)], 512)
    [AlignedRead(begin=0, end=6144, wanted=Extent(begin=10, end=6000))]
    """
    size = transfer_nbytes(sum(extent.end - extent.begin for extent in order))
    reads: list[AlignedRead] = []
    for begin, end in _runs(order):
        aligned_end = -(-end // alignment) * alignment
        for at in range(begin // alignment * alignment, aligned_end, size):
            stop = min(at + size, aligned_end)
            reads.append(AlignedRead(at, stop, Extent(max(at, begin), min(stop, end))))
    return reads


def _runs(order: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    run: tuple[int, int] | None = None
    for extent in order:
        if run and run[1] <= extent.begin <= run[1] + _GAP_NBYTES:
            run = (run[0], extent.end)
        else:
            if run:
                yield run
            run = (extent.begin, extent.end)
    if run:
        yield run


@dataclass(slots=True)
class _Fetch:
    """One read in progress: the read into ``buffer``, and the copies out of the buffer."""

    begin: int
    buffer: Buffer
    filled: Future[int]
    copies: list[Future[int]]

    @property
    def idle(self) -> bool:
        """True when no thread reads or writes the buffer any more."""
        return self.filled.done() and all(copy.done() for copy in self.copies)

    def wait(self) -> None:
        """Return when the read is idle."""
        finish([self.filled, *self.copies])


class RingReader:
    """Reads ahead in the order that was announced. See :class:`fastensor.backends.base.Reader`.

    Filling fresh memory is slower than the disk, because every page is touched for the first time. So several threads
    copy large reads out of the buffers. A forked child has neither the threads nor the bytes in the buffers, so the
    reader ``elsewhere`` reads everything there.

    Args:
        read: called by several threads at once.
        alignment: unit of the offsets and lengths of reads.
        order: the extents that will be asked for.
        elsewhere: reads what is asked for out of order; closed with this reader.
        resources: what ``read`` needs; closed with this reader.
    """

    def __init__(
        self, read: ReadInto, alignment: int, order: Sequence[Extent], *, elsewhere: Reader, resources: ExitStack
    ) -> None:
        reads = plan_reads(order, alignment)
        self._read_file = read
        self._elsewhere = elsewhere
        self._resources = resources  # closed in the opposite order: the threads end before the buffers go back
        resources.callback(elsewhere.close)
        self._lent = resources.enter_context(transfer_buffers.lending())
        self._reading = _opened_pool(resources, TRANSFERS_IN_FLIGHT, "fastensor-read")
        self._copying = _opened_pool(resources, usable_cores(TRANSFERS_IN_FLIGHT), "fastensor-copy")
        self._started = False
        self._reads = reads
        self._by_offset = sorted(range(len(reads)), key=lambda number: reads[number].begin)
        self._begins = [reads[number].wanted.begin for number in self._by_offset]
        self._free: list[Buffer] = []
        self._device: torch.device | None = None
        """The device that buffers are pinned for."""
        self._current = 0
        """Number of the read that is being copied out. Earlier reads are not used any more."""
        self._fetches: deque[_Fetch] = deque()
        """Reads in flight or done, from ``_current`` on."""
        self._emptying: deque[_Fetch] = deque()
        """Earlier reads whose buffers are still being copied from."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        return self._read(offset, buffer, checksum)

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        """See :class:`fastensor.backends.to_device.DeviceReader`. The device copies from the buffers."""
        self._device = target.device
        return self._read(offset, target, checksum)

    def _read(self, offset: int, buffer: memoryview | DeviceTarget, checksum: bool) -> int:
        try:
            return self._read_through_ring(offset, buffer, checksum)
        except NoThreadsError:  # the interpreter exits, or this is a forked child: read without threads from now on
            self._begins = []
            return _read_at_once(self._elsewhere, offset, buffer, checksum)

    def _read_through_ring(self, offset: int, buffer: memoryview | DeviceTarget, checksum: bool) -> int:
        if self._reading.is_of_parent:  # reads that were given to them will never end
            raise NoThreadsError("the threads are those of the process that this one was forked from")
        parts: list[tuple[int, Future[int] | int]] = []
        try:
            while buffer.nbytes:
                number = self._number_of(offset)
                if number is None or number < self._current:
                    parts.append((buffer.nbytes, _read_at_once(self._elsewhere, offset, buffer, checksum)))
                    break
                fetch = self._fetched(number)
                begin = offset - fetch.begin
                count = min(fetch.filled.result() - begin, buffer.nbytes)
                if count <= 0:  # the file ended, or the read came back short at an odd place
                    parts.append((buffer.nbytes, _read_at_once(self._elsewhere, offset, buffer, checksum)))
                    break
                parts.append((count, self._copy(fetch, begin, buffer[:count], checksum)))
                offset += count
                buffer = buffer[count:]
        finally:
            finish(part for _, part in parts if isinstance(part, Future))
        crc32 = 0
        for count, part in parts:
            crc32 = isal_zlib.crc32_combine(crc32, part.result() if isinstance(part, Future) else part, count)
        return crc32

    def close(self) -> None:
        self._resources.close()

    def _copy(self, fetch: _Fetch, begin: int, target: memoryview | DeviceTarget, checksum: bool) -> Future[int] | int:
        source = fetch.buffer.view[begin : begin + target.nbytes]
        if target.nbytes < _PARALLEL_COPY_NBYTES:
            return _copied(target, source, checksum)
        copy = submit(self._copying, _copied, target, source, checksum)
        fetch.copies.append(copy)
        return copy

    def _number_of(self, offset: int) -> int | None:
        at = bisect_right(self._begins, offset) - 1
        if at < 0:
            return None
        number = self._by_offset[at]
        return number if offset < self._reads[number].wanted.end else None

    def _fetched(self, number: int) -> _Fetch:
        """Make ``number`` the current read, drop earlier ones, and read ahead into all free buffers."""
        if not self._started:
            self._free = [transfer_buffers.take(self._lent) for _ in self._reads[:BUFFER_COUNT]]
            self._started = True
        while self._fetches and self._current < number:
            self._emptying.append(self._fetches.popleft())
            self._current += 1
        self._current = number
        while self._emptying and (self._emptying[0].idle or not (self._free or self._fetches)):
            emptied = self._emptying.popleft()
            emptied.wait()
            self._free.append(emptied.buffer)
        while self._free and (following := number + len(self._fetches)) < len(self._reads):
            buffer, read = self._free.pop(), self._reads[following]
            buffer.prepare(self._device)
            view = buffer.view[: read.end - read.begin]
            filled = submit(self._reading, self._read_file, view, read.begin)
            self._fetches.append(_Fetch(read.begin, buffer, filled, []))
        return self._fetches[0]


def _copied(target: memoryview | DeviceTarget, source: memoryview, checksum: bool) -> int:
    if isinstance(target, DeviceTarget):
        return target.copy(source, checksum=checksum)
    return copy_with_checksum(target, source, checksum)


def _read_at_once(reader: Reader, offset: int, target: memoryview | DeviceTarget, checksum: bool) -> int:
    if isinstance(target, DeviceTarget):
        return read_through_host(reader, offset, target, checksum=checksum)
    return reader.readinto(offset, target, checksum=checksum)


def _opened_pool(resources: ExitStack, threads: int, name: str) -> Pool:
    pool = open_pool(threads, name)
    resources.callback(shut_down, pool)
    return pool
