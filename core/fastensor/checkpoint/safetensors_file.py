"""Loading safetensors files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.backends.memory import copy_memory
from fastensor.backends.to_device import Filler
from fastensor.backends.window import SMALL_NBYTES, Window, joined
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.names import resolve
from fastensor.checkpoint.opened import OpenedFile, explained, read_exactly, read_explained
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
    with explained(file.where):
        extents = joined((entry.begin, entry.end, entry.nbytes <= SMALL_NBYTES) for entry in order)
        used, why, reader = file.open_reader(extents, request.wanted, request.fallbacks)
    tensors = dict.fromkeys((entry.name for entry in entries), torch.empty(0))  # in the order of the header
    with closing(reader):
        source = _Source(file, reader, request, extents)
        for entry in order:
            tensors[entry.name] = _as_tensor(source.storage(entry), entry, file.where)
    return Loaded(tensors, used, why, header.checked and request.checked, header.unchecked)


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


class _Source:
    """Reads a file's tensors to where they are to be, and verifies them if it can: small ones that follow each other
    together, large ones straight to their memory."""

    def __init__(self, file: OpenedFile, reader: Reader, request: LoadRequest, extents: Sequence[Extent]) -> None:
        self._where = file.where
        self._reader = reader
        self._filler = Filler(reader)
        self._window = Window(partial(read_explained, reader, file.where, checksum=request.checked), extents)
        self._map_location = request.map_location
        self._checked = request.checked

    def storage(self, entry: Entry) -> torch.UntypedStorage:
        """The tensor's bytes.

        Raises:
            CheckpointReadError: they cannot be read.
            CorruptCheckpointError: they do not match their checksum.
        """

        def fill(storage: torch.UntypedStorage) -> None:
            is_checked = self._checked and entry.crc32 is not None
            if entry.nbytes <= SMALL_NBYTES and storage.device.type == "cpu":
                part = self._window.part(entry.begin, entry.nbytes)
                copy_memory(storage.data_ptr(), self._window.address_of(entry.begin), entry.nbytes)
                found = isal_zlib.crc32(part) if is_checked else 0
            else:
                with explained(self._where):
                    found = self._filler.fill(storage, entry.begin, checksum=is_checked)
            if is_checked and found != entry.crc32 and (checked := checked_entry(entry)):
                checked.compare(found, self._where)

        return filled(entry.nbytes, _SAVED_FROM, self._map_location, fill)


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
