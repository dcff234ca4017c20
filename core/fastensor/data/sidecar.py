"""The file that keeps an index, so that it is built once, and shared by all processes that map it.

Layout, in the byte order of the machine, as LMDB's own: a header of 256 bytes, then three columns of 8 bytes a record:
offsets, lengths, and where the keys are. The header names the snapshot that the index is of, and has the CRC32 of
itself and of each column.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from platformdirs import user_cache_path

from fastensor.data.pages import Ints, Tree
from fastensor.data.snapshot import DatabaseSnapshot
from fastensor.data.walk import Records
from fastensor.files import posix

SUFFIX = ".fastensor-index"
_MAGIC = b"FSTLMDB1"
_HEADER_NBYTES = 256
_COLUMNS = 3
_FIXED = struct.Struct("=8s32s3Q2Q48sQ3I")
"""Magic number; digest of the database's name; inode, size and mtime_ns of the file; number of the transaction and
main root; the tree; the count of records; a CRC32 for each column."""


class Columns(NamedTuple):
    """An index, mapped read-only from its file."""

    tree: Tree
    offsets: Ints
    lengths: Ints
    keys: npt.NDArray[np.uint64]


def beside(path: str, name: bytes | None) -> str:
    """The sidecar in the folder of the data."""
    return path + SUFFIX if name is None else f"{path}.{_digest(name).hex()[:16]}{SUFFIX}"


def in_cache(path: str, name: bytes | None) -> str | None:
    """The sidecar in the user's cache; None if the user has none."""
    try:
        folder = user_cache_path("fastensor") / "indexes"
    except RuntimeError:  # a user without a home folder has no cache
        return None
    stem = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    return beside(str(folder / stem), name) if folder.is_absolute() else None


def write(fd: int, snapshot: DatabaseSnapshot, name: bytes | None, tree: Tree, records: Iterable[Records]) -> None:
    """Write an index into an empty file.

    Args:
        fd: the file.
        snapshot: what the index is of.
        name: the name of the database; None for the main one.
        tree: the database.
        records: its records, exactly as many as ``tree.entries``.
    """
    count, done = tree.entries, 0
    posix.truncate(fd, _HEADER_NBYTES + _COLUMNS * 8 * count)
    crcs = [0] * _COLUMNS
    for found in records:
        for number, column in enumerate((found.offsets, found.lengths, found.keys)):
            data = np.ascontiguousarray(column).data.cast("B")
            crcs[number] = isal_zlib.crc32(data, crcs[number])
            posix.write_fully(fd, data, _HEADER_NBYTES + 8 * (number * count + done))
        done += len(found.offsets)
    posix.write_fully(fd, memoryview(_header(snapshot, name, tree, crcs)), 0)


def read(fd: int, snapshot: DatabaseSnapshot, name: bytes | None, *, check: bool = True) -> Columns | None:
    """Map an index.

    Args:
        fd: its file, which may be closed then.
        snapshot: the state of the data that is wanted.
        name: the name of the database; None for the main one.
        check: whether to compare the CRC32s of the columns, which takes reading them.

    Returns:
        None if the file is damaged, or is the index of something else.
    """
    nbytes = os.fstat(fd).st_size
    if nbytes < _HEADER_NBYTES:
        return None
    mapped = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    header = mapped[:_HEADER_NBYTES]
    *_, tree_data, count, first, second, third = _FIXED.unpack_from(header)
    tree, crcs = Tree.parse(tree_data), [first, second, third]
    if header != _header(snapshot, name, tree, crcs) or nbytes != _HEADER_NBYTES + _COLUMNS * 8 * count:
        return None
    data = memoryview(mapped)[_HEADER_NBYTES:]
    parts = [data[8 * count * number : 8 * count * (number + 1)] for number in range(_COLUMNS)]
    if check and [isal_zlib.crc32(part) for part in parts] != crcs:
        return None
    offsets, lengths = (np.frombuffer(part, np.int64) for part in parts[:2])
    return Columns(tree, offsets, lengths, np.frombuffer(parts[2], np.uint64))


def _header(snapshot: DatabaseSnapshot, name: bytes | None, tree: Tree, crcs: list[int]) -> bytes:
    meta = snapshot.meta
    fixed = _FIXED.pack(
        _MAGIC,
        _digest(name),
        snapshot.inode,
        snapshot.nbytes,
        snapshot.mtime_ns,
        meta.txnid,
        meta.main.root,
        tree.packed(),
        tree.entries,
        *crcs,
    )
    return (fixed + struct.pack("=I", isal_zlib.crc32(fixed))).ljust(_HEADER_NBYTES, b"\0")


def _digest(name: bytes | None) -> bytes:
    return hashlib.sha256(b"" if name is None else b"=" + name).digest()
