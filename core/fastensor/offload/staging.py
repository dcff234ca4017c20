"""Staging blocks in host memory, and the copies that devices make to them and from them.

Copies are queued, and nobody waits for them here. What they use is given back once their events are reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from fastensor.backends.buffers import BUFFER_NBYTES, Buffer, BufferPool
from fastensor.backends.streams import Event, are_reached
from fastensor.offload import copying, moving
from fastensor.offload.saved import SavedBytes

_GROWTH_NBYTES = 64 << 20
"""Bytes by which staging memory grows, within the budgets."""


class Staging:
    """The staging blocks of one swapper. Call every method with the lock of
    :class:`~fastensor.offload.swapper.Swapper` held.

    Args:
        limit: gives the most bytes of all blocks.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.pool = BufferPool(limit)
        self.copying: deque[SavedBytes] = deque()
        """Ranges that are being copied to blocks, in the order in which that was queued."""
        self._leaving: deque[tuple[Sequence[Event], list[Buffer], torch.UntypedStorage | None]] = deque()
        """Blocks that are given back when events are reached: devices copy from them, or to them from a storage."""

    def events(self) -> list[Event]:
        """Events to wait for until no block is copied from or to."""
        leaving = [event for events, _, _ in self._leaving for event in events]
        return [event for saved in self.copying for event in saved.copied] + leaving

    def busy(self, nbytes: int) -> Sequence[Event]:
        """Events to wait for before :meth:`take` has so many bytes; none if that may be called now."""
        with suppress(MemoryError):  # which take raises
            self._reserve(in_blocks(nbytes))
        self._collect()
        return self._leaving[0][0] if self._leaving and self.pool.free_nbytes < in_blocks(nbytes) else ()

    def take(self, saved: SavedBytes) -> None:
        """Give a range blocks.

        Raises:
            MemoryError: ranges whose write has failed hold the blocks, or the system gives no memory.
        """
        wanted = in_blocks(saved.nbytes)
        self._reserve(wanted)
        if self.pool.free_nbytes < wanted:
            raise MemoryError("no staging memory is left: activations that could not be written hold it")
        blocks: list[Buffer] = []
        while len(blocks) < wanted // BUFFER_NBYTES:
            self.pool.take(blocks)
        saved.blocks = sorted(blocks, key=lambda block: block.address)  # neighbours are copied at once

    def begin_copy(self, saved: SavedBytes) -> None:
        """Queue copies of a range to blocks. The device copies when it has computed the bytes.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no memory for that. Nothing is under way.
        """
        try:
            self.take(saved)
            saved.copied = moving.stage(saved)
        except BaseException:
            copying.wait_until_left(saved.device)  # a part may have been queued
            self.give(saved)
            raise
        assert saved.source is not None
        saved.address = saved.source.data_ptr()
        self.copying.append(saved)

    def copied(self) -> Iterator[SavedBytes]:
        """Take back blocks that no copy uses any more. Returns ranges that were copied, each once. Nothing holds the
        memory any more that they were saved in."""
        self._collect()
        while self.copying and are_reached(self.copying[0].copied):
            saved = self.copying.popleft()
            saved.copied = ()
            _check_unchanged(saved)
            saved.source = saved.ready = None
            yield saved

    def leave(self, saved: SavedBytes) -> None:
        """Leave a range, which is being copied, where it was saved."""
        self.copying.remove(saved)
        self.give(saved)
        saved.copied = ()

    def give(self, saved: SavedBytes) -> None:
        """Take back the blocks of a range, when the copies from them and to them are done that are queued now. Nothing
        else uses them any more."""
        if saved.blocks:
            source = saved.source if saved.copied else None
            self._leaving.append(((*saved.copied, *saved.arrived), saved.blocks, source))
            saved.blocks = []
            self._collect()

    def _collect(self) -> None:
        """Take back blocks that no copy uses any more."""
        while self._leaving and are_reached(self._leaving[0][0]):
            self._take_back()

    def close(self) -> None:
        """Free the memory. No copy is under way any more."""
        while self._leaving:
            self._take_back()
        self.pool.close()

    def _take_back(self) -> None:
        for block in self._leaving.popleft()[1]:
            self.pool.give(block)

    def _reserve(self, nbytes: int) -> None:
        wanted = self.pool.nbytes - self.pool.free_nbytes + nbytes
        if wanted > self.pool.nbytes:  # much at once: it is pinned at once, and ranges find neighbours in it
            self.pool.reserve(max(wanted, self.pool.nbytes + _GROWTH_NBYTES))


def _check_unchanged(saved: SavedBytes) -> None:
    """Note that a range is lost whose storage was resized while it was copied: its memory was freed before."""
    source, end = saved.source, saved.origin + saved.nbytes
    if source is not None and (source.nbytes() < end or source.data_ptr() != saved.address):
        saved.failure = copying.resized(source, end)


def in_blocks(nbytes: int) -> int:
    """``nbytes`` in whole blocks."""
    return -(-nbytes // BUFFER_NBYTES) * BUFFER_NBYTES


def cost(saved: SavedBytes) -> int:
    """The bytes that a range takes of budgets of host memory: whole blocks if it is copied to blocks."""
    return in_blocks(saved.nbytes) if copying.is_staged(saved.device) else saved.nbytes
