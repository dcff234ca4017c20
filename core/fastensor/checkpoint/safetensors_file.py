"""Loading safetensors files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from fastensor.backends.memory import copy_memory
from fastensor.checkpoint.names import resolve
from fastensor.checkpoint.opened import OpenedFile, read_exactly
from fastensor.checkpoint.placement import MapLocation, check_destination, filled, place
from fastensor.checkpoint.reader import PartReader, extents_of, is_joined
from fastensor.checkpoint.request import MAPPED, Loaded, LoadRequest
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.parts import Part
from fastensor.stitch.safetensors import (
    LENGTH_NBYTES,
    SafetensorsHeader,
    header_nbytes,
    parse_header,
    torch_dtype,
)
from fastensor.stitch.shape import row_major

_SAVED_FROM = "cpu"
"""The format does not say where tensors were."""


def load_safetensors(file: OpenedFile, request: LoadRequest) -> Loaded:
    """Load a dict of tensors, each with memory of its own unless the file is mapped."""
    if sys.byteorder != "little":
        raise UnsupportedContentError(f"{file.where}: safetensors files are little endian, this machine is not")
    header = read_header(file, verify=request.checked)
    parts = _chosen(header.tensors, request.keys, file.where)
    check_destination(_SAVED_FROM, request.map_location, file.where)
    if request.mmap:
        return Loaded(_map(file, parts, request.map_location), "torch", MAPPED, False)
    order = sorted(parts, key=attrgetter("begin"))
    tensors = dict.fromkeys((part.name for part in parts), torch.empty(0))  # in the order of the header
    with PartReader(
        file, extents_of(order), request.options, verify=request.checked, fallbacks=request.fallbacks
    ) as reader:
        for part in order:
            storage = _read(reader, part, request.map_location)
            tensors[part.name] = _as_tensor(storage, part, file.where)
        verified = header.checked and request.checked
        return Loaded(tensors, reader.backend, reader.reason, verified, header.unchecked)


def read_header(file: OpenedFile, *, verify: bool) -> SafetensorsHeader:
    """The file's header, checked."""
    start = read_exactly(file, 0, min(LENGTH_NBYTES, file.nbytes))
    data = read_exactly(file, 0, header_nbytes(start, file.nbytes, file.where))
    return parse_header(data, file.nbytes, where=file.where, verify=verify)


def _read(reader: PartReader, part: Part, map_location: MapLocation) -> torch.UntypedStorage:
    """The bytes of a tensor, verified, where ``map_location`` says."""

    def fill(storage: torch.UntypedStorage) -> None:
        if is_joined(part) and storage.device.type == "cpu":
            begin = reader.read_small(part)
            copy_memory(storage.data_ptr(), reader.window.address_of(begin), part.nbytes)
        else:
            reader.read(part, storage)

    return filled(part.nbytes, _SAVED_FROM, map_location, fill)


def _chosen(parts: Sequence[Part], keys: Iterable[str] | None, where: str) -> Sequence[Part]:
    if keys is None:
        return parts
    names = resolve(keys, [part.name for part in parts], where)
    return [part for part in parts if part.name in names]


def _as_tensor(placed: torch.UntypedStorage, part: Part, where: str) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch_dtype(part, where), device=placed.device)
    return empty.set_(placed, 0, part.shape, row_major(part.shape))


def _map(file: OpenedFile, parts: Sequence[Part], map_location: MapLocation) -> dict[str, torch.Tensor]:
    """Tensors that are read when they are used, and whose changes stay private, as with ``torch.load(mmap=True)``."""
    mapped = torch.UntypedStorage.from_file(file.path, shared=False, nbytes=file.nbytes)
    return {
        part.name: _as_tensor(place(mapped[part.begin : part.end], _SAVED_FROM, map_location), part, file.where)
        for part in parts
    }
