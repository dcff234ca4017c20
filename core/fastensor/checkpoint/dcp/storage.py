"""The directory of a distributed checkpoint: on this machine, or one that ``fsspec`` reaches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.reading.opened import OpenedFile, opened
from fastensor.checkpoint.remote import Upload, open_remote, refusals_as_os_errors
from fastensor.checkpoint.writing.freeing import freeing_afterwards
from fastensor.checkpoint.writing.outputs import Output, Replacement
from fastensor.files import posix
from fastensor.files.atomic import LEFTOVER_SECONDS, new_file
from fastensor.files.os_errors import kept_at, read_errors, write_errors

_NOT_REMOVED = "a file that is not needed any more cannot be removed"
_IN_PLACE = "no checkpoint needs it, and those beside it are as they were"


class Directory(Protocol):
    """The directory of one checkpoint."""

    @property
    def path(self) -> str:
        """A path or URL, for messages."""

    @property
    def filesystem(self) -> FileSystemBase:
        """The same filesystem, as torch's own classes want it."""

    @property
    def as_torch_names_it(self) -> str | os.PathLike[str]:
        """The ``path`` of torch's own reader and writer."""

    def name_of(self, name: str) -> str:
        """The path or URL of a file, for messages."""

    def make(self) -> None:
        """Create the directory, and those above it. It may exist."""

    def create(self, name: str) -> Output:
        """A file that is to get a name. The caller closes it.

        Raises:
            OSError: the directory does not let files be created.
        """

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Put a file in place of another one, atomically.

        Raises:
            CheckpointWriteError: the file could not be written.
        """

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointReadError: the file could not be read.
        """

    def open(self, name: str) -> AbstractContextManager[OpenedFile]:
        """Open a file for reading. Raises as :func:`fastensor.checkpoint.reading.opened.opened`."""

    def names(self) -> list[str]:
        """The names of all files; none if there is no directory."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Those that are missing are passed over. A thread frees the space of local ones afterwards.

        Raises:
            CheckpointWriteError: a file could not be removed.
        """

    def is_left_over(self, name: str, new: str) -> bool:
        """True if a file is so much older than a new one that no living process can be about to use it. Both times are
        those of the filesystem."""


class LocalDirectory:
    """See :class:`Directory`."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.filesystem: FileSystemBase = FileSystem()
        self.as_torch_names_it = Path(path)
        self._unsynced: set[str] = set()
        """Directories whose new entries are not durable yet."""

    def name_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def make(self) -> None:
        missing = []
        path = self.path
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
            missing.append(path)
        with write_errors(self.path, "the directory cannot be created"):
            os.makedirs(self.path, exist_ok=True)
        self._unsynced.update(missing)

    def sync(self) -> None:
        """Make the names of all files durable, and the directory's own."""
        for path in (self.path, *self._unsynced):
            posix.sync_directory(path)
        self._unsynced.clear()

    def create(self, name: str) -> Replacement:
        return Replacement(self.name_of(name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        with new_file(self.name_of(name), "the save failed") as new:
            new.write_at(memoryview(data), 0)
            if durable:
                posix.sync_file(new.fd)
                self.sync()
            new.publish(durable=durable)

    def read(self, name: str) -> bytes:
        path = self.name_of(name)
        with read_errors(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return posix.read_exactly(fd, 0, os.fstat(fd).st_size)
            finally:
                posix.close_read_only(fd)

    def open(self, name: str) -> AbstractContextManager[OpenedFile]:
        return opened(self.name_of(name))

    def names(self) -> list[str]:
        with read_errors(self.path), suppress(FileNotFoundError):
            return os.listdir(self.path)
        return []

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.name_of(name)
            with (
                write_errors(path, _NOT_REMOVED, _IN_PLACE),
                freeing_afterwards(path),
                suppress(FileNotFoundError),
            ):
                os.unlink(path)

    def is_left_over(self, name: str, new: str) -> bool:
        path = self.name_of(name)
        with write_errors(path, _NOT_REMOVED, _IN_PLACE), suppress(FileNotFoundError):
            return os.stat(path).st_mtime < os.stat(self.name_of(new)).st_mtime - LEFTOVER_SECONDS
        return False


class RemoteDirectory:
    """See :class:`Directory`. Durability is up to the filesystem.

    Args:
        location: the directory.
    """

    def __init__(self, location: RemotePath) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem

        self.path = location.url
        self._location = location
        adapter = FsspecFileSystem()
        adapter.fs = location.filesystem
        self.filesystem: FileSystemBase = adapter
        self.as_torch_names_it = location.url

    def at(self, name: str) -> RemotePath:
        """A file in the directory."""
        place = self._location
        return RemotePath(self.name_of(name), place.filesystem, f"{place.path.rstrip('/')}/{name}")

    def name_of(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def make(self) -> None:
        with write_errors(self.path, "the directory cannot be created"), refusals_as_os_errors():
            self._location.filesystem.makedirs(self._location.path, exist_ok=True)

    def create(self, name: str) -> Upload:
        return Upload(self.at(name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        path = self.name_of(name)
        with write_errors(path, "the save failed", kept_at(path)), closing(self.create(name)) as file:
            file.begin(len(data))
            file.write(memoryview(data))
            file.replace(durable=False)

    def read(self, name: str) -> bytes:
        with read_errors(self.name_of(name)), refusals_as_os_errors():
            found: bytes = self._location.filesystem.cat_file(self.at(name).path)
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[OpenedFile]:
        where = self.name_of(name)
        with ExitStack() as stack:
            with read_errors(where):
                file = open_remote(self.at(name), where, stack)
            yield file

    def names(self) -> list[str]:
        found: list[str] = []
        with read_errors(self.path), suppress(FileNotFoundError), refusals_as_os_errors():
            self._location.filesystem.invalidate_cache(self._location.path)
            found = self._location.filesystem.ls(self._location.path, detail=False)
        return [str(path).rsplit("/", 1)[-1] for path in found]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            where = self.name_of(name)
            with (
                write_errors(where, _NOT_REMOVED, _IN_PLACE),
                suppress(FileNotFoundError),
                refusals_as_os_errors(),
            ):
                self._location.filesystem.rm_file(self.at(name).path)

    def is_left_over(self, name: str, new: str) -> bool:
        return False  # not all remote filesystems have times


def directory_at(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> LocalDirectory | RemoteDirectory:
    """The directory at a path or a URL.

    Args:
        path: as users give it.
        storage_options: what ``fsspec`` needs to reach a URL.

    Raises:
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        TypeError: ``path`` is neither a path nor a URL.
    """
    found = locate(path, storage_options)
    if isinstance(found, str):
        return LocalDirectory(found)
    if isinstance(found, RemotePath):
        return RemoteDirectory(found)
    raise TypeError(f"expected the path or URL of a directory, found {type(path).__name__}")
