"""One state of an LMDB file: what a transaction has committed, and how to tell it from others."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from fastensor.data.pages import HEAD_NBYTES, META_PAGES, TXNID_OFFSET, Geometry, Meta, parse_meta
from fastensor.errors import CorruptDatasetError, DatasetChangedError, FastensorError
from fastensor.files import posix

T = TypeVar("T")
_ATTEMPTS = 3
"""Attempts to read a file that changes meanwhile."""


@dataclass(frozen=True, slots=True)
class DatabaseSnapshot:
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

    def is_current(self, fd: int) -> bool:
        """True if this is the state of the file now.

        Commits are seen by their numbers: the time of change comes from a clock that ticks some hundred times a second,
        and, of what is written through a map, much later. It shows that another file was copied over this one.
        """
        status = os.fstat(fd)
        if (status.st_ino, status.st_size, status.st_mtime_ns) != (self.inode, self.nbytes, self.mtime_ns):
            return False
        at = self.meta.format.header_nbytes + TXNID_OFFSET
        numbers = (os.pread(fd, 8, at), os.pread(fd, 8, at + self.meta.page_size))
        return max(int.from_bytes(number, sys.byteorder) for number in numbers) == self.meta.txnid


def data_file(path: str | os.PathLike[str]) -> str:
    """The absolute path of the file that holds the data of an LMDB environment.

    Args:
        path: the directory of the environment, or the file itself.
    """
    found = os.path.abspath(path)
    return os.path.join(found, "data.mdb") if os.path.isdir(found) else found


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file for reading, in a block whose errors name the file.

    Yields:
        The descriptor, which is closed at the end of the block.

    Raises:
        CorruptDatasetError: the path leads to something else than a regular file; or the block has met the file's end.
        OSError: the file cannot be opened, or read in the block; ``filename`` is the path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptDatasetError(f"{path}: expected the data file of an LMDB environment, found no regular file")
        with naming(path):
            yield fd
    finally:
        posix.close_read_only(fd)


class naming:
    """Add the path to each ``OSError`` of the block that names no file. Takes a third of the time of a generator.

    Raises:
        CorruptDatasetError: a ``posix.EndOfFile`` has left the block.
    """

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, posix.EndOfFile):
            raise CorruptDatasetError(f"{self._path}: {error.strerror}: it was cut off") from error
        if isinstance(error, OSError) and error.filename is None:
            error.filename = self._path


def take(fd: int, path: str, txnid: int | None = None) -> DatabaseSnapshot:
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
    return DatabaseSnapshot(path, status.st_ino, status.st_size, status.st_mtime_ns, meta)


def read_unchanged(fd: int, path: str, read: Callable[[DatabaseSnapshot], T]) -> tuple[DatabaseSnapshot, T]:
    """Call a function with the newest snapshot of a file; returns its result and that snapshot. If the file is written
    to meanwhile, the function is called again.

    Raises:
        DatasetChangedError: the file was written to each time.
        CorruptDatasetError: ``read`` has raised it, and nobody has written to the file.
    """
    for _ in range(_ATTEMPTS):
        snapshot = take(fd, path)
        try:
            found = read(snapshot)
        except CorruptDatasetError:  # a writer has reused pages, or the file is damaged
            if take(fd, path) == snapshot:
                raise
        else:
            if take(fd, path) == snapshot:
                return snapshot, found
    what = f"it has changed {_ATTEMPTS} times while it was read; wait for the writer, or pin a snapshot (pin=True)"
    raise DatasetChangedError(f"{path}: {what}")


class Pin:
    """A read transaction of py-lmdb: while it is open, no writer reuses the pages of its snapshot.

    The transaction belongs to the process that has begun it. A forked child leaves it alone.

    Args:
        path: the data file.

    Raises:
        FastensorError: py-lmdb is not installed, or cannot open the environment.
    """

    def __init__(self, path: str) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise FastensorError("pinning a snapshot needs py-lmdb: install Fastensor with its extra lmdb") from error
        try:
            self._environment: Any = lmdb.open(readonly=True, create=False, readahead=False, **_environment_of(path))
            self._transaction = self._begin()
        except lmdb.Error as error:
            raise FastensorError(f"{path}: py-lmdb cannot pin a snapshot: {error}") from error
        self._process = os.getpid()

    @property
    def txnid(self) -> int:
        """The number of the transaction that has committed the snapshot."""
        number: int = self._transaction.id()
        return number

    def renew(self) -> None:
        """Pin the newest snapshot instead."""
        self._transaction.abort()
        self._transaction = self._begin()

    def _begin(self) -> Any:
        """A transaction of the newest snapshot."""
        import lmdb

        while True:
            try:
                return self._environment.begin()
            except lmdb.MapResizedError:  # a writer has let the file grow beyond what was mapped
                self._environment.set_mapsize(0)

    def close(self) -> None:
        """End the transaction."""
        if os.getpid() == self._process:
            self._transaction.abort()
            self._environment.close()


def take_pinned(fd: int, path: str, pin: Pin) -> DatabaseSnapshot:
    """The state of a file that a transaction pins: of the newest one, if writers have committed others since.

    Raises:
        DatasetChangedError: writers commit faster than their meta pages can be read.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(DatasetChangedError):
            snapshot = take(fd, path, pin.txnid)
            if take(fd, path, pin.txnid).meta == snapshot.meta:  # no writer has replaced the meta page meanwhile
                return snapshot
        pin.renew()
    raise DatasetChangedError(f"{path}: transactions are committed faster than its meta pages can be read")


def _environment_of(path: str) -> dict[str, Any]:
    """The arguments by which py-lmdb opens a data file, with the lock file that the writers of this file use."""
    directory, name = os.path.split(path)
    if name == "data.mdb" and not os.path.exists(f"{path}-lock"):
        return {"path": directory, "subdir": True}
    return {"path": path, "subdir": False}


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
