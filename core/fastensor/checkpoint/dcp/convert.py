"""Converting distributed checkpoints to files, one tensor at a time, and files to distributed checkpoints."""

from __future__ import annotations

import io
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, cast

import torch
from isal import isal_zlib
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.convert import plan_stand_ins, untouched
from fastensor.checkpoint.dcp.catalog import Contents, check_single, read_contents
from fastensor.checkpoint.dcp.items import Item, ItemReader, items_by_file
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.load import load
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.checkpoint.report import SaveReport
from fastensor.checkpoint.save import SavedContainer, choose_container
from fastensor.checkpoint.save_transaction import SaveTransaction
from fastensor.checkpoint.verify import Progress
from fastensor.checkpoint.verify import verify as verify_file
from fastensor.errors import CorruptCheckpointError, LayoutError, UnsupportedContentError
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.source import Plan


@dataclass(frozen=True, slots=True)
class Settings:
    """Keywords of :func:`fastensor.convert`."""

    root: str | None
    metadata: Mapping[str, str] | None
    checksums: bool
    container: SavedContainer | None
    verify: bool
    backend: BackendChoice
    durable: bool


class DirectoryTensors:
    """Reads tensors of a distributed checkpoint, each put together of its chunks. Used by one thread.

    Args:
        contents: the checkpoint.
        backend: as for :func:`fastensor.load`.
        verify: whether chunks are compared with their CRC32s.
    """

    def __init__(self, contents: Contents, backend: BackendChoice, *, verify: bool) -> None:
        self._directory = contents.directory
        self._options = ReadOptions(backend)
        self._verify = verify
        self.entries = {
            name: entry
            for name, entry in contents.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """Dtypes and shapes by name."""
        self._items: dict[str, list[Item]] = {}
        for items in contents.files.values():
            for item in items:
                self._items.setdefault(item.fqn, []).append(item)

    def nbytes(self, name: str) -> int:
        """Size of a tensor."""
        entry = self.entries[name]
        return math.prod(entry.size) * entry.properties.dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """A tensor in new memory of the host.

        Raises:
            CorruptCheckpointError: a chunk is damaged, or missing.
            CheckpointReadError: the operating system failed to deliver bytes.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        items = self._items.get(name, [])
        if sum(math.prod(item.shape) for item in items if item.shape is not None) != tensor.numel():
            raise CorruptCheckpointError(
                f"{self._directory.path}: the chunks of {name!r} are not as many elements as it has: the metadata are "
                f"damaged, or not all of its ranks have saved"
            )
        for file, some in items_by_file(items).items():
            with (
                self._directory.open(file) as opened,
                ItemReader(opened, some, self._options, verify=self._verify) as reader,
            ):
                for item in some:
                    place = narrow_tensor_by_index(tensor, item.chunk_offset, cast(tuple[int, ...], item.shape))
                    if not reader.read_into(item, place):
                        place.copy_(reader.read_tensor(item))
        return tensor

    def read_object(self, name: str) -> Any:
        """Another object than a tensor.

        Raises:
            UnsafeCheckpointError: it needs a class that is not allow-listed.
        """
        items = self._items.get(name, [])
        if len(items) != 1:
            raise CorruptCheckpointError(
                f"{self._directory.path}: {name!r} is an object of {len(items)} items, expected 1: the metadata are "
                f"damaged"
            )
        (item,) = items
        with (
            self._directory.open(item.file) as opened,
            ItemReader(opened, [item], self._options, verify=True) as reader,
        ):
            return load(io.BytesIO(reader.read(item)), "cpu", weights_only=True)


class _TensorBytes:
    """The bytes of one tensor: a :class:`fastensor.stitch.source.FileBytes`. It is in memory while it is read.

    Args:
        tensors: the checkpoint.
        name: the name of the tensor.
        report: called with the number of bytes of the tensor that have been read.
    """

    def __init__(self, tensors: DirectoryTensors, name: str, report: Callable[[int], object]) -> None:
        self._tensors = tensors
        self._name = name
        self._report = report
        self._nbytes = tensors.nbytes(name)
        self._bytes: memoryview | None = None

    def nbytes(self) -> int:
        return self._nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        if self._bytes is None:
            self._bytes = self._tensors.read(self._name).view(-1).view(torch.uint8).numpy().data
        end = begin + buffer.nbytes
        buffer[:] = self._bytes[begin:end]
        if end >= self._nbytes:
            self._bytes = None
        self._report(end)
        return int(isal_zlib.crc32(buffer))

    def check(self, crc32: int) -> None:
        """Chunks have been compared when they were read."""


def from_directory(source: Location, target: Location, settings: Settings, progress: Progress) -> SaveReport:
    """:func:`fastensor.convert` from a distributed checkpoint to a file."""
    directory = cast(str, source)
    check_single(directory, metadata_names(directory))
    kind = choose_container(settings.container, name_of(target), settings.metadata, settings.checksums)
    contents = read_contents(directory)
    tensors = DirectoryTensors(contents, settings.backend, verify=settings.verify)
    chosen = _chosen(contents, settings.root)
    stand_ins = {
        name: untouched(entry.properties.dtype, tuple(entry.size))
        for name, entry in tensors.entries.items()
        if name in chosen
    }
    if kind == "safetensors":
        if others := sorted(chosen.keys() - stand_ins.keys()):
            raise UnsupportedContentError(
                f"{contents.directory.path}: a safetensors file holds tensors only, but {others[0]!r} is another "
                f"object; choose a dict of tensors with root, or write a file of torch"
            )
        state: Any = {".".join(map(str, chosen[name])): stand_in for name, stand_in in stand_ins.items()}
    else:
        flat = {name: stand_ins[name] if name in stand_ins else tensors.read_object(name) for name in chosen}
        state = unflatten_state_dict(flat, cast(Any, chosen))
    total = sum(map(tensors.nbytes, stand_ins))

    def plan(fallbacks: list[Fallback]) -> Plan:
        planned, names = plan_stand_ins(state, stand_ins, kind, settings.metadata, settings.checksums)
        storages: list[Any] = []
        before = 0
        for name, storage in zip(names, planned.storages, strict=True):
            if name is None:
                storages.append(storage)
                continue
            storages.append(_TensorBytes(tensors, name, partial(_add, progress, before, total)))
            before += tensors.nbytes(name)
        return replace(planned, storages=tuple(storages))

    transaction = SaveTransaction(
        target, _refuse, backend=settings.backend, durable=settings.durable, follow_symlinks=True
    )
    return transaction.run(plan)


def _add(progress: Progress, before: int, total: int, read: int) -> None:
    progress(before + read, total)


def _chosen(contents: Contents, root: str | None) -> dict[str, tuple[Any, ...]]:
    """The names of what is converted, and the way to each below the root.

    Raises:
        UnsupportedContentError: there is nothing below the root.
    """
    ways = contents.metadata.planner_data
    names = contents.metadata.state_dict_metadata
    found = {}
    above = () if root is None else tuple(root.split("."))
    for name in names:
        way = ways.get(name) if isinstance(ways, dict) else None
        way = way if isinstance(way, tuple) and way else (name,)
        if tuple(map(str, way[: len(above)])) == above and len(way) > len(above):
            found[name] = way[len(above) :]
    if not found and root is not None:
        tops = sorted({str(way[0]) for way in ways.values() if len(way) > 1}) if isinstance(ways, dict) else []
        raise UnsupportedContentError(
            f"{contents.directory.path}: it has no dict called {root!r}; found {', '.join(tops) or 'none'}"
        )
    return found


def to_directory(
    source: Location, target: Location, root: str | None, *, verify: bool, backend: BackendChoice, durable: bool
) -> SaveReport:
    """:func:`fastensor.convert` from a file to a distributed checkpoint."""
    started = time.perf_counter()
    if not isinstance(target, str | os.PathLike):
        raise UnsupportedContentError(f"{name_of(target)}: a distributed checkpoint needs the path of a directory")
    if metadata_names(source):
        raise UnsupportedContentError(f"{name_of(source)}: it is a distributed checkpoint already; copy its directory")
    if verify:
        verify_file(source)
    state = load(source, "cpu", mmap=True, weights_only=True)
    for key in () if root is None else root.split("."):
        if not isinstance(state, dict) or key not in state:
            raise UnsupportedContentError(f"{name_of(source)}: it has no dict called {root!r}")
        state = state[key]
    if not isinstance(state, dict):
        raise UnsupportedContentError(f"{name_of(source)}: expected a dict, found {type(state).__name__}")
    planned = time.perf_counter()
    writer = FastensorStorageWriter(target, sync_files=durable, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that there are no other processes
        metadata = save(state, storage_writer=writer, no_dist=True)
    ended = time.perf_counter()
    return SaveReport(
        path=str(writer.checkpoint_id),
        nbytes=sum(info.length for info in metadata.storage_data.values()),
        backend=backend if isinstance(backend, str) else "auto",
        reason="asked for",
        durable=durable,
        atomic=True,
        plan_seconds=planned - started,
        write_seconds=ended - planned,
        sync_seconds=0.0,
        publish_seconds=0.0,
        seconds=ended - started,
        stall_seconds=ended - started,
    )


def _refuse(file: BinaryIO) -> None:
    raise LayoutError("torch cannot write a file whose tensors are in other files")
