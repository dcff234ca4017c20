"""A checkpoint as torch sees it: a file object that fills torch's memory through a backend, and verifies it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from fastensor.backends.base import Reader
from fastensor.backends.to_device import Filler, storage_on
from fastensor.checkpoint.checksums import Checked, checksum_of
from fastensor.checkpoint.opened import FileView, OpenedFile, explained
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.torch_records import Checks, OpenRecord
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record

_AS_IT_IS: Mapping[str, bytes] = {}


class NotAskedForError(Exception):
    """torch did not ask where a storage goes whose reading was postponed until then."""


class CheckedFile(FileView):
    """Reads go to a backend, and a record's bytes are compared with its CRC32 before torch gets to use them.

    torch reads the local header of a record, then its data with one call, straight into the memory of the storage.

    Args:
        file: for what the backend's reader does not do.
        reader: closed by the caller, or here when a read fails: then no thread may write to torch's memory any more.
        checks: what can be compared.
        skipped: names of records of which nothing is read: torch's memory for their data is left as it is, and whoever
            calls torch sees to it that nobody looks.
        replaced: by names of records, what torch gets instead of their data; of the same size.
        postpones: leave the memory of storages as it is until :meth:`fill` is called for each of them, which has to be
            before torch asks for the next one.
    """

    def __init__(
        self,
        file: OpenedFile,
        reader: Reader,
        checks: Checks,
        skipped: Container[str] = (),
        replaced: Mapping[str, bytes] = _AS_IT_IS,
        *,
        postpones: bool = False,
    ) -> None:
        super().__init__(file)
        self._reader = reader
        self._checks = checks
        self.skipped = skipped
        self._replaced = replaced
        self._filler = Filler(reader)
        self._postpones = postpones
        self._postponed: OpenRecord | None = None
        self._current: OpenRecord | None = None
        self.failure: BaseException | None = None
        """What went wrong in a read. torch calls from C code that exceptions must not cross, so it gets a short
        read instead, and whoever called torch raises this."""

    @property
    def record(self) -> Record | None:
        """The one that torch has asked for last."""
        return None if self._current is None else self._current.record

    def take_postponed(self) -> OpenRecord | None:
        """The storage whose memory was left as it is, once."""
        postponed, self._postponed = self._postponed, None
        return postponed

    def check_none_postponed(self) -> None:
        """
        Raises:
            NotAskedForError: a storage was left empty.
        """
        if self._postponed is not None:
            raise NotAskedForError(self._postponed.record.name)

    def fill(self, postponed: OpenRecord, storage: torch.UntypedStorage) -> None:
        """Read it to where it goes. A record may be longer than what the pickle says of it, and is compared as a whole.

        Raises:
            CorruptCheckpointError: it is damaged, or shorter.
            OSError: it cannot be read.
        """
        record, nbytes = postponed.record, storage.nbytes()
        if nbytes > record.nbytes:
            raise CorruptCheckpointError(
                f"{self.where}: record {record.name!r} has {record.nbytes} bytes, the pickle asks for {nbytes}: the "
                "file was damaged after it was written"
            )
        whole = storage if nbytes == record.nbytes else storage_on(storage.device, record.nbytes)
        with explained(self.where):
            found = self._filler.fill(whole, postponed.begin, checksum=postponed.compared)
        if postponed.compared:
            Checked.of_record(postponed).compare(found, self.where)
        if whole is not storage:
            storage.copy_(whole[:nbytes])

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
        if current is not None and inside and current.record.name in self._replaced:
            begin = offset - current.begin
            view[:] = self._replaced[current.record.name][begin : begin + view.nbytes]
            return
        if self._postpones and current is not None and inside and self._checks.is_whole_storage(current, view.nbytes):
            self.check_none_postponed()
            self._postponed = current
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
