"""Reading a zip archive of torch without rebuilding what it holds."""

from __future__ import annotations

import sys
import zipfile
import zlib
from typing import IO, cast

from fastensor.backends.base import Reader
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.opened import FileView, OpenedFile, explained, read_exactly
from fastensor.errors import CorruptCheckpointError, FastensorError
from fastensor.stitch.torch_records import Checks, OpenRecord, payload_records
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record, ZipDirectory, parse_directory


def read_directory(file: OpenedFile) -> ZipDirectory:
    """The archive's directory, checked."""
    with explained(file.where):
        return parse_directory(lambda at, count: read_exactly(file, at, count), file.nbytes, where=file.where)


def read_pickle(file: OpenedFile, archive: ZipDirectory, *, verify: bool) -> bytes:
    """The bytes of ``data.pkl``.

    Raises:
        CorruptCheckpointError: there is none, it is compressed, or it does not match its CRC32.
    """
    record = find_pickle(archive, file.where)
    if record.compressed:
        raise CorruptCheckpointError(f"{file.where}: data.pkl at offset {record.header_offset} is compressed")
    checks = Checks(archive, enabled=verify)
    with explained(file.where):
        header = read_exactly(file, record.header_offset, LOCAL_HEADER.size)
        opened = checks.open_known_record(record, header, file.where)
        data = read_exactly(file, opened.begin, record.nbytes)
    if opened.compared:
        Checked.of_record(opened).compare(zlib.crc32(data), file.where)
    return data


def find_pickle(archive: ZipDirectory, where: str) -> Record:
    """The record that makes an archive a checkpoint.

    Raises:
        CorruptCheckpointError: there is none, or more than one.
    """
    named = [record for record in archive.records if record.name.endswith("/data.pkl")]
    found = [record for record in named if record.name.count("/") == 1]
    if len(found) != 1:
        raise CorruptCheckpointError(
            f"{where}: the directory at offset {archive.offset} has {len(found)} records named data.pkl at its top, "
            f"expected one; it is not a checkpoint"
        )
    return found[0]


def open_record(reader: Reader, checks: Checks, record: Record, where: str) -> OpenRecord:
    """Read the local header of a record.

    Raises:
        CorruptCheckpointError: it contradicts the directory.
        OSError: it cannot be read.
    """
    header = bytearray(LOCAL_HEADER.size)
    reader.readinto(record.header_offset, memoryview(header), checksum=False)
    return checks.open_known_record(record, header, where)


def records_by_key(archive: ZipDirectory, where: str) -> dict[str, Record]:
    """The records of storages by the keys that the pickle has for them."""
    top = find_pickle(archive, where).name.partition("/")[0]
    prefix = f"{top}/data/"
    return {
        record.name.removeprefix(prefix): record
        for record in payload_records(archive)
        if record.name.startswith(prefix)
    }


def reason_for_torch(archive: ZipDirectory) -> str:
    """Why torch has to read an archive by itself; empty if it need not."""
    if any(record.name.endswith("/constants.pkl") for record in archive.records):
        return "the file is a TorchScript archive, which torch.jit loads"
    if _is_compressed(archive):
        return "the archive has been compressed, which torch never does"
    return ""


def _is_compressed(archive: ZipDirectory) -> bool:
    return any(record.compressed for record in archive.records)


def verify_compressed(file: OpenedFile, archive: ZipDirectory) -> bool:
    """Check every record, so that a damaged method field does not turn plain bytes into something else unnoticed.

    Returns whether there was something to check.
    """
    if not _is_compressed(archive):
        return False
    try:
        with explained(file.where), zipfile.ZipFile(cast(IO[bytes], FileView(file))) as opened:
            damaged = opened.testzip()
    except Exception as error:
        is_stream_error = isinstance(error, OSError) and error.errno is None  # how bz2 says that its data is damaged
        if isinstance(error, FastensorError) and not is_stream_error:
            raise
        raise CorruptCheckpointError(f"{file.where}: a compressed record is damaged ({error})") from error
    if damaged is not None:
        raise CorruptCheckpointError(f"{file.where}: record {damaged!r} does not match its CRC32")
    return True


def is_of_other_byte_order(archive: ZipDirectory) -> bool:
    """Whether the file was written on a machine of the other byte order."""
    other = "big" if sys.byteorder == "little" else "little"
    return any(record.name.endswith("/byteorder") and record.nbytes == len(other) for record in archive.records)
