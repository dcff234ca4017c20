"""A checkpoint as torch sees it: a file object that fills torch's memory through a backend, and verifies it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from fastensor.backends.base import Reader
from fastensor.checkpoint.checksums import Checked, checksum_of
from fastensor.checkpoint.opened import FileView, OpenedFile
from fastensor.stitch.torch_records import Checks, OpenRecord
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record


class CheckedFile(FileView):
    """Reads go to a backend, and a record's bytes are compared with its CRC32 before torch gets to use them.

    torch reads the local header of a record, then its data with one call, straight into the memory of the storage.

    Args:
        file: for what the backend's reader does not do.
        reader: closed by the caller, or here when a read fails: then no thread may write to torch's memory any more.
        checks: what can be compared.
        skipped: names of records of which nothing is read: torch's memory for their data is left as it is, and whoever
            calls torch sees to it that nobody looks.
    """

    def __init__(self, file: OpenedFile, reader: Reader, checks: Checks, skipped: Container[str] = ()) -> None:
        super().__init__(file)
        self._reader = reader
        self._checks = checks
        self.skipped = skipped
        self._current: OpenRecord | None = None
        self.failure: BaseException | None = None
        """What went wrong in a read. torch calls from C code that exceptions must not cross, so it gets a short
        read instead, and whoever called torch raises this."""

    @property
    def record(self) -> Record | None:
        """The one that torch has asked for last."""
        return None if self._current is None else self._current.record

    def readinto(self, buffer: Any) -> int:
        if self.failure is not None:
            return 0
        view = memoryview(buffer).cast("B")[: max(self._file.nbytes - self._position, 0)]
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
        skipped = self._checks.record_at(offset) if view.nbytes == LOCAL_HEADER.size else None
        if skipped is not None and skipped.name in self.skipped:
            self._current = self._checks.stand_in(skipped, view)
            return
        current = self._current
        inside = current is not None and current.contains(offset, view.nbytes)
        if current is not None and inside and current.record.name in self.skipped:
            return
        compared = current is not None and inside and current.compared
        found = self._reader.readinto(offset, view, checksum=compared)
        if current is None or not compared:
            self._current = self._checks.open_record(offset, view, self._file.where) or current
            return
        checked = Checked.of_record(current)
        if view.nbytes != checked.nbytes:
            found = checksum_of(self._reader, checked.begin, checked.nbytes)
        checked.compare(found, self._file.where)
