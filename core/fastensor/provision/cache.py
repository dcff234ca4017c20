"""The samples that a server has in memory: where they are, which can be found, and which go first. Everything here is
pure: the memory belongs to others.

What is used last, goes first: if there is no room, the sample is evicted whose next use is furthest in the plan (Belady
1966, "MIN", which no other rule beats if samples have one size). A sample evicts only those that are used after it. So
whoever fills the cache in the order of the plan finds every sample at its use, whatever the size of the cache is
(KSpeed, section III-B), and finds as many as possible there already from the epoch before.

All takes 28 bytes for each sample of the dataset, and when the cache is full, about a hundred for each that is in it.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from fastensor.data.coalescing import Integers
from fastensor.data.plan import Positions
from fastensor.data.ring import ALIGNMENT
from fastensor.files.ranges import FreeRanges, rounded

_OUTDATED = 1000
"""The heap is made anew when it has so many entries more than twice those of use."""


class SampleCache:
    """The samples in the cache.

    A sample has a place before a worker writes it, and can be found when that is done. While it is **held**, it stays
    where it is: its bytes are being written or read. What is taken or placed is given back, which says when the sample
    is used next.

    Args:
        samples: the number of samples in the dataset.
        nbytes: of the cache. 0: nothing is kept.

    >>> cache = SampleCache(10, nbytes=2048)
    >>> for sample, position in ((3, 13), (4, 7)):
    ...     _ = cache.place(sample, 1000, next_use=position)
    ...     cache.release(sample, next_use=position)
    >>> cache.place(5, 1000, next_use=8), cache.find(3), cache.find(4)
    ((0, 1000), None, (1024, 1000))
    """

    def __init__(self, samples: int, *, nbytes: int) -> None:
        self.counts = {"hits": 0, "misses": 0, "preloaded": 0, "damaged": 0}
        """Samples of batches that the cache had, that were read for a batch, and before a batch needed them; and those
        whose bytes in memory were not what had been stored, which were read again."""
        self.nbytes = nbytes
        self._units = nbytes // ALIGNMENT
        self._free = FreeRanges(self._units)
        kept = samples if nbytes else 0
        self._offsets = np.full(kept, -1)
        """Offset of each sample; -1 if it is not in the cache."""
        self._nbytes = np.zeros(kept, np.int64)
        self._next_uses = np.full(kept, -1)
        """Next use of each sample; -1 if it is held, or not in the cache."""
        self._last_uses: list[int] | None = None
        """A heap of next uses, and of some that are outdated. See :meth:`_entries`. None: made when needed."""
        self._holders = np.zeros(kept, np.int32)
        self._reading: set[int] = set()
        """Samples that workers read now."""
        self._unwritten: set[int] = set()
        """Samples that have a place, and are not written yet."""
        self._damaged: set[int] = set()
        """Samples that go as soon as nobody holds them."""
        self._unreadable: set[int] = set()
        """Samples that could not be read ahead. The batches that need them try again, and their loaders are told."""
        self.samples = 0
        """Samples in the cache."""
        self.evictions = 0
        """Samples that were evicted so far, to make room for others."""

    @property
    def used_nbytes(self) -> int:
        """Bytes of the samples in the cache, and of what rounding adds to them: up to 1/32."""
        return (self._units - self._free.free) * ALIGNMENT

    def find(self, sample: int) -> tuple[int, int] | None:
        """Offset and bytes of a sample; None if it has no place in the cache."""
        offset = int(self._offsets[sample]) if self.nbytes else -1
        return None if offset < 0 else (offset, int(self._nbytes[sample]))

    # For tasks

    def take(self, positions: Integers) -> tuple[Integers, Integers]:
        """Offsets of samples, -1 for those that cannot be found; and their bytes. They are held from now on. No
        position occurs twice."""
        if not self.nbytes:
            return np.full(len(positions), -1), np.zeros(len(positions), np.int64)
        offsets, lengths = self._offsets[positions], self._nbytes[positions]
        for hidden in (self._unwritten, self._damaged):
            if not hidden.isdisjoint(wanted := positions.tolist()):
                offsets[[position in hidden for position in wanted]] = -1
        lengths[offsets < 0] = 0
        self.hold(positions[offsets >= 0])
        return offsets, lengths

    def give_back(self, positions: Integers, next_uses: Integers) -> None:
        """A task does not use samples any more that it has taken."""
        assert (self._holders[positions] > 0).all(), f"not all of the samples {positions} are held"
        self._holders[positions] -= 1
        is_free = self._holders[positions] == 0
        free = positions[is_free]
        self._next_uses[free] = next_uses[is_free]
        if self._last_uses is not None:
            for entry in self._entries(free):
                heappush(self._last_uses, entry)
            if len(self._last_uses) > 2 * self.samples + _OUTDATED:
                self._last_uses = None
        for position in self._damaged.intersection(free.tolist()):
            self._damaged.remove(position)
            self._remove(position)

    def reading(self, positions: Integers) -> None:
        """Samples are being read."""
        if self.nbytes:
            self._reading.update(positions.tolist())

    def not_reading(self, positions: Integers) -> None:
        """Samples have been read, or the worker has ended."""
        self._reading.difference_update(positions.tolist())

    def store(self, positions: Integers, lengths: Integers, next_uses: Integers) -> Integers:
        """Offsets to write samples to; -1 where there are others that are used sooner, or held. They are held. No
        position occurs twice."""
        offsets = np.full(len(positions), -1)
        places = np.flatnonzero(self._offsets[positions] < 0) if self.nbytes else offsets[:0]
        if not len(places):
            return offsets
        lacking, nbytes = positions[places], lengths[places]
        ends = np.cumsum([_units(one) for one in nbytes.tolist()])
        begin = self._free.take(int(ends[-1]))  # room for all is found as quickly as for one
        if begin is not None:
            self._put(lacking, begin + np.append(0, ends[:-1]), nbytes)
            self.samples += len(lacking)
        else:
            for entry in zip(lacking.tolist(), nbytes.tolist(), next_uses[places].tolist(), strict=True):
                self.place(*entry[:2], next_use=entry[2])
        offsets[places] = self._offsets[lacking]
        self._unwritten.update(lacking[offsets[places] >= 0].tolist())
        return offsets

    def written(self, positions: Integers, next_uses: Integers) -> None:
        """Samples that were placed can be found now."""
        self._unwritten.difference_update(positions.tolist())
        self.give_back(positions, next_uses)

    def not_written(self, positions: Integers) -> None:
        """The worker that was to write samples has ended."""
        self._damaged.update(positions.tolist())
        self.written(positions, positions)

    def damaged(self, positions: Integers) -> None:
        """The bytes of samples, which are held, are not what was stored."""
        self.counts["damaged"] += len(positions)
        self._damaged.update(positions.tolist())

    # For reading ahead

    def not_readable(self, positions: Integers) -> None:
        """Samples could not be read ahead."""
        self._unreadable.update(positions.tolist())

    @property
    def unreadable(self) -> int:
        """Number of samples that could not be read ahead, and are not kept since."""
        return sum(self.find(position) is None for position in self._unreadable)

    def awaits(self, positions: Integers) -> bool:
        """True if some of the samples will be found soon."""
        wanted = positions.tolist()
        return not (self._reading.isdisjoint(wanted) and self._unwritten.isdisjoint(wanted))

    def lacking(self, positions: Integers) -> Integers:
        """The samples that are to be read ahead: they have no place, are not being read, and have not failed."""
        known = self._reading | self._unreadable
        return np.array([one for one in positions.tolist() if one not in known and self.find(one) is None], np.int64)

    def would_keep(self, count: int, next_use: int) -> bool:
        """True if there is likely to be room for so many samples more, the last of which is used then."""
        mean_nbytes = self.used_nbytes / max(self.samples, 1)
        if self.nbytes - self.used_nbytes >= count * mean_nbytes:
            return True
        last = self._last()
        return last is not None and last[0] > next_use

    def reschedule(self, next_uses: Positions) -> None:
        """Take another plan: when each sample of the dataset is used next. Those that are held keep being so."""
        self._next_uses = np.where(self._next_uses >= 0, next_uses, -1)
        self._last_uses = None

    # One by one

    def place(self, sample: int, nbytes: int, *, next_use: int) -> tuple[int, int] | None:
        """Make room for a sample, and hold it.

        Args:
            sample: not in the cache.
            nbytes: of the sample.
            next_use: its position in the plan.

        Returns:
            its offset and bytes; None if it is larger than the cache, or there is only room where samples are that are
            held, or used before this one.
        """
        assert self.find(sample) is None, f"sample {sample} is in the cache already"
        units = _units(nbytes)
        if units > self._units:
            return None
        while (begin := self._free.take(units)) is None:
            last = self._last()
            if last is None or last[0] < next_use:
                return None
            self._remove(last[1])
            self.evictions += 1
        self._put(sample, begin, nbytes)
        self.samples += 1
        return begin * ALIGNMENT, nbytes

    def hold(self, samples: Integers | int) -> None:
        """Keep samples of the cache, or one, where they are until they are released."""
        self._holders[samples] += 1
        self._next_uses[samples] = -1

    def release(self, sample: int, *, next_use: int) -> None:
        """Stop holding a sample, whose next position in the plan is this one."""
        self.give_back(np.array([sample]), np.array([next_use]))

    def _put(self, samples: Integers | int, begins: Integers | int, nbytes: Integers | int) -> None:
        """Samples have their places from now on, and are held."""
        self._offsets[samples], self._nbytes[samples] = begins * ALIGNMENT, nbytes
        self.hold(samples)

    def _remove(self, sample: int) -> None:
        self._free.add(int(self._offsets[sample]) // ALIGNMENT, _units(int(self._nbytes[sample])))
        self._offsets[sample] = self._next_uses[sample] = -1
        self.samples -= 1

    def _last(self) -> tuple[int, int] | None:
        """The furthest next use of the samples that are not held, and its sample; None if there are none."""
        if self._last_uses is None:
            self._last_uses = self._entries(np.flatnonzero(self._next_uses >= 0))
            heapify(self._last_uses)
        while self._last_uses:
            next_use, sample = divmod(-self._last_uses[0], len(self._offsets))
            if self._next_uses[sample] == next_use:
                return next_use, sample
            heappop(self._last_uses)
        return None

    def _entries(self, samples: Integers) -> list[int]:
        """Numbers by which the furthest next use comes first."""
        uses = zip(self._next_uses[samples].tolist(), samples.tolist(), strict=True)
        return [-(next_use * len(self._offsets) + sample) for next_use, sample in uses]


def kept_nbytes(nbytes: int) -> int:
    """The bytes that a sample takes in the cache. What is placed together lies in a row, at such distances."""
    return _units(nbytes) * ALIGNMENT


@lru_cache(maxsize=4096)
def _units(nbytes: int) -> int:
    """The size of a sample in the cache, in units of :data:`~fastensor.data.ring.ALIGNMENT`."""
    return rounded(max(-(-nbytes // ALIGNMENT), 1))
