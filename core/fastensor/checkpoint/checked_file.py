"""A checkpoint as torch sees it: a file object that fills torch's memory through a backend, and verifies it."""

from __future__ import annotations

import io
import os
from typing import Any

from isal import isal_zlib

from fastensor.backends import posix
from fastensor.backends.base import Reader
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.torch_records import Checks, OpenRecord

_BLOCK_NBYTES = 1 << 20


class CheckedFile(io.RawIOBase):
    """Reads go to a backend, and a record's bytes are compared with its CRC32 before torch gets to use them.

    torch reads the local header of a record, then its data with one call, straight into the memory of the storage.

    Args:
        fd: the file, for what the backend's reader does not do.
        nbytes: the file's size.
        reader: closed by the caller, or here when a read fails: then no thread may write to torch's memory any more.
        checks: what can be compared.
        where: the file's name, for messages.
    """

    def __init__(self, fd: int, nbytes: int, reader: Reader, checks: Checks, where: str) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._reader = reader
        self._checks = checks
        self._where = where
        self._position = 0
        self._current: OpenRecord | None = None
        self.failure: BaseException | None = None
        """What went wrong in a read. torch calls from C code that exceptions must not cross, so it gets a short
        read instead, and whoever called torch raises this."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self.failure is not None:
            return 0
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._position, 0)]
        try:
            self._fill(view)
        except BaseException as failure:  # noqa: BLE001  # raised by whoever called torch
            self.failure = failure
            self._reader.close()
            return 0
        self._position += view.nbytes
        return view.nbytes

    def _fill(self, view: memoryview) -> None:
        offset = self._position
        current = self._current
        compared = current is not None and current.compared and current.contains(offset, view.nbytes)
        found = self._reader.readinto(offset, view, checksum=compared)
        if current is None or not compared:
            self._current = self._checks.open_record(offset, view, self._where) or current
            return
        record = current.record
        if view.nbytes != record.nbytes:
            found = self._checksum_of(current)
        if found != record.crc32:
            raise CorruptCheckpointError(
                f"{self._where}: record {record.name!r} ({record.nbytes} bytes at offset {current.begin}) has CRC32 "
                f"{found:08x}, expected {record.crc32:08x}: the file was damaged after it was written. Load an older "
                f"checkpoint, or pass verify=False to get the damaged values"
            )

    def _checksum_of(self, current: OpenRecord) -> int:
        """The CRC32 of a whole record, for a read of a part of it."""
        nbytes = current.record.nbytes
        block = memoryview(bytearray(min(nbytes, _BLOCK_NBYTES)))
        crc32 = 0
        for at in range(0, nbytes, block.nbytes):
            part = block[: nbytes - at]
            posix.read_fully(self._fd, part, current.begin + at)
            crc32 = isal_zlib.crc32(part, crc32)
        return crc32
