"""Safetensors files: a :class:`~fastensor.checkpoint.containers.FileContainer`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from fastensor.checkpoint.containers import ToCompare
from fastensor.checkpoint.reading.opened import OpenedFile, named_in_errors, read_exactly
from fastensor.checkpoint.reading.placement import MapLocation, check_destination, filled, may_be_filled_at_once, place
from fastensor.checkpoint.reading.reader import PartReader, empty_storage, is_joined, open_reader
from fastensor.checkpoint.reading.request import MAPPED, Loaded, LoadRequest
from fastensor.errors import CorruptCheckpointError, UnsupportedContentError, caught_as
from fastensor.files.garbage import without_collection
from fastensor.stitch.parts import Part
from fastensor.stitch.safetensors_header import SafetensorsHeader, header_nbytes, parse_header, torch_dtype
from fastensor.stitch.shape import kept_if_short, row_major
from fastensor.stitch.signatures import LENGTH_NBYTES, MAX_HEADER_NBYTES

if TYPE_CHECKING:
    from fastensor.checkpoint.tools.catalog import Catalog

_HOST = torch.device("cpu")
_SAVED_FROM = "cpu"
"""The location that tensors were saved from: the format does not say it."""
_row_major = kept_if_short(row_major)


def load(file: OpenedFile, request: LoadRequest) -> Loaded:
    """Each tensor has memory of its own, unless the file is mapped."""
    if sys.byteorder != "little":
        raise UnsupportedContentError(f"{file.where}: safetensors files are little endian, this machine is not")
    header = read_header(file, verify=request.checked)
    parts = _chosen(header.tensors, request.keys, file.where)
    check_destination(_SAVED_FROM, request.map_location, file.where)
    if request.mmap:
        return Loaded(_map(file, parts, request.map_location), "torch", MAPPED, False)
    order = sorted(parts, key=attrgetter("begin"))
    read = _read_to_device if may_be_filled_at_once(request.map_location) else _read_by_way_of_host
    tensors = dict.fromkeys((part.name for part in parts), torch.empty(0))  # in the order of the header
    with without_collection(len(order)), open_reader(file, order, request) as reader:
        for part in order:
            tensors[part.name] = read(reader, part, request.map_location, file.where)
        verified = header.checked and request.checked
        return Loaded(tensors, reader.backend, reader.reason, verified, header.unchecked)


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    from fastensor.checkpoint.tools.catalog import Catalog, Located, TensorInfo  # a load needs nothing of it

    header = read_header(file, verify=verify)
    located = {}
    for part in header.tensors:
        info = TensorInfo(part.name, "Tensor", torch_dtype(part, file.where), part.shape, part.name, part.crc32)
        located[part.name] = Located(info, part, 0, _row_major(part.shape))
    infos = {name: one.info for name, one in located.items()}
    return Catalog(
        "safetensors",
        infos,
        located,
        {},
        header.metadata,
        header.checked,
        header.unchecked,
        structure=located,
        by_identity={id(one): one for one in located.values()},
        is_flat=True,
    )


def to_compare(file: OpenedFile) -> ToCompare:
    header = read_header(file, verify=True)
    return ToCompare(header.tensors, [header.nbytes] if header.checked else (), int(not header.checked))


def foreign_code(file: OpenedFile) -> tuple[str, ...]:
    return ()


def read_header(file: OpenedFile, *, verify: bool) -> SafetensorsHeader:
    """The file's header, checked."""
    try:
        start = read_exactly(file, 0, min(LENGTH_NBYTES, file.nbytes))
        _check_is_not_too_large(file, int.from_bytes(start, "little"))
        data = read_exactly(file, 0, header_nbytes(start, file.nbytes, file.where))
        return parse_header(data, file.nbytes, where=file.where, verify=verify)
    except (CorruptCheckpointError, UnsupportedContentError) as error:
        from safetensors import SafetensorError  # only a refusal needs it

        raise caught_as(error, SafetensorError) from error.__cause__


def _check_is_not_too_large(file: OpenedFile, length: int) -> None:
    """
    Raises:
        UnsupportedContentError: there is a header where there should be, and it is larger than readers take. Writers
            have made such files: https://github.com/safetensors/safetensors/issues/668
    """
    end = LENGTH_NBYTES + length
    if length <= MAX_HEADER_NBYTES or end > file.nbytes:
        return
    if read_exactly(file, LENGTH_NBYTES, 1) == b"{" and read_exactly(file, end - 1, 1) in (b"}", b" "):
        raise UnsupportedContentError(
            f"{file.where}: its header has {length} bytes, and no reader of safetensors takes more than "
            f"{MAX_HEADER_NBYTES}; save its tensors again in several files, or with shorter names"
        )


def _read_to_device(reader: PartReader, part: Part, map_location: MapLocation, where: str) -> torch.Tensor:
    """A tensor, verified, on its device."""
    return _as_tensor(filled(part.nbytes, _SAVED_FROM, map_location, partial(reader.read, part)), part, where)


def _read_by_way_of_host(reader: PartReader, part: Part, map_location: MapLocation, where: str) -> torch.Tensor:
    """A tensor, verified, read to the host first. Small neighbours are read together."""
    if is_joined(part):
        tensor = torch.empty(part.shape, dtype=torch_dtype(part, where), device=_HOST)
        if part.nbytes:
            begin = reader.read_small(part)
            ctypes.memmove(tensor.data_ptr(), reader.window.address_of(begin), part.nbytes)
    else:
        tensor = _as_tensor(torch.from_numpy(reader.read_array(part)).untyped_storage(), part, where)
    storage = tensor.untyped_storage()
    placed = place(storage, _SAVED_FROM, map_location)
    return tensor if placed is storage else _as_tensor(placed, part, where)


def _chosen(parts: Sequence[Part], keys: Iterable[str] | None, where: str) -> Sequence[Part]:
    if keys is None:
        return parts
    from fastensor.checkpoint.models.names import resolve  # a whole load needs nothing of it

    names = resolve(keys, [part.name for part in parts], where)
    return [part for part in parts if part.name in names]


def _as_tensor(placed: torch.UntypedStorage, part: Part, where: str) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch_dtype(part, where), device=placed.device)
    return empty.set_(placed, 0, part.shape, _row_major(part.shape))


def _map(file: OpenedFile, parts: Sequence[Part], map_location: MapLocation) -> dict[str, torch.Tensor]:
    """Tensors that are read when they are used. Changes stay private, as with ``torch.load(mmap=True)``."""
    with named_in_errors(file):
        mapped = torch.UntypedStorage.from_file(file.path, shared=False, nbytes=file.nbytes)
    storages = (mapped[part.begin : part.end] if part.nbytes else empty_storage() for part in parts)
    return {
        part.name: _as_tensor(place(storage, _SAVED_FROM, map_location), part, file.where)
        for part, storage in zip(parts, storages, strict=True)
    }
