"""Loading safetensors files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing

import torch

from fastensor.backends.base import Extent
from fastensor.backends.to_device import Filler
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.names import resolve
from fastensor.checkpoint.opened import OpenedFile, explained, read_exactly
from fastensor.checkpoint.placement import MapLocation, check_destination, filled, place
from fastensor.checkpoint.request import MAPPED, Loaded, LoadRequest
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.safetensors import (
    LENGTH_NBYTES,
    Entry,
    SafetensorsHeader,
    header_nbytes,
    parse_header,
    torch_dtype,
)

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
    order = [Extent(entry.begin, entry.end) for entry in sorted(entries, key=lambda entry: entry.begin)]
    with explained(file.where):
        used, why, reader = file.open_reader(order, request.wanted, request.fallbacks)
    tensors, filler = {}, Filler(reader)
    with closing(reader):
        for entry in sorted(entries, key=lambda entry: entry.begin):
            tensors[entry.name] = _read(file, filler, entry, request)
    in_order = {entry.name: tensors[entry.name] for entry in entries}
    return Loaded(in_order, used, why, header.checked and request.checked, header.unchecked)


def read_header(file: OpenedFile, *, verify: bool) -> SafetensorsHeader:
    """The file's header, checked."""
    with explained(file.where):
        start = read_exactly(file, 0, min(LENGTH_NBYTES, file.nbytes))
        data = read_exactly(file, 0, header_nbytes(start, file.nbytes, file.where))
    return parse_header(data, file.nbytes, where=file.where, verify=verify)


def checked_entry(entry: Entry) -> Checked | None:
    """What the bytes of a tensor are to be compared with."""
    if entry.crc32 is None:
        return None
    return Checked(f"tensor {entry.name!r}", entry.begin, entry.nbytes, entry.crc32)


def _read(file: OpenedFile, filler: Filler, entry: Entry, request: LoadRequest) -> torch.Tensor:
    """A tensor where it is to be, verified if it can be."""
    checked = checked_entry(entry) if request.checked else None

    def fill(storage: torch.UntypedStorage) -> None:
        with explained(file.where):
            found = filler.fill(storage, entry.begin, checksum=checked is not None)
        if checked is not None:
            checked.compare(found, file.where)

    return _as_tensor(filled(entry.nbytes, _SAVED_FROM, request.map_location, fill), entry, file.where)


def _chosen(entries: Sequence[Entry], keys: Iterable[str] | None, where: str) -> Sequence[Entry]:
    if keys is None:
        return entries
    names = resolve(keys, [entry.name for entry in entries], where)
    return [entry for entry in entries if entry.name in names]


def _as_tensor(placed: torch.UntypedStorage, entry: Entry, where: str) -> torch.Tensor:
    stride = torch.empty(entry.shape, device="meta").stride()
    return torch.empty(0, dtype=torch_dtype(entry, where), device=placed.device).set_(placed, 0, entry.shape, stride)


def _map(file: OpenedFile, entries: Sequence[Entry], map_location: MapLocation) -> dict[str, torch.Tensor]:
    """Tensors that are read when they are used, and whose changes stay private, as with ``torch.load(mmap=True)``."""
    mapped = torch.UntypedStorage.from_file(file.path, shared=False, nbytes=file.nbytes)
    return {
        entry.name: _as_tensor(place(mapped[entry.begin : entry.end], _SAVED_FROM, map_location), entry, file.where)
        for entry in entries
    }
