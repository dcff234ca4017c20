"""Converting distributed checkpoints to files, in bounded memory, and files to distributed checkpoints."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from fastensor.backends import registry
from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.convert import OF_TORCH, plan_stand_ins, untouched
from fastensor.checkpoint.dcp.catalog import Contents, read_contents
from fastensor.checkpoint.dcp.tensors import DirectoryTensors, TensorBytes
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.load import load
from fastensor.checkpoint.location import Location, locate, name_of
from fastensor.checkpoint.report import SaveReport
from fastensor.checkpoint.save import SavedContainer, choose_container
from fastensor.checkpoint.save_transaction import SaveTransaction
from fastensor.checkpoint.sharded import INDEX_SUFFIX, WHOLE, files_of, find_weights, write_sharded
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
    container: SavedContainer | Literal["huggingface"] | None
    verify: bool
    backend: BackendChoice
    durable: bool
    shard_nbytes: int
    memory_nbytes: int

    @property
    def texts(self) -> Mapping[str, str] | None:
        """The metadata of safetensors files."""
        return OF_TORCH if self.metadata is None and self.container == "huggingface" else self.metadata


def from_directory(source: Location, target: Location, settings: Settings, progress: Progress) -> SaveReport:
    """:func:`fastensor.convert` from a distributed checkpoint to a file, or to the shards of a model."""
    contents = read_contents(cast(str, source))
    chosen = _chosen(contents, settings.root)
    with DirectoryTensors(contents, settings.backend, verify=settings.verify) as tensors:
        names = [name for name in tensors.entries if name in chosen]
        done = _Done(progress, sum(map(tensors.nbytes, names)))
        if settings.container == "huggingface":
            by_key = _keys(contents, chosen, names)
            return write_sharded(
                cast(str, target),
                {key: tensors.nbytes(name) for key, name in by_key.items()},
                settings.shard_nbytes,
                lambda path, keys: _write(
                    path, tensors, {key: by_key[key] for key in keys}, None, "safetensors", settings, done
                ),
                durable=settings.durable,
            )
        kind = choose_container(settings.container, name_of(target), settings.metadata, settings.checksums)
        if kind == "safetensors":
            return _write(target, tensors, _keys(contents, chosen, names), None, kind, settings, done)
        others = {name: tensors.read_object(name) for name in chosen if name not in tensors.entries}

        def build(stand_ins: Mapping[str, torch.Tensor]) -> Any:
            flat = {name: stand_ins[name] if name in stand_ins else others[name] for name in chosen}
            return unflatten_state_dict(flat, cast(Any, chosen))

        return _write(target, tensors, {name: name for name in names}, build, kind, settings, done)


class _Done:
    """How many bytes of all tensors have been read.

    Args:
        progress: gets the bytes done and the bytes to do.
        total: the bytes to do.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0

    def of_next(self, nbytes: int) -> Callable[[int], object]:
        """What is called with the bytes that have been read of the next tensor."""
        before = self._before
        self._before += nbytes
        return lambda read: self._progress(before + read, self._total)


def _write(
    target: Location,
    tensors: DirectoryTensors,
    names: Mapping[str, str],
    build: Callable[[Mapping[str, torch.Tensor]], Any] | None,
    kind: SavedContainer,
    settings: Settings,
    done: _Done,
) -> SaveReport:
    """Write one file.

    Args:
        target: where.
        tensors: the checkpoint.
        names: the names of tensors in the checkpoint, by the names that they get.
        build: makes what is saved of stand-ins by their names; None if it is a dict of them.
        kind: the container.
        settings: of the conversion.
        done: is told what has been read.
    """
    entries = {key: tensors.entries[name] for key, name in names.items()}
    stand_ins = {key: untouched(one.properties.dtype, tuple(one.size)) for key, one in entries.items()}
    state = stand_ins if build is None else build(stand_ins)

    def plan(fallbacks: list[Fallback]) -> Plan:
        planned, keys = plan_stand_ins(state, stand_ins, kind, settings.texts, settings.checksums)
        storages: list[Any] = []
        for key, storage in zip(keys, planned.storages, strict=True):
            if key is None:
                storages.append(storage)
            else:
                name = names[key]
                report = done.of_next(tensors.nbytes(name))
                storages.append(TensorBytes(tensors, name, settings.memory_nbytes // 2, report))
        return replace(planned, storages=tuple(storages))

    transaction = SaveTransaction(
        target, _refuse, backend=settings.backend, durable=settings.durable, follow_symlinks=True
    )
    return transaction.run(plan)


def _keys(contents: Contents, chosen: Mapping[str, tuple[Any, ...]], names: Sequence[str]) -> dict[str, str]:
    """The names of tensors by the keys that they get in a file that holds nothing else.

    Raises:
        UnsupportedContentError: there is something else, or two tensors get one key.
    """
    if others := sorted(chosen.keys() - set(names)):
        raise UnsupportedContentError(
            f"{contents.directory.path}: a safetensors file holds tensors only, but {others[0]!r} is another "
            f"object; choose a dict of tensors with root, or write a file of torch"
        )
    keys: dict[str, str] = {}
    for name in names:
        key = ".".join(map(str, chosen[name]))
        if key in keys:
            raise UnsupportedContentError(
                f"{contents.directory.path}: {keys[key]!r} and {name!r} would both be called {key!r} in a safetensors "
                f"file; write a file of torch"
            )
        keys[key] = name
    return keys


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
    state = _loaded(source, verify=verify)
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
        reason="the writer has chosen" if backend == registry.AUTO else "asked for",
        durable=durable,
        atomic=True,
        plan_seconds=planned - started,
        write_seconds=ended - planned,
        sync_seconds=0.0,
        publish_seconds=0.0,
        seconds=ended - started,
        stall_seconds=ended - started,
    )


def _loaded(source: Location, *, verify: bool) -> Any:
    """What a file, or the files of a model, hold. Tensors are mapped."""
    path = Path(source) if isinstance(source, str | os.PathLike) and isinstance(locate(source), str) else None
    if path is not None and path.is_dir():
        found = find_weights(path)
        if found is None:
            raise UnsupportedContentError(
                f"{path}: expected a file, or a directory with *{INDEX_SUFFIX} or {' or '.join(WHOLE)}, found neither"
            )
        source = path = found
    if path is None or not path.name.endswith(INDEX_SUFFIX):
        return _load_mapped(source, verify=verify)
    state: dict[str, Any] = {}
    for file, names in files_of(path).items():
        loaded = _load_mapped(file, verify=verify)
        if missing := names - loaded.keys():
            raise CorruptCheckpointError(
                f"{file}: {min(missing)!r} is not in it ({len(missing)} of the tensors that {path.name} expects there "
                f"are missing); the index and the file are of different checkpoints"
            )
        state.update((name, loaded[name]) for name in sorted(names))
    return state


def _load_mapped(source: Location, *, verify: bool) -> Any:
    if verify:
        verify_file(source)
    return load(source, "cpu", mmap=True, weights_only=True)


def _refuse(file: BinaryIO) -> None:
    raise LayoutError("torch cannot write a file whose tensors are in other files")
