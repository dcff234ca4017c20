"""Host memory that activations are read into, without a copy between, and that is reused.

The first touch of memory costs more than reading into it. So the memory of a freed tensor is kept for the next tensor
of its size. Whoever holds the tensor holds the memory, as long as it likes: a
:class:`~fastensor.backends.buffers.BufferPool` lends pieces of one size for the length of a transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import resource
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from fastensor.backends.memory import MADV_KEEPONFORK, MADV_WIPEONFORK, advise, map_private
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes
from fastensor.offload.copying import PAGE_NBYTES

_HUGE_PAGES_FROM = 4 << 20
_MAPPED_FROM = 1 << 20
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_FAULTED_PAGES = 1024
"""Pages whose first touch is timed."""
_logger = logging.getLogger("fastensor")
_beside_heap = 0
"""Bytes of this process's memory that were neither the C library's, when it returned what was free, nor in ``_mapped``:
those of other allocators and of libraries, 60 MB with torch for CPUs, 180 MB with torch for CUDA."""
_mapped: dict[int, int] = {}
"""The bytes of each piece of memory that a :class:`HostMemory` has mapped, by ``id``."""


def return_freed_memory() -> None:
    """Return memory that was freed to the system, wherever it lies in the C library's heap (``malloc_trim``). Does
    nothing with a C library that cannot."""
    global _beside_heap
    if (trim := _malloc_trim()) is not None:
        trim(0)
        _beside_heap = max(resident_bytes() - bytes_in_use(), 0)


@cache
def page_fault_seconds() -> float:
    """Seconds that a thread takes for the first touch of a page of memory, which the system clears. Measured once: the
    least of three times."""
    seconds = []
    for _ in range(3):
        with contextlib.closing(map_private(_FAULTED_PAGES * mmap.PAGESIZE)) as memory:
            array = np.frombuffer(memory, dtype=np.uint8)
            started = time.perf_counter()
            array[:: mmap.PAGESIZE] = 1
            seconds.append(time.perf_counter() - started)
            del array  # or else the memory cannot be unmapped
    return min(seconds) / _FAULTED_PAGES


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        _logger.warning("this C library has no malloc_trim: memory of offloaded tensors may stay with the process")
    return trim


def is_address_space_limited() -> bool:
    """True if the address space of this process is limited (``ulimit -d``, ``ulimit -v``)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def spare_address_space() -> None:
    """Have the C library of this process map each large tensor by itself from now on, and give new threads no heaps of
    their own. Call it where address space is limited.

    Such a limit counts the holes that freed tensors leave in heaps, whose pages :func:`return_freed_memory` returns;
    and tensors of the same size do not fit into the holes, for their alignment. Only the main heap ever shrinks. Other
    processes are better off with heaps, whose pages are there already.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_M_ARENA_MAX, 1)


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def free_heap_bytes() -> int:
    """Bytes of this process's memory that were freed, and that the C library keeps for the next allocations; 0 if it
    does not say. What it has returned to the system is not counted. Memory that other allocators have taken since
    :func:`return_freed_memory` may be."""
    found = _mallinfo2()
    return min(max(resident_bytes() - _in_use(found) - _beside_heap, 0), int(found.fordblks))


def bytes_in_use() -> int:
    """Bytes that the C library has given out and not got back, with those of storages that a :class:`HostMemory` has
    given out or keeps."""
    return _in_use(_mallinfo2())


def _mallinfo2() -> _MallInfo2:
    """State of the C library's heap; zeros if it does not say."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return _MallInfo2()
    mallinfo2.restype = _MallInfo2
    found: _MallInfo2 = mallinfo2()
    return found


def _in_use(found: _MallInfo2) -> int:
    return int(found.uordblks) + int(found.hblkhd) + sum(list(_mapped.values()))  # other threads map and unmap


def bytes_until_short(reserve: int) -> int:
    """Bytes that this process may take until memory is short; negative if it is. Then fewer than ``reserve`` bytes are
    free, or fewer than a quarter of what lies in holes of the C library's heap. Takes about a millisecond."""
    return available_memory() // local_processes() - max(reserve, free_heap_bytes() // 4)


def free_host_memory() -> int:
    """Bytes that this process may still take, what the C library keeps for it included. The processes of the job on
    this machine share what is free."""
    return available_memory() // local_processes() + free_heap_bytes()


def resident_bytes() -> int:
    """Bytes of this process that are in memory, without pages of files; 0 where there is no ``/proc``."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except FileNotFoundError:
        return 0
    return (resident - shared) * mmap.PAGESIZE


def keep_on_fork(memory: memoryview) -> None:
    """Let children that are forked from now on see the contents of memory that :class:`HostMemory` gave out, and that
    is filled by now."""
    assert isinstance(memory.obj, mmap.mmap)
    advise(memory.obj, MADV_KEEPONFORK)


class HostMemory:
    """Gives out page-aligned storages, and reuses their memory. Use it in one thread at a time. Storages may be freed
    in any thread at any time.

    Args:
        budget: the most bytes that are kept for later.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._closed = False
        self._returned: deque[mmap.mmap] = deque()
        """Memory of freed storages, appended by finalizers, which must not wait."""
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_nbytes = 0

    @property
    def idle_nbytes(self) -> int:
        """Bytes that are kept for later."""
        self.trim()
        return self._idle_nbytes

    def storage(self, nbytes: int) -> tuple[torch.UntypedStorage, memoryview]:
        """A storage of ``nbytes``, rounded up to whole pages, and its memory, to be filled by the caller."""
        rounded = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self.trim()
        memory = self._take(rounded)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        with torch.inference_mode(False):
            storage = torch.from_numpy(array).untyped_storage()
        return storage, memoryview(memory)

    def clear(self) -> None:
        """Return all kept memory to the system, and keep none from now on."""
        self._closed, self.budget = True, 0
        self.trim()

    def trim(self, most: int | None = None) -> None:
        """Collect the memory of freed storages, and return to the system what exceeds ``most``, or the budget."""
        most = self.budget if most is None else most
        while self._returned:
            memory = self._returned.popleft()
            self._idle.setdefault(len(memory), []).append(memory)
            self._idle_nbytes += len(memory)
        while self._idle and self._idle_nbytes > most:
            nbytes = next(iter(self._idle))
            same = self._idle.pop(nbytes)
            self._idle_nbytes -= nbytes * len(same)

    def _take(self, nbytes: int) -> mmap.mmap:
        if same := self._idle.get(nbytes):
            self._idle_nbytes -= nbytes
            memory = same.pop()
        else:
            memory = self._new_memory(nbytes)
            _mapped[id(memory)] = nbytes
            weakref.finalize(memory, _mapped.pop, id(memory)).atexit = False
            if nbytes >= _HUGE_PAGES_FROM:
                advise(memory, mmap.MADV_HUGEPAGE)
        advise(memory, MADV_WIPEONFORK)
        return memory

    def _new_memory(self, nbytes: int) -> mmap.mmap:
        """New memory; in place of idle memory of other sizes, if there is no room for both.

        Raises:
            OSError: there is no memory.
        """
        try:
            return map_private(nbytes)
        except OSError:
            if not self._idle_nbytes:
                raise
            self.trim(0)
            return map_private(nbytes)

    def _give_back(self, memory: mmap.mmap) -> None:
        """Called by finalizers, which must not wait."""
        if not self._closed:
            self._returned.append(memory)
