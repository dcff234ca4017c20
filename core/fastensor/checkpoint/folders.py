"""What is in a folder: checkpoints, and files that are none. Nothing in it is left out."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from fastensor.checkpoint.archive import read_archive
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location, locate
from fastensor.checkpoint.opened import OpenedFile, container_of, opened, read_exactly
from fastensor.checkpoint.ordering import wait_to_read_directory
from fastensor.checkpoint.sharded import files_of, is_index, weights_at
from fastensor.errors import (
    CorruptCheckpointError,
    EmptyCheckpointError,
    FastensorError,
    NotACheckpointError,
)
from fastensor.files import new_directory, posix
from fastensor.stitch.containers import SNIFFED_NBYTES, is_plain_pickle, is_text

OtherKind: TypeAlias = Literal["text", "pickle", "other"]
"""What a file is that is no checkpoint: a text; a pickle that torch.save did not write; anything else."""
Kind: TypeAlias = Literal["checkpoint", "index", OtherKind]
_Recognized: TypeAlias = Literal["checkpoint", "foreign", "unknown"]
_SHARD_SUFFIX = ".distcp"
_BESIDE_SHARDS = "meta.pt"
_LEFT_BEHIND = (posix.TEMPORARY_SUFFIX, new_directory.SUFFIX, _SHARD_SUFFIX)
"""Endings of what a save has left that was killed, or that goes on; and of shards, if no metadata name them, of a
replaced checkpoint."""
_OF_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_OF_PICKLES = (".pkl", ".pickle")
_NOT_ENTERED = ".git"
"""A repository of Git has checksums of its own, and copies of what is in the folder."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint, or a file that is none."""

    path: Location
    kind: Kind
    """``checkpoint`` is a file of torch or safetensors, or the directory of a distributed checkpoint; ``index`` a model
    in several files, which are no entries of their own."""

    @property
    def is_checkpoint(self) -> bool:
        return self.kind in ("checkpoint", "index")


@dataclass(frozen=True, slots=True)
class Member:
    """A file, or the directory of a distributed checkpoint, that is read by itself."""

    path: Location
    kind: Kind
    expected: frozenset[str] | None = None
    """The names of tensors that an index expects in it, if not None."""


def folder_at(location: Location) -> Path | None:
    """The folder of this machine that a location names, or that of the index that it names; None if it is neither."""
    found = locate(location) if isinstance(location, str | os.PathLike) else None
    if not isinstance(found, str):
        return None
    path = Path(found)
    if is_index(path):
        return path.parent
    return path if os.path.isdir(found) else None


def entries_at(location: Location) -> list[Entry]:
    """What a location names: one file, one model, or all that is in a folder and its folders, ordered by path.

    Saves that this process has pending there are waited for. A folder with nothing but texts in it stands for
    itself: whoever opens it says what is wrong.

    Raises:
        Exception: what such a save has failed with.
    """
    wait_to_read_directory(location)
    folder = folder_at(location)
    if folder is None:
        return [Entry(location, "checkpoint")]
    path = Path(str(locate(location)))
    if is_index(path):
        return [Entry(path, "index")]
    if os.path.samefile(folder, os.sep):  # all files of a machine are no checkpoint
        return [Entry(location, "checkpoint")]
    found = [*_entries_in(folder, frozenset(), frozenset())]
    return found if any(entry.kind != "text" for entry in found) else [Entry(location, "checkpoint")]


def main_entry(location: Location, entries: Sequence[Entry]) -> Entry | None:
    """The entry whose tensors are named without the file that they are in: the only one, the distributed checkpoint
    that the location is, or the model that :func:`fastensor.load_sharded` would load. None if there is none."""
    if len(entries) == 1:
        return entries[0]
    found = folder_at(location) if metadata_names(location) else weights_at(location)
    return next((entry for entry in entries if found is not None and entry.path == found), None)


def members_of(entry: Entry) -> list[Member]:
    """The files of an entry. An index that cannot be read is the only member of its model."""
    if entry.kind != "index":
        return [Member(entry.path, entry.kind)]
    index = Path(str(entry.path))
    return [*(Member(file, "checkpoint", names) for file, names in _expected_by(index).items()), Member(index, "index")]


def name_in(folder: Path | None, path: Location) -> str:
    """The name of a file in messages about its folder."""
    return os.path.relpath(str(path), folder) if folder is not None else str(path)


def name_behind(file: str, name: str) -> str:
    """The name of what is in a file of a folder.

    >>> name_behind("optimizer.bin", "state.0.step")
    'optimizer.bin: state.0.step'
    """
    return f"{file}: {name}"


def _expected_by(index: Path) -> dict[Path, frozenset[str]]:
    try:
        return {file: frozenset(names) for file, names in files_of(index).items()}
    except (FastensorError, OSError):  # is raised when the index is read by itself
        return {}


def _entries_in(folder: Path, above: frozenset[str], claimed: frozenset[Path]) -> Iterator[Entry]:
    """
    Args:
        folder: is searched.
        above: the folders that it was reached through, without symlinks: one of them is not entered again.
        claimed: what belongs to models above.
    """
    real = os.path.realpath(folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        yield Entry(folder, "checkpoint")  # whoever opens it says what is wrong
        return
    shards = _shards_among(folder, names)
    if shards:
        yield Entry(folder, "checkpoint")
    indexes = [folder / name for name in names if is_index(folder / name)]
    claimed |= {folder / name for name in shards}.union(*map(_expected_by, indexes))
    for name in names:
        path = folder / name
        if path in claimed:
            continue
        if name == _NOT_ENTERED or name.endswith(_LEFT_BEHIND):
            yield Entry(path, "other")
        elif not os.path.isdir(path):
            yield Entry(path, _kind_of(path))
        elif os.path.realpath(path) not in above | {real}:
            yield from _entries_in(path, above | {real}, claimed)


def _shards_among(folder: Path, names: Sequence[str]) -> set[str]:
    """The files in a folder that belong to its distributed checkpoint; none if it is no such folder. Shards without
    metadata are what is left of one."""
    metadata = metadata_names(folder)
    shards = {name for name in names if name.endswith(_SHARD_SUFFIX)}
    if not metadata:
        return shards
    data = b""
    with contextlib.suppress(OSError):  # whoever opens the checkpoint says what is wrong
        data = b"".join((folder / name).read_bytes() for name in metadata)
    named = {name for name in shards if os.fsencode(name) in data}
    return {*metadata, *named, *{_BESIDE_SHARDS}.intersection(names)}


def _kind_of(path: Path) -> Kind:
    """What a file is. A file that cannot be opened counts as a checkpoint: whoever opens it says what is wrong."""
    if is_index(path):
        return "index"
    suffix = path.suffix.lower()
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "other"
        with opened(path) as file:
            start = read_exactly(file, 0, min(SNIFFED_NBYTES, file.nbytes))
            return _kind_by(suffix, start, "unknown" if suffix in _OF_CHECKPOINTS else _recognized(file))
    except EmptyCheckpointError:
        return _kind_by(suffix, b"", "unknown")
    except OSError:
        return "checkpoint"


def _recognized(file: OpenedFile) -> _Recognized:
    """What the contents of a file say."""
    try:
        container = container_of(file)
    except NotACheckpointError:
        return "foreign"
    except CorruptCheckpointError:
        return "unknown"
    try:
        if container == "torch":
            read_archive(file)
    except NotACheckpointError:  # an archive of something else
        return "foreign"
    except CorruptCheckpointError:
        pass  # is raised when the file is read
    return "checkpoint"


def _kind_by(suffix: str, start: bytes, recognized: _Recognized) -> Kind:
    """What a file is, by the ending of its name, its first bytes and what its contents say. A file that its name calls
    a checkpoint is a damaged one if nothing says that it is something else.

    >>> _kind_by(".json", b"{}", "unknown"), _kind_by(".pt", b"\\0", "unknown"), _kind_by(".npz", b"PK\\3", "foreign")
    ('text', 'checkpoint', 'other')
    """
    if is_plain_pickle(start):
        return "pickle"
    if recognized == "checkpoint" or suffix in _OF_CHECKPOINTS:
        return "checkpoint"
    if suffix in _OF_PICKLES:
        return "pickle" if recognized == "foreign" else "checkpoint"
    return "text" if is_text(start) else "other"
