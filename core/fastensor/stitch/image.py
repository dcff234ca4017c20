"""The flat image of a file: what stands at which offset. Pure records, no I/O and no tensors.

An image tiles ``[0, nbytes)`` with three kinds of segments: header bytes that are known, storages whose bytes are
copied while the image is moved, and the CRC32s of those storages, known only once they have been copied. A checksum
stands behind its storage, so one pass in file order can produce the whole image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

CHECKSUM_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Header:
    """Bytes that are known when the image is planned."""

    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one storage, whole."""

    offset: int
    nbytes: int
    index: int
    """Which storage: its position in the sequence that accompanies the image."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC32 (IEEE 802.3, little endian, four bytes) of storage ``index``."""

    offset: int
    index: int

    @property
    def nbytes(self) -> int:
        return CHECKSUM_NBYTES


Segment: TypeAlias = Header | Payload | Checksum


class Piece(NamedTuple):
    """The part of a segment that falls into a window of the file.

    A tuple, because a small checkpoint has thousands of pieces and is to be saved in milliseconds.
    """

    segment: Segment
    begin: int
    """First byte of the part, counted from the segment's start."""
    nbytes: int
    position: int
    """Where the part begins, counted from the window's start."""


class Image:
    """The layout of one file.

    Args:
        segments: in file order, without gaps or overlaps, the first at offset 0; each storage occurs once, and its
            checksums stand behind it.

    Raises:
        ValueError: the segments do not tile the file, or a checksum precedes its storage.
    """

    __slots__ = ("_offsets", "nbytes", "payload_nbytes", "segments")

    def __init__(self, segments: Sequence[Segment]) -> None:
        _check_tiling(segments)
        self.segments = tuple(segments)
        self._offsets = [segment.offset for segment in segments]
        self.nbytes = segments[-1].offset + segments[-1].nbytes if segments else 0
        self.payload_nbytes = sum(s.nbytes for s in segments if isinstance(s, Payload))

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield what stands in ``[begin, end)`` of the file, in order.

        >>> image = Image([Header(0, b"abcd"), Payload(4, 10, index=0), Checksum(14, index=0)])
        >>> [(type(p.segment).__name__, p.begin, p.nbytes, p.position) for p in image.pieces(2, 8)]
        [('Header', 2, 2, 0), ('Payload', 0, 4, 2)]
        """
        first = max(bisect_right(self._offsets, begin) - 1, 0)
        for segment in islice(self.segments, first, None):
            offset, nbytes = segment.offset, segment.nbytes
            if offset >= end:
                return
            if begin <= offset and offset + nbytes <= end:
                yield Piece(segment, 0, nbytes, offset - begin)
            elif offset + nbytes > begin:
                start = max(begin, offset)
                yield Piece(segment, start - offset, min(end, offset + nbytes) - start, start - begin)


def _check_tiling(segments: Sequence[Segment]) -> None:
    if segments and segments[0].offset != 0:
        raise ValueError(f"the first segment stands at offset {segments[0].offset}, expected 0")
    for before, after in pairwise(segments):
        if before.offset + before.nbytes != after.offset:
            raise ValueError(f"segments do not tile the file: {before!r} is followed by {after!r}")
    copied: set[int] = set()
    for segment in segments:
        if isinstance(segment, Payload):
            if segment.index in copied:
                raise ValueError(f"storage {segment.index} occurs twice")
            copied.add(segment.index)
        elif isinstance(segment, Checksum) and segment.index not in copied:
            raise ValueError(f"the checksum of storage {segment.index} stands before the storage")
