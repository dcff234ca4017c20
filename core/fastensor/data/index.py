"""Index of an LMDB database: offsets and lengths of its records."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from fastensor.data import snapshot as snapshots
from fastensor.data.building import Sidecar, kept_or_built
from fastensor.data.pages import DUP_SORT, INTEGER_KEY, REVERSE_KEY, Ints, Tree, unpack_key
from fastensor.data.sidecar import Columns
from fastensor.data.snapshot import DatabaseSnapshot, Pin
from fastensor.data.walk import Progress
from fastensor.errors import DatasetChangedError, UnknownKeyError
from fastensor.files import posix
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted


@checks_keywords
class LmdbIndex:
    """Index of an LMDB database: the offset of each record in the file, in the order of the database. Immutable.

    The arrays are mapped, so processes share their memory. Any thread may use an index, and a forked child may. A
    pickled index names its file: whoever unpickles it opens the same file, and gets an error if the data has changed.

    Use :meth:`open` to make one. Values are read from :attr:`path` by whatever means; this class reads keys only. It
    keeps the file open until :meth:`close`, the end of its ``with``, or until it is forgotten.
    """

    path: str
    """The data file."""
    offsets: Ints
    """Offset of each value in the file, in bytes: int64, read-only."""
    lengths: Ints
    """The bytes of value i: int64, read-only, one for each record."""
    sidecar: str | None
    """The file that keeps the index; None if it is in memory only."""
    page_size: int
    """The bytes of a page. A value on overflow pages begins 16 or 24 bytes after the start of a page."""
    fingerprint: str
    """Identifies the file and its contents: inode, size, time of change, number of the transaction, roots of the trees.
    The device is left out: machines that share a filesystem number it differently."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        db: str | bytes | None = None,
        sidecar: Sidecar = "auto",
        progress: Progress | None = None,
        pin: bool = False,
    ) -> Self:
        """Read the index of a database from its sidecar; or from the data, if there is no sidecar of its present state.

        Args:
            path: the directory of the environment, or its data file.
            db: the name of a database in the environment; None for the main one.
            sidecar: where the index is kept. ``"auto"``: beside the data; in the user's cache if that folder cannot be
                written to; in memory if neither can. True: beside the data, or it is an error. False: in memory. A
                path: there, or it is an error.
            progress: is called while the index is built, with the pages that were read so far and those in all.
            pin: keep the snapshot as it is while others write to the file, until :meth:`close`: writers do not reuse
                its pages, so the file grows. Needs py-lmdb (the extra ``lmdb``). A pickled copy, and a forked child,
                rely on the index that has pinned the snapshot.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptDatasetError: the file is damaged, or no LMDB file.
            UnsupportedDatasetError: its version, byte order or encryption is not supported.
            UnknownKeyError: there is no database of that name.
            DatasetChangedError: the file is being written to. ``pin=True`` helps.
            FastensorError: the snapshot cannot be pinned.
            OSError: the file cannot be read, or the sidecar cannot be written and has to be.
        """
        file = snapshots.data_file(path)
        name = db.encode() if isinstance(db, str) else db
        sidecar = sidecar if isinstance(sidecar, bool) or sidecar == "auto" else os.path.abspath(sidecar)
        with snapshots.opened(file) as fd:
            if pin:
                return cls._open_pinned(fd, file, name, sidecar, progress)
            snapshot, (columns, place) = snapshots.read_unchanged(
                fd, file, lambda snapshot: kept_or_built(fd, snapshot, name, sidecar, progress)
            )
            return cls(os.dup(fd), snapshot, columns, place, opened_by=(db, sidecar))

    @classmethod
    def _open_pinned(cls, fd: int, file: str, name: bytes | None, sidecar: Sidecar, progress: Progress | None) -> Self:
        pin = Pin(file)
        try:
            snapshot = snapshots.take_pinned(fd, file, pin)
            columns, place = kept_or_built(fd, snapshot, name, sidecar, progress)
            return cls(os.dup(fd), snapshot, columns, place, pin=pin)
        except BaseException:
            pin.close()
            raise

    def __init__(
        self,
        fd: int,
        snapshot: DatabaseSnapshot,
        columns: Columns,
        place: str | None,
        *,
        opened_by: tuple[str | bytes | None, Sidecar] | None = None,
        pin: Pin | None = None,
        pinned: bool = False,
    ) -> None:
        self._fd = fd
        self._closing = weakref.finalize(self, _close, fd, pin)
        self._snapshot, self._columns, self._opened_by = snapshot, columns, opened_by
        self._pinned = pinned or pin is not None
        self.path = snapshot.path
        self.sidecar = place
        self.offsets, self.lengths = columns.offsets, columns.lengths
        self.page_size = snapshot.meta.page_size
        self.fingerprint = _fingerprint(snapshot, columns.tree)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let writers reuse the pages of a pinned snapshot. The arrays stay as they are."""
        self._closing()

    def __len__(self) -> int:
        return len(self.offsets)

    @shown
    def __repr__(self) -> str:
        return f" of {counted(len(self), 'records')} in {self.path}{'' if self._closing.alive else ', closed'}"

    def fileno(self) -> int:
        """The descriptor of the data file. It belongs to the index.

        Raises:
            ValueError: the index is closed.
        """
        self._check_open()
        return self._fd

    def check_unchanged(self) -> None:
        """Check that nobody has written to the open file since it was indexed: what was read until now is right.

        Takes some microseconds, and no reads of the disk. Does nothing for a pinned snapshot.

        Raises:
            DatasetChangedError: somebody has written to the file.
            OSError: the file cannot be read.
        """
        if not self._pinned and not self._snapshot.is_current(self._fd):
            raise DatasetChangedError(f"{self.path}: it was written to since it was indexed; open it anew")

    def key(self, position: int) -> bytes:
        """The key of a record, read from the file.

        Raises:
            IndexError: there is no such record.
            CorruptDatasetError: the file was cut off.
            OSError: the file cannot be read.
            ValueError: the index is closed.
        """
        offset, nbytes = unpack_key(int(self._columns.keys[position]))
        return self._read(offset, nbytes)

    def keys(self) -> Iterator[bytes]:
        """The keys of all records, in order; a key with several values comes as often."""
        places = (unpack_key(int(packed)) for packed in self._columns.keys)
        for page, some in itertools.groupby(places, lambda place: place[0] // self.page_size):
            data = self._read(page * self.page_size, self.page_size)
            for offset, nbytes in some:
                at = offset - page * self.page_size
                yield data[at : at + nbytes]

    def find(self, key: bytes) -> range:
        """The positions of the records of a key: one, or several in a database of duplicates.

        Takes about log2(n) reads of a key.

        Raises:
            TypeError: the key is no bytes.
            UnknownKeyError: there is no such key.
        """
        if not isinstance(key, bytes | bytearray | memoryview):
            raise TypeError(f"a key is bytes, found {key!r}: encode it as whoever has written the database did")
        key = bytes(key)
        order = _order(self._columns.tree)
        positions, wanted = range(len(self)), order(key)
        first = bisect.bisect_left(positions, wanted, key=lambda position: order(self.key(position)))
        if first == len(self) or self.key(first) != key:
            raise UnknownKeyError(f"{self.path}: no record has the key {key!r}")
        if not self._columns.tree.flags & DUP_SORT:
            return range(first, first + 1)
        return range(first, bisect.bisect_right(positions, wanted, lo=first, key=lambda place: order(self.key(place))))

    def _read(self, offset: int, nbytes: int) -> bytes:
        self._check_open()
        with snapshots.naming(self.path):
            data = os.pread(self._fd, nbytes, offset)
            return data if len(data) == nbytes else posix.read_exactly(self._fd, offset, nbytes)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise ValueError(f"{self.path}: its index is closed")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.sidecar is not None and self._opened_by is not None:
            return _reopened, (type(self), self.path, *self._opened_by, self.fingerprint)
        return _restored, (type(self), self._snapshot, self._columns, self._pinned)


def _reopened(cls: type[LmdbIndex], path: str, db: str | bytes | None, sidecar: Sidecar, fingerprint: str) -> LmdbIndex:
    index = cls.open(path, db, sidecar)
    if index.fingerprint != fingerprint:
        index.close()
        raise _changed(path)
    return index


def _restored(cls: type[LmdbIndex], snapshot: DatabaseSnapshot, columns: Columns, pinned: bool) -> LmdbIndex:
    for column in columns[1:]:
        column.flags.writeable = False
    with snapshots.opened(snapshot.path) as fd:
        # a pinned snapshot may be an earlier state of the file
        if not (os.fstat(fd).st_ino == snapshot.inode if pinned else snapshot.is_current(fd)):
            raise _changed(snapshot.path)
        return cls(os.dup(fd), snapshot, columns, None, pinned=pinned)


def _changed(path: str) -> DatasetChangedError:
    return DatasetChangedError(f"{path}: it was written to, or replaced, since its index was pickled; open it anew")


def _close(fd: int, pin: Pin | None) -> None:
    posix.close_read_only(fd)
    if pin is not None:
        pin.close()


def _fingerprint(snapshot: DatabaseSnapshot, tree: Tree) -> str:
    meta = snapshot.meta
    numbers = (snapshot.inode, snapshot.nbytes, snapshot.mtime_ns, meta.txnid, meta.main.root, tree.root)
    return "lmdb:" + "-".join(f"{number:x}" for number in numbers)


def _order(tree: Tree) -> Any:
    """Sort key that gives a database's order of keys."""
    if tree.flags & REVERSE_KEY:
        return lambda key: key[::-1]
    if tree.flags & INTEGER_KEY:
        return lambda key: int.from_bytes(key, sys.byteorder)
    return bytes
