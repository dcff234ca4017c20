"""Merging many small reads of a file into few large ones. Everything here is pure.

The paper on LMDBIO calls this coalescing (section 4.5): what several iterations need is sorted by
offset, and read together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from fastensor.files.arguments import as_nbytes, checks_keywords

Integers: TypeAlias = npt.NDArray[np.int64]

_MEASURED = 4096
_PAGE_BITS = 12
STREAM_GAPS = 4
"""In the order of the file, gaps are read that are so many times larger than others. They cost no seek, and other
processes may want them."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Extents of values in a file, in the order in which they are wanted. They may overlap, be equal, or be empty."""

    offsets: Integers
    """Offset of each value, in bytes."""
    lengths: Integers
    """Bytes of each value."""

    def __len__(self) -> int:
        return len(self.offsets)

    def at(self, where: slice | Integers) -> Extents:
        """Some of them, by their positions."""
        return Extents(self.offsets[where], self.lengths[where])


@checks_keywords
@dataclass(frozen=True, slots=True)
class Merging:
    """Limits of reads that bring several values. Sizes are in bytes, or texts (``"64KiB"``), which become numbers.

    Raises:
        TypeError, ValueError: a size is none, or too small.
    """

    gap_nbytes: int = 8 << 10
    """Two values are read together if at most this many bytes lie between them that nobody wants."""
    read_nbytes: int = 4 << 20
    """A read takes values that begin within this many bytes. So a read is longer only by its last value. With 1, only
    values that begin at the same place are read together."""

    def __post_init__(self) -> None:
        for name, least in (("gap_nbytes", 0), ("read_nbytes", 1)):
            object.__setattr__(self, name, as_nbytes(getattr(self, name), name, at_least=least))

    if TYPE_CHECKING:  # what is read is a number, whatever is given

        def __init__(self, gap_nbytes: int | str = ..., read_nbytes: int | str = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of a file that bring all values of :class:`Extents`. They are in the order in which they are needed."""

    offsets: Integers
    """Offset of each read, a multiple of the alignment."""
    lengths: Integers
    """Bytes of each read, a multiple of the alignment. So the last read may reach beyond the end of the file."""
    read_of: Integers
    """Number of the read that holds each value."""
    begin_in_read: Integers
    """Offset of each value in that read."""

    def __len__(self) -> int:
        return len(self.offsets)


def mean_of_some(lengths: Integers) -> float:
    """The mean, estimated from evenly spaced ones; 0 if there are none."""
    if not len(lengths):
        return 0.0
    return float(lengths[np.linspace(0, len(lengths) - 1, min(_MEASURED, len(lengths))).astype(np.int64)].mean())


def is_stream(extents: Extents, end: int, gap_nbytes: int) -> bool:
    """True if the pages of values follow one another on the disk: most begin at most ``gap_nbytes`` behind the end of
    the value before. Within a page, values may have any order: LMDB stores them backwards.

    Args:
        extents: the values.
        end: where the value before the first one ends.
        gap_nbytes: the largest gap.

    >>> there, back = np.arange(100) * 5000, np.arange(100)[::-1] * 5000
    >>> [is_stream(Extents(offsets, np.full(100, 3000)), 0, 2000) for offsets in (there, back)]
    [True, False]
    """
    before = ends_before(extents.offsets, extents.lengths, end)
    gaps = (extents.offsets - before)[extents.offsets >> _PAGE_BITS != (before - 1) >> _PAGE_BITS]
    return bool(2 * np.count_nonzero((gaps >= 0) & (gaps <= gap_nbytes)) > len(gaps))


def ends_before(offsets: Integers, lengths: Integers, end: int) -> Integers:
    """The end of what comes before each extent; before the first one, this is ``end``."""
    return np.concatenate([[end], (offsets + lengths)[:-1]])


def coalesce(extents: Extents, merging: Merging, *, alignment: int = 1) -> Reads:
    """Merge the reads of values that lie close together. Costs about as much as sorting the offsets.

    Args:
        extents: at least one value.
        merging: what is read together.
        alignment: the unit of the offsets and lengths of reads, a power of two.

    >>> reads = coalesce(Extents(np.array([900, 0, 120]), np.array([50, 100, 100])), Merging(gap_nbytes=20))
    >>> reads.offsets.tolist(), reads.lengths.tolist(), reads.read_of.tolist(), reads.begin_in_read.tolist()
    ([900, 0], [50, 220], [0, 1, 1], [0, 0, 120])
    """
    begins = extents.offsets & -alignment
    ends = (extents.offsets + extents.lengths + (alignment - 1)) & -alignment
    if len(extents) == 1:
        return Reads(begins, ends - begins, np.zeros(1, np.int64), extents.offsets - begins)
    by_offset = np.argsort(begins, kind="stable")
    begins, ends = begins[by_offset], ends[by_offset]
    is_first = _first_of_reads(begins, ends, merging)
    firsts = np.flatnonzero(is_first)
    offsets = begins[firsts]
    lengths = np.maximum.reduceat(ends, firsts) - offsets
    by_need = np.argsort(np.minimum.reduceat(by_offset, firsts), kind="stable")
    number = np.empty_like(by_need)
    number[by_need] = np.arange(len(by_need))
    read_of = np.empty_like(by_offset)
    read_of[by_offset] = number[np.cumsum(is_first) - 1]
    offsets, lengths = offsets[by_need], lengths[by_need]
    return Reads(offsets, lengths, read_of, extents.offsets - offsets[read_of])


def spans(reads: Reads, merging: Merging) -> Extents:
    """What the file has from the first of several reads that lie close together to the last one, with the gaps between
    them: one extent for each read. The others of the same span have empty ones.

    >>> found = spans(coalesce(Extents(np.arange(6) * 100, np.full(6, 10)), Merging(0)), Merging(90, 300))
    >>> found.offsets.tolist(), found.lengths.tolist()
    ([0, 0, 0, 300, 300, 300], [210, 0, 0, 210, 0, 0])
    """
    found = coalesce(Extents(reads.offsets, reads.lengths), merging)
    lengths = np.zeros(len(reads), np.int64)
    lengths[np.unique(found.read_of, return_index=True)[1]] = found.lengths
    return Extents(found.offsets[found.read_of], lengths)


def _first_of_reads(begins: Integers, ends: Integers, merging: Merging) -> npt.NDArray[np.bool_]:
    """Flags of the values, sorted by offset, with which a read begins."""
    is_first = np.ones(len(begins), np.bool_)
    is_first[1:] = begins[1:] - np.maximum.accumulate(ends)[:-1] > merging.gap_nbytes
    run_begins = begins[is_first][np.cumsum(is_first) - 1]
    part_of_run = (begins - run_begins) // merging.read_nbytes
    is_first[1:] |= part_of_run[1:] != part_of_run[:-1]
    return is_first
