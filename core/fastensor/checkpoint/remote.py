"""Files of remote filesystems. All knowledge about the differences between filesystems of ``fsspec`` is here."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from fastensor.backends import stream
from fastensor.backends.base import Extent
from fastensor.backends.buffers import BUFFER_NBYTES, TRANSFERS_IN_FLIGHT
from fastensor.backends.registry import Fallback, announce, record_fallback
from fastensor.backends.ring_reader import RingReader
from fastensor.checkpoint.location import NO_LOCAL_FILE, RemotePath, keep_in_children, locate
from fastensor.checkpoint.reading.opened import LocalFile, OpenedFile, OpenedReader, ReadOptions
from fastensor.checkpoint.writing.outputs import StreamOutput
from fastensor.checkpoint.writing.report import Freeing
from fastensor.errors import BackendUnavailableError
from fastensor.files.os_errors import refusals_as_os_errors
from fastensor.files.posix import TEMPORARY_SUFFIX

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PARALLEL_NBYTES = 8 << 20
"""Reading less than this is not faster through several open files."""
_QUIET_SECONDS = 300.0
"""The longest time that a server may be silent while it sends a file."""


class Upload(StreamOutput):
    """A file that takes the target's place by :meth:`replace`, and never if it is closed before.

    Object stores show nothing of an upload before it is complete. On other filesystems a temporary file beside the
    target is written, and then renamed, or copied where the filesystem has no rename.
    """

    atomic = True

    def __init__(self, target: RemotePath) -> None:
        super().__init__(target.url)
        self._filesystem = target.filesystem
        self._target = target.path
        self._temporary = f"{target.path}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
        self._renames = True
        self._replaced = False
        self._file: Any = None

    def begin(self, nbytes: int) -> None:
        """Open the file. An interrupt must not part it from who closes it: the garbage collector would publish it."""
        with refusals_as_os_errors():
            self._open()

    def _open(self) -> None:
        if not self._target.strip("/") or self._target.endswith("/"):
            raise OSError(errno.EISDIR, "the URL names no file")
        self._file = self._filesystem.open(self._temporary, "wb")
        if _is_invisible_until_closed(self._file):
            self._drop()  # nothing has been sent yet
            # Without autocommit: if an interrupt comes before the assignment, the garbage collector must not publish.
            self._file = self._filesystem.open(self._target, "wb", autocommit=False)
            self._renames = False
            self._file.autocommit = True
            with contextlib.suppress(
                ValueError
            ):  # the file would wait there for a commit of a transaction, of which it is no part
                self._filesystem.transaction.files.remove(self._file)
        elif self._filesystem.isdir(self._target):
            raise OSError(errno.EISDIR, "the target is a directory")

    def _append(self, data: memoryview) -> int:
        with refusals_as_os_errors():
            return int(self._file.write(data))

    def replace(self, *, durable: bool, free_later: bool = True) -> Freeing:
        with refusals_as_os_errors():
            self._file.close()
            if self._renames:
                _rename(self._filesystem, self._temporary, self._target)
        self._replaced = True
        return Freeing()

    def close(self) -> None:
        """Drop the data and the temporary file, unless that has taken the target's place. Errors are ignored: the one
        that led here says more."""
        if self._replaced:
            return
        self._drop()
        if self._renames:
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(self._temporary)

    def _drop(self) -> None:
        """Discard the file. Closing it would publish it, and so would its garbage collection."""
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
    """True if the filesystem shows a file only when it is complete, and can discard it before."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and type(file).discard is not AbstractBufferedFile.discard


def _rename(filesystem: AbstractFileSystem, source: str, target: str) -> None:
    """Rename a file. The general ``mv`` of ``fsspec`` takes names for glob patterns, so it is not used."""
    from fsspec import AbstractFileSystem

    if type(filesystem).mv is not AbstractFileSystem.mv:
        filesystem.mv(source, target)
    else:
        filesystem.cp_file(source, target)
        filesystem.rm_file(source)
    if not filesystem.isfile(target):
        raise OSError(errno.EIO, "the filesystem moved the file somewhere else")


class OnlyWholeError(Exception):
    """A server sends a file only as a whole; the message says how that was found out."""


def download(target: RemotePath, resources: ExitStack) -> int:
    """Copy a remote file to a nameless file in the folder for temporary files. Returns the descriptor.

    Raises:
        OSError: the filesystem refused an operation, or the folder has no room.
    """
    file = resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the caller closes the resources
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
    """The filesystem, for a download that may take long: HTTP's stops after five minutes by default."""
    filesystem = target.filesystem
    if not _is_http(target):
        return filesystem
    from aiohttp import ClientTimeout

    options = dict(filesystem.storage_options)
    timeout = ClientTimeout(total=None, sock_connect=_QUIET_SECONDS, sock_read=_QUIET_SECONDS)
    client = {"timeout": timeout, **(options.pop("client_kwargs", None) or {})}
    patient = type(filesystem)(**options, client_kwargs=client)
    keep_in_children(patient)
    return patient


def _is_http(target: RemotePath) -> bool:
    return "http" in target.filesystem.protocol


class RemoteFile:
    """A file of a remote filesystem, open for reading. See :class:`fastensor.checkpoint.reading.opened.OpenedFile`.

    Several ranges are requested at a time. Where the store has entity tags, all ranges are of the version that was
    opened. A forked child opens the file anew.

    Raises:
        OnlyWholeError: the file can be downloaded, but not be read by ranges.
        OSError: the filesystem refused an operation.
    """

    path = None
    resident_fraction = 0.0
    borrowed = None

    def __init__(self, target: RemotePath, where: str, resources: ExitStack) -> None:
        self.where = where
        self._target = target
        self._process = os.getpid()
        self._resources = resources
        self._version: str | None = None
        self._handles: SimpleQueue[_Handle] = SimpleQueue()
        self._opened_by = 0
        """The process that has opened the handles."""
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
        if self._opened_by != os.getpid():  # in a forked child, threads of the parent may hold some
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
            if self._process != os.getpid():  # threads of fsspec's filesystem are missing in a forked child
                target = cast(RemotePath, locate(target.url))
            file = target.filesystem.open(target.path, "rb", **options)
            if isinstance(file, io.BytesIO):  # a file in memory is one object, with one position for all
                file = _SharedFile(target)
        self._resources.enter_context(file)
        version = str(file.details.get("ETag")) if _is_of_ranges(file) else ""
        if self._version is None:
            self._version = version
        if version != self._version:
            raise OSError(errno.EBUSY, "the file was replaced while it was being read")
        return file


def _is_of_ranges(file: Any) -> bool:
    """True if ``fsspec`` reads the file by ranges. Then the file has details."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


class _SharedFile(io.RawIOBase):
    """A file that is read by ranges, with a position of its own."""

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
    """An open file, which a forked child opens anew. Its failures are ``OSError``s. The caller closes the file.

    Raises:
        OnlyWholeError: the file cannot seek.
    """

    def __init__(self, open_file: Callable[[], Any]) -> None:
        self._open = open_file
        self._begin()
        self.independent = _is_of_ranges(self._file)
        """True if several handles read faster than one."""
        if self.independent and self._file.size is None:
            self._file.close()
            raise OnlyWholeError("the server does not say how long the file is, or that it sends no parts of it")

    def _begin(self) -> None:
        self._file = self._open()
        self._process = os.getpid()

    def check_ranges(self, nbytes: int) -> None:
        """Check that the server sends the last byte alone.

        Raises:
            OnlyWholeError: the server answers otherwise.
        """
        self.seek(nbytes - 1)
        try:
            found = self.read(1)
        except OSError as error:
            if not isinstance(error.__cause__, ValueError):  # by which fsspec reports such an answer
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
