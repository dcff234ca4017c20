"""Cutting the image of a file into extents, each of which another process writes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fastensor.stitch.image import Header, Image, Payload, Segment

UNIT_NBYTES = 1 << 20
"""Extents begin at multiples of this. Stripes of parallel filesystems, over whose parts machines would wait for each
other, are rarely larger."""
Extent: TypeAlias = tuple[int, int]
"""Begin and end in the file."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An image in extents."""

    extents: Sequence[Extent]
    """They tile the file. Behind the last one with bytes, they are empty."""
    parts: Sequence[Sequence[Segment]]
    """Segments of each extent, as an image of its own, which begins at 0. Each header in it has all its blanks, or
    none: those for the CRC32s of storages of which the extent has only a part are left out."""
    unfilled: Sequence[Header]
    """The headers of the whole image whose blanks no extent can fill."""


def extents_of(nbytes: int, count: int) -> list[Extent]:
    """Tile a file with extents of about the same size.

    >>> extents_of(5 << 20, 2), extents_of(100, 2)
    ([(0, 3145728), (3145728, 5242880)], [(0, 100), (100, 100)])
    """
    units = -(-nbytes // UNIT_NBYTES)
    bounds = [min(-(-units * number // count) * UNIT_NBYTES, nbytes) for number in range(count + 1)]
    return list(pairwise(bounds))


def cut(image: Image, count: int, only_first: Collection[int] = ()) -> Cut:
    """Cut an image into extents of about the same size.

    Args:
        image: the image of the whole file.
        count: how many extents there are.
        only_first: storages whose CRC32 only the process of the first extent knows.
    """
    extents = extents_of(image.nbytes, count)
    unfilled: list[Header] = []
    unknown: list[Collection[int]] = [(), *[only_first] * (count - 1)]
    parts = [_part(image, *one, unfilled) for one in zip(extents, unknown, strict=True)]
    return Cut(extents, parts, unfilled)


def _part(image: Image, extent: Extent, unknown: Collection[int], unfilled: list[Header]) -> list[Segment]:
    segments: list[Segment] = []
    whole: set[int] = set()
    """Storages whose CRC32 is known when the extent has been staged."""
    for segment, begin, nbytes, position in image.pieces(*extent):
        if isinstance(segment, Payload):
            before, behind = segment.before + begin, segment.behind + segment.nbytes - begin - nbytes
            segments.append(Payload(position, nbytes, segment.storage, before, behind))
            if nbytes == segment.nbytes and segment.storage not in unknown:
                whole.add(segment.storage)
            continue
        blanks = segment.blanks
        if nbytes < segment.nbytes or not whole.issuperset(storage for _, storage in blanks):
            blanks = ()
            if segment.blanks and begin == 0:
                unfilled.append(segment)
        segments.append(Header(position, segment.data[begin : begin + nbytes], blanks))
    return segments
