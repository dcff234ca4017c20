"""Laying out a torch checkpoint: headers as torch's own writer makes them, and blanks for checksums.

torch writes zip archives by miniz, without compression and times, each record padded to an alignment (PyTorch,
``caffe2/serialize/inline_container.cc`` and ``third_party/miniz``). This module lays out the records in one pass, in a
tenth of the time that torch's writer takes. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias, overload

from isal import isal_zlib

from fastensor.stitch.image import CHECKSUM_NBYTES, Blank, Header, Image, Payload, Segment
from fastensor.stitch.parts import LOCAL_HEADER, LOCAL_SIGNATURE, MAX32
from fastensor.stitch.zip_directory import (
    DESCRIPTOR_CRC_OFFSET,
    DESCRIPTOR_SIGNATURE,
    END,
    END64,
    END64_LOCATOR,
    END64_LOCATOR_SIGNATURE,
    END64_SIGNATURE,
    END_SIGNATURE,
    ENTRY,
    ENTRY_CRC_OFFSET,
    ENTRY_SIGNATURE,
    MAX16,
    ZIP64_EXTRA,
)

ARCHIVE = "archive"
"""The folder of all records. torch names it so, unless ``torch.save`` was given a path."""
_MOST_KEPT = 10_000
"""Storages of a file whose layout is kept for the next one: headers of so many take 27 MB if they are padded to whole
pages."""
_UTF8, _DESCRIPTOR_FOLLOWS = 0x0800, 0x0008
_EXTRA = struct.Struct("<2H")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_PADDING_ID = int.from_bytes(b"FB", "little")
_PADDING = b"Z"
_MADE_BY, _NEEDED = 0x031E, 0x002D
"""Versions of the zip specification that miniz names in the zip64 end of the directory."""


class SmallRecord(NamedTuple):
    """A record that is not a storage."""

    name: str
    """Its name without the folder."""
    data: bytes


def storage_name(index: int) -> str:
    """The name of a storage's record, without the folder."""
    return f"data/{index}"


def lay_out(
    before: Sequence[SmallRecord], sizes: Sequence[int], behind: Sequence[SmallRecord], alignment: int
) -> Image:
    """The image of the file that torch's writer makes.

    Args:
        before: the records in front of the storages.
        sizes: sizes of the storages, in bytes.
        behind: the records behind the storages.
        alignment: at a multiple of this many bytes the contents of each record begin.
    """
    lay_out_sizes = _laid_out if len(sizes) <= _MOST_KEPT else _laid_out.__wrapped__
    layout = lay_out_sizes(_sizes_of(before), tuple(sizes), _sizes_of(behind), alignment)
    return layout.image([record.data for record in (*before, *behind)])


_Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""Names of small records, and how many bytes each has."""


def _sizes_of(records: Sequence[SmallRecord]) -> _Sizes:
    return tuple((record.name, len(record.data)) for record in records)


@lru_cache(maxsize=2)
def _laid_out(before: _Sizes, sizes: tuple[int, ...], behind: _Sizes, alignment: int) -> _Layout:
    """The layout of all files with records of these sizes: a program saves the same structure again and again."""
    layout = _Layout(alignment)
    for name, nbytes in before:
        layout.add(name, nbytes)
    for index, nbytes in enumerate(sizes):
        layout.add(storage_name(index), nbytes, index)
    for name, nbytes in behind:
        layout.add(name, nbytes)
    layout.end()
    return layout


def without_headers(image: Image) -> Image:
    """An image that :func:`lay_out` has made, without the bytes of its headers, for callers that have these bytes
    elsewhere. Blanks stay."""
    assert isinstance(image.segments, _Segments)
    return image.segments.without_headers().image()


class _Layout:
    """A file that grows record by record, up to :meth:`end`. Small records have no contents yet."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._segments: list[bytes | int] = []
        """Each is bytes, or the index of a storage."""
        self._offsets: list[int] = []
        """Offset of each segment, and after :meth:`end` the end of the last one."""
        self._end = 0
        """Offset of the next record."""
        self._between = b""
        """Bytes in front of the next record that are in no segment yet."""
        self._directory: list[bytes] = []
        self._directory_nbytes = 0
        self._blanks: list[Blank] = []
        """The blanks of storages in the directory, counted from the directory's start; after :meth:`end` from that of
        the last segment."""
        self._small: list[tuple[int, int]] = []
        """For small records: the number of the segment that holds each, and the offset of the blank for its CRC32 in
        the directory; after :meth:`end` in the last segment."""

    def add(self, name: str, nbytes: int, storage: int | None = None) -> None:
        """Add a record.

        Args:
            name: without the folder.
            nbytes: the size of the contents.
            storage: the index of the storage that has the contents; None for a small record.
        """
        full = b"%b/%b" % (ARCHIVE.encode(), name.encode())
        offset = self._end
        wide = nbytes >= MAX32 or offset >= MAX32
        header = _local_header(full, nbytes, offset, self._alignment, wide=wide)
        self._segments.append(self._between + header)
        self._offsets.append(offset - len(self._between))
        self._between = b""
        self._end = begin = offset + len(header)
        blank = self._directory_nbytes + ENTRY_CRC_OFFSET
        if storage is None:
            self._small.append((len(self._segments), blank))
        elif nbytes:
            self._blanks.append((blank, storage))
        if nbytes:
            self._segments.append(b"" if storage is None else storage)
            self._offsets.append(begin)
            descriptor = _DESCRIPTOR64 if wide else _DESCRIPTOR
            self._between = descriptor.pack(DESCRIPTOR_SIGNATURE, 0, nbytes, nbytes)  # 0: a blank for the CRC32
            self._end = begin + nbytes + len(self._between)
        entry = _entry(full, nbytes, offset, wide=wide)
        self._directory.append(entry)
        self._directory_nbytes += len(entry)

    def end(self) -> None:
        """Add the directory."""
        ends = _ends(len(self._directory), self._directory_nbytes, self._end)
        before = len(self._between)
        self._offsets.append(self._end - before)
        self._segments.append(b"".join((self._between, *self._directory, ends)))
        self._offsets.append(self._end + self._directory_nbytes + len(ends))
        self._blanks = [(before + at, index) for at, index in self._blanks]
        self._small = [(number, before + at) for number, at in self._small]
        self._directory.clear()

    def image(self, small: Sequence[bytes]) -> Image:
        """The image of the file whose small records have these contents."""
        segments = [*self._segments]
        last = bytearray(self._of_bytes(-1))
        for (number, in_directory), data in zip(self._small, small, strict=True):
            if not data:
                continue
            crc32 = isal_zlib.crc32(data).to_bytes(CHECKSUM_NBYTES, "little")
            segments[number] = data
            behind = last if number + 2 == len(segments) else bytearray(self._of_bytes(number + 1))
            behind[DESCRIPTOR_CRC_OFFSET : DESCRIPTOR_CRC_OFFSET + CHECKSUM_NBYTES] = crc32
            segments[number + 1] = bytes(behind)
            last[in_directory : in_directory + CHECKSUM_NBYTES] = crc32
        segments[-1] = bytes(last)
        return _Segments(segments, self._offsets, self._blanks).image()

    def _of_bytes(self, number: int) -> bytes:
        segment = self._segments[number]
        assert isinstance(segment, bytes)
        return segment


class _Segments(Sequence[Segment]):
    """The segments of an image. Each is made when it is asked for: tens of thousands of objects would make the garbage
    collector go through all of the program's memory.

    Args:
        contents: the contents of each segment: bytes, or the index of a storage.
        offsets: where each segment begins, and where the last one ends.
        blanks: the blanks of the last segment, without the one for a storage directly in front of it.
    """

    def __init__(self, contents: list[bytes | int], offsets: list[int], blanks: Sequence[Blank]) -> None:
        self._contents = contents
        self._offsets = offsets
        self._of_last = blanks

    def image(self) -> Image:
        """The image of these segments."""
        return Image.tiled(self, self._offsets)

    def without_headers(self) -> _Segments:
        """The same segments, without the bytes of headers."""
        contents = [one if isinstance(one, int) else b"" for one in self._contents]
        return _Segments(contents, self._offsets, self._of_last)

    def __len__(self) -> int:
        return len(self._contents)

    @overload
    def __getitem__(self, number: int) -> Segment: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Segment]: ...
    def __getitem__(self, number: int | slice) -> Segment | Sequence[Segment]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if number < 0:
            return self[len(self) + number]
        contents, offset = self._contents[number], self._offsets[number]
        nbytes = self._offsets[number + 1] - offset
        if isinstance(contents, int):
            return Payload(offset, nbytes, contents)
        before = self._contents[number - 1] if number else b""
        blanks: tuple[Blank, ...] = ((DESCRIPTOR_CRC_OFFSET, before),) if isinstance(before, int) else ()
        if number == len(self._contents) - 1:
            blanks = (*blanks, *self._of_last)
        return Header(offset, contents, blanks, 0 if contents else nbytes)


def _local_header(name: bytes, nbytes: int, offset: int, alignment: int, *, wide: bool) -> bytes:
    """The local header of a record, padded so that the contents begin at a multiple of the alignment.

    ``wide`` says that the record's size, or its offset, does not fit into 32 bits.
    """
    sizes = _zip64_extra(nbytes, 0, offset) if wide else b""  # miniz does not know the stored size yet
    padding = _padding(-(offset + LOCAL_HEADER.size + len(name) + len(sizes) + _EXTRA.size) % alignment)
    flags = _UTF8 | _DESCRIPTOR_FOLLOWS if nbytes else _UTF8
    fixed = LOCAL_HEADER.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(sizes) + len(padding))
    return fixed + name + sizes + padding


@lru_cache(maxsize=4096)
def _padding(nbytes: int) -> bytes:
    """The extra field that pads a local header: its head, and ``nbytes`` bytes."""
    return _EXTRA.pack(_PADDING_ID, nbytes) + _PADDING * nbytes


def _entry(name: bytes, nbytes: int, offset: int, *, wide: bool) -> bytes:
    """The record's entry of the central directory, with a blank for the CRC32."""
    sizes = _zip64_extra(nbytes, nbytes, offset) if wide else b""
    flags = _UTF8 | _DESCRIPTOR_FOLLOWS if nbytes else _UTF8
    shown, at = (min(nbytes, MAX32), min(offset, MAX32)) if wide else (nbytes, offset)
    fixed = ENTRY.pack(ENTRY_SIGNATURE, 0, 0, flags, 0, 0, 0, 0, shown, shown, len(name), len(sizes), 0, 0, 0, 0, at)
    return fixed + name + sizes


def _zip64_extra(nbytes: int, stored_nbytes: int, offset: int) -> bytes:
    """The extra field with the numbers that do not fit into 32 bits."""
    values = [nbytes, stored_nbytes] * (nbytes >= MAX32) + [offset] * (offset >= MAX32)
    return _EXTRA.pack(ZIP64_EXTRA, 8 * len(values)) + struct.pack(f"<{len(values)}Q", *values)


def _ends(count: int, directory_nbytes: int, directory_offset: int) -> bytes:
    """The end of the central directory: the zip64 record, its locator, and the classic record."""
    end64_offset = directory_offset + directory_nbytes
    return b"".join((
        END64.pack(
            END64_SIGNATURE, END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, directory_nbytes, directory_offset
        ),
        END64_LOCATOR.pack(END64_LOCATOR_SIGNATURE, 0, end64_offset, 1),
        END.pack(
            END_SIGNATURE, 0, 0, min(count, MAX16), min(count, MAX16), min(directory_nbytes, MAX32),
            min(directory_offset, MAX32), 0,
        ),
    ))  # fmt: skip
