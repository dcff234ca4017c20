"""Host memory that activations are read into, straight from the disk, and that goes from one tensor to the next.

First touches of memory cost more than reading into it, so what a tensor leaves behind is kept for another of its size.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections import deque
from functools import cache

import numpy as np
import torch

from fastensor.offload.copying import PAGE_NBYTES

_HUGE_PAGES_FROM = 4 << 20


_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 1 << 20
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19
"""A fork during a direct read into shared pages would leave the bytes with the child (open(2))."""
_logger = logging.getLogger("fastensor")


@cache
def return_freed_memory() -> None:
    """Have the C library map what is large, so that freeing it gives it back. Its own way of guessing what is large is
    switched off by that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM):
        _logger.warning("this C library has no mallopt: memory of offloaded tensors may stay with the process")


def keep_on_fork(memory: memoryview) -> None:
    """Memory of :class:`HostMemory` has been filled: children that are forked from now on find there what this process
    does."""
    assert isinstance(memory.obj, mmap.mmap)
    _advise(memory.obj, _MADV_KEEPONFORK)


class HostMemory:
    """Gives out page-aligned storages, and keeps what is left of them. Used by one thread at a time.

    Storages may be freed by any thread at any time.

    Args:
        budget: how many bytes are kept for later at most.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._closed = False
        self._returned: deque[mmap.mmap] = deque()
        """Appended to by finalizers, which may wait for nothing."""
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_nbytes = 0

    @property
    def idle_nbytes(self) -> int:
        """How much is kept for later."""
        self.trim()
        return self._idle_nbytes

    def storage(self, nbytes: int) -> tuple[torch.UntypedStorage, memoryview]:
        """A storage of at least so many bytes, rounded up to whole pages, and its memory, for filling it."""
        rounded = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self.trim()
        memory = self._take(rounded)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        with torch.inference_mode(False):
            storage = torch.from_numpy(array).untyped_storage()
        return storage, memoryview(memory)

    def clear(self) -> None:
        """Keep nothing of what has been given back, nor of what will be."""
        self._closed, self._budget = True, 0
        self.trim()

    def trim(self) -> None:
        """Take in what has been given back, and keep no more of it than may be."""
        while self._returned:
            memory = self._returned.popleft()
            self._idle.setdefault(len(memory), []).append(memory)
            self._idle_nbytes += len(memory)
        for nbytes in list(self._idle):
            if self._idle_nbytes <= self._budget:
                break
            same = self._idle.pop(nbytes)
            self._idle_nbytes -= nbytes * len(same)

    def _take(self, nbytes: int) -> mmap.mmap:
        if same := self._idle.get(nbytes):
            self._idle_nbytes -= nbytes
            memory = same.pop()
        else:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if nbytes >= _HUGE_PAGES_FROM:
                _advise(memory, mmap.MADV_HUGEPAGE)
        _advise(memory, _MADV_WIPEONFORK)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        """Called by finalizers, which may wait for nothing."""
        if not self._closed:
            self._returned.append(memory)


def _advise(memory: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # this kernel does not have it
        memory.madvise(advice)
