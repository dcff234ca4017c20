"""The samples that a server has in memory: where they are, which can be found, and which go first. Everything here is
pure: the memory belongs to others.

What is used last, goes first: if there is no room, the sample is evicted whose next use is furthest in the plan (Belady
1966, "MIN", which no other rule beats if samples have one size). A sample evicts only those that are used after it. So
whoever fills the cache in the order of the plan finds every sample at its use, whatever the size of the cache is
(KSpeed, section III-B), and finds as many as possible there already from the epoch before.

All takes 24 bytes for each sample of the dataset, and about a hundred for each that is in the cache.
"""

from __future__ import annotations

from array import array
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
        self._offsets = array("q", [-1]) * kept
        """Offset of each sample; -1 if it is not in the cache."""
        self._nbytes = array("q", [0]) * kept
        self._next_uses = array("q", [-1]) * kept
        """Next use of each sample; -1 if it is held, or not in the cache."""
        self._last_uses: list[int] = []
        """A heap of next uses, and of some that are outdated. See :meth:`_entry`."""
        self._holders: dict[int, int] = {}
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
        offset = self._offsets[sample] if self.nbytes else -1
        return None if offset < 0 else (offset, self._nbytes[sample])

    # For tasks

    def take(self, positions: Integers) -> tuple[Integers, Integers]:
        """Offsets of samples, -1 for those that cannot be found; and their bytes. They are held from now on."""
        offsets, lengths = np.full(len(positions), -1), np.zeros(len(positions), np.int64)
        for place, position in enumerate(positions.tolist() if self.nbytes else ()):
            offset = self._offsets[position]
            if offset >= 0 and position not in self._unwritten and position not in self._damaged:
                offsets[place], lengths[place] = offset, self._nbytes[position]
                self.hold(position)
        return offsets, lengths

    def give_back(self, positions: Integers, next_uses: Integers) -> None:
        """A task does not use samples any more that it has taken."""
        for position, next_use in zip(positions.tolist(), next_uses.tolist(), strict=True):
            self.release(position, next_use=next_use)

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
        entries = zip(positions.tolist(), lengths.tolist(), next_uses.tolist(), strict=True)
        lacking = [(place, *one) for place, one in enumerate(entries) if self.nbytes and self._offsets[one[0]] < 0]
        units = [_units(nbytes) for _, _, nbytes, _ in lacking]
        begin = self._free.take(sum(units)) if lacking else None  # room for all is found as quickly as for one
        for (place, position, nbytes, next_use), size in zip(lacking, units, strict=True):
            if begin is not None:
                self._put(position, begin, nbytes)
                begin += size
            elif self.place(position, nbytes, next_use=next_use) is None:
                continue
            offsets[place] = self._offsets[position]
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
        last = self._last()
        return self.nbytes - self.used_nbytes >= count * mean_nbytes or (last is not None and last[0] > next_use)

    def reschedule(self, next_uses: Positions) -> None:
        """Take another plan: when each sample of the dataset is used next. Those that are held keep being so."""
        idle = np.frombuffer(self._next_uses, np.int64) >= 0
        self._next_uses = array("q", np.where(idle, next_uses, -1).astype(np.int64).tobytes())
        self._sort()

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
        return self._offsets[sample], nbytes

    def hold(self, sample: int) -> None:
        """Keep a sample of the cache where it is until it is released."""
        self._holders[sample] = self._holders.get(sample, 0) + 1
        self._next_uses[sample] = -1

    def release(self, sample: int, *, next_use: int) -> None:
        """Stop holding a sample, whose next position in the plan is this one."""
        holders = self._holders.pop(sample) - 1
        if holders:
            self._holders[sample] = holders
        elif sample in self._damaged:
            self._damaged.remove(sample)
            self._remove(sample)
        else:
            self._next_uses[sample] = next_use
            heappush(self._last_uses, self._entry(next_use, sample))
            if len(self._last_uses) > 2 * self.samples + _OUTDATED:
                self._sort()

    def _put(self, sample: int, begin: int, nbytes: int) -> None:
        """A sample has its place from now on, and is held."""
        self._offsets[sample], self._nbytes[sample] = begin * ALIGNMENT, nbytes
        self._holders[sample] = 1
        self.samples += 1

    def _remove(self, sample: int) -> None:
        self._free.add(self._offsets[sample] // ALIGNMENT, _units(self._nbytes[sample]))
        self._offsets[sample] = self._next_uses[sample] = -1
        self.samples -= 1

    def _last(self) -> tuple[int, int] | None:
        """The furthest next use of the samples that are not held, and its sample; None if there are none."""
        while self._last_uses:
            next_use, sample = divmod(-self._last_uses[0], len(self._offsets))
            if self._next_uses[sample] == next_use:
                return next_use, sample
            heappop(self._last_uses)
        return None

    def _entry(self, next_use: int, sample: int) -> int:
        """A number by which the furthest next use comes first."""
        return -(next_use * len(self._offsets) + sample)

    def _sort(self) -> None:
        """Have the heap without what is outdated."""
        entries = ((next_use, sample) for sample, next_use in enumerate(self._next_uses) if next_use >= 0)
        self._last_uses = [self._entry(next_use, sample) for next_use, sample in entries]
        heapify(self._last_uses)


def kept_nbytes(nbytes: int) -> int:
    """The bytes that a sample takes in the cache. What is placed together lies in a row, at such distances."""
    return _units(nbytes) * ALIGNMENT


@lru_cache(maxsize=4096)
def _units(nbytes: int) -> int:
    """The size of a sample in the cache, in units of :data:`~fastensor.data.ring.ALIGNMENT`."""
    return rounded(max(-(-nbytes // ALIGNMENT), 1))
