"""Allocator of the cache's bytes. Everything here is pure.

The cache is a row of slabs of equal size. Samples that are no larger than a slab are packed: none crosses a border.
A larger one takes consecutive slabs, as a whole. So slabs can be separate pieces of memory, if no sample is larger.
"""

from __future__ import annotations

from fastensor.data.ring import ALIGNMENT
from fastensor.files.ranges import FreeRanges, rounded, rounded_down


class SlabSpace:
    """The free bytes of all slabs.

    Args:
        nbytes: of all slabs; what is left of the last one is not used.
        slab_nbytes: of each slab, rounded down so that gaps of a whole slab are found.

    >>> space = SlabSpace(4096, slab_nbytes=1024)
    >>> space.take(1000), space.take(100), space.take(100), space.take(2048), space.take(1000)
    (0, 1024, 1152, 2048, None)
    >>> space.give_back(1024, 100); space.give_back(1152, 100)
    >>> space.take(1000)
    1024
    """

    def __init__(self, nbytes: int, *, slab_nbytes: int) -> None:
        self._slab = rounded_down(slab_nbytes // ALIGNMENT)
        """Size of a slab, in units of :data:`ALIGNMENT`, as all inside."""
        self.slab_nbytes = self._slab * ALIGNMENT
        self.slabs = nbytes // self.slab_nbytes if self._slab else 0
        if not self.slabs:
            raise ValueError(f"expected at least one slab of {ALIGNMENT} bytes, found {nbytes=} and {slab_nbytes=}")
        self._whole = FreeRanges(self.slabs)
        """Slabs that are free as a whole, by their numbers."""
        self._parts = FreeRanges(border=self._slab)
        """Free parts of the others."""

    def taken_nbytes(self, nbytes: int) -> int:
        """Bytes that a sample takes: rounding makes it up to 1/32 more, or whole slabs."""
        units = self._units(nbytes)
        return (units if units <= self._slab else self._slabs(units) * self._slab) * ALIGNMENT

    def take(self, nbytes: int) -> int | None:
        """Offset of room for a sample; None if no gap is large enough. See :meth:`taken_nbytes`."""
        units = self._units(nbytes)
        if units > self._slab:
            first = self._whole.take(self._slabs(units))
            return None if first is None else first * self.slab_nbytes
        begin = self._parts.take(units)
        if begin is None:
            if (slab := self._whole.take(1)) is None:
                return None
            self._parts.add(slab * self._slab, self._slab)
            begin = self._parts.take(units)
            assert begin is not None
        return begin * ALIGNMENT

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free what was taken for a sample of so many bytes."""
        units = self._units(nbytes)
        if units > self._slab:
            self._whole.add(begin // self.slab_nbytes, self._slabs(units))
            return
        gap, size = self._parts.add(begin // ALIGNMENT, units)
        if size == self._slab:
            self._parts.remove(gap)
            self._whole.add(gap // self._slab, 1)

    def _units(self, nbytes: int) -> int:
        return rounded(max(-(-nbytes // ALIGNMENT), 1))

    def _slabs(self, units: int) -> int:
        return rounded(-(-units // self._slab))
