"""``fastensor.inspect``: the contents of a checkpoint, as a record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from fastensor.checkpoint.catalog import Catalog, TensorInfo, read_catalog, ties_in
from fastensor.checkpoint.directories import metadata_names, nbytes_in_directory
from fastensor.checkpoint.folders import (
    OTHER_KINDS,
    Entry,
    OtherKind,
    entries_at,
    folder_at,
    main_entry,
    name_behind,
    name_in,
)
from fastensor.checkpoint.foreign_code import refused_globals
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.opened import container_of, opened
from fastensor.checkpoint.sharded import check_holds, files_in, read_json
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import counted, human_size, some_of
from fastensor.stitch.containers import Container

_SHOWN = 5
"""So many names are shown in words."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    path: str
    container: Container | Literal["dcp", "huggingface", "folder"] | OtherKind
    """``dcp`` is a distributed checkpoint, ``huggingface`` a model in several files: their parts are files. ``folder``
    is any other folder of several checkpoints. In a folder, names stand behind the path of their file
    (``optimizer.bin: state.0.step``), but for those of the distributed checkpoint that it is, or of the model that
    :func:`fastensor.load_sharded` finds there."""
    nbytes: int
    """Size of the file, or of all files."""
    checked: bool
    """Whether the file carries checksums of its tensors. :func:`fastensor.verify` compares them."""
    tensors: tuple[TensorInfo, ...]
    others: Mapping[str, str]
    """Everything that is not a tensor: names, and values in words."""
    metadata: Mapping[str, str]
    """The ``__metadata__`` of a safetensors file, without our checksums. Of a model in several files, what its index
    says. Of a distributed checkpoint, how many files it has, and the version and the identity of its save."""
    refused: tuple[str, ...]
    """Classes and functions that the file needs and ``weights_only=True`` refuses. If it refuses the pickle as a whole,
    the reason."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of tensors that share bytes."""
    memory_bytes: int
    """What the tensors take when they are loaded: those that share memory once, and of views all that they are views
    of."""
    files: Mapping[str, Inspection] = field(default_factory=dict)
    """What each file in a folder holds, by its path in the folder; empty if there is but one. Files that are no
    checkpoints are among them (``text``, ``pickle``, ``link``, ``other``). Of those that can only be loaded whole,
    ``metadata`` says so."""

    __repr__ = record_repr

    def __str__(self) -> str:
        """What there is for people, in a few lines; ``fastensor inspect`` shows all of it."""
        checked = "with checksums" if self.checked else "without checksums"
        lines = [
            f"{without_secrets(self.path)}: {self.container}, {human_size(self.nbytes)}, {checked}",
            f"{counted(len(self.tensors), 'tensors')} of {human_size(self.tensor_bytes)}, "
            f"{human_size(self.memory_bytes)} in memory; {counted(len(self.others), 'other values')}",
        ]
        if self.files:
            lines.append(f"{counted(len(self.files), 'files')}: {some_of([*self.files], _SHOWN)}")
        if self.refused:
            lines.append(f"weights_only=True refuses: {some_of(self.refused, _SHOWN)}")
        return "\n".join(lines)

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together. Tied tensors count once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors)


@checks_keywords
def inspect(path: Location) -> Inspection:
    """List what a checkpoint holds, without reading a tensor.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`; or
            ``*.index.json`` of a model in several files; or a folder of this machine, of which all is listed, with its
            folders; or the directory of a checkpoint of ``torch.distributed.checkpoint`` at a URL.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged or cut off; or not that of the index. Notes (``__notes__``) say
            which other files of a folder could not be listed.
        NotACheckpointError: the file is something else than a checkpoint; the message says what.
        UnsupportedContentError: the file can only be loaded whole (files of torch before 1.6, TorchScript).
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.

    No code of the file is run and none of its classes is imported: this is safe for any file.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> _ = fastensor.save({"weight": torch.ones(5, 2), "epoch": 3}, path)
    >>> found = fastensor.inspect(path)
    >>> [(tensor.name, tensor.shape, tensor.nbytes) for tensor in found.tensors], found.others, found.checked
    ([('weight', (5, 2), 40)], {'epoch': '3'}, True)
    """
    found, failures = inspect_all(path)
    if not failures:
        return found
    first, *others = failures
    for other in others:
        first.add_note(f"another file of the folder could not be listed: {other}")
    raise first


def inspect_all(path: Location) -> tuple[Inspection, list[Exception]]:
    """:func:`inspect`, and why files of a folder could not be listed.

    Raises:
        Exception: as :func:`inspect`, if there is but one checkpoint and nothing beside it.
    """
    entries = entries_at(path)
    if len(entries) == 1:
        return _inspect_entry(entries[0]), []
    main, folder = main_entry(path, entries), folder_at(path)
    files: dict[str, Inspection] = {}
    failures: list[Exception] = []
    main_name = ""
    for entry in entries:
        name = name_in(folder, entry.path)
        main_name = name if entry is main else main_name
        try:
            files[name] = _inspect_or_name(entry)
        except (CorruptCheckpointError, NotACheckpointError, OSError) as error:
            failures.append(error)
    return _joined(name_of(path), files, main_name), failures


def _inspect_entry(entry: Entry) -> Inspection:
    if entry.kind == "index":
        return _inspect_sharded(Path(str(entry.path)))
    if metadata_names(entry.path):
        from fastensor.checkpoint.dcp.catalog import inspect_directory  # loads torch.distributed.checkpoint

        return inspect_directory(cast(str, entry.path))
    return _inspect_file(entry.path)


def _inspect_or_name(entry: Entry) -> Inspection:
    """Contents of an entry of a folder; of what is no checkpoint, or can only be loaded whole, nothing but its size."""
    if entry.kind != "checkpoint" and entry.kind != "index":
        return _named(entry, entry.kind, entry.nbytes)
    try:
        return _inspect_entry(entry)
    except UnsupportedContentError as error:
        return replace(_not_listed(entry), metadata={"not listed": str(error)})


def _not_listed(entry: Entry) -> Inspection:
    where = str(entry.path)
    if entry.kind == "index":
        return _named(entry, "huggingface", sum(os.stat(file).st_size for file in entry.files))
    if metadata_names(entry.path):
        return _named(entry, "dcp", nbytes_in_directory(where))
    with opened(entry.path) as file:
        return _named(entry, container_of(file), file.nbytes)


def _named(entry: Entry, container: Container | Literal["dcp", "huggingface"] | OtherKind, nbytes: int) -> Inspection:
    return Inspection(str(entry.path), container, nbytes, False, (), {}, {}, (), (), 0)


def _joined(path: str, files: Mapping[str, Inspection], main: str) -> Inspection:
    """Contents of a folder.

    Args:
        path: of the folder.
        files: in it.
        main: the one whose names need no path in front of them; empty if there is none.
    """
    checkpoints = {name: one for name, one in files.items() if one.container not in OTHER_KINDS}
    if [*checkpoints] == [main]:
        return replace(checkpoints[main], files=files)
    named = [one if name == main else _behind(name, one) for name, one in checkpoints.items()]
    model = checkpoints.get(main)
    model = model if model is not None and model.container in ("dcp", "huggingface") else None
    return Inspection(
        path=path if model is None else model.path,
        container="folder" if model is None else model.container,
        nbytes=sum(one.nbytes for one in named),
        checked=bool(named) and all(one.checked for one in named),
        tensors=tuple(tensor for one in named for tensor in one.tensors),
        others={name: text for one in named for name, text in one.others.items()},
        metadata={name: text for one in named for name, text in one.metadata.items()},
        refused=tuple(dict.fromkeys(name for one in named for name in one.refused)),
        ties=tuple(group for one in named for group in one.ties),
        memory_bytes=sum(one.memory_bytes for one in named),
        files=files,
    )


def _behind(file: str, found: Inspection) -> Inspection:
    """Contents of a file, with the path of the file in front of all names."""

    def behind(names: Mapping[str, str]) -> dict[str, str]:
        return {name_behind(file, name): text for name, text in names.items()}

    return replace(
        found,
        tensors=tuple(
            replace(one, name=name_behind(file, one.name), part=name_behind(file, one.part)) for one in found.tensors
        ),
        others=behind(found.others),
        metadata=behind(found.metadata),
        ties=tuple(tuple(name_behind(file, name) for name in group) for group in found.ties),
    )


def _inspect_file(path: Location) -> Inspection:
    with opened(path) as file:
        catalog = read_catalog(file, verify=True)
        return Inspection(
            path=file.where,
            container=catalog.container,
            nbytes=file.nbytes,
            checked=catalog.checked,
            tensors=tuple(catalog.tensors.values()),
            others=catalog.others,
            metadata=catalog.metadata,
            refused=refused_globals(catalog.globals) if catalog.container == "torch" else (),
            ties=tuple(map(tuple, ties_in(catalog.located))),
            memory_bytes=_memory_bytes(catalog),
        )


def _memory_bytes(catalog: Catalog) -> int:
    storages = {one.part.name: one.part.nbytes for one in catalog.located.values()}
    others = (info.nbytes for name, info in catalog.tensors.items() if name not in catalog.located)
    return sum(storages.values()) + sum(others)


def _inspect_sharded(index: Path) -> Inspection:
    """The contents of a model in several files.

    Raises:
        CorruptCheckpointError: a file does not hold what the index expects there.
    """
    contents = read_json(index)
    expected_of = files_in(index, contents)
    files = {path: _inspect_file(path) for path in expected_of}
    tensors: list[TensorInfo] = []
    others: dict[str, str] = {}
    for path, expected in expected_of.items():
        found = {tensor.name: tensor for tensor in files[path].tensors}
        check_holds(str(path), found, expected)
        shard = name_in(index.parent, path)
        tensors += [replace(one, part=shard) for one in found.values() if one.name in expected]
        others |= {name_behind(shard, name): text for name, text in files[path].others.items()}
    return Inspection(
        path=str(index),
        container="huggingface",
        nbytes=sum(one.nbytes for one in files.values()),
        checked=all(one.checked for one in files.values()),
        tensors=tuple(tensors),
        others=others,
        metadata={"files": str(len(files)), **_metadata_in(contents)},
        refused=tuple(dict.fromkeys(name for one in files.values() for name in one.refused)),
        ties=tuple(group for one in files.values() for group in one.ties),
        memory_bytes=sum(one.memory_bytes for one in files.values()),
    )


def _metadata_in(index: Mapping[str, Any]) -> dict[str, str]:
    found = index.get("metadata")
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}
