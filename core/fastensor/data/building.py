"""The columns of an index: from a sidecar, or read from the data and kept in one."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal, TypeAlias

from fastensor.data import sidecar as sidecars
from fastensor.data import snapshot as snapshots
from fastensor.data.pages import MOST_FILE_NBYTES, Tree
from fastensor.data.sidecar import Columns
from fastensor.data.snapshot import DatabaseSnapshot
from fastensor.data.walk import Progress, TreeReader
from fastensor.errors import CorruptDatasetError, UnknownKeyError, UnsupportedDatasetError
from fastensor.files.atomic import NewFile

Sidecar: TypeAlias = Literal["auto"] | bool | str | os.PathLike[str]

_MOST_NAMES = 10
_MOST_DATABASES = 1000
"""A main database of more records is taken for one of data without a look at them."""
_logger = logging.getLogger("fastensor")


def kept_or_built(
    fd: int, snapshot: DatabaseSnapshot, name: bytes | None, sidecar: Sidecar, progress: Progress | None
) -> tuple[Columns, str | None]:
    """The index of a database, from a sidecar, or read from the data and kept in a sidecar.

    Args:
        fd: the data file.
        snapshot: its state.
        name: the name of the database; None for the main one.
        sidecar: where the index may be kept, as for :meth:`fastensor.data.LmdbIndex.open`.
        progress: is called while the index is built.

    Returns:
        The index, and the path of the sidecar; None if the index is in memory only.

    Raises:
        CorruptDatasetError: the file is damaged.
        UnsupportedDatasetError: the file is too large.
        UnknownKeyError: there is no such database.
        OSError: the data cannot be read, or the sidecar cannot be written and has to be.
    """
    places = _places(snapshot.path, name, sidecar)
    for path in places:
        if (kept := _kept(path, snapshot, name)) is not None:
            return kept, path
    failure: OSError | None = None
    for place in (*places, None):
        try:
            built = _built(place, fd, snapshot, name, progress)
        except OSError as error:
            if sidecar != "auto" or place is None:
                raise
            failure = error
        else:
            break
    if failure is not None:
        where = f"as {place}" if place is not None else "in memory, and built by each process"
        _say_once(f"{snapshot.path}: its index is kept {where}, because it cannot be kept beside: {failure}")
    return built, place


def _places(path: str, name: bytes | None, sidecar: Sidecar) -> list[str]:
    """Paths of a sidecar, the best one first."""
    if sidecar is False:
        return []
    if sidecar is True:
        return [sidecars.beside(path, name)]
    if sidecar == "auto":
        cached = sidecars.in_cache(path, name)
        return [sidecars.beside(path, name), *([] if cached is None else [cached])]
    return [os.fspath(sidecar)]


def _kept(place: str, snapshot: DatabaseSnapshot, name: bytes | None) -> Columns | None:
    """The index that a sidecar keeps, if it can be read and is the index of this snapshot."""
    try:
        with snapshots.opened(place) as fd:
            return sidecars.read(fd, snapshot, name)
    except (OSError, CorruptDatasetError):  # a sidecar that cannot be read is built anew, and then says why
        return None


def _built(
    place: str | None, fd: int, snapshot: DatabaseSnapshot, name: bytes | None, progress: Progress | None
) -> Columns:
    """The index, read from the data, and kept in a sidecar or in memory."""
    if place is None:
        with os.fdopen(os.memfd_create("fastensor-index", os.MFD_CLOEXEC), "wb") as memory:
            return _build(memory.fileno(), fd, snapshot, name, progress)
    os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
    with snapshots.naming(place), NewFile(place) as new:
        columns = _build(new.fd, fd, snapshot, name, progress)
        new.publish()
    return columns


def _build(target: int, fd: int, snapshot: DatabaseSnapshot, name: bytes | None, progress: Progress | None) -> Columns:
    """Read the trees of the data, and write the index into an empty file."""
    tree = _tree_of(fd, snapshot, name)
    if snapshot.nbytes > MOST_FILE_NBYTES:
        raise UnsupportedDatasetError(f"{snapshot.path}: {snapshot.nbytes} bytes, expected at most {MOST_FILE_NBYTES}")
    if tree.entries > snapshot.nbytes:
        raise CorruptDatasetError(f"{snapshot.path}: {tree.entries} records are said to be in {snapshot.nbytes} bytes")
    records = TreeReader(fd, snapshot.geometry, progress).records(tree)
    sidecars.write(target, snapshot, name, tree, records)
    columns = sidecars.read(target, snapshot, name, check=False)
    if columns is None:
        raise OSError(f"{snapshot.path}: the index that was written cannot be read")
    return columns


def _tree_of(fd: int, snapshot: DatabaseSnapshot, name: bytes | None) -> Tree:
    """The tree of a database.

    Raises:
        UnknownKeyError: there is no such database; or the main one has nothing but the names of others.
    """
    main, named = snapshot.meta.main, TreeReader(fd, snapshot.geometry).named(snapshot.meta.main)
    if name is not None:
        known = []
        for one, tree in named:
            if one == name:
                return tree
            known.append(one)
        raise UnknownKeyError(f"{snapshot.path}: there is no database {name!r}; the file has {_listed(known)}")
    if 0 < main.entries <= _MOST_DATABASES:
        known = [one for one, _ in named]
        if len(known) == main.entries:
            raise UnknownKeyError(f"{snapshot.path}: its records are in named databases; name one of {_listed(known)}")
    return main


def _listed(names: list[bytes]) -> str:
    shown = [*map(repr, names[:_MOST_NAMES]), *["…"][: len(names) > _MOST_NAMES]]
    return ", ".join(shown) or "none"


@cache
def _say_once(message: str) -> None:
    _logger.warning("%s", message)
