"""Reading ahead through a ring of buffers, several reads in flight: for files that answer slowly.

Reader threads run through the file in the order that was announced, and the calling thread copies from the ring to
where the bytes belong. Memory beyond the state is the ring: 32 MiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.memory import BUFFER_NBYTES, Buffer, borrowed_ring
from fastensor.backends.numpy import copy_with_checksum
from fastensor.backends.threads import NoThreadsError, finish, open_pool, shut_down, submit, usable_cores
from fastensor.backends.to_device import DeviceTarget, read_through_host

TRANSFERS_IN_FLIGHT = 4
_MIN_TRANSFER_NBYTES = 2 << 20
_TRANSFERS_PER_FILE = 128
_PARALLEL_COPY_NBYTES = 512 << 10
"""Copies from this size on are worth handing to another thread."""
_GAP_NBYTES = 64 << 10
"""Extents that lie closer together than this are read in one go."""

ReadInto: TypeAlias = Callable[[memoryview, int], int]
"""``read(buffer, offset)``: fill the buffer; returns the number of bytes read, fewer only at the end of the file."""


def transfer_nbytes(total: int) -> int:
    """The size of single transfers: large, but so small that filling and draining the pipeline takes little time.

    >>> transfer_nbytes(1 << 30) >> 20, transfer_nbytes(200 << 20) >> 20, transfer_nbytes(100) >> 20
    (4, 2, 2)
    """
    share = -(-total // _TRANSFERS_PER_FILE)
    rounded = -(-share // _MIN_TRANSFER_NBYTES) * _MIN_TRANSFER_NBYTES
    return min(max(rounded, _MIN_TRANSFER_NBYTES), BUFFER_NBYTES)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One aligned read of ``[begin, end)``, for the sake of the bytes in ``wanted``."""

    begin: int
    end: int
    wanted: Extent


def plan_transfers(order: Sequence[Extent], alignment: int) -> list[Transfer]:
    """Cut the extents into aligned transfers, in the same order; extents that lie close together share transfers.

    >>> plan_transfers([Extent(10, 5000), Extent(5010, 6000)], 512)
    [Transfer(begin=0, end=6144, wanted=Extent(begin=10, end=6000))]
    """
    size = transfer_nbytes(sum(extent.end - extent.begin for extent in order))
    transfers: list[Transfer] = []
    for begin, end in _runs(order):
        aligned_end = -(-end // alignment) * alignment
        for at in range(begin // alignment * alignment, aligned_end, size):
            stop = min(at + size, aligned_end)
            transfers.append(Transfer(at, stop, Extent(max(at, begin), min(stop, end))))
    return transfers


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
    """One transfer: the file's bytes from ``begin`` are, or will be, in ``buffer``, and are copied out of it."""

    begin: int
    buffer: Buffer
    filled: Future[int]
    copies: list[Future[int]]

    @property
    def idle(self) -> bool:
        """Whether nothing reads or writes the buffer any more."""
        return self.filled.done() and all(copy.done() for copy in self.copies)

    def wait(self) -> None:
        """Return when it is idle."""
        finish([self.filled, *self.copies])


class RingReader:
    """Reads ahead through planned transfers; what is asked for out of order is read on the spot, buffered.

    Filling fresh memory is slower than the disk, because every page of it is touched for the first time: so large
    reads are copied out of the ring by several threads. In a forked child, which has neither the threads nor what is in
    the ring, all is read on the spot. See :class:`fastensor.backends.base.Reader`.

    Args:
        read: called by several threads at once.
        alignment: what offsets and lengths of reads are multiples of.
        order: the extents that will be asked for.
        elsewhere: for what is asked for out of order; closed with this one.
        resources: what ``read`` needs, closed with this one.
    """

    def __init__(
        self, read: ReadInto, alignment: int, order: Sequence[Extent], *, elsewhere: Reader, resources: ExitStack
    ) -> None:
        transfers = plan_transfers(order, alignment)
        self._threads = _ReadThreads()
        self._read_file = read
        self._resources = resources
        self._resources.callback(elsewhere.close)
        self._elsewhere = elsewhere
        self._started = False
        self._transfers = transfers
        self._by_offset = sorted(range(len(transfers)), key=lambda number: transfers[number].begin)
        self._begins = [transfers[number].wanted.begin for number in self._by_offset]
        self._free: list[Buffer] = []
        self._device: torch.device | None = None
        """That the ring is pinned for."""
        self._current = 0
        """The transfer that is being consumed; all earlier ones are done with."""
        self._fetches: deque[_Fetch] = deque()
        """Those in flight or filled: ``_current`` and the ones behind it."""
        self._emptying: deque[_Fetch] = deque()
        """Those done with, whose buffers are still being copied from."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        return self._read(offset, buffer, checksum)

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        """See :class:`fastensor.backends.to_device.DeviceReader`: the device copies from the ring."""
        self._device = target.device
        return self._read(offset, target, checksum)

    def _read(self, offset: int, buffer: memoryview | DeviceTarget, checksum: bool) -> int:
        try:
            return self._read_through_ring(offset, buffer, checksum)
        except NoThreadsError:  # the interpreter exits, or this is a forked child: from now on without
            self._begins = []
            return _read_at_once(self._elsewhere, offset, buffer, checksum)

    def _read_through_ring(self, offset: int, buffer: memoryview | DeviceTarget, checksum: bool) -> int:
        if self._threads.reading.is_of_parent:  # they will never fill what they were to fill
            raise NoThreadsError("the ring is that of the process that this one was forked from")
        parts: list[tuple[int, Future[int] | int]] = []
        try:
            while buffer.nbytes:
                number = self._transfer_of(offset)
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
        try:
            self._threads.close()
        finally:
            self._resources.close()

    def _copy(self, fetch: _Fetch, begin: int, target: memoryview | DeviceTarget, checksum: bool) -> Future[int] | int:
        source = fetch.buffer.view[begin : begin + target.nbytes]
        if target.nbytes < _PARALLEL_COPY_NBYTES:
            return _copied(target, source, checksum)
        copy = submit(self._threads.copying, _copied, target, source, checksum)
        fetch.copies.append(copy)
        return copy

    def _transfer_of(self, offset: int) -> int | None:
        at = bisect_right(self._begins, offset) - 1
        if at < 0:
            return None
        number = self._by_offset[at]
        return number if offset < self._transfers[number].wanted.end else None

    def _fetched(self, number: int) -> _Fetch:
        """Make ``number`` the current transfer, dropping those before it, and keep the ring busy behind it."""
        if not self._started:
            ring = self._resources.enter_context(borrowed_ring())
            self._free = ring.buffers()[: len(self._transfers)]
            self._started = True
        while self._fetches and self._current < number:
            self._emptying.append(self._fetches.popleft())
            self._current += 1
        self._current = number
        while self._emptying and (self._emptying[0].idle or not (self._free or self._fetches)):
            emptied = self._emptying.popleft()
            emptied.wait()
            self._free.append(emptied.buffer)
        while self._free and (following := number + len(self._fetches)) < len(self._transfers):
            buffer, transfer = self._free.pop(), self._transfers[following]
            buffer.prepare(self._device)
            view = buffer.view[: transfer.end - transfer.begin]
            filled = submit(self._threads.reading, self._read_file, view, transfer.begin)
            self._fetches.append(_Fetch(transfer.begin, buffer, filled, []))
        return self._fetches[0]


def _copied(target: memoryview | DeviceTarget, source: memoryview, checksum: bool) -> int:
    if isinstance(target, DeviceTarget):
        return target.copy(source, checksum=checksum)
    return copy_with_checksum(target, source, checksum)


def _read_at_once(reader: Reader, offset: int, target: memoryview | DeviceTarget, checksum: bool) -> int:
    if isinstance(target, DeviceTarget):
        return read_through_host(reader, offset, target, checksum=checksum)
    return reader.readinto(offset, target, checksum=checksum)


class _ReadThreads:
    """Threads that wait for the disk, and threads that copy."""

    def __init__(self) -> None:
        self.reading = open_pool(TRANSFERS_IN_FLIGHT, "fastensor-read")
        self.copying = open_pool(usable_cores(TRANSFERS_IN_FLIGHT), "fastensor-copy")

    def close(self) -> None:
        try:
            shut_down(self.reading)
        finally:
            shut_down(self.copying)
