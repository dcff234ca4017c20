"""What a zip directory says about a checkpoint: which records are storages, where, and what can be verified."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.zip_directory import LOCAL_HEADER, LOCAL_SIGNATURE, Record, ZipDirectory


def payload_records(archive: ZipDirectory) -> list[Record]:
    """The records that hold storages, empty ones left out, in the order in which the unpickler will ask for them.

    torch numbers storages in the order of the pickle. Files lie in that order, too, but before torch 2.1 they were
    sorted as text (0, 1, 10, 11, 2).
    """
    records = [record for record in archive.records if record.nbytes and record.name.split("/", 2)[1:2] == ["data"]]
    keys = [record.name.rpartition("/")[2] for record in records]
    if not (all(map(str.isdecimal, keys)) and "".join(keys).isascii()):
        return records
    if all((len(one), one) <= (len(other), other) for one, other in pairwise(keys)):  # nearly always: spare the tuples
        return records
    numbered = sorted(zip(map(len, keys), keys, records, strict=True), key=itemgetter(0, 1))
    return [record for _, _, record in numbered]


def record_ends(archive: ZipDirectory) -> dict[int, int]:
    """Where the space of a record ends, by where its local header begins."""
    begins = sorted(record.header_offset for record in archive.records)
    return dict(zip(begins, [*begins[1:], archive.offset], strict=True))


class OpenRecord(NamedTuple):
    """A record whose local header has been read."""

    record: Record
    begin: int
    """Where its data begins."""
    compared: bool
    """Whether its bytes are to be compared with its CRC32."""

    def contains(self, offset: int, nbytes: int) -> bool:
        return nbytes > 0 and self.begin <= offset and offset + nbytes <= self.begin + self.record.nbytes


class Checks:
    """Which records of an archive can be compared with a CRC32, and where their data must be.

    torch can be told to leave CRC32s out: then they are zero everywhere. Files whose storages were filled in later
    (``skip_data``) have them for the other records only.
    """

    def __init__(self, archive: ZipDirectory, *, enabled: bool) -> None:
        self.enabled = enabled
        self.records = payload_records(archive)
        """The storages that are not empty, as :func:`payload_records` has them."""
        self._payload_names = {record.name for record in self.records}
        others = [record for record in archive.records if record.nbytes and record.name not in self._payload_names]
        self.payload = enabled and any(record.crc32 for record in self.records or others)
        """Whether storages are compared."""
        self._others = enabled and any(record.crc32 for record in others)
        self.complete = enabled and (self.payload or not self.records) and (self._others or not others)
        """Whether everything is compared."""
        self._ends = record_ends(archive)
        self._by_offset = {record.header_offset: record for record in archive.records}

    def end_of(self, record: Record) -> int:
        """Where the space of a record ends."""
        return self._ends[record.header_offset]

    def record_at(self, header_offset: int) -> Record | None:
        """The record whose local header begins there."""
        return self._by_offset.get(header_offset)

    def is_whole_storage(self, record: OpenRecord, nbytes: int) -> bool:
        """Whether so many bytes of a record are all bytes of a storage."""
        return nbytes == record.record.nbytes and record.record.name in self._payload_names

    def stand_in(self, record: Record, header: memoryview) -> OpenRecord:
        """Write a local header as it could be, for a record of which nothing is read."""
        name_nbytes = record.earliest_data_offset - record.header_offset - LOCAL_HEADER.size
        header[:] = LOCAL_HEADER.pack(LOCAL_SIGNATURE, 0, 0, 0, 0, 0, 0, 0, 0, name_nbytes, 0)
        return OpenRecord(record, record.earliest_data_offset, False)

    def open_record(self, header_offset: int, header: memoryview, where: str) -> OpenRecord | None:
        """The record whose local header that is; None if no record begins there.

        Raises:
            CorruptCheckpointError: the local header contradicts the directory. A changed length in it would move the
                data to where other bytes are.
        """
        record = self._by_offset.get(header_offset)
        if record is None or header.nbytes != LOCAL_HEADER.size:
            return None
        return self.open_known_record(record, header, where)

    def open_known_record(self, record: Record, header: bytes | bytearray | memoryview, where: str) -> OpenRecord:
        """The same for a record that is known to begin there, and the whole of its local header."""
        header_offset = record.header_offset
        signature, *_, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack(header)
        begin = header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes
        expected_name = record.earliest_data_offset - header_offset - LOCAL_HEADER.size
        if (
            signature != LOCAL_SIGNATURE
            or name_nbytes != expected_name
            or begin + record.stored_nbytes > self._ends[header_offset]
        ):
            raise CorruptCheckpointError(
                f"{where}: the local header of record {record.name!r} at offset {header_offset} contradicts the "
                f"directory: the file was damaged after it was written"
            )
        return OpenRecord(record, begin, record.nbytes > 0 and self._is_compared(record.name))

    def _is_compared(self, name: str) -> bool:
        if self.payload == self._others:
            return self.payload
        return self.payload if name in self._payload_names else self._others
