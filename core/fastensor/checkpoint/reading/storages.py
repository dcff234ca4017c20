"""Rebuilding the object of an archive with torch's restricted unpickler and our storages: quick for many tensors.

For each storage, ``torch.load`` searches for a record, reads it in several calls, and tests several times for fake
tensors. Here, neighbouring storages are read together, and with them the pickle and the small records beside it.
torch's own restricted unpickler decides what the pickle may hold and do, and asks :class:`Storages` only for storages
that it has allowed. In a large pickle, calls that make plain tensors, of a function that it has allowed, are run in one
step (:mod:`fastensor.checkpoint.reading.one_step`). The unpickler is private to torch. With a release of torch that is
not known here, and for unusual files and requests, ``torch.load`` itself loads the file.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fastensor.backends.memory import Bytes
from fastensor.backends.window import ALIGNMENT, WINDOW_NBYTES
from fastensor.checkpoint.reading.placement import MapLocation, kind_of_device, place
from fastensor.checkpoint.reading.reader import PartReader, empty_storage, extents_of, is_joined, new_array
from fastensor.stitch.parts import Part
from fastensor.stitch.plain_tensors import NotAsTorchWritesError, release_is_known, skips_values, typed_storage
from fastensor.stitch.torch_records import TorchArchive

_ENCODING = "utf-8"
"""The encoding of texts in pickles of Python 2. ``torch.load`` uses the same."""
_PICKLE = "data.pkl"
_NEEDED = ("version", "byteorder")
_OTHERS = (".data/serialization_id", ".format_version", ".storage_alignment")
"""Records that torch writes beside the storages, and reads before them."""
_BEHIND = ("version", ".data/serialization_id")
"""Records behind the storages. Unless all of the file is read at once, they are read first, so that the pickle and the
records behind it are read together with the storages that follow."""
_VERSIONS = (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"10")
"""Versions of archives that every release of torch that is known here reads."""
_LARGE_PICKLE_NBYTES = 16 << 10
"""A pickle of about 150 tensors: with fewer, to import what makes each in one step takes longer than it saves."""


class NotOrdinaryError(Exception):
    """The file is unusual: ``torch.load`` has to load it, or to refuse it."""


def is_known() -> bool:
    """True if ``torch.load``, and what makes a tensor, are torch's own functions, and its restricted unpickler is as
    this module expects."""
    unpickler = getattr(getattr(torch, "_weights_only_unpickler", None), "Unpickler", None)
    return (
        release_is_known()
        and getattr(torch.load, "__globals__", None) is vars(torch.serialization)
        and getattr(torch._utils._rebuild_tensor, "__globals__", None) is vars(torch._utils)
        and getattr(torch._utils._rebuild_tensor_v2, "__globals__", None) is vars(torch._utils)
        and unpickler is not None
        and _is_as_expected(unpickler)
        and hasattr(torch.serialization, "_serialization_tls")
        and hasattr(torch._guards, "detect_fake_mode")
    )


@cache
def _is_as_expected(unpickler: Any) -> bool:
    parameters = list(inspect.signature(unpickler).parameters)
    return parameters == ["file", "encoding"] and callable(getattr(unpickler, "persistent_load", None))


def are_wanted(map_location: MapLocation) -> bool:
    """True if values are to be loaded. With fake tensors, or to the meta device, torch loads none."""
    pretends = skips_values() or torch._guards.detect_fake_mode(None) is not None
    return not pretends and kind_of_device(map_location) != "meta"


def small_records(archive: TorchArchive) -> Mapping[str, Part]:
    """The records beside the storages of an archive that is as torch writes them today: by their names in its folder,
    in the order of the file.

    Raises:
        NotOrdinaryError: the archive has other records, or another byte order, or does not say its byte order.
    """
    folder = archive.pickle.name.removesuffix(_PICKLE)
    found = {part.name.removeprefix(folder): part for part in archive.others}
    if not all(part.name.startswith(folder) for part in archive.others):
        raise NotOrdinaryError("the archive has records in another folder, which torch refuses")
    if not {_PICKLE, *_NEEDED} <= found.keys() <= {_PICKLE, *_NEEDED, *_OTHERS}:
        raise NotOrdinaryError("the archive has other records than torch writes today")
    if found["byteorder"].nbytes != len(sys.byteorder):
        raise NotOrdinaryError("the file was written with another byte order")
    return found


def in_reading_order(small: Mapping[str, Part], storages: Sequence[Part]) -> tuple[Mapping[str, Part], list[Part]]:
    """The records of :func:`small_records` in the order in which :func:`rebuild` is to read them; and all that is read
    then, in order, as far as it is read together."""
    behind = {name: small[name] for name in _BEHIND if name in small}
    before = {name: part for name, part in small.items() if name not in behind}
    everything = [*before.values(), *storages, *behind.values()]
    if everything[-1].end - everything[0].begin <= WINDOW_NBYTES and len(extents_of(everything)) == 1:
        return {**before, **behind}, everything
    return {**behind, **before}, [*before.values(), *storages]


def rebuild(small: Mapping[str, Part], reader: PartReader, storages: Storages) -> Any:
    """The object in an archive, as ``torch.load(..., weights_only=True)`` gives it.

    Args:
        small: the records of :func:`small_records`, in the order of :func:`in_reading_order`.
        reader: reads the same file.
        storages: the storages of the same file.

    Raises:
        NotOrdinaryError: ``torch.load`` has to load the file.
        CorruptCheckpointError: a record is damaged.
        pickle.UnpicklingError: the restricted unpickler refuses the pickle. ``torch.load`` says more about it.
        Exception: any exception that ``torch.load`` would raise.
    """
    private: Any = torch
    content = {name: reader.read_bytes(part) for name, part in small.items()}
    if content["byteorder"][1] != sys.byteorder.encode() or content["version"][1].strip() not in _VERSIONS:
        raise NotOrdinaryError("the archive is of another byte order or version")
    begin, program = content[_PICKLE]
    storages.end = begin + len(program)
    file = io.BytesIO(program)
    unpickler = private._weights_only_unpickler.Unpickler(file, encoding=_ENCODING)
    if len(program) >= _LARGE_PICKLE_NBYTES:
        from fastensor.checkpoint.reading.one_step import OneStepMemo

        unpickler.memo = OneStepMemo(program, file, storages)
    unpickler.persistent_load = storages.load
    private.serialization._serialization_tls.map_location = storages.map_location
    try:
        result = unpickler.load()
    except NotAsTorchWritesError as error:
        raise NotOrdinaryError(str(error)) from error
    finally:
        private.serialization._serialization_tls.map_location = None
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
        self._loaded: dict[str, tuple[torch.UntypedStorage, torch.dtype]] = {}
        """The storages that have been loaded, by their keys, each with the dtype that was asked for first."""
        self._typed: dict[str, Any] = {}
        """Typed storages, which torch's unpickler has asked for, by their keys."""
        self.end = 0
        """End of what was read last, in the file: the pickle, and then a storage. 0 before that."""

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
        storage = self.get(key, dtype, location, numel)
        typed = self._typed.get(key)
        if typed is None or typed.dtype != dtype:
            typed = self._typed[key] = typed_storage(storage, dtype)
        return typed

    def get(self, key: str, dtype: torch.dtype, location: str, numel: int) -> torch.UntypedStorage:
        """The storage of that key, where it belongs. Raises as :meth:`load`."""
        loaded = self._loaded.get(key)
        if loaded is None:
            placed = place(self._read(key, numel * dtype.itemsize), location, self.map_location)
            self._loaded[key] = placed, dtype
            return placed
        storage, first = loaded
        if first != dtype and storage.nbytes():
            raise NotOrdinaryError(f"storage {key!r} has tensors of several dtypes")
        return storage

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


def _aligned_copy(data: Bytes) -> Bytes:
    """A copy of a storage that the file does not align as torch does."""
    memory = new_array(data.nbytes)
    memory[:] = data
    return memory
