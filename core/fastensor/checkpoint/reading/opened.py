"""A checkpoint that is open for reading, wherever it is."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from fastensor.backends import registry
from fastensor.backends.base import Extent, Reader
from fastensor.backends.memory import map_file
from fastensor.backends.registry import Fallback, record_fallback
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.ordering import wait_to_read
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    EmptyCheckpointError,
    caught_as,
)
from fastensor.files import posix
from fastensor.files.os_errors import read_errors
from fastensor.select.context import RESIDENT_FRACTION, Context
from fastensor.select.transfer import BackendChoice, Transfer

if TYPE_CHECKING:
    from fastensor.checkpoint.reading.borrowed import BorrowedFile

_NEARLY_ALL = 0.9
"""Reading this fraction of a file is learned as reading the whole file, so that it compares with writing the file."""


class ReadOptions(NamedTuple):
    """Options for reading a file."""

    backend: BackendChoice = registry.AUTO
    device: str = "cpu"
    """Kind of the device that the bytes go to."""
    learn: bool = False
    """Let the selector learn from the time that reading takes: the whole file is read, once and without pauses."""


class OpenedReader(NamedTuple):
    """The backend reader that was opened for a file."""

    backend: str
    reason: str
    """Reason for the choice of the backend."""
    reader: Reader
    transfer: Transfer | None = None
    """Takes the time of reading for the selector; None if no backend was chosen."""


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
        learned_as = self.nbytes if nbytes >= _NEARLY_ALL * self.nbytes else nbytes
        learn = options.learn and bool(order)
        transfer = Transfer.of_file(options.backend, self.path, learned_as, context, registry.names, learn=learn)
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
            file = _open(location, where, stack)
        if file.nbytes <= 0:
            raise EmptyCheckpointError(_emptiness(location, where))
        yield file


def _open(location: Location, where: str, stack: ExitStack) -> OpenedFile:
    """Open a file of any kind. Those that few programs have are imported here."""
    target = locate(location)
    if isinstance(target, str):
        return _open_local(target, where, stack)
    if isinstance(target, RemotePath):
        from fastensor.checkpoint.remote import open_remote

        return open_remote(target, where, stack)
    from fastensor.checkpoint.reading.borrowed import borrow

    return borrow(target, where, stack)


def _open_local(path: str, where: str, stack: ExitStack) -> LocalFile:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        from fastensor.checkpoint.models.sharded import what_is

        error = CheckpointReadError(errno.EISDIR, f"cannot load: expected a file, found {what_is(path)}", where)
        raise caught_as(error, IsADirectoryError)
    if not stat.S_ISREG(mode):
        raise CheckpointReadError(errno.EINVAL, "cannot load: expected a checkpoint file, found something else", where)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(posix.close_read_only, fd)
    return LocalFile(fd, where)


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
