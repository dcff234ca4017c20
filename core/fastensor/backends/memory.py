"""Memory that transfers go through: a ring of page-aligned buffers, touched once and reused between transfers.

First touches of memory cost more than the copy that follows, and pinning costs more still, so one ring is kept for
the next transfer. Concurrent transfers get rings of their own, which go away with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

BUFFER_NBYTES = 4 << 20
BUFFER_COUNT = 8
_logger = logging.getLogger("fastensor")
_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_WORTH_POPULATING_NBYTES = 64 << 10
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_WIPEONFORK = 18
"""Linux 4.14. A fork during a direct transfer into shared pages would leave the bytes with the child (open(2))."""


class Buffer:
    """A page-aligned piece of a ring's memory. Belongs to one thread at a time: whoever fills it hands it on."""

    __slots__ = ("_begin", "_memory", "_pinned_for", "_touched", "address", "array", "nbytes", "view")

    def __init__(self, memory: mmap.mmap, begin: int, nbytes: int) -> None:
        self._memory = memory
        self._begin = begin
        self.nbytes = nbytes
        self.view = memoryview(memory)[begin : begin + nbytes]
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.view, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self._touched = False
        self._pinned_for: torch.device | None = None

    def touch(self) -> None:
        """Back every page with memory, so that no transfer waits for it."""
        if self._touched:
            return
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE, self._begin, self.nbytes)
        except OSError:  # an older kernel
            self.array[:: mmap.PAGESIZE] |= 0
        self._touched = True

    def prepare(self, device: torch.device | None) -> None:
        """Touch it, and pin it if copies come from a CUDA device."""
        self.touch()
        if device is not None:
            self.pin(device)

    def pin(self, device: torch.device) -> None:
        """Register the memory with CUDA, so that device copies into it are at full speed. They work without."""
        if self._pinned_for is not None:
            return
        with torch.cuda.device(device):
            status = int(_cudart().cudaHostRegister(self.address, self.nbytes, 0))
            if status == 0:
                self._pinned_for = device
                return
            _forget_error()
        _report_unpinned(status)

    def as_tensor(self) -> torch.Tensor:
        """A uint8 tensor over the same memory."""
        return torch.from_numpy(self.array)

    def release(self) -> None:
        """Undo :meth:`pin`; the memory itself goes with the last reference to it."""
        if self._pinned_for is not None:
            with torch.cuda.device(self._pinned_for):
                torch.cuda.check_error(int(_cudart().cudaHostUnregister(self.address)))
            self._pinned_for = None


@cache
def _report_unpinned(status: int) -> None:
    _logger.warning("staging memory is not pinned: cudaHostRegister returned %d; device copies are slower", status)


def _forget_error() -> None:
    """CUDA remembers the last error of each thread, and torch would raise it after something else that it does."""
    major = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError):  # torch has it linked in, where it cannot be reached
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types


def map_buffers(count: int) -> list[Buffer]:
    """Buffers of ``BUFFER_NBYTES`` in one private mapping, whose huge pages are used whole. Children find it empty."""
    memory = mmap.mmap(-1, count * BUFFER_NBYTES + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # this kernel does not have it
            memory.madvise(advice)
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    begin = -address % _HUGE_PAGE
    return [Buffer(memory, begin + number * BUFFER_NBYTES, BUFFER_NBYTES) for number in range(count)]


class Ring:
    """The buffers of one transfer."""

    def __init__(self) -> None:
        self._buffers = map_buffers(BUFFER_COUNT)

    def buffers(self) -> list[Buffer]:
        """All of them, which may not have been touched yet."""
        return list(self._buffers)

    def buffer(self, index: int) -> Buffer:
        """Buffer number ``index``, touched."""
        self._buffers[index].touch()
        return self._buffers[index]

    def release(self) -> None:
        for buffer in self._buffers:
            buffer.release()


class Releasable(Protocol):
    """What a shelf keeps."""

    @property
    def release(self) -> Callable[[], None]:
        """Called when it is not kept."""


Key = TypeVar("Key")
Kept = TypeVar("Kept", bound=Releasable)


class Shelf(Generic[Key, Kept]):
    """Keeps what a transfer needs for the next one: one idle ring of each kind.

    Single operations of a dict, which are atomic, lend and take back. A lock could be held by the very code that a
    signal handler interrupts, which saves.
    """

    def __init__(self) -> None:
        self._idle: dict[Key, Kept] = {}
        self._of_parent: list[Kept] = []
        """Kept alive, so that nothing frees them here."""
        os.register_at_fork(after_in_child=self.forget)

    @contextmanager
    def borrowed(self, key: Key, make: Callable[[], Kept]) -> Iterator[Kept]:
        """One for the length of a transfer. Nothing may use it any more when the block is left."""
        process = os.getpid()
        ring = self._idle.pop(key, None)
        if ring is None:
            ring = make()
        try:
            yield ring
        finally:
            if process != os.getpid():  # this thread has forked in the block
                self._of_parent.append(ring)
            else:
                self._give_back(key, ring)

    def _give_back(self, key: Key, ring: Kept) -> None:
        kept = self._idle.setdefault(key, ring)
        if kept is not ring:
            ring.release()

    def forget(self) -> None:
        """In a forked child, which does not share pinned pages, and must not free a device's."""
        self._of_parent += self._idle.values()
        self._idle = {}


_rings: Shelf[None, Ring] = Shelf()


def borrowed_ring() -> AbstractContextManager[Ring]:
    """A ring for the length of one transfer. No buffer may be in use any more when the block is left."""
    return _rings.borrowed(None, Ring)


def populate(address: int, nbytes: int) -> None:
    """Back memory with pages in one go, which takes half as long as a fault for each when it is filled. What is there
    stays. Does nothing where the kernel cannot, and little where the pages are there already."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _WORTH_POPULATING_NBYTES:
        _madvise(begin, end - begin, _MADV_POPULATE_WRITE)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """``memmove`` between two addresses, without the GIL."""
    ctypes.memmove(target, source, nbytes)
