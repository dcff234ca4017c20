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
    Entry,
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
    entries = _chosen(header.entries, request.keys, file.where)
    check_destination(_SAVED_FROM, request.map_location, file.where)
    if request.mmap:
        return Loaded(_map(file, entries, request.map_location), "torch", MAPPED, False)
    order = sorted(entries, key=attrgetter("begin"))
    parts = [part_of(entry) for entry in order]
    tensors = dict.fromkeys((entry.name for entry in entries), torch.empty(0))  # in the order of the header
    with PartReader(
        file, extents_of(parts), request.options, verify=request.checked, fallbacks=request.fallbacks
    ) as reader:
        for entry, part in zip(order, parts, strict=True):
            storage = _read(reader, part, request.map_location)
            tensors[entry.name] = _as_tensor(storage, entry, file.where)
        verified = header.checked and request.checked
        return Loaded(tensors, reader.backend, reader.reason, verified, header.unchecked)


def read_header(file: OpenedFile, *, verify: bool) -> SafetensorsHeader:
    """The file's header, checked."""
    start = read_exactly(file, 0, min(LENGTH_NBYTES, file.nbytes))
    data = read_exactly(file, 0, header_nbytes(start, file.nbytes, file.where))
    return parse_header(data, file.nbytes, where=file.where, verify=verify)


def part_of(entry: Entry) -> Part:
    """The bytes of a tensor."""
    return Part(entry.name, entry.nbytes, entry.crc32, entry.begin, entry.end)


def _read(reader: PartReader, part: Part, map_location: MapLocation) -> torch.UntypedStorage:
    """The bytes of a tensor, verified, where ``map_location`` says."""

    def fill(storage: torch.UntypedStorage) -> None:
        if is_joined(part) and storage.device.type == "cpu":
            begin = reader.read_small(part)
            copy_memory(storage.data_ptr(), reader.window.address_of(begin), part.nbytes)
        else:
            reader.read(part, storage)

    return filled(part.nbytes, _SAVED_FROM, map_location, fill)


def _chosen(entries: Sequence[Entry], keys: Iterable[str] | None, where: str) -> Sequence[Entry]:
    if keys is None:
        return entries
    names = resolve(keys, [entry.name for entry in entries], where)
    return [entry for entry in entries if entry.name in names]


def _as_tensor(placed: torch.UntypedStorage, entry: Entry, where: str) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch_dtype(entry, where), device=placed.device)
    return empty.set_(placed, 0, entry.shape, row_major(entry.shape))


def _map(file: OpenedFile, entries: Sequence[Entry], map_location: MapLocation) -> dict[str, torch.Tensor]:
    """Tensors that are read when they are used, and whose changes stay private, as with ``torch.load(mmap=True)``."""
    mapped = torch.UntypedStorage.from_file(file.path, shared=False, nbytes=file.nbytes)
    return {
        entry.name: _as_tensor(place(mapped[entry.begin : entry.end], _SAVED_FROM, map_location), entry, file.where)
        for entry in entries
    }
