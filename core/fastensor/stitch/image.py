"""The flat image of a file: which bytes stand at which offset. Pure records, no I/O and no tensors.

An image tiles ``[0, nbytes)`` with two kinds of segments: header bytes, and storages, whose bytes are copied while the
file is written. The CRC32 of a storage is known only when the storage has been copied. Headers have blanks for these
CRC32s, each behind its storage, so one pass in file order can write the whole file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

CHECKSUM_NBYTES = 4


Blank: TypeAlias = tuple[int, int]
"""A place in a header for the CRC32 (4 bytes, IEEE 802.3, little endian) of a storage: the offset from the header's
start, and the number of the storage, as in :class:`Payload`. A plain tuple of integers costs the garbage collector
nothing."""


class Header(NamedTuple):
    """Bytes that are known when the image is planned, except for the blanks.

    Headers and payloads are tuples: a small checkpoint has thousands of them, and is to be saved in milliseconds.
    """

    offset: int
    data: bytes
    blanks: tuple[Blank, ...] = ()
    """Ordered by offset."""
    forgotten_nbytes: int = 0
    """The size of the header if its bytes were forgotten, else 0."""

    @property
    def nbytes(self) -> int:
        return len(self.data) or self.forgotten_nbytes

    def filled(self, crc32s: Sequence[int]) -> bytes:
        """The bytes of the header.

        Args:
            crc32s: the CRC32 of each storage.
        """
        data = bytearray(self.data)
        for position, storage in self.blanks:
            data[position : position + CHECKSUM_NBYTES] = crc32s[storage].to_bytes(CHECKSUM_NBYTES, "little")
        return bytes(data)


class Payload(NamedTuple):
    """The bytes of one storage, or a part of them."""

    offset: int
    nbytes: int
    storage: int
    """The number of the storage: its position in the sequence that accompanies the image."""
    before: int = 0
    """Bytes of the storage before the part."""
    behind: int = 0
    """Bytes of the storage behind the part."""

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
    """Offset of the part from the window's start."""


class Image:
    """The layout of one file.

    Args:
        segments: in file order, without gaps or overlaps, the first at offset 0; each storage occurs once, and the
            blanks for its checksum stand behind it.

    Raises:
        ValueError: the segments do not tile the file, or a blank precedes its storage.
    """

    __slots__ = ("_offsets", "nbytes", "segments")
    _offsets: Sequence[int]
    """Where each segment begins, and where the last one ends."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        _check_tiling(segments)
        self.segments = segments
        self.nbytes = segments[-1].offset + segments[-1].nbytes if segments else 0
        self._offsets = [*(segment.offset for segment in segments), self.nbytes]

    @classmethod
    def tiled(cls, segments: Sequence[Segment], offsets: Sequence[int]) -> Image:
        """An image of segments that are known to tile the file. This is not checked.

        Args:
            segments: as for the constructor.
            offsets: where each segment begins, and where the last one ends.
        """
        image = cls.__new__(cls)
        image.segments, image._offsets, image.nbytes = segments, offsets, offsets[-1]
        return image

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the parts of segments that stand in ``[begin, end)`` of the file, in order.

        >>> image = Image([Header(0, b"abcd"), Payload(4, 10, 0), Header(14, bytes(4), ((0, 0),))])
        >>> [(type(p.segment).__name__, p.begin, p.nbytes, p.position) for p in image.pieces(2, 8)]
        [('Header', 2, 2, 0), ('Payload', 0, 4, 2)]
        """
        offsets = self._offsets
        for number in range(max(bisect_right(offsets, begin) - 1, 0), len(offsets) - 1):
            offset, stop = offsets[number], offsets[number + 1]
            if offset >= end:
                return
            if begin >= stop or begin >= end:
                continue
            if begin <= offset and stop <= end:
                yield Piece(self.segments[number], 0, stop - offset, offset - begin)
            else:
                start = max(begin, offset)
                yield Piece(self.segments[number], start - offset, min(end, stop) - start, start - begin)


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
