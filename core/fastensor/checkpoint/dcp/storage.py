"""The directory of a distributed checkpoint: on this machine, or one that ``fsspec`` reaches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from fastensor.checkpoint.directories import METADATA_NAME
from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.reading.opened import OpenedFile, opened
from fastensor.checkpoint.remote import Upload, open_remote
from fastensor.checkpoint.writing.freeing import freeing_afterwards
from fastensor.checkpoint.writing.outputs import Output, Replacement
from fastensor.errors import CheckpointReadError, FastensorError
from fastensor.files import posix
from fastensor.files.atomic import LEFTOVER_SECONDS
from fastensor.files.os_errors import read_errors, refusals_as_os_errors, write_errors

_NOT_REMOVED = "a file that is not needed any more cannot be removed"
_IN_PLACE = "no checkpoint needs it, and those beside it are as they were"


class Directory:
    """The directory of one checkpoint. Durability in a remote one is up to its filesystem.

    Args:
        path: a path or URL, as users give it.
        storage_options: what ``fsspec`` needs to reach a URL.

    Raises:
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        TypeError: ``path`` is neither a path nor a URL.
    """

    filesystem: FileSystemBase
    """The same filesystem, as torch's own classes want it."""
    as_torch_names_it: str | Path
    """The ``path`` of torch's own reader and writer."""

    def __init__(self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        found = locate(path, storage_options)
        self._remote = found if isinstance(found, RemotePath) else None
        self._unsynced: set[str] = set()
        """Directories whose new entries are not durable yet."""
        if isinstance(found, str):
            self.path, self.as_torch_names_it, self.filesystem = os.path.abspath(found), Path(found), FileSystem()
        elif isinstance(found, RemotePath):
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem

            self.path, self.as_torch_names_it, self.filesystem = found.url, found.url, FsspecFileSystem()
            self.filesystem.fs = found.filesystem
        else:
            raise TypeError(f"expected the path or URL of a directory, found {type(path).__name__}")

    def name_of(self, name: str) -> str:
        """The path or URL of a file."""
        return f"{self.path.rstrip('/')}/{name}"

    def _at(self, name: str) -> RemotePath | None:
        """A file of a remote directory."""
        place = self._remote
        return place and RemotePath(self.name_of(name), place.filesystem, f"{place.path.rstrip('/')}/{name}")

    def make(self) -> None:
        """Create the directory, and those above it. It may exist."""
        path = self.path
        while self._remote is None and not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
            self._unsynced.add(path)
        with write_errors(self.path, "the directory cannot be created"), refusals_as_os_errors():
            if self._remote is None:
                os.makedirs(self.path, exist_ok=True)
            else:
                self._remote.filesystem.makedirs(self._remote.path, exist_ok=True)

    def sync(self) -> None:
        """Make the names of all files durable, and the directory's own."""
        for path in (self.path, *self._unsynced) if self._remote is None else ():
            posix.sync_directory(path)
        self._unsynced.clear()

    def create(self, name: str) -> Output:
        """A file that is to get a name. The caller closes it.

        Raises:
            OSError: the directory does not let files be created.
        """
        remote = self._at(name)
        return Replacement(self.name_of(name)) if remote is None else Upload(remote)

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointReadError: the file could not be read.
        """
        path, remote = self.name_of(name), self._at(name)
        with read_errors(path), refusals_as_os_errors():
            found: bytes = Path(path).read_bytes() if remote is None else remote.filesystem.cat_file(remote.path)
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[OpenedFile]:
        """Open a file that the metadata name.

        Raises:
            CheckpointReadError: it is missing, or cannot be opened.
            EmptyCheckpointError: it is empty.
        """
        path, remote = self.name_of(name), self._at(name)
        with ExitStack() as stack:
            try:
                if remote is None:
                    file = stack.enter_context(opened(path))
                else:
                    with read_errors(path):
                        file = open_remote(remote, path, stack)
            except FileNotFoundError as error:
                raise CheckpointReadError(
                    error.errno,
                    f"{METADATA_NAME} names this file, which is missing: it was not copied, the metadata are those of "
                    f"another save, or a save has replaced the checkpoint meanwhile, so that it can be loaded again",
                    path,
                ) from error
            yield file

    def names(self) -> list[str]:
        """The names of all files; none if there is no directory."""
        found: list[str] = []
        with read_errors(self.path), suppress(FileNotFoundError), refusals_as_os_errors():
            if self._remote is None:
                return os.listdir(self.path)
            self._remote.filesystem.invalidate_cache(self._remote.path)
            found = self._remote.filesystem.ls(self._remote.path, detail=False)
        return [str(path).rsplit("/", 1)[-1] for path in found]

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Those that are missing are passed over. A thread frees the space of local ones afterwards.

        Raises:
            CheckpointWriteError: a file could not be removed.
        """
        for name in names:
            path, remote = self.name_of(name), self._at(name)
            with (
                write_errors(path, _NOT_REMOVED, _IN_PLACE),
                freeing_afterwards(path) if remote is None else nullcontext(),
                suppress(FileNotFoundError),
                refusals_as_os_errors(),
            ):
                if remote is None:
                    os.unlink(path)
                else:
                    remote.filesystem.rm_file(remote.path)

    def is_left_over(self, name: str, new: str) -> bool:
        """True if a file is so much older than a new one that no living process can be about to use it. Both times are
        those of the filesystem. False for remote files: not all filesystems have times."""
        if self._remote is not None:
            return False
        path = self.name_of(name)
        with write_errors(path, _NOT_REMOVED, _IN_PLACE), suppress(FileNotFoundError):
            return os.stat(path).st_mtime < os.stat(self.name_of(new)).st_mtime - LEFTOVER_SECONDS
        return False


class InDirectory:
    """What the storage writer and the storage reader have in common: the directory that they are used for, which each
    save or load may change. In front of torch's own class in the list of bases."""

    _storage_options: Mapping[str, Any] | None
    _directory: Directory
    fs: FileSystem
    path: str | os.PathLike[str]

    def _move_to(self, path: str | os.PathLike[str]) -> None:
        self._directory = Directory(path, self._storage_options)
        self.fs = cast(FileSystem, self._directory.filesystem)  # as in torch's FsspecReader and FsspecWriter
        self.path = self._directory.as_torch_names_it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save or load, in another directory if ``checkpoint_id`` is one."""
        super().reset()  # type: ignore[misc]  # of torch's class
        if checkpoint_id:
            self._move_to(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a checkpoint can be there: at any path, and at the URLs that ``fsspec`` knows."""
        try:
            return isinstance(locate(checkpoint_id), str | RemotePath)
        except (FastensorError, TypeError):
            return False
