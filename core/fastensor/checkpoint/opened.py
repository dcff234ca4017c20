"""A checkpoint that is open for reading, wherever it is."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from fastensor.backends import registry, stream
from fastensor.backends.base import Extent
from fastensor.backends.fallback import Fallback, announce, record_fallback
from fastensor.backends.memory import map_file
from fastensor.checkpoint.borrowed import BorrowedFile
from fastensor.checkpoint.directories import METADATA_NAME, metadata_names
from fastensor.checkpoint.location import Location, RemotePath, can, locate, name_of
from fastensor.checkpoint.ordering import wait_to_read
from fastensor.checkpoint.read_options import NO_LOCAL_FILE, OpenedReader, ReadOptions
from fastensor.checkpoint.remote import OnlyWholeError, RemoteFile, download
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    EmptyCheckpointError,
    caught_as,
)
from fastensor.files import posix
from fastensor.files.os_errors import read_errors
from fastensor.select.context import Context
from fastensor.select.rule import RESIDENT_FRACTION, choose_reader
from fastensor.select.transfer import Transfer

_BUFFERED: tuple[Any, ...] = (io.BufferedReader, io.BufferedRandom)
_NEARLY_ALL = 0.9
"""Reading this fraction of a file is learned as reading the whole file, so that it compares with writing the file."""


class OpenedFile(Protocol):
    """Random access to the bytes of a checkpoint. Used by one thread."""

    @property
    def where(self) -> str:
        """The file's name, for messages."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def path(self) -> str | None:
        """Its path on a local filesystem, for libraries that open it themselves; None if it has none."""

    @property
    def resident_fraction(self) -> float:
        """Part of the file that was in the page cache when it was opened, estimated."""

    @property
    def borrowed(self) -> BorrowedFile | None:
        """The caller's open file, whose position the load leaves as torch does; None if the caller gave a name."""

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the number of bytes read, fewer only at the end of the file."""

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        """Open a backend reader that reads these extents fast in this order. Backends that cannot are added to
        ``fallbacks``."""


class LocalFile:
    """A regular file of this machine.

    Args:
        copied: why the file is read from a local copy, if it is one of a remote file.
        borrowed: the caller's file, if the caller has opened it. Reading from ``fd`` does not move its position.
    """

    def __init__(
        self, fd: int, where: str, *, copied: Fallback | None = None, borrowed: BorrowedFile | None = None
    ) -> None:
        self._fd = fd
        self._copied = copied
        self.borrowed = borrowed
        self.where = where
        # by its name, another file might be there by now
        self.path = f"/proc/self/fd/{fd}" if posix.has_proc() else where
        self._status = os.fstat(fd)
        self.nbytes = self._status.st_size
        self.resident_fraction = posix.resident_fraction(fd, self.nbytes)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        return posix.read_fully(self._fd, buffer, offset)

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        if self._copied is not None and self._copied not in fallbacks:
            fallbacks.append(self._copied)
        nbytes = sum(extent.end - extent.begin for extent in order)
        context = Context("read", options.device, warm=self.resident_fraction >= RESIDENT_FRACTION)
        default = choose_reader(nbytes, self.resident_fraction)
        learned_as = self.nbytes if nbytes >= _NEARLY_ALL * self.nbytes else nbytes
        learn = options.learn and bool(order)
        transfer = Transfer.of_file(
            options.backend, self.path, learned_as, context, registry.names(), default, learn=learn
        )
        reader = transfer.run(
            lambda backend: backend.open_reader(self._fd, self.nbytes, order), partial(record_fallback, fallbacks)
        )
        return OpenedReader(transfer.used, transfer.reason, reader, transfer)

    def map(self, offset: int, nbytes: int, *, checksum: bool) -> tuple[torch.UntypedStorage, int]:
        """A range of the file as a storage in host memory. See :func:`fastensor.backends.memory.map_file`."""
        return map_file(self._fd, offset, nbytes, checksum=checksum)

    def check_unchanged(self) -> None:
        """
        Raises:
            CheckpointReadError: the contents of the file were changed after it was opened. A file that has taken its
                name is another one.
        """
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise CheckpointReadError(
                errno.ESTALE,
                "the file was written to after it was opened; open it again to read what is in it",
                self.where,
            )


class StreamFile:
    """An open binary file: a checkpoint begins at its position and ends where it ends."""

    path = None
    resident_fraction = 0.0

    def __init__(self, borrowed: BorrowedFile, where: str) -> None:
        self.borrowed = borrowed
        self._file = borrowed.for_reading()
        self._start = borrowed.begin
        self.where = where
        borrowed.file.seek(0, os.SEEK_END)  # which may return nothing, as that of mmap.mmap does
        self.nbytes = borrowed.file.tell() - self._start

    def readinto(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(self._start + offset)
        return stream.read_block(self._file, buffer)

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        return OpenedReader(stream.NAME, NO_LOCAL_FILE, stream.StreamReader(self._file, self._start))


class FileView(io.RawIOBase):
    """An opened file as a Python file object, for libraries that want one. The caller keeps ownership of the file."""

    def __init__(self, file: OpenedFile) -> None:
        self._file = file
        self.where = file.where
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def note_stop(self) -> None:
        """Have a file that the caller has opened left at the position that was reached here."""
        if self._file.borrowed is not None:
            self._file.borrowed.stopped_at = self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.nbytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a file has no negative positions")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._file.nbytes - self._position, 0)]
        count = self._file.readinto(self._position, view) if view.nbytes else 0
        self._position += count
        return count


@contextmanager
def named_in_errors(file: OpenedFile) -> Iterator[None]:
    """Have exceptions of libraries that open the file by its ``path`` call it by the name that users know."""
    try:
        yield
    except Exception as error:
        if file.path is not None and file.path != file.where and file.path in str(error):
            error.args = tuple(
                one.replace(file.path, file.where) if isinstance(one, str) else one for one in error.args
            )
            if isinstance(error, OSError) and error.filename == file.path:
                error.filename = file.where
        raise


@contextmanager
def opened(location: Location) -> Iterator[OpenedFile]:
    """Open a checkpoint for reading. An open file is borrowed: its position is undefined until the block ends.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointReadError: it cannot be opened, or is not a file.
        EmptyCheckpointError: it is empty.
    """
    where = name_of(location)
    wait_to_read(location)
    with ExitStack() as stack:
        with read_errors(where):
            target = locate(location)
            if isinstance(target, str):
                file: OpenedFile = _open_local(target, where, stack)
            elif isinstance(target, RemotePath):
                file = open_remote(target, where, stack)
            else:
                file = _borrow(target, where, stack)
        if file.nbytes <= 0:
            raise EmptyCheckpointError(_emptiness(location, where))
        yield file


def _open_local(path: str, where: str, stack: ExitStack) -> LocalFile:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        error = CheckpointReadError(errno.EISDIR, f"cannot load: expected a file, found {_what_is(path)}", where)
        raise caught_as(error, IsADirectoryError)
    if not stat.S_ISREG(mode):
        raise CheckpointReadError(errno.EINVAL, "cannot load: expected a checkpoint file, found something else", where)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(posix.close_read_only, fd)
    return LocalFile(fd, where)


def _what_is(directory: str) -> str:
    from fastensor.checkpoint.sharded import find_weights  # only this message needs it

    if metadata_names(directory):
        return (
            "the directory of a distributed checkpoint; load it by torch.distributed.checkpoint with "
            "FastensorStorageReader, or make a file of it by fastensor.convert"
        )
    if find_weights(Path(directory)) is not None:
        return "the folder of a model; fastensor.load_sharded loads what is in it"
    return f"a directory that is no distributed checkpoint (it has no {METADATA_NAME}); name what is in it"


def open_remote(target: RemotePath, where: str, stack: ExitStack) -> OpenedFile:
    """Open a remote file, or a local copy of it if the server sends no ranges. Both are closed with ``stack``.

    Raises:
        OSError: the filesystem refused an operation.
    """
    try:
        return RemoteFile(target, where, stack)
    except OnlyWholeError as error:
        copied = Fallback("reading by ranges", f"{error}; it is downloaded to a temporary file")
        announce(copied.backend, copied.reason)
        return LocalFile(download(target, stack), where, copied=copied)


def _borrow(file: BinaryIO, where: str, stack: ExitStack) -> OpenedFile:
    can_seek = can(file, "seekable", "seek") and hasattr(file, "tell")
    if isinstance(file, io.TextIOBase) or not (can(file, "readable", "read") and can_seek):
        error = CheckpointReadError(
            errno.EINVAL,
            "cannot load: expected a file opened in mode 'rb' that can seek, found something else; "
            "read a pipe or a network stream into a file or an io.BytesIO first",
            where,
        )
        raise caught_as(error, io.UnsupportedOperation)
    borrowed = BorrowedFile(file)
    stack.callback(borrowed.give_back, where)
    raw: Any = getattr(file, "raw", None) if type(file) in _BUFFERED else file
    if type(raw) is not io.FileIO or borrowed.begin != 0 or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        return StreamFile(borrowed, where)
    if isinstance(file, io.BufferedRandom):
        file.flush()
    fd = os.dup(raw.fileno())  # the user may close the file before we are done
    stack.callback(posix.close_read_only, fd)
    return LocalFile(fd, where, borrowed=borrowed)


def _emptiness(location: Location, where: str) -> str:
    if isinstance(location, str | os.PathLike):
        return f"{where}: the file is empty; its save was interrupted or never happened"
    return f"{where}: nothing stands behind the file's position at offset 0 of it; file.seek(0) goes back to its start"


def read_exactly(file: OpenedFile, offset: int, nbytes: int) -> bytes:
    """``nbytes`` bytes of the file from ``offset`` on.

    Raises:
        CorruptCheckpointError: the file ends before.
        CheckpointReadError: the operating system failed to deliver them.
    """
    data = bytearray(nbytes)
    with read_errors(file.where):
        found = file.readinto(offset, memoryview(data))
    if found != nbytes:
        raise CorruptCheckpointError(f"{file.where}: the file ends before offset {offset + nbytes}; it was cut off")
    return bytes(data)
