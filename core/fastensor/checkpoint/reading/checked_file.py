"""A checkpoint as ``torch.load`` sees it: a file object whose bytes come from the verifying reader."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import torch

from fastensor.backends.memory import is_filled_at_once, storage_on
from fastensor.checkpoint.reading.opened import FileView, OpenedFile
from fastensor.checkpoint.reading.placement import MapLocation, destination, place
from fastensor.checkpoint.reading.reader import PartReader, open_reader
from fastensor.checkpoint.reading.request import ArchivePart, Loaded, LoadRequest
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.parts import LOCAL_HEADER, Part, stand_in_header
from fastensor.stitch.torch_records import TorchArchive


class NotAskedForError(Exception):
    """torch never asked where a postponed storage goes."""


class CheckedFile(FileView):
    """A file object for torch's reader of archives.

    For each record, torch reads the local header, and then the data with one call, straight into the memory of the
    storage. Before that call returns, the data has been compared with its CRC32.

    Args:
        file: the checkpoint.
        reader: of that file. It is closed by the caller, or here when a read fails: then no thread may write to
            torch's memory any more.
        archive: the records of that file.
        skipped: names of records that are not read. torch's memory for them is left as it is, and the caller keeps it
            from users.
        pickle: bytes that torch gets in place of ``data.pkl``, of the same size; None for the file's own.
        postpones: whether to leave the memory of storages as it is. The caller calls :meth:`fill` for each of them,
            before torch asks for the next one.
    """

    def __init__(
        self,
        file: OpenedFile,
        reader: PartReader,
        archive: TorchArchive,
        skipped: Container[str] = (),
        pickle: bytes | None = None,
        *,
        postpones: bool = False,
    ) -> None:
        super().__init__(file)
        self._reader = reader
        self._by_begin = {part.begin: part for part in archive.parts}
        self._postponable = {part.begin for part in archive.storages.values()} if postpones else set()
        self._pickle_name = archive.pickle.name
        self._pickle = pickle
        self.skipped = skipped
        self.record: Part | None = None
        """The record that torch asked for last."""
        self._data = 0
        """Offset of the data of that record."""
        self._postponed: Part | None = None
        self.failure: BaseException | None = None
        """The exception of a read that failed, which the caller of torch raises. torch calls :meth:`readinto` from C
        code that exceptions must not cross, so torch gets a short read instead."""

    def take_postponed(self) -> Part | None:
        """The record of the storage whose memory was left as it is; None if there is none. Each is returned once."""
        postponed, self._postponed = self._postponed, None
        return postponed

    def check_none_postponed(self) -> None:
        """Make sure that every postponed storage has been filled.

        Raises:
            NotAskedForError: a storage was left empty.
        """
        if self._postponed is not None:
            raise NotAskedForError(self._postponed.name)

    def fill(self, record: Part, storage: torch.UntypedStorage) -> None:
        """Read a postponed record into a storage, which may be shorter. The record is compared as a whole.

        Raises:
            CorruptCheckpointError: the record is damaged, or shorter than the storage.
            CheckpointReadError: the record cannot be read.
        """
        nbytes = storage.nbytes()
        if nbytes > record.nbytes:
            raise CorruptCheckpointError(
                f"{self.where}: {record.title} has {record.nbytes} bytes, the pickle asks for {nbytes}: the file was "
                "damaged after it was written"
            )
        whole = storage if nbytes == record.nbytes else storage_on(storage.device, record.nbytes)
        self._reader.read(record, whole)
        if whole is not storage:
            storage.copy_(whole[:nbytes])

    def readinto(self, buffer: Any) -> int:
        if self.failure is not None:
            return 0
        view = memoryview(buffer).cast("B")[: max(self._file.nbytes - self._position, 0)]
        try:
            self._read(self._position, view)
        except BaseException as failure:  # noqa: BLE001  # raised by the caller of torch
            self.failure = failure
            self._reader.close(completed=False)
            return 0
        self._position += view.nbytes
        return view.nbytes

    def _read(self, offset: int, view: memoryview) -> None:
        record = self._by_begin.get(offset) if view.nbytes == LOCAL_HEADER.size else None
        if record is not None:
            self._read_header(record, view)
        elif self.record is not None and self._data <= offset < offset + view.nbytes <= self._data + self.record.nbytes:
            self._read_data(self.record, offset - self._data, view)
        else:  # the directory of the archive, and what is around it
            self._reader.read_raw(offset, view)

    def _read_header(self, record: Part, header: memoryview) -> None:
        if record.name in self.skipped:
            header[:] = stand_in_header(record)
            self._data = record.begin + record.header_nbytes
        else:
            self._data = self._reader.data_begin(record, header)
        self.record = record

    def _read_data(self, record: Part, offset: int, view: memoryview) -> None:
        if record.name in self.skipped:
            return
        if self._pickle is not None and record.name == self._pickle_name:
            view[:] = self._pickle[offset : offset + view.nbytes]
        elif view.nbytes < record.nbytes:
            self._reader.check(record)
            self._reader.read_raw(self._data + offset, view)
        elif record.begin in self._postponable:
            self.check_none_postponed()
            self._postponed = record
        else:
            self._reader.read(record, view)


def load_through_torch(
    file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: ArchivePart, *, fills_devices: bool
) -> Loaded:
    """Let ``torch.load`` rebuild the object from our file object.

    Args:
        fills_devices: whether storages that go to a device are read straight into its memory.
    """
    with open_reader(file, archive.wanted(selection.skipped), request) as reader:
        view = CheckedFile(file, reader, archive, selection.skipped, selection.pickle, postpones=fills_devices)
        placing: MapLocation = request.map_location
        if selection.skipped:
            placing = _place_skipped_on_meta(view, placing)
        if fills_devices:
            placing = _fill_on_device(view, placing, request.map_location)
        with _failures_raised(view):
            result = torch.load(cast(IO[bytes], view), placing, weights_only=request.weights_only, mmap=False)
        view.check_none_postponed()
        return Loaded(result, reader.backend, reader.reason, request.checked and archive.checked)


def _place_skipped_on_meta(view: CheckedFile, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that puts storages that were not read on the meta device."""

    def place_chosen(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if view.record is not None and view.record.name in view.skipped and storage.nbytes():
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        return place(storage, location, map_location)

    return place_chosen


def _fill_on_device(view: CheckedFile, otherwise: MapLocation, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that reads postponed storages straight to their device.

    Args:
        view: the file that torch reads.
        otherwise: the ``map_location`` for storages that were not postponed.
        map_location: the user's.
    """

    def fill(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        postponed = view.take_postponed()
        if postponed is None:
            return place(storage, location, otherwise)
        device = destination(location, map_location)
        if not is_filled_at_once(device):
            view.fill(postponed, storage)
            return place(storage, location, map_location)
        filled = storage_on(device, storage.nbytes())
        view.fill(postponed, filled)
        return filled

    return fill


@contextmanager
def _failures_raised(view: CheckedFile) -> Iterator[None]:
    """Raise the failure of a read in place of the exception that torch makes of it. It is noted where torch stops."""
    try:
        yield
    except Exception:
        _raise_failure(view)
        raise
    finally:
        view.note_stop()
    _raise_failure(view)


def _raise_failure(view: CheckedFile) -> None:
    failure, view.failure = view.failure, None  # its traceback holds the view, through the frames of torch's reader
    if failure is not None:
        raise failure
