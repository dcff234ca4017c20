"""Reading ``.metadata`` of a distributed checkpoint without running it.

The file is a pickle, which may name any function. :mod:`fastensor.stitch.torch_pickle` interprets the pickle
symbolically; here the records become the metadata of torch, checked: each name, number and path has the type and the
range that torch gives it, and no path leads out of the directory.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        with _without_garbage_collection():
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


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Make objects faster: the collector would visit all of them again and again, which takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _MetadataBuilder:
    """Makes metadata of records. A record that is in several places becomes one object.

    Args:
        most: how many elements the lists of all records may have together, also those that are in several places.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._done: dict[int, Any] = {}

    def count(self, elements: Sequence[Any]) -> None:
        """Refuse lists that stand in the file once and are in so many places that visiting them takes long."""
        self._left -= len(elements)
        _check(self._left >= 0, "lists of more than the file holds")

    def build(self, value: Any) -> Any:
        """Raises ``ValueError`` or ``TypeError`` if something is not as torch makes it."""
        kind = type(value)
        if kind in (str, int, float, bool, type(None), torch.Size, torch.dtype, bytes):
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
        maker = _MAKERS.get(value.name)
        if maker is not None:
            return maker(self, value)
        if _PATHS.fullmatch(value.name):
            parts = value.parts[1]
            return os.path.join("", *map(_text, parts))
        return value

    def state(self, value: UnknownObject) -> dict[str, Any]:
        """The attributes of an object."""
        if len(value.parts) != 3 or type(value.parts[2]) is not dict:
            raise ValueError(f"an object of {value.name} without attributes")
        return dict(value.parts[2])


def _metadata(builder: _MetadataBuilder, value: UnknownObject) -> Metadata:
    state = builder.state(value)
    entries = builder.build(state["state_dict_metadata"])
    items = builder.build(state["storage_data"])
    _check(isinstance(entries, dict) and all(isinstance(key, str) for key in entries), "names that are no texts")
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    _check(all(isinstance(one, kinds) for one in entries.values()), "entries that are neither tensors nor bytes")
    _check(isinstance(items, dict), "no list of items; perhaps another writer's than torch's has made it")
    for index, info in items.items():
        _check(isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo), "items of another writer's")
    meta = builder.build(state.get("storage_meta"))
    _check(meta is None or isinstance(meta, StorageMeta), "a storage_meta that is none")
    version = state.get("version")
    _check(version is None or isinstance(version, str), "a version that is no text")
    return Metadata(entries, builder.build(state.get("planner_data")), items, meta, version)


def _index(builder: _MetadataBuilder, value: UnknownObject) -> MetadataIndex:
    state = builder.state(value)
    offset, number = state.get("offset"), state.get("index")
    _check(offset is None or _is_size(offset), "an offset that is none")
    _check(number is None or _is_count(number), "a number of a chunk that is none")
    return MetadataIndex(_text(state["fqn"]), offset, number)


def _storage_info(builder: _MetadataBuilder, value: UnknownObject) -> _StorageInfo:
    state = builder.state(value)
    path, offset, nbytes = state["relative_path"], state["offset"], state["length"]
    _check(_is_inside(_text(path)), f"a file {path!r}, which is not in the directory")
    _check(_is_count(offset) and _is_count(nbytes) and offset + nbytes <= _MAX_SIZE, "a place that no file has")
    transforms = builder.build(state.get("transform_descriptors"))
    if transforms is not None:
        _check(isinstance(transforms, list | tuple), "transforms that are no list")
        builder.count(transforms)
        transforms = list(map(_text, transforms))
    made = _StorageInfo(path, offset, nbytes, transforms)
    crc32 = state.get("crc32")
    if crc32 is not None:
        _check(_is_count(crc32) and crc32 < 2**32, "a CRC32 that is none")
        made.crc32 = crc32  # type: ignore[attr-defined]  # ours, see FORMAT.md
    return made


def _tensor(builder: _MetadataBuilder, value: UnknownObject) -> TensorStorageMetadata:
    state = builder.state(value)
    properties, size, chunks = builder.build(state["properties"]), state["size"], builder.build(state["chunks"])
    _check(isinstance(properties, TensorProperties) and _is_size(size), "a tensor without a shape or a dtype")
    _check(isinstance(chunks, list), "a tensor without a list of chunks")
    builder.count(chunks)
    for chunk in chunks:
        is_chunk = isinstance(chunk, ChunkStorageMetadata) and len(chunk.offsets) == len(chunk.sizes) == len(size)
        _check(is_chunk, "a chunk of another shape than its tensor")
        is_inside = all(
            begin + one <= whole for begin, one, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        _check(is_inside, "a chunk that reaches beyond its tensor")
    return TensorStorageMetadata(properties, size, chunks)


def _chunk(builder: _MetadataBuilder, value: UnknownObject) -> ChunkStorageMetadata:
    state = builder.state(value)
    _check(_is_size(state["offsets"]) and _is_size(state["sizes"]), "a chunk without offsets or sizes")
    return ChunkStorageMetadata(state["offsets"], state["sizes"])


def _properties(builder: _MetadataBuilder, value: UnknownObject) -> TensorProperties:
    """The properties of a tensor. torch 2.15 writes strides behind them, which no torch uses to load, and for which an
    older one has no place."""
    dtype, layout, requires_grad, encoding, pin_memory, *more = value.parts[2]
    _check(isinstance(dtype, torch.dtype), "a tensor without a dtype")
    _check(isinstance(layout, UnknownObject) and layout.name == _LAYOUT, "a tensor without a layout")
    name = _text(layout.parts[1][0])
    found: Any = vars(torch).get(name.removeprefix("torch."))
    _check(isinstance(found, torch.layout), f"a layout {name!r}, which torch does not have")
    made = TensorProperties(dtype, found, bool(requires_grad is True), pin_memory=bool(pin_memory is True))
    made.__setstate__(  # type: ignore[no-untyped-call]  # torch gives it no types
        (dtype, found, made.requires_grad, _memory_format(encoding), made.pin_memory)
    )
    if more:
        (strides,) = more
        _check(strides is None or _is_strides(strides), "strides that are none")
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


def _storage_meta(builder: _MetadataBuilder, value: UnknownObject) -> StorageMeta:
    state = builder.state(value)
    texts = {name: builder.build(state.get(name)) for name in ("checkpoint_id", "save_id", "load_id")}
    _check(all(one is None or isinstance(one, str) for one in texts.values()), "a name of a save that is no text")
    modules = builder.build(state.get("modules") or [])
    return StorageMeta(**texts, modules=list(map(_text, modules)))


def _bytes(builder: _MetadataBuilder, value: UnknownObject) -> BytesStorageMetadata:
    return BytesStorageMetadata()


_MAKERS: dict[str, Callable[[_MetadataBuilder, UnknownObject], Any]] = {
    f"{_MODULE}.metadata.Metadata": _metadata,
    f"{_MODULE}.metadata.MetadataIndex": _index,
    f"{_MODULE}.metadata.TensorStorageMetadata": _tensor,
    f"{_MODULE}.metadata.BytesStorageMetadata": _bytes,
    f"{_MODULE}.metadata.ChunkStorageMetadata": _chunk,
    f"{_MODULE}.metadata.TensorProperties": _properties,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _properties,  # before torch 2.3
    f"{_MODULE}.metadata.StorageMeta": _storage_meta,
    f"{_MODULE}.filesystem._StorageInfo": _storage_info,
}


def _check(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(f"it has {what}")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"it has a {type(value).__name__} where a text is expected")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _is_size(value: Any) -> bool:
    return (
        type(value) is torch.Size
        and len(value) <= _MOST_DIMENSIONS
        and all(size >= 0 for size in value)
        and is_shape(value)
    )


def _is_strides(value: Any) -> bool:
    return type(value) is tuple and len(value) <= _MOST_DIMENSIONS and all(map(_is_count, value))


def _is_inside(path: str) -> bool:
    """True if a path is that of a file in a directory, and leads nowhere else."""
    return bool(path) and not path.startswith("/") and "\0" not in path and ".." not in path.split("/")
