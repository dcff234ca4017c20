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
import re
import sys
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.to_device import memory_of
from fastensor.backends.window import ALIGNMENT, SMALL_NBYTES, Window, joined
from fastensor.checkpoint.archive import find_pickle
from fastensor.checkpoint.checked_file import CheckedFile
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.opened import OpenedFile, explained, read_explained
from fastensor.checkpoint.placement import MapLocation, kind_of_device, place
from fastensor.stitch.source import skips_values
from fastensor.stitch.torch_records import Checks
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record, ZipDirectory

_KNOWN_TORCH = re.compile(r"2\.13\.\d+(\+.*)?")
"""Releases of torch whose unpickler, and what ``torch.load`` does around it, have been read."""
_ENCODING = "utf-8"
"""Of texts in pickles of Python 2, as ``torch.load`` has it."""
_BYTE_ORDER = "byteorder"
_READ_BEFORE = (".format_version", _BYTE_ORDER, ".storage_alignment")
"""Records that ``torch.load`` reads before the pickle."""
_PAD_NBYTES = 512
"""What a local header, alignment to 64 bytes and a data descriptor take at most, with an ordinary name."""
_TYPED: Any = torch.storage.TypedStorage


class NotOrdinaryError(Exception):
    """What stands in the pickle is for ``torch.load`` to deal with."""


def is_known() -> bool:
    """Whether ``torch.load`` is torch's own, and its restricted unpickler as this module expects."""
    unpickler = getattr(getattr(torch, "_weights_only_unpickler", None), "Unpickler", None)
    return (
        _KNOWN_TORCH.fullmatch(torch.__version__) is not None
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
    try:
        result = unpickler.load()
    finally:
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
        self._read = partial(read_explained, reader, file.where, checksum=checks.payload)
        self._window = Window(self._read, extents(checks), kept=True)  # no method: that were a circle
        self._header = memoryview(bytearray(LOCAL_HEADER.size))
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
        if not nbytes:
            return _of_fixed_size(nbytes)
        begin, is_small = record.header_offset, is_joined(record, self._checks)
        if is_small:
            around = self._window.part(begin, self._checks.end_of(record) - begin)
        else:
            self._read(begin, around := self._header)
        opened = self._checks.open_known_record(record, around[: LOCAL_HEADER.size], self._where)
        if is_small:
            at = opened.begin - begin
            storage = self._carved(opened.begin, nbytes)
            found = isal_zlib.crc32(around[at : at + nbytes]) if opened.compared else 0
        else:
            storage = _of_fixed_size(nbytes)
            with explained(self._where):
                found = self._reader.readinto(opened.begin, memory_of(storage), checksum=opened.compared)
        if opened.compared and found != record.crc32:
            Checked.of_record(opened).compare(found, self._where)
        return storage

    def _carved(self, begin: int, nbytes: int) -> torch.UntypedStorage:
        """A small storage: a part of the window that it was read in, which lives as long as any of them."""
        found = self._window.array(begin, nbytes)
        return torch.from_numpy(found if begin % ALIGNMENT == 0 else _aligned_copy(found)).untyped_storage()


def _of_fixed_size(nbytes: int) -> torch.UntypedStorage:
    """A storage on the host as ``torch.load`` makes them. A tensor that reaches beyond it is refused by torch; one that
    reached beyond an ordinary storage would make it grow."""
    return torch.from_numpy(_aligned(nbytes)).untyped_storage()


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    memory: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memory


def _aligned_copy(found: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """For files of tools that do not align storages as torch does."""
    memory = _aligned(found.nbytes)
    memory[:] = found
    return memory


def is_joined(record: Record, checks: Checks) -> bool:
    """Whether a record is small, and so is its space, so that little is read in vain with its neighbours."""
    space = checks.end_of(record) - record.header_offset
    return record.nbytes <= SMALL_NBYTES and space <= 2 * record.nbytes + _PAD_NBYTES


def extents(checks: Checks) -> list[Extent]:
    """What will be read, in order."""
    return joined((record.header_offset, checks.end_of(record), is_joined(record, checks)) for record in checks.records)
