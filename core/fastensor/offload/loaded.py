"""Ranges that come back to memory: threads read them from slots, or devices copy them from staging blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import TypeAlias

import torch

from fastensor.backends.streams import Event, are_reached, event_now, hold_back_current
from fastensor.offload import copying, moving
from fastensor.offload.host_memory import HostMemory
from fastensor.offload.moving import Reading
from fastensor.offload.saved import ByteBudget, SavedBytes
from fastensor.offload.tiers import StorageTiers
from fastensor.offload.trace import Trace, note_move

NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
BeginRead: TypeAlias = Callable[[Reading, bool], Future[torch.UntypedStorage | None]]


class LoadedRanges(ByteBudget):
    """The ranges that have come back, or are about to, and the memory that they come to. Call every method with the
    lock of :class:`~fastensor.offload.swapper.Swapper` held.

    Args:
        limit: the most bytes of them, but for what is needed at once; and of memory that is kept for the next ones.
        note: as for :class:`ByteBudget`.
        tiers: get back what ranges need no more.
        begin_read: has a reader thread read a range, which is needed now, or ahead.
        trace: where copies are recorded.
    """

    def __init__(
        self,
        limit: int,
        note: Callable[[int], None],
        tiers: StorageTiers,
        begin_read: BeginRead,
        trace: Trace | None,
    ) -> None:
        super().__init__(limit, note)
        self._tiers = tiers
        self._begin_read = begin_read
        self._trace = trace
        self.host = HostMemory(limit)

    def set_limit(self, limit: int) -> None:
        """Have another limit, and evict what is beyond it, if nothing copies or reads it."""
        self.limit = self.host.budget = limit
        self._make_room(0, set())

    def events(self) -> list[Event]:
        """Events to wait for until no range is copied from staging blocks."""
        return [event for saved in self.oldest_first() for event in saved.arrived]

    def get(self, saved: SavedBytes) -> tuple[torch.UntypedStorage, int]:
        """The memory of a range that has come back, and the offset in the original storage at which it begins. What is
        queued on the current stream from now on follows the copies."""
        assert saved.loaded is not None
        saved.prefetched = False
        self.use(saved)
        hold_back_current(saved.device, saved.arrived)
        return saved.loaded, saved.origin - saved.lead

    def bring(self, saved: SavedBytes, next_ones: Set[SavedBytes]) -> None:
        """Have a range that is needed now copied back or read, before others, and beyond the budget if the
        ``next_ones`` leave no room. If there is no memory for it, what came back before gives up its own.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read into.
        """
        for other in self.oldest_first():
            if other.prefetched:
                self.cancel(other)
        self._make_room(saved.nbytes, next_ones)
        try:
            self._begin(saved, urgent=True)
        except NO_MEMORY:
            if not self._evict_all():
                raise
            self._begin(saved, urgent=True)

    def bring_ahead(self, saved: SavedBytes, sooner: Set[SavedBytes]) -> bool:
        """Have a range copied back or read before it is needed. False if there is no room beside those that are needed
        ``sooner``.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read into.
        """
        has_room = self._make_room(saved.nbytes, sooner)
        if has_room:
            self._begin(saved, urgent=False)
        return has_room

    def note_read(self, reading: Reading, *, succeeded: bool) -> None:
        """Note that a read has ended."""
        saved = reading.saved
        saved.read = None
        if succeeded and not saved.released:
            saved.loaded = reading.target
        else:
            self.evict(saved)

    def cancel(self, saved: SavedBytes) -> None:
        """Have a range not read, if its read has not begun."""
        if saved.read is not None and saved.read.cancel():
            saved.read = None
            self.evict(saved)
            self._tiers.tidy(saved)

    def evict(self, saved: SavedBytes) -> None:
        """Give up the memory of a range."""
        if saved.loaded is not None and saved.prefetched and not are_reached(saved.arrived):
            copying.keep_until_filled(saved.loaded)  # no stream waits for what was read ahead for nothing
        self.remove(saved)
        saved.loaded = None

    def _begin(self, saved: SavedBytes, *, urgent: bool) -> None:
        if saved.blocks:
            started = time.perf_counter()
            target, _ = moving.new_memory(saved, self.host)
            saved.arrived = copying.queue_in(target, saved.lead, saved.nbytes, saved.blocks, event_now(saved.device))
            saved.loaded = target
            note_move(self._trace, "copy in", started, saved)
        else:
            saved.read = self._begin_read(Reading.of(saved, self.host), urgent)
        self.add(saved, saved.nbytes, beyond=urgent)
        saved.prefetched = not urgent

    def _make_room(self, nbytes: int, sooner: Set[SavedBytes]) -> bool:
        """Evict ranges that no saved tensor is known to need again, then others, but none that is needed ``sooner``.
        False if that is not enough."""
        for may_be_needed in (False, True):
            for saved in self.oldest_first():
                if self.fits(nbytes):
                    return True
                if saved.loaded is not None and saved not in sooner and (may_be_needed or not saved.unread):
                    self.evict(saved)
        return self.fits(nbytes)

    def _evict_all(self) -> bool:
        """Evict all ranges that came back. Returns whether there were any."""
        found = [saved for saved in self.oldest_first() if saved.loaded is not None]
        for saved in found:
            self.evict(saved)
        return bool(found)
