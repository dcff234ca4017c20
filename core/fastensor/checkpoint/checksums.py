"""Comparing what was read with the CRC32 that it was saved with."""

from __future__ import annotations

from dataclasses import dataclass

from isal import isal_zlib

from fastensor.backends.base import Reader
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.torch_records import OpenRecord

_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checked:
    """A part of a file that has a CRC32."""

    name: str
    """What it is, such as ``record 'archive/data/0'``."""
    begin: int
    nbytes: int
    crc32: int

    @classmethod
    def of_record(cls, opened: OpenRecord) -> Checked:
        record = opened.record
        return cls(f"record {record.name!r}", opened.begin, record.nbytes, record.crc32)

    def compare(self, found: int, where: str) -> None:
        """Raise what a load raises if the bytes have another CRC32 than they were saved with."""
        if found != self.crc32:
            raise CorruptCheckpointError(
                f"{where}: {self.describe(found)}: the file was damaged after it was written. Load an older "
                f"checkpoint, or pass verify=False to get the damaged values"
            )

    def describe(self, found: int) -> str:
        """The mismatch, in words."""
        return (
            f"{self.name} ({self.nbytes} bytes at offset {self.begin}) has CRC32 {found:08x}, expected {self.crc32:08x}"
        )


def checksum_of(reader: Reader, begin: int, nbytes: int) -> int:
    """The CRC32 of a part of a file, in bounded memory."""
    block = memoryview(bytearray(min(nbytes, _BLOCK_NBYTES)))
    crc32 = 0
    for at in range(0, nbytes, _BLOCK_NBYTES):
        part = block[: nbytes - at]
        crc32 = isal_zlib.crc32_combine(crc32, reader.readinto(begin + at, part, checksum=True), part.nbytes)
    return crc32
