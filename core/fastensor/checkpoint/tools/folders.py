"""The contents of a folder: checkpoints, and files that are none. Nothing in it is left out."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from fastensor.checkpoint.containers import container_in, start_of
from fastensor.checkpoint.directories import SHARD_NAMES, metadata_names
from fastensor.checkpoint.location import Location, locate
from fastensor.checkpoint.models.sharded import WEIGHT_MAP, files_in, find_weights, is_index, read_json, weights_at
from fastensor.checkpoint.ordering import wait_to_read_directory
from fastensor.checkpoint.reading.opened import OpenedFile, opened
from fastensor.errors import (
    CorruptCheckpointError,
    EmptyCheckpointError,
    FastensorError,
    NotACheckpointError,
    UnsupportedContentError,
)
from fastensor.files import new_directory, posix
from fastensor.stitch.signatures import is_plain_pickle, is_text

OtherKind: TypeAlias = Literal["text", "pickle", "link", "other"]
"""Kind of a file that is no checkpoint: a text; a pickle that torch.save did not write; a link to a directory that is
searched under its own path; anything else, such as a link to a directory elsewhere."""
OTHER_KINDS: frozenset[str] = frozenset(get_args(OtherKind))
Kind: TypeAlias = Literal["checkpoint", "index", OtherKind]
_Recognized: TypeAlias = Literal["checkpoint", "foreign", "unknown"]
_SHARD_SUFFIX = ".distcp"
_LEFT_BEHIND = (posix.TEMPORARY_SUFFIX, new_directory.SUFFIX, new_directory.ASIDE_SUFFIX, _SHARD_SUFFIX)
"""Endings of what a save has left that was killed, or that goes on; and of shards, if no metadata name them, of a
replaced checkpoint."""
_OF_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_OF_PICKLES = (".pkl", ".pickle")
_NOT_ENTERED = ".git"
"""A repository of Git has checksums of its own, and copies of what is in the folder."""


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A checkpoint, or a file that is none."""

    path: Location
    kind: Kind
    """``checkpoint`` is a file of torch or safetensors, or the directory of a distributed checkpoint; ``index`` a model
    in several files, which are no entries of their own."""
    nbytes: int = 0
    """Size of a file that is no checkpoint when its folder was searched: it may be gone since."""
    files: Mapping[Path, Set[str]] = field(default_factory=dict, compare=False)
    """The files of a model, and the names of the tensors that its index expects in each; empty if it cannot be read."""

    expected: Set[str] | None = field(default=None, compare=False)
    """The names of tensors that indexes expect in a file of a model, which :func:`members_of` has made an entry."""

    @property
    def is_checkpoint(self) -> bool:
        return self.kind not in OTHER_KINDS


def folder_at(location: Location) -> Path | None:
    """The folder of this machine that a location names, or that of the index that it names; None if it is neither."""
    found = locate(location) if isinstance(location, str | os.PathLike) else None
    if not isinstance(found, str):
        return None
    path = Path(found)
    if is_index(path):
        return path.parent
    return path if os.path.isdir(found) else None


def entries_at(location: Location) -> list[FolderEntry]:
    """Entries at a location: one file, one model, or all that is in a folder and its folders, ordered by path.

    Saves that this process has pending there are waited for. A folder without a checkpoint stands for itself: whoever
    opens it says what is wrong. Directories are searched, but not those that a link points to: the link is an entry.

    Raises:
        Exception: what such a save has failed with.
    """
    wait_to_read_directory(location)
    folder = folder_at(location)
    if folder is None:
        return [FolderEntry(location, "checkpoint")]
    path = Path(str(locate(location)))
    if is_index(path):
        return [replace(_index_at(path, 0), kind="index")]
    if os.path.samefile(folder, os.sep):  # all files of a machine are no checkpoint
        return [FolderEntry(location, "checkpoint")]
    found = sorted(_entries_below(folder), key=lambda entry: str(entry.path).split(os.sep))
    return found if any(entry.is_checkpoint for entry in found) else [FolderEntry(location, "checkpoint")]


def main_entry(location: Location, entries: Sequence[FolderEntry]) -> FolderEntry | None:
    """The entry whose tensors are named without the file that they are in: the only one, the distributed checkpoint
    that the location is, or the model that :func:`fastensor.load_sharded` would load. None if there is none."""
    if len(entries) == 1:
        return entries[0]
    found = folder_at(location) if metadata_names(location) else weights_at(location)
    return next((entry for entry in entries if entry.is_checkpoint and entry.path == found), None)


def members_of(entries: Sequence[FolderEntry]) -> list[FolderEntry]:
    """The files of entries, each of which is read once. An index that cannot be read is the only member of its model.
    A file that an index names is a checkpoint, whatever else it is: whoever opens it says what is wrong."""
    expected: dict[str, set[str]] = {}
    members = {str(entry.path): entry for entry in entries}
    for entry in entries:
        for file, names in entry.files.items():
            expected.setdefault(str(file), set()).update(names)
            members[str(file)] = FolderEntry(file, "checkpoint", expected=expected[str(file)])
    return [*members.values()]


def name_in(folder: Path | None, path: Location) -> str:
    """The name of a file in messages about its folder."""
    return os.path.relpath(str(path), folder) if folder is not None else str(path)


def name_behind(file: str, name: str) -> str:
    """The name of what is in a file of a folder.

    >>> name_behind("optimizer.bin", "state.0.step")
    'optimizer.bin: state.0.step'
    """
    return f"{file}: {name}"


def _entries_below(folder: Path) -> Iterator[FolderEntry]:
    """Entries of a folder and its folders, in no order."""
    root = Path(os.path.realpath(folder))
    claimed: set[Path] = set()
    """The files of models above, and of distributed checkpoints."""
    folders = [folder]
    while folders:
        here = folders.pop()
        try:
            names = os.listdir(here)
        except OSError:
            yield FolderEntry(here, "checkpoint")  # whoever opens it says what is wrong
            continue
        if shards := _shards_among(here, names):
            yield FolderEntry(here, "checkpoint")
        statuses = {here / name: _status_of(here / name) for name in names}
        files = {path: one.st_size for path, one in statuses.items() if one is not None and stat.S_ISREG(one.st_mode)}
        indexes = _without_copies(here, {path: _index_at(path, files[path]) for path in files if is_index(path)})
        yield from indexes.values()
        claimed.update(here / name for name in shards)
        claimed.update(*(index.files for index in indexes.values()))
        deeper = {path for path, status in statuses.items() if _is_searched(path, status)}
        folders += deeper
        done = indexes.keys() | deeper | (files.keys() & claimed)
        found = (_entry_at(path, status, root) for path, status in statuses.items() if path not in done)
        yield from (entry for entry in found if entry is not None)


def _is_searched(path: Path, status: os.stat_result | None) -> bool:
    """True if a directory is a folder in a folder."""
    is_directory = status is not None and stat.S_ISDIR(status.st_mode)
    return is_directory and not (_is_left(path.name) or path.name == _NOT_ENTERED or path.is_symlink())


def _entry_at(path: Path, status: os.stat_result | None, root: Path) -> FolderEntry | None:
    """Entry of what is no index, and no directory that is searched; None if a save has left it, and it is gone."""
    if status is None:
        return None if _is_left(path.name) else FolderEntry(path, "checkpoint")  # whoever opens it says what is wrong
    return FolderEntry(path, _kind_of(path, status, root), 0 if stat.S_ISDIR(status.st_mode) else status.st_size)


def _is_left(name: str) -> bool:
    """True if a save has left a file, or is writing it."""
    return name.endswith(_LEFT_BEHIND)


def _status_of(path: Path) -> os.stat_result | None:
    """None if a file is gone since it was listed, or cannot be reached."""
    try:
        return path.stat()
    except OSError:
        return None


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
    return {*metadata, *shards.intersection(map(os.fsdecode, re.findall(SHARD_NAMES, data)))}


def _index_at(path: Path, nbytes: int) -> FolderEntry:
    """The model of an index. One that cannot be read is an index, too: it is raised when the index is read by itself.
    A JSON object of anything else is a text."""
    try:
        index = read_json(path)
        return (
            FolderEntry(path, "index", nbytes, files_in(path, index))
            if WEIGHT_MAP in index
            else FolderEntry(path, "text", nbytes)
        )
    except (FastensorError, OSError):
        return FolderEntry(path, "index", nbytes)


def _without_copies(folder: Path, indexes: Mapping[Path, FolderEntry]) -> dict[Path, FolderEntry]:
    """The indexes in a folder. One that names the same tensors in the same files as another, such as that of a variant,
    is a text, so that a model counts once; that of the folder's model is none."""
    weights = find_weights(folder) if len(indexes) > 1 else None
    found: dict[Path, FolderEntry] = {}
    for path, entry in sorted(indexes.items(), key=lambda item: (item[0] != weights, item[0].name)):
        is_copy = bool(entry.files) and any(entry.files == other.files for other in found.values())
        found[path] = FolderEntry(path, "text", entry.nbytes) if is_copy else entry
    return found


def _kind_of(path: Path, status: os.stat_result, root: Path) -> Kind:
    """Kind of what is no index, and no directory that is searched. A file that cannot be opened counts as a checkpoint:
    whoever opens it says what is wrong.

    Args:
        path: of it.
        status: of it, or of what it links to.
        root: the folder that is searched, without symlinks.
    """
    if _is_left(path.name) or path.name == _NOT_ENTERED:
        return "other"
    if stat.S_ISDIR(status.st_mode):
        return "link" if Path(os.path.realpath(path)).is_relative_to(root) else "other"
    if not stat.S_ISREG(status.st_mode):
        return "other"
    suffix = path.suffix.lower()
    try:
        with opened(path) as file:
            start = start_of(file)
            return _kind_by(suffix, start, "unknown" if suffix in _OF_CHECKPOINTS else _recognized(file))
    except EmptyCheckpointError:
        return _kind_by(suffix, b"", "unknown")
    except OSError:
        return "checkpoint"


def _recognized(file: OpenedFile) -> _Recognized:
    """Kind of a file by its contents."""
    try:
        container = container_in(file)
    except NotACheckpointError:
        return "foreign"
    except CorruptCheckpointError:
        return "unknown"
    try:
        container.to_compare(file)
    except NotACheckpointError:  # an archive of something else
        return "foreign"
    except (CorruptCheckpointError, UnsupportedContentError):
        pass  # is raised when the file is read
    return "checkpoint"


def _kind_by(suffix: str, start: bytes, recognized: _Recognized) -> Kind:
    """Kind of a file, by the ending of its name, its first bytes and what its contents say. A file that its name calls
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
