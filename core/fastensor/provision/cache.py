"""The cache's records of samples, and its decisions. Everything here is pure: the memory belongs to others.

What is used last, goes first: if there is no room, the sample is evicted whose next use is furthest in the plan (Belady
1966, "MIN", which no other rule beats if samples have one size). A sample evicts only those that are used after it. So
whoever fills the cache in the order of the plan finds every sample at its use, whatever the size of the cache is
(KSpeed, section III-B), and finds as many as possible there already from the epoch before.

All takes about 40 bytes for each sample of the dataset, and for each free range a few hundred.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from fastensor.data.plan import Positions
from fastensor.provision.next_uses import NextUses
from fastensor.provision.slabs import SlabSpace

SLAB_NBYTES = 64 << 20


class CacheExtent(NamedTuple):
    """Where the bytes of a sample are in the cache."""

    offset: int
    nbytes: int


class Cache:
    """The samples in the cache.

    A sample that is **held** stays where it is: its bytes are being written or read. Each :meth:`place` and
    :meth:`hold` is followed by a :meth:`release`, which says when the sample is used next.

    Args:
        samples: the number of samples in the dataset.
        nbytes: of the cache.
        slab_nbytes: of its slabs; see :mod:`fastensor.provision.slabs`. Less if the cache is smaller, and up to twice
            as much so that little of the cache is left.

    Raises:
        ValueError: there is no room for a single slab.

    >>> cache = Cache(10, nbytes=2048, slab_nbytes=1024)
    >>> for sample, position in ((3, 13), (4, 7)):
    ...     _ = cache.place(sample, 1000, next_use=position)
    ...     cache.release(sample, next_use=position)
    >>> cache.place(5, 1000, next_use=8), cache.find(3), cache.find(4)
    (CacheExtent(offset=0, nbytes=1000), None, CacheExtent(offset=1024, nbytes=1000))
    """

    def __init__(self, samples: int, *, nbytes: int, slab_nbytes: int = SLAB_NBYTES) -> None:
        self._space = SlabSpace(nbytes, slab_nbytes=nbytes // max(nbytes // slab_nbytes, 1))
        self._offsets = array("q", [-1]) * samples
        self._nbytes = array("q", bytes(8 * samples))
        self._uses = NextUses(samples)
        """Next uses of the samples that are not held."""
        self._held: dict[int, int] = {}
        """Number of holders of each sample."""
        self.samples = 0
        """Samples in the cache."""
        self.used_nbytes = 0
        """Bytes of these samples, and of what rounding adds to them."""
        self.evictions = 0
        """Samples that were evicted so far, to make room for others."""

    @property
    def nbytes(self) -> int:
        """Bytes that can be used."""
        return self._space.slabs * self._space.slab_nbytes

    @property
    def slab_nbytes(self) -> int:
        """Bytes of each slab."""
        return self._space.slab_nbytes

    def find(self, sample: int) -> CacheExtent | None:
        """CacheExtent of a sample; None if it is not in the cache."""
        offset = self._offsets[sample]
        return None if offset < 0 else CacheExtent(offset, self._nbytes[sample])

    def last_use(self) -> int | None:
        """The furthest next use of the samples that are not held; None if there are none."""
        last = self._uses.furthest()
        return None if last is None else last[1]

    def place(self, sample: int, nbytes: int, *, next_use: int) -> CacheExtent | None:
        """Make room for a sample, and hold it.

        Args:
            sample: not in the cache.
            nbytes: of the sample.
            next_use: its position in the plan.

        Returns:
            None if there is only room where samples are that are held, or used before this one: wait.

        Raises:
            ValueError: the sample is in the cache, or larger than the cache.
        """
        if self._offsets[sample] >= 0:
            raise ValueError(f"sample {sample} is in the cache already")
        if self._space.taken_nbytes(nbytes) > self.nbytes:
            raise ValueError(f"sample {sample} has {nbytes} bytes, the cache {self.nbytes}: raise cache_bytes")
        while (offset := self._space.take(nbytes)) is None:
            last = self._uses.furthest()
            if last is None or last[1] < next_use:
                return None
            self.evict(last[0])
            self.evictions += 1
        self._offsets[sample], self._nbytes[sample] = offset, nbytes
        self._held[sample] = 1
        self.samples += 1
        self.used_nbytes += self._space.taken_nbytes(nbytes)
        return CacheExtent(offset, nbytes)

    def hold(self, sample: int) -> CacheExtent:
        """Keep a sample where it is until it is released.

        Raises:
            KeyError: it is not in the cache.
        """
        found = self.find(sample)
        if found is None:
            raise KeyError(f"sample {sample} is not in the cache")
        self._held[sample] = self._held.get(sample, 0) + 1
        self._uses.remove(sample)
        return found

    def release(self, sample: int, *, next_use: int | None) -> None:
        """Stop holding a sample.

        Args:
            sample: held.
            next_use: its next position in the plan; None if it has none, and can go at once.

        Raises:
            KeyError: it is not held.
        """
        holds = self._held.pop(sample) - 1
        if holds:
            self._held[sample] = holds
        elif next_use is None:
            self._remove(sample)
        else:
            self._uses.set(sample, position=next_use)

    def evict(self, sample: int) -> None:
        """Drop a sample: it has to go, or its bytes are damaged.

        Raises:
            ValueError: it is held, or not in the cache.
        """
        if self._offsets[sample] < 0 or sample in self._held:
            raise ValueError(f"sample {sample} is {'held' if sample in self._held else 'not in the cache'}")
        self._uses.remove(sample)
        self._remove(sample)

    def reschedule(self, next_uses: Positions) -> None:
        """Take another plan: when each sample of the dataset is used next. Those that are held keep being so."""
        in_cache = np.frombuffer(self._offsets, np.int64) >= 0
        in_cache[list(self._held)] = False
        self._uses.reset(np.where(in_cache, next_uses, -1))

    def _remove(self, sample: int) -> None:
        offset, nbytes = self._offsets[sample], self._nbytes[sample]
        self._space.give_back(offset, nbytes)
        self._offsets[sample] = -1
        self.samples -= 1
        self.used_nbytes -= self._space.taken_nbytes(nbytes)
