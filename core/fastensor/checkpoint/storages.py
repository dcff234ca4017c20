"""Rebuilding the object of an archive with torch's restricted unpickler and storages of ours: for thousands of tensors.

For each storage, ``torch.load`` looks for a record, reads it in several calls, and asks several times whether somebody
only pretends to load. Here neighbours are read together and then copied apart. What may be in the
pickle, and what it does, is decided by torch's own restricted unpickler, which calls :class:`Storages` only for the
storages that it has allowed. It is private to torch: where it is not as it is known here, or the file or the request is
out of the ordinary, ``torch.load`` does it.
"""

from __future__ import annotations

import inspect
import io
import sys
from typing import Any

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.memory import copy_memory
from fastensor.backends.to_device import memory_of
from fastensor.checkpoint.archive import find_pickle
from fastensor.checkpoint.checked_file import CheckedFile
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.opened import OpenedFile, explained
from fastensor.checkpoint.placement import MapLocation, kind_of_device, place
from fastensor.stitch.source import skips_values
from fastensor.stitch.torch_records import Checks, payload_records
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record, ZipDirectory

_KNOWN_TORCH = "2.13."
"""Releases of torch whose unpickler, and what ``torch.load`` does around it, have been read."""
_ENCODING = "utf-8"
"""Of texts in pickles of Python 2, as ``torch.load`` has it."""
_BYTE_ORDER = "byteorder"
_READ_BEFORE = (".format_version", _BYTE_ORDER, ".storage_alignment")
"""Records that ``torch.load`` reads before the pickle."""
_WINDOW_NBYTES = 1 << 20
_SMALL_NBYTES = 64 << 10
"""Records up to this size are read together with their neighbours; larger ones straight into their storages."""
_TYPED: Any = torch.storage.TypedStorage
_HOST = torch.device("cpu")


class NotOrdinaryError(Exception):
    """What stands in the pickle is for ``torch.load`` to deal with."""


def is_known() -> bool:
    """Whether ``torch.load`` is torch's own, and its restricted unpickler as this module expects."""
    unpickler = getattr(getattr(torch, "_weights_only_unpickler", None), "Unpickler", None)
    return (
        torch.__version__.startswith(_KNOWN_TORCH)
        and getattr(torch.load, "__globals__", None) is vars(torch.serialization)
        and unpickler is not None
        and list(inspect.signature(unpickler).parameters) == ["file", "encoding"]
        and callable(getattr(unpickler, "persistent_load", None))
        and hasattr(torch.serialization, "_serialization_tls")
        and hasattr(torch._utils, "_validate_loaded_sparse_tensors")
        and hasattr(torch._C, "PyTorchFileReader")
        and hasattr(torch._guards, "detect_fake_mode")
    )


def are_wanted(map_location: MapLocation) -> bool:
    """Whether whoever loads wants the values, and does not only pretend to load."""
    pretends = skips_values() or torch._guards.detect_fake_mode(None) is not None
    return not pretends and kind_of_device(map_location) != "meta"


def rebuild(view: CheckedFile, storages: Storages) -> Any:
    """The object in an archive, as ``torch.load(..., weights_only=True)`` brings it.

    Args:
        view: the file. torch's reader of archives opens it, and reads all from it but the storages.
        storages: of the same file.

    Raises:
        NotOrdinaryError: ``torch.load`` has to do it.
        pickle.UnpicklingError: the restricted unpickler refuses the pickle. ``torch.load`` says more about it.
        Exception: as ``torch.load``.
    """
    private: Any = torch
    archive = private._C.PyTorchFileReader(view)
    archive.get_all_records()  # as torch.load asks for them: it refuses archives of several folders
    read_before = {name: archive.get_record(name) for name in _READ_BEFORE if archive.has_record(name)}
    if read_before.get(_BYTE_ORDER) != sys.byteorder.encode():
        raise NotOrdinaryError("the file was written with another byte order, or does not say with which")
    unpickler = private._weights_only_unpickler.Unpickler(
        io.BytesIO(archive.get_record("data.pkl")), encoding=_ENCODING
    )
    unpickler.persistent_load = storages.load
    private.serialization._serialization_tls.map_location = storages.map_location
    result = unpickler.load()
    private.serialization._serialization_tls.map_location = None
    private._utils._validate_loaded_sparse_tensors()
    return result


class Storages:
    """The storages of one archive, read by one thread and compared with their CRC32s before torch gets them.

    Args:
        file: for messages.
        archive: its directory.
        reader: closed by the caller.
        checks: what can be compared.
        map_location: where they go, as for ``torch.load``.
    """

    def __init__(
        self, file: OpenedFile, archive: ZipDirectory, reader: Reader, checks: Checks, map_location: MapLocation
    ) -> None:
        self.map_location = map_location
        self._where = file.where
        self._reader = reader
        self._checks = checks
        prefix = find_pickle(archive, file.where).name.removesuffix("data.pkl") + "data/"
        self._records = {
            record.name.removeprefix(prefix): record for record in archive.records if record.name.startswith(prefix)
        }
        self._end = archive.offset
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")
        """Bytes of the file, from ``_begin`` on."""
        self._data = memory_of(self._window.untyped_storage())
        self._begin = 0
        self._next = 0
        """Where the record begins that follows the last one: torch writes them in the order in which it reads them."""
        self._loaded: dict[str, Any] = {}
        """By their keys."""

    def load(self, saved_id: Any) -> Any:
        """The typed storage that a persistent id in the pickle means: ``persistent_load`` of ``torch.load``.

        Raises:
            NotOrdinaryError: that is none, or one without bytes, or of another size than its record.
            CorruptCheckpointError: its bytes do not match their CRC32.
        """
        if not isinstance(saved_id, tuple) or len(saved_id) != 5:
            raise NotOrdinaryError("a persistent id that torch does not write")
        word, kind, key, location, numel = saved_id
        if word != "storage" or not isinstance(location, str):
            raise NotOrdinaryError("a persistent id that torch does not write")
        if key in self._loaded:
            return self._loaded[key]
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        placed = place(self._filled(key, numel * dtype.itemsize), location, self.map_location)
        typed = _TYPED(wrap_storage=placed, dtype=dtype, _internal=True)
        if placed.data_ptr():
            self._loaded[key] = typed
        return typed

    def _filled(self, key: str, nbytes: int) -> torch.UntypedStorage:
        record = self._records.get(key)
        if record is None or record.nbytes != nbytes:
            raise NotOrdinaryError(f"storage {key!r} of {nbytes} bytes, whose record is {record}")
        storage = _of_fixed_size(nbytes)
        if not nbytes:
            return storage
        at = self._at(record)
        opened = self._checks.open_known_record(record, self._data[at : at + LOCAL_HEADER.size], self._where)
        if nbytes > _SMALL_NBYTES:
            with explained(self._where):
                found = self._reader.readinto(opened.begin, memory_of(storage), checksum=opened.compared)
        else:
            at = opened.begin - self._begin
            copy_memory(storage.data_ptr(), self._window.data_ptr() + at, nbytes)
            found = isal_zlib.crc32(self._data[at : at + nbytes]) if opened.compared else 0
        if opened.compared and found != record.crc32:
            Checked.of_record(opened).compare(found, self._where)
        return storage

    def _at(self, record: Record) -> int:
        """Where a record begins in the window; of a large one, only its header is there."""
        begin = record.header_offset
        small = record.nbytes <= _SMALL_NBYTES
        nbytes = self._checks.end_of(record) - begin if small else LOCAL_HEADER.size
        if not self._begin <= begin <= begin + nbytes <= self._begin + self._data.nbytes:
            ahead = min(2 * self._data.nbytes, _WINDOW_NBYTES) if small and begin == self._next else 0
            self._read_window(begin, min(max(nbytes, ahead), self._end - begin))
        self._next = self._checks.end_of(record)
        return begin - self._begin

    def _read_window(self, begin: int, nbytes: int) -> None:
        if nbytes != self._data.nbytes:
            self._window = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._data = memory_of(self._window.untyped_storage())
        with explained(self._where):
            self._reader.readinto(begin, self._data, checksum=self._checks.payload)
        self._begin = begin


def _of_fixed_size(nbytes: int) -> torch.UntypedStorage:
    """A storage on the host as ``torch.load`` makes them. A tensor that reaches beyond it is refused by torch; one that
    reached beyond an ordinary storage would make it grow."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=_HOST).numpy()
    return torch.from_numpy(memory).untyped_storage()


def extents(archive: ZipDirectory, checks: Checks) -> list[Extent]:
    """What will be read, in order; records that follow each other are one part."""
    runs: list[list[int]] = []
    for record in payload_records(archive):
        if not runs or runs[-1][1] != record.header_offset or record.header_offset - runs[-1][0] > _WINDOW_NBYTES:
            runs.append([record.header_offset, 0])
        runs[-1][1] = checks.end_of(record)
    return [Extent(begin, end) for begin, end in runs]
