"""Free ranges of numbers: the allocator of memory, slots and cache. Pure: touches nothing that the ranges stand for.

Lent are bytes of rings in shared memory, slots in files of activations, and the cache of the data service, each in
units of the lender's alignment.
"""

from __future__ import annotations

_SUBCLASS_BITS = 5


def class_of(size: int) -> int:
    """The class of a range: 32 of them from one power of two to the next. Larger classes have larger ranges.

    >>> [class_of(size) for size in (1, 63, 64, 65, 66, 127, 128)]
    [1, 63, 64, 64, 65, 95, 96]
    """
    power = max(size.bit_length() - 1 - _SUBCLASS_BITS, 0)
    return (power << _SUBCLASS_BITS) + (size >> power)


def rounded(size: int) -> int:
    """The least size of the class from which on every range is large enough. At most 1/32 more.

    >>> [rounded(size) for size in (1, 63, 64, 65, 66, 127, 128)]
    [1, 63, 64, 66, 66, 128, 128]
    """
    power = max(size.bit_length() - 1 - _SUBCLASS_BITS, 0)
    return -(-size >> power) << power


class FreeRanges:
    """Lends ranges of numbers, the smallest free one that fits, and merges those that are given back with their
    neighbours. What is lent in a row lies in a row, and once all is free the same ranges are lent again.

    Lending a size that :func:`rounded` gives takes the same time however many ranges are free. For other sizes, ranges
    of one class are looked through: nothing is rounded up.

    Args:
        count: the numbers from 0 to this one are free.

    >>> free = FreeRanges(60)
    >>> free.take(45), free.take(10), free.take(8), free.free
    (0, 45, None, 5)
    >>> free.add(0, 45); free.add(45, 10)
    >>> free.take(60), free.free
    (0, 0)
    """

    def __init__(self, count: int) -> None:
        self._sizes: dict[int, int] = {}
        """Size of each range, by its offset."""
        self._begins: dict[int, int] = {}
        """Offset of each range, by its end."""
        self._classes: dict[int, dict[int, None]] = {}
        """Offsets of the ranges of each class."""
        self._present = 0
        """A bit for each class that has ranges."""
        self.free = 0
        """Count of free numbers."""
        if count:
            self._insert(0, count)

    def take(self, size: int) -> int | None:
        """Beginning of a range that was free until now; None if no free range is large enough.

        Args:
            size: of the range, at least 1.
        """
        assert size > 0, f"{size} numbers are no range"
        least = class_of(size)
        alike = self._classes.get(least, {})
        # The range that was given back last, so the processor's caches may have it.
        begin = next((one for one in reversed(alike) if self._sizes[one] >= size), None)
        if begin is None:
            larger = self._present >> least + 1
            if not larger:
                return None
            begin = next(reversed(self._classes[least + (larger & -larger).bit_length()]))
        left = self._remove(begin) - size
        if left:
            self._insert(begin + size, left)
        return begin

    def add(self, begin: int, size: int) -> None:
        """Free a range."""
        was_free = begin in self._sizes or begin + size in self._begins
        assert not was_free, f"{begin} was free already"
        if (before := self._begins.get(begin)) is not None:
            size += self._remove(before)
            begin = before
        if begin + size in self._sizes:
            size += self._remove(begin + size)
        self._insert(begin, size)

    def _remove(self, begin: int) -> int:
        """Take the whole free range that begins here. Returns its size."""
        size = self._sizes.pop(begin)
        self.free -= size
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
        self.free += size
        self._begins[begin + size] = begin
        number = class_of(size)
        self._classes.setdefault(number, {})[begin] = None
        self._present |= 1 << number
