"""Files of remote filesystems: the only place that knows in what those of ``fsspec`` differ."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from fastensor.backends import stream
from fastensor.backends.base import Extent
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.fallback import Fallback, record_fallback
from fastensor.backends.posix import TEMPORARY_SUFFIX
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, RingReader
from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.read_options import NO_LOCAL_FILE, OpenedReader, ReadOptions
from fastensor.errors import BackendUnavailableError, FastensorError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PARALLEL_NBYTES = 8 << 20
"""Less than this is not worth opening a file several times."""
_QUIET_SECONDS = 300.0
"""How long a server may be silent while it sends a file."""


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


class OnlyWholeError(Exception):
    """A server sends a file only from its beginning to its end; the message says how that was seen."""


def download(target: RemotePath, resources: ExitStack) -> int:
    """A nameless file in the folder for temporary files that holds all of a remote one: its descriptor.

    Raises:
        OSError: the filesystem refused something, or the folder has no room.
    """
    file = resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the resources are left later
    try:
        with refusals_as_os_errors():
            _patient(target).get_file(target.path, file)
            file.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        folder = tempfile.gettempdir()
        raise OSError(errno.ENOSPC, f"{folder} has no room for it; set TMPDIR to a folder that has") from error
    return file.fileno()


def _patient(target: RemotePath) -> AbstractFileSystem:
    """A filesystem for a download that may take long: that of HTTP gives up after five minutes by default."""
    filesystem = target.filesystem
    if not _is_http(target):
        return filesystem
    from aiohttp import ClientTimeout

    options = dict(filesystem.storage_options)
    timeout = ClientTimeout(total=None, sock_connect=_QUIET_SECONDS, sock_read=_QUIET_SECONDS)
    client = {"timeout": timeout, **(options.pop("client_kwargs", None) or {})}
    return type(filesystem)(**options, client_kwargs=client)


def _is_http(target: RemotePath) -> bool:
    return "http" in target.filesystem.protocol


class RemoteFile:
    """A file of a remote filesystem, open for reading. See :class:`fastensor.checkpoint.opened.OpenedFile`.

    Object stores are asked for several ranges at a time, all of them of the version that was there at the opening where
    the store has entity tags. A forked child opens it anew.

    Raises:
        OnlyWholeError: it can be downloaded, but not be read by ranges.
        OSError: the filesystem refused something.
    """

    path = None
    resident_fraction = 0.0

    def __init__(self, target: RemotePath, where: str, resources: ExitStack) -> None:
        self.where = where
        self._target = target
        self._process = os.getpid()
        self._resources = resources
        self._version: str | None = None
        self._handles: SimpleQueue[_Handle] = SimpleQueue()
        self._opened_by = 0
        """The process that the handles are of."""
        self._file = _Handle(partial(self._open, block_size=BUFFER_NBYTES))
        self.nbytes = self._file.seek(0, os.SEEK_END)
        if _is_http(target) and self.nbytes > BUFFER_NBYTES:
            self._file.check_ranges(self.nbytes)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(offset)
        return stream.read_block(self._file, buffer)

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        plain = stream.StreamReader(self._file, 0)
        if sum(extent.end - extent.begin for extent in order) < _PARALLEL_NBYTES or not self._file.independent:
            return OpenedReader(stream.NAME, NO_LOCAL_FILE, plain)
        if self._opened_by != os.getpid():  # in a forked child, threads that do not live there may hold some of them
            self._handles = SimpleQueue()
            for _ in range(TRANSFERS_IN_FLIGHT):
                self._handles.put(_Handle(partial(self._open, cache_type="none")))
            self._opened_by = os.getpid()
        handles = self._handles

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
            record_fallback(fallbacks, "reading in parallel", str(error))
            return OpenedReader(stream.NAME, NO_LOCAL_FILE, plain)

    def _open(self, **options: Any) -> Any:
        with refusals_as_os_errors():
            target = self._target
            if self._process != os.getpid():  # fsspec's filesystems have threads, which do not live here
                target = cast(RemotePath, locate(target.url))
            file = target.filesystem.open(target.path, "rb", **options)
            if isinstance(file, io.BytesIO):  # of files in memory there is one, whose position all who open it share
                file = _SharedFile(target)
        self._resources.enter_context(file)
        version = str(file.details.get("ETag")) if _is_of_ranges(file) else ""
        if self._version is None:
            self._version = version
        if version != self._version:
            raise OSError(errno.EBUSY, "the file was replaced while it was being read")
        return file


def _is_of_ranges(file: Any) -> bool:
    """Whether it is one of those that ``fsspec`` reads by ranges; its details say more about it."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


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


class _Handle:
    """A file that is opened, in a forked child anew, and whose failures are ``OSError``s. Does not own it.

    Raises:
        OnlyWholeError: it cannot seek.
    """

    def __init__(self, open_file: Callable[[], Any]) -> None:
        self._open = open_file
        self._begin()
        self.independent = _is_of_ranges(self._file)
        """Whether reading through several at a time pays."""
        if self.independent and self._file.size is None:
            self._file.close()
            raise OnlyWholeError("the server does not say how long the file is, or that it sends no parts of it")

    def _begin(self) -> None:
        self._file = self._open()
        self._process = os.getpid()

    def check_ranges(self, nbytes: int) -> None:
        """Find out whether the last byte can be had without the others.

        Raises:
            OnlyWholeError: the server answers with something else.
        """
        self.seek(nbytes - 1)
        try:
            found = self.read(1)
        except OSError as error:
            if not isinstance(error.__cause__, ValueError):  # as which fsspec tells of such an answer
                raise
            raise OnlyWholeError("the server was asked for the last byte, and would have sent all of them") from error
        if not found:
            raise OnlyWholeError("the server was asked for the last byte, and has sent none")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self._process != os.getpid():
            self._begin()
        with refusals_as_os_errors():
            self._file.seek(offset, whence)
            return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        with refusals_as_os_errors():
            data: bytes = self._file.read(size)
            return data
