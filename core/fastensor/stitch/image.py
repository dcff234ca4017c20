"""The flat image of a file: what stands at which offset. Pure records, no I/O and no tensors.

An image tiles ``[0, nbytes)`` with two kinds of segments: header bytes, and storages whose bytes are copied while the
image is moved. The CRC32s of the storages are known only then: headers have blanks for them, each behind its storage,
so one pass in file order can produce the whole image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, TypeAlias, cast

CHECKSUM_NBYTES = 4


class Blank(NamedTuple):
    """Four bytes of a header that are the CRC32 (IEEE 802.3, little endian) of a storage."""

    position: int
    """Counted from the header's start."""
    storage: int
    """Which one, as in :class:`Payload`."""


@dataclass(frozen=True, slots=True)
class Header:
    """Bytes that are known when the image is planned, but for the blanks."""

    offset: int
    data: bytes
    blanks: tuple[Blank, ...] = ()
    """In the order of their positions."""
    forgotten_nbytes: int = 0
    """How many bytes it had before they were forgotten."""

    @property
    def nbytes(self) -> int:
        return len(self.data) or self.forgotten_nbytes


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one storage, or a part of them."""

    offset: int
    nbytes: int
    index: int
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
        segments: in file order, without gaps or overlaps, the first at offset 0; each storage occurs once, and the
            blanks for its checksum stand behind it.

    Raises:
        ValueError: the segments do not tile the file, or a blank precedes its storage.
    """

    __slots__ = ("_offsets", "nbytes", "segments")

    def __init__(self, segments: Sequence[Segment]) -> None:
        _check_tiling(segments)
        self.segments = tuple(segments)
        self._offsets = [segment.offset for segment in segments]
        self.nbytes = segments[-1].offset + segments[-1].nbytes if segments else 0

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield what stands in ``[begin, end)`` of the file, in order.

        >>> image = Image([Header(0, b"abcd"), Payload(4, 10, index=0), Header(14, bytes(4), (Blank(0, storage=0),))])
        >>> [(type(p.segment).__name__, p.begin, p.nbytes, p.position) for p in image.pieces(2, 8)]
        [('Header', 2, 2, 0), ('Payload', 0, 4, 2)]
        """
        first = max(bisect_right(self._offsets, begin) - 1, 0)
        for segment in islice(self.segments, first, None):
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

    def patched(self, patches: Iterable[tuple[int, bytes]]) -> Image:
        """The same layout with other bytes from some offsets on.

        >>> Image([Header(0, b"abcd"), Payload(4, 10, index=0)]).patched([(1, b"BC")]).segments[0].data
        b'aBCd'

        Raises:
            ValueError: not all of a patch is in one header.
        """
        changed: dict[int, bytearray] = {}
        for offset, data in patches:
            index, header = self._header_at(offset, len(data))
            at = offset - header.offset
            if index not in changed:
                changed[index] = bytearray(header.data)
            changed[index][at : at + len(data)] = data
        segments = list(self.segments)
        for index, contents in changed.items():
            segments[index] = replace(cast(Header, segments[index]), data=bytes(contents))
        image = copy(self)
        image.segments = tuple(segments)
        return image

    def without_headers(self) -> Image:
        """The same layout, its headers forgotten but for their blanks: for whoever has the file's bytes elsewhere."""
        image = copy(self)
        image.segments = tuple(
            replace(one, data=b"", forgotten_nbytes=one.nbytes) if isinstance(one, Header) else one
            for one in self.segments
        )
        return image

    def _header_at(self, offset: int, nbytes: int) -> tuple[int, Header]:
        index = max(bisect_right(self._offsets, offset) - 1, 0)
        found = self.segments[index] if self.segments else None
        if (
            not isinstance(found, Header)
            or not found.offset <= offset <= offset + nbytes <= found.offset + found.nbytes
        ):
            raise ValueError(f"no header holds the {nbytes} bytes from offset {offset} on: there is {found!r}")
        return index, found


def _check_tiling(segments: Sequence[Segment]) -> None:
    position = 0
    copied: set[int] = set()
    for segment in segments:
        if segment.offset != position:
            raise ValueError(f"segments do not tile the file: {segment!r} stands at {segment.offset}, not {position}")
        position += segment.nbytes
        if isinstance(segment, Payload):
            if segment.index in copied:
                raise ValueError(f"storage {segment.index} occurs twice")
            copied.add(segment.index)
        for blank in segment.blanks if isinstance(segment, Header) else ():
            if blank.storage not in copied:
                raise ValueError(f"a blank for the checksum of storage {blank.storage} stands before the storage")
            if not 0 <= blank.position <= segment.nbytes - CHECKSUM_NBYTES:
                raise ValueError(f"{blank} is not inside its header of {segment.nbytes} bytes")
