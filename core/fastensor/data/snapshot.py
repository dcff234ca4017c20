"""One state of an LMDB file: what a transaction has committed, and how to tell it from others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastensor.data.pages import HEAD_NBYTES, META_PAGES, Geometry, Meta, parse_meta
from fastensor.errors import CorruptDatasetError, DatasetChangedError
from fastensor.files import posix


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of a file. Two are equal if the file is the same and nothing was written to it in between."""

    path: str
    inode: int
    nbytes: int
    mtime_ns: int
    meta: Meta

    @property
    def geometry(self) -> Geometry:
        """The limits of references in this snapshot."""
        meta = self.meta
        pages = min(meta.last_page + 1, self.nbytes // meta.page_size)
        return Geometry(self.path, meta.format, meta.page_size, pages, meta.txnid)


def data_file(path: str | os.PathLike[str]) -> str:
    """The absolute path of the file that holds the data of an LMDB environment.

    Args:
        path: the directory of the environment, or the file itself.
    """
    found = os.path.abspath(path)
    return os.path.join(found, "data.mdb") if os.path.isdir(found) else found


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor for reading the file.

    Raises:
        CorruptDatasetError: the path leads to something else than a regular file.
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptDatasetError(f"{path}: expected the data file of an LMDB environment, found no regular file")
        yield fd
    finally:
        posix.close_read_only(fd)


def take(fd: int, path: str, txnid: int | None = None) -> Snapshot:
    """The newest state of a file; or the state that a transaction has committed.

    Args:
        fd: the file.
        path: its path, for messages.
        txnid: the number of the transaction, whose state a reader pins.

    Raises:
        CorruptDatasetError: the file is no LMDB file.
        UnsupportedDatasetError: it is one of a kind that is not read here.
        DatasetChangedError: the state of ``txnid`` is not in the file any more.
    """
    status = os.fstat(fd)
    metas = _metas(fd, path)
    if txnid is not None:
        metas = [meta for meta in metas if meta.txnid == txnid]
        if not metas:
            raise DatasetChangedError(f"{path}: it has no meta page of transaction {txnid} any more")
    meta = max(metas, key=lambda meta: meta.txnid)
    return Snapshot(path, status.st_ino, status.st_size, status.st_mtime_ns, meta)


def _metas(fd: int, path: str) -> list[Meta]:
    """The two meta pages. The second one may be unreadable in a file whose first commit was interrupted."""
    first = parse_meta(_head(fd, 0), path)
    second = parse_meta(_head(fd, first.page_size), path)
    if first.page_size != second.page_size or first.format != second.format:
        raise CorruptDatasetError(f"{path}: its two meta pages disagree about the size of pages or the data version")
    for meta in (first, second):
        if meta.last_page < META_PAGES - 1:
            raise CorruptDatasetError(f"{path}: a meta page says that the last page is page {meta.last_page}")
    return [first, second]


def _head(fd: int, offset: int) -> bytes:
    data = bytearray(HEAD_NBYTES)
    return bytes(data[: posix.read_fully(fd, memoryview(data), offset)])
