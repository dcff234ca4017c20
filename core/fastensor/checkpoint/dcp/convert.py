"""Converting distributed checkpoints to files, in bounded memory, and files to distributed checkpoints."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from fastensor.backends import registry
from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.catalog import dict_in
from fastensor.checkpoint.conversion.casting import CastBytes
from fastensor.checkpoint.conversion.layout import plan_stand_ins, refuse, untouched
from fastensor.checkpoint.conversion.renames import renamed
from fastensor.checkpoint.conversion.settings import ConvertSettings
from fastensor.checkpoint.dcp.catalog import Contents, read_contents
from fastensor.checkpoint.dcp.tensors import DirectoryTensors, TensorBytes
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter
from fastensor.checkpoint.directories import metadata_names, survives_power_failure
from fastensor.checkpoint.load import load
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.opened import container_of, opened
from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.report import SaveReport, warn_unverified
from fastensor.checkpoint.save import SavedContainer
from fastensor.checkpoint.save_transaction import SaveTransaction
from fastensor.checkpoint.sharded import check_holds, files_behind, write_sharded
from fastensor.checkpoint.verify import verify_part, with_progress
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.source import FileBytes, Plan


def from_directory(source: Location, target: Location, settings: ConvertSettings, progress: Progress) -> SaveReport:
    """:func:`fastensor.convert` from a distributed checkpoint to a file, or to the shards of a model."""
    contents = read_contents(cast(str, source))
    chosen = _chosen(contents, settings.root)
    with DirectoryTensors(contents, settings.backend, verify=settings.verify) as tensors:
        names = [name for name in tensors.entries if name in chosen]
        writer = _Writer(tensors, settings, _Done(progress, sum(map(tensors.nbytes, names))))
        if settings.container == "huggingface":
            by_key = _keys(contents, chosen, names, settings)
            return write_sharded(
                cast(str, target),
                {key: writer.nbytes_written(name) for key, name in by_key.items()},
                settings.shard_nbytes,
                lambda path, keys: writer.write(path, {key: by_key[key] for key in keys}, "safetensors"),
                durable=settings.durable,
            )
        kind = cast(SavedContainer, settings.container)
        if kind == "safetensors" or settings.rename:
            return writer.write(target, _keys(contents, chosen, names, settings), kind)
        others = {name: tensors.read_object(name) for name in chosen if name not in tensors.entries}

        def build(stand_ins: Mapping[str, torch.Tensor]) -> Any:
            flat = {name: stand_ins[name] if name in stand_ins else others[name] for name in chosen}
            return _with_numbers_of_parameters(unflatten_state_dict(flat, cast(Any, chosen)))

        return writer.write(target, {name: name for name in names}, kind, build)


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


class _Writer:
    """Writes files with tensors of a distributed checkpoint.

    Args:
        tensors: the checkpoint.
        settings: of the conversion.
        done: is told what has been read.
    """

    def __init__(self, tensors: DirectoryTensors, settings: ConvertSettings, done: _Done) -> None:
        self._tensors = tensors
        self._settings = settings
        self._done = done

    def nbytes_written(self, name: str) -> int:
        """The size that a tensor has in the new file."""
        dtype = self._tensors.entries[name].properties.dtype
        return self._tensors.nbytes(name) // dtype.itemsize * self._settings.cast(dtype).itemsize

    def write(
        self,
        target: Location,
        names: Mapping[str, str],
        kind: SavedContainer,
        build: Callable[[Mapping[str, torch.Tensor]], Any] | None = None,
    ) -> SaveReport:
        """Write one file.

        Args:
            target: where.
            names: the names of tensors in the checkpoint, by the names that they get.
            kind: the container.
            build: makes what is saved of stand-ins by their names; None if it is a dict of them.
        """
        settings = self._settings
        stand_ins = {key: self._stand_in(name) for key, name in names.items()}
        state = stand_ins if build is None else build(stand_ins)
        texts = settings.texts({}) if kind == "safetensors" else None

        def plan(fallbacks: list[Fallback]) -> Plan:
            planned, keys = plan_stand_ins(state, stand_ins, kind, texts, settings.checksums)
            storages = [
                storage if key is None else self._bytes(names[key])
                for key, storage in zip(keys, planned.storages, strict=True)
            ]
            return replace(planned, storages=tuple(storages))

        transaction = SaveTransaction(
            target, refuse, backend=settings.backend, durable=settings.durable, follow_symlinks=True
        )
        return transaction.run(plan)

    def _stand_in(self, name: str) -> torch.Tensor:
        entry = self._tensors.entries[name]
        return untouched(self._settings.cast(entry.properties.dtype), tuple(entry.size))

    def _bytes(self, name: str) -> FileBytes:
        report = self._done.of_next(self._tensors.nbytes(name))
        found = TensorBytes(self._tensors, name, self._settings.memory_nbytes // 2, report)
        dtype = self._tensors.entries[name].properties.dtype
        wanted = self._settings.cast(dtype)
        return found if wanted == dtype else CastBytes(found, dtype, wanted, repr(name))


def _keys(
    contents: Contents, chosen: Mapping[str, tuple[Any, ...]], names: Sequence[str], settings: ConvertSettings
) -> dict[str, str]:
    """The names of tensors by the keys that they get in a file that holds nothing else.

    Raises:
        UnsupportedContentError: there is something else, which is not to be left out; or two tensors get one key.
    """
    others = sorted(chosen.keys() - set(names))
    if others and not settings.drop:
        raise UnsupportedContentError(
            f"{contents.directory.path}: the new file holds tensors only, but {others[0]!r} is another object; "
            f"choose a dict of tensors with root, leave other objects out with drop=True, or write a file of torch"
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
    new = renamed(keys, settings.rename, contents.directory.path)
    return {new[key]: name for key, name in keys.items()}


def _ways(contents: Contents) -> dict[str, tuple[Any, ...]]:
    """The way to each entry of the state: keys of dicts and positions in lists."""
    known = contents.metadata.planner_data
    found: dict[str, tuple[Any, ...]] = {}
    for name in contents.metadata.state_dict_metadata:
        way = known.get(name) if isinstance(known, dict) else None
        found[name] = way if isinstance(way, tuple) and way else (name,)
    return found


def _above(root: str | None) -> tuple[str, ...]:
    return () if root is None else tuple(root.split("."))


def _with_numbers_of_parameters(value: Any) -> Any:
    """The same object, in which each state of an optimizer has the number of its parameter as key, as in
    ``Optimizer.state_dict``.

    Planners of torch make strings of keys (https://github.com/pytorch/pytorch/issues/153842), and an optimizer takes a
    state whose key is no number for one of no parameter, without a word. ``param_groups`` holds the numbers.
    """
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _with_numbers_of_parameters(inner)
    if isinstance(value, dict) and (numbers := _numbers_of_parameters(value)):
        value["state"] = {numbers.get(key, key): state for key, state in value["state"].items()}
    return value


def _numbers_of_parameters(value: Mapping[Any, Any]) -> dict[str, int]:
    """The numbers of parameters that the state of an optimizer has, by their texts; empty if a dict is none."""
    state, groups = value.get("state"), value.get("param_groups")
    if not (isinstance(state, dict) and isinstance(groups, list) and all(isinstance(one, dict) for one in groups)):
        return {}
    lists = [group.get("params") for group in groups]
    if not all(isinstance(one, list | tuple) and all(type(number) is int for number in one) for one in lists):
        return {}
    return {str(number): number for one in lists for number in one}


def _chosen(contents: Contents, root: str | None) -> dict[str, tuple[Any, ...]]:
    """The names of what is converted, and the way to each below the root.

    Raises:
        UnsupportedContentError: there is nothing below the root.
    """
    ways = _ways(contents)
    above = _above(root)
    found = {
        name: way[len(above) :]
        for name, way in ways.items()
        if tuple(map(str, way[: len(above)])) == above and len(way) > len(above)
    }
    if not found and root is not None:
        tops = sorted({str(way[0]) for way in ways.values() if len(way) > 1})
        raise UnsupportedContentError(
            f"{contents.directory.path}: it has no dict called {root!r}; found {', '.join(tops) or 'none'}"
        )
    return found


def left_out(contents: Contents, root: str | None, *, only_tensors: bool) -> tuple[str, ...]:
    """Names of what a conversion leaves out: what is beside the root, and other objects than tensors.

    Raises:
        UnsupportedContentError: there is nothing below the root.
    """
    ways = _ways(contents)
    chosen = _chosen(contents, root)
    above = _above(root)
    aside = dict.fromkeys(_up_to_fork(way, above) for name, way in ways.items() if name not in chosen)
    kinds = contents.metadata.state_dict_metadata
    others = [name for name in chosen if only_tensors and not isinstance(kinds[name], TensorStorageMetadata)]
    return (*aside, *others)


def _up_to_fork(way: Sequence[Any], other: Sequence[str]) -> str:
    """
    >>> _up_to_fork(("model", "head", "w"), ("model", "body"))
    'model.head'
    """
    texts = [*map(str, way)]
    depth = next((at for at, (one, two) in enumerate(zip(texts, other, strict=False)) if one != two), len(other))
    return ".".join(texts[: depth + 1])


def to_directory(source: Location, target: Location, settings: ConvertSettings, progress: Progress) -> SaveReport:
    """:func:`fastensor.convert` from files to a distributed checkpoint. The progress is that of verifying them.

    Args:
        source, target, settings, progress: as there.
    """
    started = time.perf_counter()
    if metadata_names(source):
        raise UnsupportedContentError(f"{name_of(source)}: it is a distributed checkpoint already; copy its directory")
    files = files_behind(source)
    verifying = with_progress([*files.items()], itemgetter(0), progress) if settings.verify else ()
    for (file, names), tell in verifying:
        verified = verify_part(file, names, settings.backend, tell)
        if not verified.complete:
            warn_unverified(verified.path)
    state = dict_in(_loaded(files), settings.root, name_of(source))
    planned = time.perf_counter()
    writer = FastensorStorageWriter(cast(str, target), sync_files=settings.durable, backend=settings.backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that there are no other processes
        metadata = save(state, storage_writer=writer, no_dist=True)
    ended = time.perf_counter()
    return SaveReport(
        path=str(writer.checkpoint_id),
        nbytes=sum(info.length for info in metadata.storage_data.values()),
        backend=settings.backend if isinstance(settings.backend, str) else "auto",
        reason="the writer has chosen" if settings.backend == registry.AUTO else "asked for",
        durable=settings.durable and survives_power_failure(cast(str, target)),
        atomic=True,
        plan_seconds=planned - started,
        write_seconds=ended - planned,
        sync_seconds=0.0,
        publish_seconds=0.0,
        seconds=ended - started,
        stall_seconds=ended - started,
    )


def _loaded(files: Mapping[Location, set[str] | None]) -> Any:
    """What a file, or the files of a model, hold. Tensors are mapped, unless torch wrote the file before 1.6."""
    state: dict[str, Any] = {}
    for file, names in files.items():
        with opened(file) as one:
            mmap = container_of(one) != "legacy"
        found = load(file, "cpu", mmap=mmap, verify=False, weights_only=True)
        if names is None:
            return found
        check_holds(name_of(file), found, names)
        state.update((name, found[name]) for name in sorted(names))
    return state
