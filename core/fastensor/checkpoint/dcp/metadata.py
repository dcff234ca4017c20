"""Reading ``.metadata`` of a distributed checkpoint without running it.

The file is a pickle, which may name any function. :mod:`fastensor.stitch.torch_pickle` interprets the pickle
symbolically; here the records become the metadata of torch, checked: each name, number and path has the type and the
range that torch gives it, and no path leads out of the directory.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fastensor.errors import CorruptCheckpointError, UnsafeCheckpointError
from fastensor.files.garbage import without_collection
from fastensor.stitch.pickle_records import UnknownGlobal, UnknownObject, all_in
from fastensor.stitch.shape import is_shape
from fastensor.stitch.signatures import SNIFFED_NBYTES, refuse_foreign
from fastensor.stitch.torch_pickle import read_structure

_SEAL = b"\nfastensor crc32 %08x\n"
_SEALED = re.compile(rb"\nfastensor crc32 ([0-9a-f]{8})\n\Z")
_DEFECTS = (
    CorruptCheckpointError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    OverflowError,
)
"""Errors that are raised where a pickle is not that of metadata."""
_MAX_SIZE = 2**63 - 1
_MOST_DIMENSIONS = 64
"""More dimensions than torch computes with."""
_MODULE = "torch.distributed.checkpoint"
_PATHS = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path")
_LAYOUT = "torch.serialization._get_layout"
_PLAIN = (str, int, float, bool, type(None), torch.Size, torch.dtype, bytes)
_Field: TypeAlias = Callable[[Any], bool]
"""True if the value of an attribute is what it has to be."""
_MEMORY_FORMAT = "MEM_FORMAT_ENCODING"
"""The end of the name of an enum, which has had others in older versions of torch."""


def sealed(metadata: Metadata) -> bytes:
    """The bytes of a metadata file: a pickle, and behind its end, where readers of pickles do not look, its CRC32."""
    data = pickle.dumps(metadata)
    return data + _SEAL % isal_zlib.crc32(data)


def has_seal(data: bytes) -> bool:
    """True if a metadata file has a CRC32 at its end."""
    return _SEALED.search(data) is not None


def check_seal(data: bytes, where: str) -> bool:
    """Compare a metadata file with the CRC32 at its end. Returns whether it has one.

    Raises:
        CorruptCheckpointError: they differ.
    """
    seal = _SEALED.search(data)
    if seal is not None and (found := isal_zlib.crc32(data[: seal.start()])) != int(seal[1], 16):
        raise CorruptCheckpointError(
            f"{where}: the file has CRC32 {found:08x}, expected {seal[1].decode()}: it was damaged after it was "
            f"written. Load an older checkpoint"
        )
    return seal is not None


def read_metadata(data: bytes, *, where: str) -> Metadata:
    """The metadata in the bytes of a file. Objects that are unknown here may only be in the planner's data, as records.

    Raises:
        CorruptCheckpointError: they are not the metadata of a distributed checkpoint.
        NotACheckpointError: it is known what they are, such as a page that a server has sent.
    """
    is_sealed = check_seal(data, where)
    try:
        with without_collection():
            found = _MetadataBuilder(len(data)).build(read_structure(data, where=where))
    except _DEFECTS as error:
        if not data.startswith(pickle.PROTO):
            refuse_foreign(data[:SNIFFED_NBYTES], where, "the metadata of a distributed checkpoint")
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"{where}: the file is damaged, or is not the metadata of a distributed checkpoint ({error})"
        ) from error
    if not isinstance(found, Metadata):
        raise CorruptCheckpointError(
            f"{where}: expected the metadata of a distributed checkpoint, found {type(found).__name__}"
        )
    if not is_sealed and any(hasattr(info, "crc32") for info in found.storage_data.values()):
        raise CorruptCheckpointError(f"{where}: Fastensor wrote this file, but its own CRC32 at the end is missing")
    return found


def check_planner_data(metadata: Metadata, where: str) -> None:
    """Refuse metadata that hold objects of classes that torch's own planners do not use.

    Raises:
        UnsafeCheckpointError: there is such an object.
    """
    for one in all_in(metadata.planner_data):
        if isinstance(one, UnknownObject | UnknownGlobal):
            raise UnsafeCheckpointError(
                f"{where}: the planner that saved it has left an object of {one.name}, which is not one of torch's; "
                f"pass weights_only=False to load it if you trust the file: it can then run any code"
            )


def file_names(metadata: Metadata) -> Iterator[str]:
    """The names of the files that hold the items."""
    for info in metadata.storage_data.values():
        yield info.relative_path


def chunks_in(metadata: Metadata) -> dict[tuple[str, tuple[int, ...] | None], tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and the shape of each chunk of a tensor, by the tensor's name and the chunk's offset."""
    return {
        (name, chunk.offsets): (entry.properties.dtype, tuple(chunk.sizes))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }


class _MetadataBuilder:
    """Makes metadata of records. A record that is in several places becomes one object.

    Args:
        most: how many elements the lists of all records may have together, also those that are in several places.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._done: dict[int, Any] = {}

    def build(self, value: Any) -> Any:
        """Raises ``ValueError`` or ``TypeError`` if something is not as torch makes it."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._new(value)
        return self._done[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, UnknownObject):
            return self._object(value)
        if isinstance(value, dict):
            made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
            made.update((self.build(key), self.build(one)) for key, one in dict.items(value))
            return made
        if isinstance(value, tuple):
            return tuple(map(self.build, value))
        if isinstance(value, list | set):
            return type(value)(map(self.build, value))
        if isinstance(value, UnknownGlobal):
            return value
        raise TypeError(f"found a {type(value).__name__}")

    def _object(self, value: UnknownObject) -> Any:
        if value.name in _PROPERTIES:
            return _properties(value)
        if _PATHS.fullmatch(value.name):
            return os.path.join("", *value.parts[1])
        return self._record(value, _RECORDS[value.name]) if value.name in _RECORDS else value

    def _record(self, value: UnknownObject, record: _Record) -> Any:
        """An object of one of torch's classes, whose attributes are all as its fields say. Others are passed over."""
        found = value.parts[2] if len(value.parts) > 2 else {}
        _check(type(found) is dict, f"an object of {value.name} with other attributes")
        state = {name: self.build(found.get(name)) for name in record.fields}
        for name, one in state.items():
            _check(record.fields[name](one), f"a {record.make.__name__} with a {name} that is none")
            # refuse lists that stand in the file once and are in so many places that visiting them takes long
            self._left -= len(one) if isinstance(one, list) else 0
        _check(self._left >= 0, "lists of more than the file holds")
        crc32 = state.pop("crc32", None)
        made = record.make(**{name: one for name, one in state.items() if one is not None})
        if crc32 is not None:
            made.crc32 = crc32  # ours, see FORMAT.md
        record.check(made)
        return made


def _properties(value: UnknownObject) -> TensorProperties:
    """The properties of a tensor. torch 2.15 writes strides behind them, which no torch uses to load, and for which an
    older one has no place."""
    dtype, layout, requires_grad, encoding, pin_memory, *more = value.parts[2]
    _check(isinstance(dtype, torch.dtype), "a tensor without a dtype")
    _check(isinstance(layout, UnknownObject) and layout.name == _LAYOUT, "a tensor without a layout")
    found: Any = vars(torch).get(layout.parts[1][0].removeprefix("torch."))
    _check(isinstance(found, torch.layout), f"a layout {layout.parts[1][0]!r}, which torch does not have")
    made = TensorProperties()
    made.__setstate__(  # type: ignore[no-untyped-call]  # torch gives it no types
        (dtype, found, requires_grad is True, _memory_format(encoding), pin_memory is True)
    )
    if more:
        (strides,) = more
        fits = type(strides) is tuple and len(strides) <= _MOST_DIMENSIONS and all(map(_is_count, strides))
        _check(strides is None or fits, "strides that are none")
        if hasattr(made, "strides"):
            made.strides = strides
    return made


def _memory_format(value: Any) -> _MEM_FORMAT_ENCODING:
    """A memory format. Enums are pickled as calls of their class with a value; by Python 3.11.0 to 3.11.3, as calls of
    ``getattr`` with the class and a name."""
    _check(isinstance(value, UnknownObject), "no memory format")
    if value.name in ("builtins.getattr", "__builtin__.getattr"):
        kind, name = value.parts[1]
        _check(isinstance(kind, UnknownGlobal) and kind.name.endswith(_MEMORY_FORMAT), "no memory format")
        return _MEM_FORMAT_ENCODING[name]
    _check(value.name.endswith(_MEMORY_FORMAT), "no memory format")
    return _MEM_FORMAT_ENCODING(value.parts[1][0])


def _check(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(f"it has {what}")


# What attributes are


def _or_none(field: _Field) -> _Field:
    return lambda value: value is None or field(value)


def _is_a(*kinds: type) -> _Field:
    return lambda value: type(value) in kinds


def _all_are(kind: type[Any], *elements: type) -> _Field:
    return lambda value: type(value) is kind and all(type(one) in elements for one in value)


def _maps(keys: type, *values: type) -> _Field:
    return lambda value: (
        isinstance(value, dict) and all(type(key) is keys and type(one) in values for key, one in dict.items(value))
    )


def _is_count(value: Any, most: int = _MAX_SIZE) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_size(value: Any) -> bool:
    return (
        type(value) is torch.Size
        and len(value) <= _MOST_DIMENSIONS
        and all(size >= 0 for size in value)
        and is_shape(value)
    )


def _is_inside(path: Any) -> bool:
    """True if a path is that of a file in a directory, and leads nowhere else."""
    return type(path) is str and path[:1] not in ("", "/") and "\0" not in path and ".." not in path.split("/")


def _check_chunks(tensor: TensorStorageMetadata) -> None:
    for chunk in tensor.chunks:
        sizes: tuple[torch.Size, ...] = chunk.offsets, chunk.sizes, tensor.size
        _check(len({*map(len, sizes)}) == 1, "a chunk of another shape than its tensor")
        is_inside = all(begin + one <= whole for begin, one, whole in zip(*sizes, strict=True))
        _check(is_inside, "a chunk that reaches beyond its tensor")


class _Record(NamedTuple):
    """One of torch's classes."""

    make: type[Any]
    fields: Mapping[str, _Field]
    """What each attribute has to be. One that is missing is None."""
    check: Callable[[Any], object] = bool
    """Raises ``ValueError`` if the attributes do not fit each other."""


_RECORDS = {
    f"{_MODULE}.metadata.Metadata": _Record(
        Metadata,
        {
            "state_dict_metadata": _maps(str, TensorStorageMetadata, BytesStorageMetadata),
            "planner_data": lambda value: True,
            "storage_data": _maps(MetadataIndex, _StorageInfo),
            "storage_meta": _or_none(_is_a(StorageMeta)),
            "version": _or_none(_is_a(str)),
        },
    ),
    f"{_MODULE}.metadata.MetadataIndex": _Record(
        MetadataIndex, {"fqn": _is_a(str), "offset": _or_none(_is_size), "index": _or_none(_is_count)}
    ),
    f"{_MODULE}.metadata.TensorStorageMetadata": _Record(
        TensorStorageMetadata,
        {"properties": _is_a(TensorProperties), "size": _is_size, "chunks": _all_are(list, ChunkStorageMetadata)},
        _check_chunks,
    ),
    f"{_MODULE}.metadata.BytesStorageMetadata": _Record(BytesStorageMetadata, {}),
    f"{_MODULE}.metadata.ChunkStorageMetadata": _Record(ChunkStorageMetadata, {"offsets": _is_size, "sizes": _is_size}),
    f"{_MODULE}.metadata.StorageMeta": _Record(
        StorageMeta,
        {
            **dict.fromkeys(("checkpoint_id", "save_id", "load_id"), _or_none(_is_a(str))),
            "modules": _or_none(_all_are(list, str)),
        },
    ),
    f"{_MODULE}.filesystem._StorageInfo": _Record(
        _StorageInfo,
        {
            "relative_path": _is_inside,
            "offset": _is_count,
            "length": _is_count,
            "transform_descriptors": _or_none(_all_are(list, str)),
            "crc32": _or_none(partial(_is_count, most=2**32 - 1)),
        },
        lambda info: _check(info.offset + info.length <= _MAX_SIZE, "a place that no file has"),
    ),
}
"""The classes in metadata that are plain records."""
_PROPERTIES = (
    f"{_MODULE}.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # before torch 2.3
)
