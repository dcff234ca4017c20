"""Distributed checkpoints: a :class:`~fastensor.checkpoint.containers.DirectoryContainer`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from fastensor.backends import registry
from fastensor.checkpoint.containers import container_of
from fastensor.checkpoint.dcp.catalog import Contents, read_contents
from fastensor.checkpoint.dcp.catalog import verify_directory as verify
from fastensor.checkpoint.dcp.tensors import DirectoryTensors, tensor_bytes
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter
from fastensor.checkpoint.directories import metadata_names, survives_power_failure
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.models.names import nodes
from fastensor.checkpoint.models.sharded import check_holds, files_at, files_behind, weights_at
from fastensor.checkpoint.progress import Progress, tell_part
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import opened
from fastensor.checkpoint.report import warn_unverified
from fastensor.checkpoint.tools.catalog import check_root, dict_in
from fastensor.checkpoint.tools.cataloged import open_files
from fastensor.checkpoint.tools.contents import OpenCheckpoint
from fastensor.checkpoint.tools.conversion.selection import beside, renamed
from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
from fastensor.checkpoint.tools.conversion.sources import ConversionSource, metadata_in_words
from fastensor.checkpoint.tools.verify import verify as verify_source
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.errors import UnsupportedContentError
from fastensor.files.budgets import available_memory
from fastensor.files.words import human_size
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.source import FileBytes

__all__ = ["left_out", "open_checkpoint", "open_source", "verify", "write"]


def open_checkpoint(location: Location, stack: ExitStack, backend: BackendChoice) -> OpenCheckpoint:
    return stack.enter_context(DirectoryTensors(read_contents(cast(str, location)), backend, verify=True))


def open_source(location: Location, settings: ConvertSettings, stack: ExitStack) -> ConversionSource:
    """A file of torch also gets the other objects, unless tensors get new names."""
    contents = read_contents(cast(str, location))
    chosen = _chosen(contents, settings.root)
    tensors = stack.enter_context(DirectoryTensors(contents, settings.backend, verify=settings.verify))
    names = [name for name in tensors.tensors if name in chosen]
    is_whole = settings.container == "torch" and not settings.rename
    _check_memory(tensors, names, settings)
    by_key = {name: name for name in names} if is_whole else _keys(contents, chosen, names, settings)

    def build(stand_ins: Mapping[str, torch.Tensor]) -> Any:
        flat = {name: stand_ins[name] if name in stand_ins else tensors.read_object(name) for name in chosen}
        return _with_numbers_of_parameters(unflatten_state_dict(flat, cast(Any, chosen)))

    return ConversionSource(
        where=contents.directory.path,
        tensors={key: tensors.tensors[name] for key, name in by_key.items()},
        read=partial(_read, tensors, by_key),
        paths=tuple(map(contents.directory.name_of, contents.directory.names())),
        left_out=_left_out(contents, settings.root, only_tensors=not is_whole),
        build=build if is_whole else dict,
    )


def _check_memory(tensors: DirectoryTensors, names: Sequence[str], settings: ConvertSettings) -> None:
    """
    Raises:
        UnsupportedContentError: a tensor takes more memory than may be used.
    """
    most = settings.memory_nbytes or available_memory() // 2 or sys.maxsize
    for name in names:
        if (needed := tensors.memory_for(name)) > most:
            raise UnsupportedContentError(
                f"{tensors.where}: {name!r} takes {human_size(needed)} of memory, with its largest chunk, and "
                f"{human_size(most)} may be used: pass memory_nbytes of at least {needed}"
            )


def _read(
    tensors: DirectoryTensors, by_key: Mapping[str, str], keys: Sequence[str], progress: Progress
) -> list[FileBytes]:
    ends = [*accumulate((tensors.tensors[by_key[key]].nbytes for key in keys), initial=0)]
    return [
        tensor_bytes(tensors, by_key[key], partial(tell_part, progress, begin, ends[-1]))
        for key, begin in zip(keys, ends, strict=False)
    ]


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


def _left_out(contents: Contents, root: str | None, *, only_tensors: bool) -> tuple[str, ...]:
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


def left_out(source: Location, settings: ConvertSettings) -> tuple[str, ...]:
    """Metadata, and what is beside the root. Only the directory of a file is read, unless torch wrote it before 1.6."""
    files = {} if metadata_names(source) else files_at(source)
    if [*files.values()] != [None]:
        return ()
    with ExitStack() as stack:
        (one,) = open_files(files, stack, verify=settings.verify, rewrite=True)
        check_root(one.catalog, settings.root, one.file.where)
        names = [node.name for node in nodes(one.catalog.structure, one.file.where)]
        aside = () if settings.root is None else beside(names, settings.root)
        return (*aside, *metadata_in_words(one.catalog.metadata))


def write(source: Location, target: Location, settings: ConvertSettings, progress: Progress) -> SaveReport:
    """The progress is that of verifying the source."""
    started = time.perf_counter()
    if metadata_names(source):
        raise UnsupportedContentError(f"{name_of(source)}: it is a distributed checkpoint already; copy its directory")
    files = files_behind(source)
    if settings.verify:
        report = verify_source(weights_at(source) or source, backend=settings.backend, progress=progress)
        if not report.complete:
            warn_unverified(report.path)
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
    """Contents of a file, or of the files of a model. Tensors are mapped, unless torch wrote the file before 1.6."""
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
