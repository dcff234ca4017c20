"""Where things stand in a file of torch's: headers that torch wrote, storages in their holes, blanks for checksums."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from fastensor.errors import CorruptCheckpointError, LayoutError
from fastensor.stitch.image import CHECKSUM_NBYTES, Blank, Header, Image, Payload, Segment
from fastensor.stitch.zip_directory import (
    DESCRIPTOR_CRC_OFFSET,
    DESCRIPTOR_SIGNATURE,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    Record,
    parse_directory,
)

_ARCHIVE = "archive"
_LARGE_NBYTES = 1 << 20
"""A pickle of at least so many bytes becomes a segment of the image by itself, so that it is not copied."""


@dataclass(frozen=True, slots=True)
class Structure:
    """All that a layout depends on: objects that have it in common have the same one."""

    pickle_nbytes: int
    keys: tuple[str, ...]
    """Of the storages, as torch names them, in the order of the file."""
    sizes: tuple[int, ...]
    """Of the storages, in bytes."""
    alignment: int
    """Of the storages in the file."""


class Skeleton:
    """A file that keeps what is written to it and notes the holes that are seeked over.

    A large pickle that is expected is not kept again, but leaves a hole as well.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, bytearray]] = [(0, bytearray())]
        """Offset and contents of the written parts; holes lie between them."""
        self.pickle: Header | None = None
        """What is in the first hole, if that is not a storage."""
        self._expected = b""

    @property
    def nbytes(self) -> int:
        offset, data = self.runs[-1]
        return offset + len(data)

    def expect(self, pickle: bytes) -> None:
        """These bytes are about to be written, in one piece."""
        self._expected = pickle if len(pickle) >= _LARGE_NBYTES else b""

    def write(self, data: memoryview) -> int:
        if self._expected and data.nbytes == len(self._expected):
            self.pickle, self._expected = Header(self.nbytes, self._expected), b""
            self.runs.append((self.nbytes + data.nbytes, bytearray()))
        else:
            self.runs[-1][1].extend(data)
        return data.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != io.SEEK_CUR or offset <= 0:
            raise LayoutError(f"torch seeked to {offset} (whence {whence}) while writing; expected a hole")
        self.runs.append((self.nbytes + offset, bytearray()))
        return self.nbytes

    def flush(self) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> bytes:
        """What was written there.

        Raises:
            LayoutError: not all of it was written in one run.
        """
        start, data = self._run_at(offset, nbytes)
        return bytes(data[offset - start : offset - start + nbytes])

    def patch(self, offset: int, new: bytes) -> None:
        """Write other bytes there."""
        start, data = self._run_at(offset, len(new))
        data[offset - start : offset - start + len(new)] = new

    def _run_at(self, offset: int, nbytes: int) -> tuple[int, bytearray]:
        for start, data in (self.runs[-1], *self.runs[:2]):  # the second is the one behind a pickle
            if start <= offset and offset + nbytes <= start + len(data):
                return start, data
        raise LayoutError(f"expected {nbytes} bytes at offset {offset} of the first or the last headers")


@dataclass(frozen=True, slots=True)
class Layout:
    """One file of a structure: an image whose pickle can be exchanged for any other of its size."""

    structure: Structure
    image: Image
    _pickle: _Place
    _identity: _Identity | None

    @classmethod
    def of(cls, skeleton: Skeleton, structure: Structure) -> Layout:
        """Put storages into the holes, and blanks for their checksums behind them and into the directory.

        Raises:
            LayoutError: a hole is not where the directory says that the storage is, or the pickle is not there.
        """
        try:
            records = {record.name: record for record in _read_records(skeleton)}
            pickled = records.get(f"{_ARCHIVE}/data.pkl")
            if pickled is None or pickled.nbytes != structure.pickle_nbytes:
                raise LayoutError(f"expected a pickle of {structure.pickle_nbytes} bytes, found {pickled}")
            place = _place(skeleton, pickled)
            _check_pickle(skeleton.pickle, place, pickled)
            named = records.get(f"{_ARCHIVE}/.data/serialization_id")
            identity = None if named is None else _Identity.of(skeleton, named)
            if identity is not None:
                for offset, data in identity.patches(pickled.crc32):
                    skeleton.patch(offset, data)  # here, because a pickle may be large, and need not be copied
            return cls(structure, _to_image(skeleton, records, structure), place, identity)
        except (CorruptCheckpointError, ValueError) as error:
            raise LayoutError(str(error)) from error

    @property
    def headers_nbytes(self) -> int:
        """Size of all that is not payload."""
        return self.image.nbytes - sum(self.structure.sizes)

    def with_pickle(self, data: bytes) -> Image:
        """The image of a file with another pickle."""
        crc32 = isal_zlib.crc32(data)
        patches = [*self._pickle.patches(data, crc32)]
        if self._identity is not None:
            patches += self._identity.patches(crc32)
        return self.image.patched(patches)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record stands that is in no hole, and where its CRC32."""

    offset: int
    nbytes: int
    crc_offsets: tuple[int, int]

    def patches(self, data: bytes, crc32: int) -> Iterator[tuple[int, bytes]]:
        """What stands where if these are the record's bytes."""
        yield self.offset, data
        for offset in self.crc_offsets:
            yield offset, crc32.to_bytes(CHECKSUM_NBYTES, "little")


@dataclass(frozen=True, slots=True)
class _Identity:
    """The serialization id, by which torch tells files apart in its logs."""

    place: _Place
    of_names: bytes
    """Its first half, which torch makes of the names of the records."""

    @classmethod
    def of(cls, skeleton: Skeleton, record: Record) -> _Identity:
        place = _place(skeleton, record)
        return cls(place, skeleton.read(place.offset, place.nbytes // 2))

    def patches(self, pickle_crc32: int) -> Iterator[tuple[int, bytes]]:
        """What stands where in a file with such a pickle."""
        identity = self.of_names + b"%0*d" % (self.place.nbytes - len(self.of_names), pickle_crc32)
        return self.place.patches(identity, isal_zlib.crc32(identity))


def _check_pickle(kept: Header | None, place: _Place, record: Record) -> None:
    """
    Raises:
        LayoutError: what was not copied is not the record.
    """
    if kept is not None and (kept.offset != place.offset or isal_zlib.crc32(kept.data) != record.crc32):
        raise LayoutError(f"expected the pickle at offset {place.offset}, found other {kept.nbytes} bytes")


def _place(skeleton: Skeleton, record: Record) -> _Place:
    local = skeleton.read(record.header_offset, LOCAL_HEADER.size)
    offset = _data_offset(record.header_offset, local, record)
    descriptor = offset + record.nbytes
    if skeleton.read(descriptor, len(DESCRIPTOR_SIGNATURE)) != DESCRIPTOR_SIGNATURE:
        raise LayoutError(f"no data descriptor behind {record.name!r}, at offset {descriptor}")
    return _Place(offset, record.nbytes, (descriptor + DESCRIPTOR_CRC_OFFSET, record.crc_offset))


def _to_image(skeleton: Skeleton, records: Mapping[str, Record], structure: Structure) -> Image:
    keys, sizes = structure.keys, structure.sizes
    filled = [index for index, nbytes in enumerate(sizes) if nbytes]
    segments: list[Segment] = []
    runs = skeleton.runs
    if skeleton.pickle is not None:
        segments += (Header(0, bytes(runs[0][1])), skeleton.pickle)
        runs = runs[1:]
    if len(runs) != len(filled) + 1:
        raise LayoutError(f"torch left {len(runs) - 1} holes for {len(filled)} storages")
    entries: list[Blank] = []
    blanks: tuple[Blank, ...] = ()
    tail, last = runs[-1]
    for index, run, (end, behind) in zip(filled, runs, runs[1:], strict=False):
        start, data = run
        record = records.get(f"{_ARCHIVE}/data/{keys[index]}")
        hole = Payload(start + len(data), sizes[index], index)
        if record is None or record.nbytes != hole.nbytes or _data_offset(start, data, record) != hole.offset:
            raise LayoutError(f"storage {keys[index]!r} is not at offset {hole.offset}: its record is {record}")
        if hole.offset + hole.nbytes != end:
            raise LayoutError(f"the hole for storage {keys[index]!r} ends at {end}, not after {hole.nbytes} bytes")
        if not behind.startswith(DESCRIPTOR_SIGNATURE):
            raise LayoutError(f"no data descriptor behind storage {keys[index]!r}, at offset {end}")
        segments += (Header(start, bytes(data), blanks), hole)
        blanks = (Blank(DESCRIPTOR_CRC_OFFSET, index),)
        entries.append(Blank(record.crc_offset - tail, index))
    return Image([*segments, Header(tail, bytes(last), (*blanks, *sorted(entries)))])


def _data_offset(start: int, data: bytes | bytearray, record: Record) -> int:
    """Where the data of a record begins whose local header is in what stands from ``start`` on."""
    at = record.header_offset - start
    if at < 0 or not data.startswith(LOCAL_SIGNATURE, at):
        raise LayoutError(f"no local header of {record.name!r} at offset {record.header_offset}")
    name_nbytes, extra_nbytes = LOCAL_HEADER.unpack_from(data, at)[-2:]
    return int(record.header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes)


def _read_records(skeleton: Skeleton) -> Sequence[Record]:
    start, data = skeleton.runs[-1]

    def read(offset: int, nbytes: int) -> bytes:
        before = min(max(start - offset, 0), nbytes)  # the search for the directory's end may reach into a storage
        at = offset + before - start
        return bytes(before) + bytes(data[at : at + nbytes - before])

    return parse_directory(read, skeleton.nbytes, where="the planned file").records
