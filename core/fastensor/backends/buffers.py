"""Buffers that transfers go through: page-aligned, touched once, pinned for a GPU where that helps, and reused.

The first touch of memory costs more than the copy that follows, and pinning costs more still. So a pool keeps buffers
for the next transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastensor.backends.memory import MADV_WIPEONFORK, map_private, populate
from fastensor.files.forks import first_in_children
from fastensor.files.words import human_size

BUFFER_NBYTES = 4 << 20
"""Size of every buffer."""
TRANSFERS_IN_FLIGHT = 4
_MIN_TRANSFER_NBYTES = 2 << 20
_TRANSFERS_PER_FILE = 128
BUFFER_COUNT = 8
"""The most buffers that one transfer uses."""
_HUGE_PAGE = 2 << 20
_logger = logging.getLogger("fastensor")


def transfer_nbytes(total: int) -> int:
    """The size of single transfers: large, but small enough that filling and draining the pipeline takes little time.

    >>> transfer_nbytes(1 << 30) >> 20, transfer_nbytes(200 << 20) >> 20, transfer_nbytes(100) >> 20
    (4, 2, 2)
    """
    share = -(-total // _TRANSFERS_PER_FILE)
    rounded = -(-share // _MIN_TRANSFER_NBYTES) * _MIN_TRANSFER_NBYTES
    return min(max(rounded, _MIN_TRANSFER_NBYTES), BUFFER_NBYTES)


class _Slab:
    """Memory that was mapped at once, whose buffers are pinned together: a device copies across buffers only if it was
    told about them in one call, and one call for much memory takes less time than many. It is unpinned before it is
    unmapped, when no buffer is left."""

    def __init__(self, memory: mmap.mmap, begin: int, nbytes: int) -> None:
        self.view = memoryview(memory)[begin : begin + nbytes]
        self._lock = threading.Lock()
        self._was_tried = False

    def pin(self, device: torch.device) -> None:
        """Pin the memory, unless that was tried before."""
        with self._lock:
            if not self._was_tried:
                self._was_tried = True
                self._pin(device, int(np.frombuffer(self.view, dtype=np.uint8).ctypes.data))

    def _pin(self, device: torch.device, address: int) -> None:
        with torch.cuda.device(device):
            status = int(_cudart().cudaHostRegister(address, self.view.nbytes, 0))
            if status:
                _clear_cuda_error()
        if status:
            _warn_unpinned(status)
        else:
            weakref.finalize(self, _unpin, address, device, os.getpid()).atexit = False


def _unpin(address: int, device: torch.device, process: int) -> None:
    if process == os.getpid():  # or else it is pinned for the parent
        with torch.cuda.device(device):
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
                torch.cuda.synchronize(device)  # copies may be queued that nobody waits for
            torch.cuda.check_error(int(_cudart().cudaHostUnregister(address)))


class Buffer:
    """``BUFFER_NBYTES`` of memory, aligned to pages. One thread uses it at a time: whoever fills it hands it on.

    In a forked child the memory is empty, and a pool neither lends it nor unpins it.

    Args:
        slab: the memory that the buffer is a part of.
        begin: offset in the slab.
        nbytes: size of the buffer.
    """

    __slots__ = ("_process", "_slab", "address", "array", "begin", "is_touched", "nbytes", "view")

    def __init__(self, slab: _Slab, begin: int, nbytes: int) -> None:
        self._slab = slab
        self._process = os.getpid()
        self.begin = begin
        self.nbytes = nbytes
        self.view = slab.view[begin : begin + nbytes]
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.view, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self.is_touched = False

    @property
    def is_of_parent(self) -> bool:
        """True if this process was forked from the one that has mapped the buffer."""
        return self._process != os.getpid()

    def prepare(self, device: torch.device | None = None) -> None:
        """Back every page with memory, so that no transfer waits for it, and pin the memory if a device of CUDA is
        given, together with that of buffers that were mapped with it.

        Only the first call does anything. If CUDA refuses to pin, a warning is logged; copies still work, more slowly.
        """
        if not self.is_touched:
            populate(self.address, self.nbytes)
            self.array[:: mmap.PAGESIZE] |= 0  # an older kernel has not done it
            self.is_touched = True
        if device is not None and device.type == "cuda":
            self._slab.pin(device)

    def as_tensor(self) -> torch.Tensor:
        """A uint8 tensor over the same memory."""
        return torch.from_numpy(self.array)


class Run:
    """Neighbouring buffers of one mapping, as one piece of memory."""

    __slots__ = ("address", "buffers", "nbytes", "view")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        first, last = buffers[0], buffers[-1]
        self.buffers = buffers
        self.view = first._slab.view[first.begin : last.begin + last.nbytes]
        self.address = first.address
        self.nbytes = self.view.nbytes

    def as_tensor(self) -> torch.Tensor:
        """A uint8 tensor over the same memory."""
        return torch.from_numpy(np.frombuffer(self.view, dtype=np.uint8))


def runs_of(buffers: Iterable[Buffer]) -> Iterator[Run]:
    """The memory of buffers, in order, in as few runs as there are."""
    run: list[Buffer] = []
    for buffer in buffers:
        if run and not (run[-1]._slab is buffer._slab and run[-1].begin + run[-1].nbytes == buffer.begin):
            yield Run(run)
            run = []
        run.append(buffer)
    if run:
        yield Run(run)


class BufferPool:
    """Lends buffers and takes them back. Any thread may call any method.

    With a limit, :meth:`reserve` maps memory, and the pool keeps it until :meth:`close`. Without one, :meth:`take` maps
    another buffer if none is idle, and the pool keeps ``BUFFER_COUNT`` of them. Such a pool takes no lock, only single
    operations of a list, which are atomic: a signal handler may save while the code that it interrupts is in here.

    A forked child begins with an empty pool.

    Args:
        limit: returns the most bytes that the pool may map, at least ``BUFFER_NBYTES``. Called once, by the first
            :meth:`reserve`, and again after :meth:`forget_limit`. None: there is no limit.
    """

    def __init__(self, limit: Callable[[], int] | None = None) -> None:
        self._limit = limit
        self._most: int | None = None
        """Number of buffers that the limit allows, once it is known."""
        self._idle: list[Buffer] = []
        self._count = 0
        """Buffers that are mapped, lent or not; counted only with a limit."""
        self._peak = 0
        self._closed = False
        self._changed = threading.Condition()
        _pools.add(self)

    def forget_limit(self) -> None:
        """Have the next :meth:`reserve` ask for the limit. What is mapped already stays so."""
        with self._changed:
            self._most = None

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped, lent or not."""
        return self._count * BUFFER_NBYTES

    @property
    def free_nbytes(self) -> int:
        """Bytes that can be lent at once."""
        return len(self._idle) * BUFFER_NBYTES

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that were lent at any instant."""
        return self._peak * BUFFER_NBYTES

    def has_room(self, nbytes: int) -> bool:
        """True if ``nbytes`` can be lent at once; or all that is mapped, if that is less."""
        return self.free_nbytes >= min(nbytes, self.nbytes)

    def reserve(self, nbytes: int) -> None:
        """Map memory until there are at least ``nbytes``, or as many as the limit allows.

        Raises:
            MemoryError: the operating system refuses so much address space.
            RuntimeError: the pool is closed.
        """
        assert self._limit is not None, "a pool without a limit maps memory when it is wanted"
        with self._changed:
            self._check_open()
            if self._most is None:
                self._most = self._limit() // BUFFER_NBYTES
            missing = min(-(-nbytes // BUFFER_NBYTES), self._most) - self._count
            if missing <= 0:
                return
            try:
                self._idle += map_buffers(missing)[::-1]
            except OSError as error:
                raise MemoryError(f"cannot map {human_size(missing * BUFFER_NBYTES)} for staging: {error}") from error
            self._count += missing
            self._changed.notify_all()

    def take(self, holder: list[Buffer]) -> Buffer:
        """Lend a buffer now.

        Args:
            holder: the buffer is appended to this list, so that the buffer is not lost if an interrupt comes before
                the method returns.

        Raises:
            MemoryError: all buffers that the limit allows are lent.
            RuntimeError: the pool is closed.
        """
        self._check_open()
        if not self._lend(holder):
            if self._limit is not None:
                raise MemoryError("all buffers are lent")
            holder += map_buffers(1)
        return holder[-1]

    def wait_and_take(
        self,
        holder: list[Buffer],
        *,
        while_waiting: Callable[[], AbstractContextManager[None]],
        stopped: Callable[[], bool],
    ) -> Buffer | None:
        """Lend a buffer as soon as one is idle.

        Args:
            holder: as for :meth:`take`.
            while_waiting: entered if none is idle now, until one is.
            stopped: asked whenever something changes. If it returns True, the method returns None.

        Raises:
            RuntimeError: the pool is closed.
        """
        with nullcontext() if self._idle else while_waiting(), self._changed:
            lent = self._changed.wait_for(lambda: self._closed or stopped() or (self._lend(holder) and holder[-1]))
            self._check_open()
            return lent if isinstance(lent, Buffer) else None

    def take_idle(self, holder: list[Buffer], most: int) -> list[Buffer]:
        """Lend up to ``most`` of the buffers that are idle now. See :meth:`wait_and_take`."""
        taken: list[Buffer] = []
        with self._changed:
            while len(taken) < most and self._lend(holder):
                taken.append(holder[-1])
        return taken

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Nothing reads or writes it any more."""
        if buffer.is_of_parent:
            return
        if self._limit is None:
            self._idle.append(buffer)
            with contextlib.suppress(IndexError):  # other threads may take buffers meanwhile
                while len(self._idle) > BUFFER_COUNT:
                    self._idle.pop()
            return
        with self._changed:
            self._idle.append(buffer)
            if self._closed:
                self._release_idle()
            self._changed.notify_all()

    @contextmanager
    def lending(self) -> Iterator[list[Buffer]]:
        """A list for :meth:`take`. The buffers in it go back to the pool at the end of the block."""
        holder: list[Buffer] = []
        try:
            yield holder
        finally:
            while holder:
                self.give(holder.pop())

    def touch_idle(self) -> None:
        """Touch the idle buffers that no transfer has used yet. Meanwhile they cannot be lent."""
        with self._changed:
            untouched = [buffer for buffer in self._idle if not buffer.is_touched]
            self._idle[:] = [buffer for buffer in self._idle if buffer.is_touched]
        for buffer in untouched:
            buffer.prepare()
            self.give(buffer)

    def wake(self) -> None:
        """Let those who wait in :meth:`wait_and_take` ask ``stopped`` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory; that of lent buffers as soon as they are given back. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._release_idle()
            self._changed.notify_all()

    def _lend(self, holder: list[Buffer]) -> bool:
        try:
            holder.extend(map(list.pop, (self._idle,)))  # one call: an interrupt finds the buffer in one of the lists
        except IndexError:
            return False
        self._peak = max(self._peak, self._count - len(self._idle))
        return True

    def _release_idle(self) -> None:
        self._count -= len(self._idle)
        self._idle.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the staging memory has been released")

    def _forget(self) -> None:
        """In a forked child: the buffers are the parent's, and so is a lock that another thread holds."""
        self._idle.clear()
        self._count = 0
        self._changed = threading.Condition()


def map_buffers(count: int) -> list[Buffer]:
    """Buffers in one private mapping, which uses whole huge pages. Forked children find the mapping empty."""
    memory = map_private(count * BUFFER_NBYTES + _HUGE_PAGE, MADV_WIPEONFORK, mmap.MADV_HUGEPAGE)
    _mappings.add(memory)
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    slab = _Slab(memory, -address % _HUGE_PAGE, count * BUFFER_NBYTES)
    return [Buffer(slab, number * BUFFER_NBYTES, BUFFER_NBYTES) for number in range(count)]


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_parent: list[mmap.mmap] = []
"""In a forked child: the parent's mappings, which must not be unmapped. CUDA may have kept them out of the child, where
something else can have their addresses."""


def _forget_parent() -> None:
    _of_parent.extend(_mappings)
    _mappings.clear()
    for pool in _pools:
        pool._forget()


first_in_children(_forget_parent)

transfer_buffers = BufferPool()
"""Buffers for single saves and loads. Transfers that run at once map more buffers than the pool keeps."""


@cache
def _warn_unpinned(status: int) -> None:
    _logger.warning("staging memory is not pinned: cudaHostRegister returned %d; device copies are slower", status)


def _clear_cuda_error() -> None:
    """CUDA keeps the last error of each thread, and torch would raise that error after some later, unrelated call."""
    major = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError):  # the library is linked into torch, where it cannot be reached
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
