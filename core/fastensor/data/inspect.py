"""Contents of an LMDB file, for the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastensor.data import snapshot as snapshots
from fastensor.data.pages import DUP_FIXED, DUP_SORT, INTEGER_DUP, INTEGER_KEY, REVERSE_DUP, REVERSE_KEY, Tree
from fastensor.data.walk import TreeReader

_FLAGS = {
    REVERSE_KEY: "reversekey",
    DUP_SORT: "dupsort",
    INTEGER_KEY: "integerkey",
    DUP_FIXED: "dupfixed",
    INTEGER_DUP: "integerdup",
    REVERSE_DUP: "reversedup",
}


@dataclass(frozen=True, slots=True)
class LmdbDatabase:
    """A database in an LMDB file, as its tree's record describes it."""

    name: str | None
    """None for the main database, which lists the named ones among its records."""
    records: int
    flags: tuple[str, ...]
    """LMDB's names of the flags, such as ``dupsort``."""
    levels: int
    """The depth of the tree."""
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    """Pages of values that do not fit into leaf pages."""


@dataclass(frozen=True, slots=True)
class LmdbInspection:
    """The newest snapshot of an LMDB file."""

    path: str
    nbytes: int
    """The size of the file; of one that was written through a map, the size of the map."""
    data_version: int
    """1 of LMDB 0.9, or 3 of LMDB 1.0."""
    page_size: int
    used_pages: int
    """Pages up to the last one in use; free ones among them are counted."""
    transaction: int
    """The number of the transaction that was committed last."""
    databases: tuple[LmdbDatabase, ...]
    """The main database first."""


def inspect_lmdb(path: str | os.PathLike[str]) -> LmdbInspection:
    """Look into an LMDB file: reads its meta pages and its main database's, which lists the others.

    Args:
        path: the directory of the environment, or its data file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptDatasetError: the file is damaged, or no LMDB file.
        UnsupportedDatasetError: its version, byte order or encryption is not supported.
        DatasetChangedError: the file was written to while it was read.
    """
    file = snapshots.data_file(path)
    with snapshots.opened(file) as fd:
        snapshot, named = snapshots.read_unchanged(
            fd, file, lambda snapshot: list(TreeReader(fd, snapshot.geometry).named(snapshot.meta.main))
        )
    meta = snapshot.meta
    databases = tuple(_described(name, tree) for name, tree in [(None, meta.main), *named])
    used = meta.last_page + 1
    return LmdbInspection(file, snapshot.nbytes, meta.format.version, meta.page_size, used, meta.txnid, databases)


def _described(name: bytes | None, tree: Tree) -> LmdbDatabase:
    return LmdbDatabase(
        None if name is None else name.decode(errors="backslashreplace"),
        tree.entries,
        tuple(word for flag, word in _FLAGS.items() if tree.flags & flag),
        tree.depth,
        tree.branch_pages,
        tree.leaf_pages,
        tree.overflow_pages,
    )
