"""Allocator of the cache's bytes. Everything here is pure.

The cache is a row of slabs of equal size. Samples that are no larger than a slab are packed: none crosses a border.
A larger one takes consecutive slabs, as a whole. So slabs can be separate pieces of memory, if no sample is larger.
"""

from __future__ import annotations

from fastensor.data.ring import ALIGNMENT

_SUBCLASS_BITS = 5


def class_of(size: int) -> int:
    """The class of a gap: 32 of them from one power of two to the next. Larger classes have larger gaps.

    >>> [class_of(size) for size in (1, 63, 64, 65, 66, 127, 128)]
    [1, 63, 64, 64, 65, 95, 96]
    """
    power = max(size.bit_length() - 1 - _SUBCLASS_BITS, 0)
    return (power << _SUBCLASS_BITS) + (size >> power)


def rounded(size: int) -> int:
    """The least size of the class from which on every gap is large enough. At most 1/32 more.

    >>> [rounded(size) for size in (1, 63, 64, 65, 66, 127, 128)]
    [1, 63, 64, 66, 66, 128, 128]
    """
    power = max(size.bit_length() - 1 - _SUBCLASS_BITS, 0)
    return -(-size >> power) << power


class Gaps:
    """Free ranges of numbers. All but the division of ranges into classes is independent of how many there are.

    Args:
        border: ranges on the two sides of a multiple of it are not merged.

    >>> gaps = Gaps(border=100)
    >>> gaps.add(0, 10), gaps.add(20, 10), gaps.add(10, 10), gaps.add(100, 50)
    ((0, 10), (20, 10), (0, 30), (100, 50))
    >>> gaps.take(25), gaps.take(25), gaps.take(30)
    (0, 100, None)
    """

    def __init__(self, border: int) -> None:
        self._border = border
        self._sizes: dict[int, int] = {}
        """Of each range, by where it begins."""
        self._begins: dict[int, int] = {}
        """Of each range, by where it ends."""
        self._classes: dict[int, dict[int, None]] = {}
        """Where the ranges of each class begin."""
        self._present = 0
        """A bit for each class that has ranges."""

    def take(self, size: int) -> int | None:
        """Where a range begins that was free until now, in the smallest gap of those that fit, more or less.

        Args:
            size: as :func:`rounded` gives it; a gap of another one may be overlooked.
        """
        least = class_of(size)
        larger = self._present >> least
        if not larger:
            return None
        ranges = self._classes[least + (larger & -larger).bit_length() - 1]
        begin = next(reversed(ranges))  # it was used last, so the processor's caches may have it
        left = self.remove(begin) - size
        if left:
            self._insert(begin + size, left)
        return begin

    def add(self, begin: int, size: int) -> tuple[int, int]:
        """Free a range.

        Returns:
            where the gap begins that it is in now, and the size of that.
        """
        if begin % self._border and (before := self._begins.get(begin)) is not None:
            size += self.remove(before)
            begin = before
        if (begin + size) % self._border and begin + size in self._sizes:
            size += self.remove(begin + size)
        self._insert(begin, size)
        return begin, size

    def remove(self, begin: int) -> int:
        """Take the whole gap that begins here. Returns its size."""
        size = self._sizes.pop(begin)
        del self._begins[begin + size]
        number = class_of(size)
        ranges = self._classes[number]
        del ranges[begin]
        if not ranges:
            del self._classes[number]
            self._present &= ~(1 << number)
        return size

    def _insert(self, begin: int, size: int) -> None:
        self._sizes[begin] = size
        self._begins[begin + size] = begin
        number = class_of(size)
        self._classes.setdefault(number, {})[begin] = None
        self._present |= 1 << number


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
        units = slab_nbytes // ALIGNMENT
        power = max(units.bit_length() - 1 - _SUBCLASS_BITS, 0)
        self._slab = units >> power << power
        """Of a slab, in units of :data:`ALIGNMENT`, as all inside."""
        self.slab_nbytes = self._slab * ALIGNMENT
        self.slabs = nbytes // self.slab_nbytes if self._slab else 0
        if not self.slabs:
            raise ValueError(f"expected at least one slab of {ALIGNMENT} bytes, found {nbytes=} and {slab_nbytes=}")
        self._whole = Gaps(border=self.slabs)
        """Slabs that are free as a whole, by their numbers."""
        self._whole.add(0, self.slabs)
        self._parts = Gaps(border=self._slab)
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
