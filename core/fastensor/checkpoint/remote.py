"""Files of remote filesystems: the only place that knows in what those of ``fsspec`` differ."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from fastensor.backends import stream
from fastensor.backends.base import Extent
from fastensor.backends.fallback import Fallback, give_up
from fastensor.backends.memory import BUFFER_NBYTES
from fastensor.backends.posix import TEMPORARY_SUFFIX
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, RingReader
from fastensor.checkpoint.choosing import NO_LOCAL_FILE, OpenedReader, Wanted
from fastensor.checkpoint.location import RemotePath
from fastensor.errors import BackendUnavailableError, FastensorError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PARALLEL_NBYTES = 8 << 20
"""Less than this is not worth opening a file several times."""


@contextmanager
def replacing(target: RemotePath) -> Iterator[BinaryIO]:
    """A file that takes the target's place when the block is left, and never if it raises.

    Object stores show nothing of an upload before it is complete. Elsewhere a temporary beside the target is written,
    and then renamed, or copied where the filesystem has no rename.

    Raises:
        OSError: the filesystem refused something.
    """
    upload = _Upload(target)
    try:
        with refusals_as_os_errors():
            upload.open()
        yield cast(BinaryIO, upload)
        with refusals_as_os_errors():
            upload.publish()
    except BaseException:
        upload.abandon()
        raise


class _Upload(io.RawIOBase):
    """A file that is being written, whose failures are ``OSError``s."""

    def __init__(self, target: RemotePath) -> None:
        self._filesystem = target.filesystem
        self._target = target.path
        self._temporary = f"{target.path}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
        self._renames = True
        self._file: Any = None

    def open(self) -> None:
        if not self._target.strip("/") or self._target.endswith("/"):
            raise OSError(errno.EISDIR, "the URL names no file")
        self._file = self._filesystem.open(self._temporary, "wb")
        if _is_invisible_until_closed(self._file):
            self._drop()  # nothing has been sent yet
            # Should we be interrupted before we hold the file, its collection must not publish it.
            self._file = self._filesystem.open(self._target, "wb", autocommit=False)
            self._renames = False
            self._file.autocommit = True
            with contextlib.suppress(ValueError):  # it waits there for a commit that is none of a transaction
                self._filesystem.transaction.files.remove(self._file)
        elif self._filesystem.isdir(self._target):
            raise OSError(errno.EISDIR, "the target is a directory")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with refusals_as_os_errors():
            return int(self._file.write(data))

    def publish(self) -> None:
        self._file.close()
        if self._renames:
            _rename(self._filesystem, self._temporary, self._target)

    def abandon(self) -> None:
        """Drop what was written. The filesystem may be gone: the first error is the one to show."""
        self._drop()
        if self._renames:
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(self._temporary)

    def _drop(self) -> None:
        """Closing the file, which also its collection does, would publish it."""
        from fsspec.spec import AbstractBufferedFile

        if self._file is None:
            return
        with contextlib.suppress(Exception):
            if isinstance(self._file, AbstractBufferedFile):
                self._file.discard()
            else:
                self._file.close()
        if isinstance(self._file, AbstractBufferedFile):
            self._file.closed = True


def _is_invisible_until_closed(file: Any) -> bool:
    """Whether the filesystem gives a file its name only when it is complete, and can be told to drop it."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and type(file).discard is not AbstractBufferedFile.discard


def _rename(filesystem: AbstractFileSystem, source: str, target: str) -> None:
    """Give a file another name. The general ``mv`` of ``fsspec`` takes names for glob patterns."""
    from fsspec import AbstractFileSystem

    if type(filesystem).mv is not AbstractFileSystem.mv:
        filesystem.mv(source, target)
    else:
        filesystem.cp_file(source, target)
        filesystem.rm_file(source)
    if not filesystem.isfile(target):
        raise OSError(errno.EIO, "the filesystem moved the file somewhere else")


@contextmanager
def refusals_as_os_errors() -> Iterator[None]:
    """Filesystems raise what they like when a network fails; here all of it becomes ``OSError`` with an errno."""
    try:
        yield
    except (OSError, FastensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, FileNotFoundError):
            code = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
            raise OSError(code, str(error)) from error
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class RemoteFile:
    """A file of a remote filesystem, open for reading. See :class:`fastensor.checkpoint.opened.OpenedFile`.

    Object stores are asked for several ranges at a time, all of them of the version that was there at the opening where
    the store has entity tags.
    """

    path = None
    resident_fraction = 0.0

    def __init__(self, target: RemotePath, where: str, resources: ExitStack) -> None:
        self.where = where
        self._target = target
        self._resources = resources
        self._version: str | None = None
        self._handles: SimpleQueue[_Handle] = SimpleQueue()
        self._opened = 0
        self._file = self._open(block_size=BUFFER_NBYTES)
        self.nbytes = self._file.seek(0, os.SEEK_END)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(offset)
        return stream.read_block(self._file, buffer)

    def open_reader(self, order: Sequence[Extent], wanted: Wanted, fallbacks: list[Fallback]) -> OpenedReader:
        plain = stream.StreamReader(self._file, 0)
        if sum(extent.end - extent.begin for extent in order) < _PARALLEL_NBYTES or not self._file.independent:
            return OpenedReader(stream.NAME, NO_LOCAL_FILE, plain)
        handles = self._handles
        while self._opened < TRANSFERS_IN_FLIGHT:
            handles.put(self._open(cache_type="none"))
            self._opened += 1

        def read(buffer: memoryview, offset: int) -> int:
            handle = handles.get()
            try:
                handle.seek(offset)
                return stream.read_block(handle, buffer)
            finally:
                handles.put(handle)

        try:
            ring = RingReader(read, 1, order, elsewhere=plain, resources=ExitStack())
            return OpenedReader(stream.NAME, NO_LOCAL_FILE, ring)
        except BackendUnavailableError as error:  # no thread can be started any more
            give_up(fallbacks, "reading in parallel", str(error))
            return OpenedReader(stream.NAME, NO_LOCAL_FILE, plain)

    def _open(self, **options: Any) -> _Handle:
        with refusals_as_os_errors():
            file = self._target.filesystem.open(self._target.path, "rb", **options)
            if isinstance(file, io.BytesIO):  # of files in memory there is one, whose position all who open it share
                file = _SharedFile(self._target)
        handle = _Handle(self._resources.enter_context(file))
        if self._version is None:
            self._version = handle.version
        if handle.version != self._version:
            raise OSError(errno.EBUSY, "the file was replaced while it was being read")
        return handle


class _SharedFile(io.RawIOBase):
    """A file that is read by ranges, at a position of its own."""

    def __init__(self, target: RemotePath) -> None:
        self._target = target
        self._nbytes = int(target.filesystem.size(target.path))
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._nbytes if size < 0 else min(self._position + size, self._nbytes)
        if end <= self._position:
            return b""
        data: bytes = self._target.filesystem.cat_file(self._target.path, start=self._position, end=end)
        self._position += len(data)
        return data


class _Handle(io.RawIOBase):
    """An open file whose failures are ``OSError``s. Does not own it."""

    def __init__(self, file: Any) -> None:
        from fsspec.spec import AbstractBufferedFile

        self._file = file
        self.independent = isinstance(file, AbstractBufferedFile)
        """Whether reading through several at a time pays."""
        self.version = str(file.details.get("ETag")) if self.independent else ""
        """Differs between contents; the store sees to it that all reads are of this one."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with refusals_as_os_errors():
            return int(self._file.seek(offset, whence))

    def read(self, size: int = -1) -> bytes:
        with refusals_as_os_errors():
            data: bytes = self._file.read(size)
            return data
