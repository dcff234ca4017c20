"""The flat image of a file: what stands at which offset. Pure records, no I/O and no tensors.

An image tiles ``[0, nbytes)`` with two kinds of segments: header bytes, and storages whose bytes are copied while the
image is moved. The CRC32s of the storages are known only then: headers have blanks for them, each behind its storage,
so one pass in file order can produce the whole image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, TypeAlias

CHECKSUM_NBYTES = 4


Blank: TypeAlias = tuple[int, int]
"""Four bytes of a header that are the CRC32 (IEEE 802.3, little endian) of a storage: where they are, counted from the
header's start, and which storage it is, as in :class:`Payload`. Plain tuples of integers are no work for the garbage
collector, however many there are."""


class Header(NamedTuple):
    """Bytes that are known when the image is planned, but for the blanks.

    This and :class:`Payload` are tuples, because a small checkpoint has thousands of segments and is to be saved in
    milliseconds.
    """

    offset: int
    data: bytes
    blanks: tuple[Blank, ...] = ()
    """In the order of their positions."""
    forgotten_nbytes: int = 0
    """How many bytes it had before they were forgotten."""

    @property
    def nbytes(self) -> int:
        return len(self.data) or self.forgotten_nbytes


class Payload(NamedTuple):
    """The bytes of one storage, or a part of them."""

    offset: int
    nbytes: int
    storage: int
    """Which storage: its position in the sequence that accompanies the image."""
    before: int = 0
    """How many bytes of the storage come before the part."""
    behind: int = 0
    """How many bytes of the storage come behind the part."""

    @property
    def storage_nbytes(self) -> int:
        return self.before + self.nbytes + self.behind


Segment: TypeAlias = Header | Payload


class Piece(NamedTuple):
    """The part of a segment that falls into a window of the file."""

    segment: Segment
    begin: int
    """First byte of the part, counted from the segment's start."""
    nbytes: int
    position: int
    """Where the part begins, counted from the window's start."""


class Image:
    """The layout of one file.

    Args:
        segments: in file order, without gaps or overlaps, the first at offset 0; each storage occurs once, and the
            blanks for its checksum stand behind it.

    Raises:
        ValueError: the segments do not tile the file, or a blank precedes its storage.
    """

    __slots__ = ("_offsets", "nbytes", "segments")

    def __init__(self, segments: Sequence[Segment]) -> None:
        _check_tiling(segments)
        self.segments = segments
        self._offsets = [segment.offset for segment in segments]
        self.nbytes = segments[-1].offset + segments[-1].nbytes if segments else 0

    @classmethod
    def tiled(cls, segments: Sequence[Segment], offsets: list[int], nbytes: int) -> Image:
        """An image of segments that are known to tile the file, which are not looked at.

        Args:
            segments: as above.
            offsets: where each begins.
            nbytes: of the file.
        """
        image = cls(())
        image.segments, image._offsets, image.nbytes = segments, offsets, nbytes
        return image

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield what stands in ``[begin, end)`` of the file, in order.

        >>> image = Image([Header(0, b"abcd"), Payload(4, 10, 0), Header(14, bytes(4), ((0, 0),))])
        >>> [(type(p.segment).__name__, p.begin, p.nbytes, p.position) for p in image.pieces(2, 8)]
        [('Header', 2, 2, 0), ('Payload', 0, 4, 2)]
        """
        first = max(bisect_right(self._offsets, begin) - 1, 0)
        for number in range(first, len(self.segments)):
            segment = self.segments[number]
            offset, nbytes = segment.offset, segment.nbytes
            if offset >= end:
                return
            if begin >= offset + nbytes or begin >= end:
                continue
            if begin <= offset and offset + nbytes <= end:
                yield Piece(segment, 0, nbytes, offset - begin)
            else:
                start = max(begin, offset)
                yield Piece(segment, start - offset, min(end, offset + nbytes) - start, start - begin)

    def without_headers(self) -> Image:
        """The same layout, its headers forgotten but for their blanks: for whoever has the file's bytes elsewhere."""
        image = copy(self)
        image.segments = tuple(
            one._replace(data=b"", forgotten_nbytes=one.nbytes) if isinstance(one, Header) else one
            for one in self.segments
        )
        return image


def _check_tiling(segments: Sequence[Segment]) -> None:
    position = 0
    copied: set[int] = set()
    for segment in segments:
        if segment.offset != position:
            raise ValueError(f"segments do not tile the file: {segment!r} stands at {segment.offset}, not {position}")
        position += segment.nbytes
        if isinstance(segment, Payload):
            if segment.storage in copied:
                raise ValueError(f"storage {segment.storage} occurs twice")
            copied.add(segment.storage)
        for at, storage in segment.blanks if isinstance(segment, Header) else ():
            if storage not in copied:
                raise ValueError(f"a blank for the checksum of storage {storage} stands before the storage")
            if not 0 <= at <= segment.nbytes - CHECKSUM_NBYTES:
                raise ValueError(f"the blank at {at} is not inside its header of {segment.nbytes} bytes")
