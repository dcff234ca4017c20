"""Allocation of parts of a file. Pure: moves nothing."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from fastensor.backends.base import Extent


class Extents:
    """Allocates parts of a file, the lowest free part first. Parts that are allocated one after the other lie one after
    the other, and once all are free the same parts are used again. So the file grows no larger than the most bytes that
    were in use at a time, but for gaps.

    Args:
        alignment: begin and end of parts are multiples of this.
        limit: the most bytes that the file may have.

    >>> extents = Extents(4096, limit=16384)
    >>> first, second = extents.allocate(5000), extents.allocate(1)
    >>> first, second
    (Extent(begin=0, end=8192), Extent(begin=8192, end=12288))
    >>> extents.free(first); extents.allocate(10000) is None, extents.allocate(4096), extents.used_nbytes
    (True, Extent(begin=0, end=4096), 8192)
    """

    def __init__(self, alignment: int, limit: int) -> None:
        self._alignment = alignment
        self._limit = limit // alignment * alignment
        self._free: list[Extent] = []
        """Free parts, sorted by offset. No two are adjacent, and none is at the end of the file."""
        self._end = 0
        self.used_nbytes = 0

    @property
    def end(self) -> int:
        """The end of the last part that is in use."""
        return self._end

    def allocate(self, nbytes: int) -> Extent | None:
        """A part for ``nbytes``; None if there is no room."""
        needed = -(-nbytes // self._alignment) * self._alignment
        for index, gap in enumerate(self._free):
            end = gap.begin + needed
            if end <= gap.end:
                self._free[index : index + 1] = [Extent(end, gap.end)] if end < gap.end else []
                self.used_nbytes += needed
                return Extent(gap.begin, end)
        if self._end + needed > self._limit:
            return None
        self._end += needed
        self.used_nbytes += needed
        return Extent(self._end - needed, self._end)

    def free(self, extent: Extent) -> None:
        """Give a part back."""
        self.used_nbytes -= extent.end - extent.begin
        at = bisect_left(self._free, extent.begin, key=attrgetter("begin"))
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        assert before is None or before.end <= extent.begin, f"{extent} was free already"
        assert extent.end <= (after.begin if after else self._end), f"{extent} was free already"
        first, last = at, at
        begin, end = extent.begin, extent.end
        if before is not None and before.end == begin:
            first, begin = at - 1, before.begin
        if after is not None and after.begin == end:
            last, end = at + 1, after.end
        if end == self._end:
            self._end = begin
            del self._free[first:last]
        else:
            self._free[first:last] = [Extent(begin, end)]
