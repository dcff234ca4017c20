"""Rebuilding the object of an archive with torch's restricted unpickler and our storages: quick for many tensors.

For each storage, ``torch.load`` searches for a record, reads it in several calls, and tests several times for fake
tensors. Here, neighbouring storages are read together. torch's own restricted unpickler decides what the pickle may
hold and do, and asks :class:`Storages` only for storages that it has allowed. That unpickler is private to torch. With
a release of torch that is not known here, and for unusual files and requests, ``torch.load`` itself loads the file.
"""

from __future__ import annotations

import inspect
import io
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastensor.backends.window import ALIGNMENT
from fastensor.checkpoint.reading.checked_file import CheckedFile
from fastensor.checkpoint.reading.placement import MapLocation, kind_of_device, place
from fastensor.checkpoint.reading.reader import PartReader, empty_storage, is_joined, new_array
from fastensor.stitch.plain_tensors import release_is_known, skips_values, typed_storage
from fastensor.stitch.torch_records import TorchArchive

_ENCODING = "utf-8"
"""The encoding of texts in pickles of Python 2. ``torch.load`` uses the same."""
_BYTE_ORDER = "byteorder"
_READ_BEFORE = (".format_version", _BYTE_ORDER, ".storage_alignment")
"""Records that ``torch.load`` reads before the pickle."""


class NotOrdinaryError(Exception):
    """The file is unusual: ``torch.load`` has to load it, or to refuse it."""


def is_known() -> bool:
    """True if ``torch.load`` is torch's own function, and its restricted unpickler is as this module expects."""
    unpickler = getattr(getattr(torch, "_weights_only_unpickler", None), "Unpickler", None)
    return (
        release_is_known()
        and getattr(torch.load, "__globals__", None) is vars(torch.serialization)
        and unpickler is not None
        and list(inspect.signature(unpickler).parameters) == ["file", "encoding"]
        and callable(getattr(unpickler, "persistent_load", None))
        and hasattr(torch.serialization, "_serialization_tls")
        and hasattr(torch._C, "PyTorchFileReader")
        and hasattr(torch._guards, "detect_fake_mode")
    )


def are_wanted(map_location: MapLocation) -> bool:
    """True if values are to be loaded. With fake tensors, or to the meta device, torch loads none."""
    pretends = skips_values() or torch._guards.detect_fake_mode(None) is not None
    return not pretends and kind_of_device(map_location) != "meta"


def rebuild(view: CheckedFile, storages: Storages) -> Any:
    """The object in an archive, as ``torch.load(..., weights_only=True)`` gives it.

    Args:
        view: the file. torch's reader of archives opens it, and reads everything but the storages from it.
        storages: the storages of the same file.

    Raises:
        NotOrdinaryError: ``torch.load`` has to load the file.
        pickle.UnpicklingError: the restricted unpickler refuses the pickle. ``torch.load`` says more about it.
        Exception: any exception that ``torch.load`` would raise.
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
        if storages.end:
            view.seek(storages.end)  # where torch.load would be now
    private._utils._validate_loaded_sparse_tensors(**_validating())
    return result


@cache
def _validating() -> dict[str, bool]:
    """Arguments of torch's validation of sparse tensors: since torch 2.14, that the file is not trusted."""
    validate: Any = vars(torch._utils)["_validate_loaded_sparse_tensors"]
    return {"weights_only": True} if "weights_only" in inspect.signature(validate).parameters else {}


class Storages:
    """The storages of one archive, compared with their CRC32s before torch gets them. Used by one thread.

    Args:
        archive: the records of the archive.
        reader: reads the same file, and keeps small parts. The caller closes it.
        map_location: where storages go, as for ``torch.load``.
    """

    def __init__(self, archive: TorchArchive, reader: PartReader, map_location: MapLocation) -> None:
        self.map_location = map_location
        self._records = archive.storages
        self._reader = reader
        self._loaded: dict[str, Any] = {}
        """The typed storages that have been loaded, by their keys, each with the dtype that was asked for first."""
        self.end = 0
        """End of the storage that was read last, in the file; 0 if none was."""

    def load(self, saved_id: Any) -> Any:
        """The typed storage that a persistent id in the pickle means: ``persistent_load`` of ``torch.load``.

        Raises:
            NotOrdinaryError: the id is none of a storage, the storage is not of the size of its record, or it is not
                empty and is asked for with two dtypes. Releases of torch differ in what they do then.
            CorruptCheckpointError: the bytes of the storage do not match their CRC32.
        """
        if not isinstance(saved_id, tuple) or len(saved_id) != 5:
            raise NotOrdinaryError("a persistent id that torch does not write")
        word, kind, key, location, numel = saved_id
        if word != "storage" or not isinstance(location, str):
            raise NotOrdinaryError("a persistent id that torch does not write")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        loaded = self._loaded.get(key)
        if loaded is None:
            placed = place(self._read(key, numel * dtype.itemsize), location, self.map_location)
            loaded = self._loaded[key] = typed_storage(placed, dtype)
        elif loaded.dtype != dtype:
            if loaded._untyped_storage.nbytes():
                raise NotOrdinaryError(f"storage {key!r} has tensors of several dtypes")
            return typed_storage(loaded._untyped_storage, dtype)
        return loaded

    def _read(self, key: str, nbytes: int) -> torch.UntypedStorage:
        record = self._records.get(key)
        if record is None or record.nbytes != nbytes:
            raise NotOrdinaryError(f"storage {key!r} of {nbytes} bytes, whose record is {record}")
        if not nbytes:
            return empty_storage()
        if is_joined(record):
            begin = self._reader.read_small(record)
            data = self._reader.window.array(begin, nbytes)
            array = data if begin % ALIGNMENT == 0 else _aligned_copy(data)
        else:
            array = self._reader.read_array(record)
            begin = self._reader.data_begin(record)
        self.end = begin + nbytes
        return torch.from_numpy(array).untyped_storage()


def _aligned_copy(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of a storage that the file does not align as torch does."""
    memory = new_array(data.nbytes)
    memory[:] = data
    return memory
