"""The samples that the server has in memory: which can be found, and which have to stay where they are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fastensor.data.coalescing import Integers
from fastensor.provision.cache import Cache, CacheExtent
from fastensor.provision.metrics import Cached


@dataclass(slots=True)
class Counts:
    """Counts of what has happened to the samples of a service."""

    hits: int = 0
    """Samples of batches that the cache had."""
    misses: int = 0
    """Samples that were read for a batch."""
    preloaded: int = 0
    """Samples that were read before a batch needed them."""
    damaged: int = 0
    """Samples whose bytes in memory were not what had been stored. They were read again."""


class SampleCache:
    """A cache with the state of its samples.

    A sample can be found when a worker has written it. It is held while a worker writes it, and while tasks use it.
    When it is used next decides whether it stays.

    Args:
        places: None: nothing is kept.
    """

    def __init__(self, places: Cache | None) -> None:
        self.counts = Counts()
        self.places = places
        self._reading: set[int] = set()
        """Samples that workers read now."""
        self._unwritten: set[int] = set()
        """Samples that have a place, and are not written yet."""
        self._damaged: set[int] = set()
        self._unreadable: set[int] = set()
        """Samples that could not be read ahead. The batches that need them try again, and their loaders are told."""

    def take(self, positions: Integers) -> tuple[Integers, Integers]:
        """Offsets of samples, -1 for those that are not there; and their bytes. They are held from now on."""
        offsets, lengths = np.full(len(positions), -1), np.zeros(len(positions), np.int64)
        for place, position in enumerate(positions.tolist()):
            if self.places is not None and (found := self._whole(position)) is not None:
                offsets[place], lengths[place] = found
                self.places.hold(position)
        return offsets, lengths

    def reading(self, positions: Integers) -> None:
        """Samples are being read."""
        if self.places is not None:
            self._reading.update(positions.tolist())

    def not_reading(self, positions: Integers) -> None:
        """Samples have been read, or the worker has ended."""
        self._reading.difference_update(positions.tolist())

    def not_readable(self, positions: Integers) -> None:
        """Samples could not be read ahead."""
        self._unreadable.update(positions.tolist())

    @property
    def unreadable(self) -> int:
        """Number of samples that could not be read ahead, and are not kept since."""
        return sum(self.places is None or self.places.find(position) is None for position in self._unreadable)

    def awaits(self, positions: Integers) -> bool:
        """True if some of the samples will be found soon."""
        wanted = positions.tolist()
        return not (self._reading.isdisjoint(wanted) and self._unwritten.isdisjoint(wanted))

    def lacking(self, positions: Integers) -> Integers:
        """Those of the samples that are to be read ahead: they have no place, are not being read, and have not failed.
        None without a cache."""
        found = (one for one in positions.tolist() if one not in self._reading and one not in self._unreadable)
        return np.array([one for one in found if self.places is not None and self.places.find(one) is None], np.int64)

    def would_keep(self, count: int, next_use: int) -> bool:
        """True if there is likely to be room for so many samples more, the last of which is used then."""
        if self.places is None:
            return False
        mean_nbytes = self.places.used_nbytes / max(self.places.samples, 1)
        last_use = self.places.last_use()
        has_room = self.places.nbytes - self.places.used_nbytes >= count * mean_nbytes
        return has_room or (last_use is not None and last_use > next_use)

    def give_back(self, positions: Integers, next_uses: Integers) -> None:
        """A task that has taken samples, or has been told to write them, does not use them any more."""
        for position, next_use in zip(positions.tolist(), next_uses.tolist(), strict=True):
            assert self.places is not None
            self.places.release(position, next_use=None if position in self._damaged else next_use)
            if self.places.find(position) is None:
                self._damaged.discard(position)

    def place(self, positions: Integers, lengths: Integers, next_uses: Integers) -> Integers:
        """Offsets to write samples to; -1 where there are others that are used sooner, or held. They are held."""
        offsets = np.full(len(positions), -1)
        entries = zip(positions.tolist(), lengths.tolist(), next_uses.tolist(), strict=True)
        for place, (position, nbytes, next_use) in enumerate(entries):
            if self.places is None or self.places.find(position) is not None:
                continue
            with suppress(ValueError):  # it is larger than the cache, and read each time
                if (found := self.places.place(position, nbytes, next_use=next_use)) is not None:
                    offsets[place] = found.offset
                    self._unwritten.add(position)
        return offsets

    def written(self, positions: Integers, next_uses: Integers) -> None:
        """Samples that were placed can be found now."""
        self._unwritten.difference_update(positions.tolist())
        self.give_back(positions, next_uses)

    def not_written(self, positions: Integers) -> None:
        """The worker that was to write samples has ended."""
        self._damaged.update(positions.tolist())
        self.written(positions, positions)

    def cached(self) -> Cached:
        """State of the cache, for monitors."""
        if self.places is None:
            return Cached(0, 0, 0, 0)
        return Cached(self.places.samples, self.places.used_nbytes, self.places.nbytes, self.places.evictions)

    def damaged(self, positions: Integers) -> None:
        """The bytes of samples, which are held, are not what was stored."""
        self.counts.damaged += len(positions)
        self._damaged.update(positions.tolist())

    def _whole(self, position: int) -> CacheExtent | None:
        if position in self._unwritten or position in self._damaged:
            return None
        return None if self.places is None else self.places.find(position)
