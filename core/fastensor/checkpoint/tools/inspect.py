"""``fastensor.inspect``: the contents of a checkpoint, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from fastensor.checkpoint.containers import Container, container_of
from fastensor.checkpoint.directories import metadata_names, nbytes_at
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.reading.opened import opened
from fastensor.checkpoint.tools.catalog import Inspection
from fastensor.checkpoint.tools.comparing import with_notes
from fastensor.checkpoint.tools.contents import describe
from fastensor.checkpoint.tools.folders import (
    OTHER_KINDS,
    FolderEntry,
    OtherKind,
    entries_at,
    folder_at,
    main_entry,
    name_behind,
    name_in,
)
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.arguments import checks_keywords


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
    raise with_notes(failures, "another file of the folder could not be listed")


def inspect_all(path: Location) -> tuple[Inspection, list[Exception]]:
    """:func:`inspect`, and why files of a folder could not be listed.

    Raises:
        Exception: as :func:`inspect`, if there is but one checkpoint and nothing beside it.
    """
    entries = entries_at(path)
    if len(entries) == 1:
        return describe(entries[0]), []
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


def _inspect_or_name(entry: FolderEntry) -> Inspection:
    """Contents of an entry of a folder; of what is no checkpoint, or can only be loaded whole, nothing but its size."""
    if entry.kind != "checkpoint" and entry.kind != "index":
        return _named(entry, entry.kind, entry.nbytes)
    try:
        return describe(entry)
    except UnsupportedContentError as error:
        return replace(_not_listed(entry), metadata={"not listed": str(error)})


def _not_listed(entry: FolderEntry) -> Inspection:
    if entry.kind == "index":
        return _named(entry, "huggingface", sum(map(nbytes_at, entry.files)))
    if metadata_names(entry.path):
        return _named(entry, "dcp", nbytes_at(entry.path))
    with opened(entry.path) as file:
        return _named(entry, container_of(file), file.nbytes)


def _named(
    entry: FolderEntry, container: Container | Literal["dcp", "huggingface"] | OtherKind, nbytes: int
) -> Inspection:
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
