"""Removing checkpoints, and making room for them, wherever they are."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from typing import TYPE_CHECKING

from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.ordering import wait_inside
from fastensor.checkpoint.writing.freeing import freeing_afterwards
from fastensor.files import posix
from fastensor.files.new_directory import remove_directory
from fastensor.files.os_errors import refusals_as_os_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint: a file, a directory with everything in it, or a symlink but not its target.

    Does nothing if the path is missing. Operations that this process has accepted for the path are finished before.

    Raises:
        OSError: the filesystem refused.
    """
    wait_inside(path)
    remove_at_once(path)


def absolute(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path in a form that stays valid when the process changes its directory."""
    target = locate(path)
    return os.path.abspath(target) if isinstance(target, str) else path


def remove_at_once(path: str | os.PathLike[str]) -> None:
    """:func:`remove`, without waiting for operations that this process has accepted for the path."""
    target = locate(path)
    if isinstance(target, RemotePath):
        with refusals_as_os_errors():
            _remove_remote(target)
    elif isinstance(target, str):
        if is_directory(target):
            remove_directory(target)
        elif os.path.lexists(target):
            with contextlib.suppress(FileNotFoundError), freeing_afterwards(target):  # another one was faster
                os.unlink(target)


def remove_file_at_once(path: str | os.PathLike[str]) -> None:
    """:func:`remove_at_once` for a path that was no directory when the removal was requested.

    Raises:
        IsADirectoryError: the path has become a directory.
    """
    if is_directory(path):
        raise IsADirectoryError(errno.EISDIR, "not removed: it has become a directory meanwhile", os.fspath(path))
    remove_at_once(path)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """True if a path of this machine is a directory; False for a link to a directory."""
    target = locate(path)
    return isinstance(target, str) and os.path.isdir(target) and not os.path.islink(target)


def _remove_remote(target: RemotePath) -> None:
    """Remove a remote file or directory, not by ``rm``, which takes the name for a glob pattern."""
    filesystem, path = target.filesystem, target.path
    filesystem.invalidate_cache(path)  # a listing that s3fs keeps may lack directories that hold directories alone
    if filesystem.isfile(path):
        filesystem.rm_file(path)
    elif filesystem.isdir(path):
        found = filesystem.find(path, withdirs=True, detail=True)
        for name in sorted(found, key=len, reverse=True):
            if found[name]["type"] == "directory":
                _remove_empty(filesystem, name)
            else:
                filesystem.rm_file(name)
        _remove_empty(filesystem, path)


def _remove_empty(filesystem: AbstractFileSystem, path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotImplementedError):  # object stores have no directories
        filesystem.rmdir(path)


def make_parent(path: str | os.PathLike[str], *, durable: bool) -> None:
    """Create the directory of a checkpoint, and the directory's missing parents.

    Raises:
        OSError: the filesystem refused.
    """
    target = locate(path)
    if isinstance(target, RemotePath):
        with refusals_as_os_errors():
            target.filesystem.makedirs(posixpath.dirname(target.path), exist_ok=True)
    elif isinstance(target, str):
        make_directories(os.path.dirname(os.path.abspath(target)), durable=durable)


def make_directories(path: str | os.PathLike[str], *, durable: bool) -> None:
    """Create a directory and its missing parents."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        os.makedirs(directory, exist_ok=True)
        if durable:
            posix.sync_directory(os.path.dirname(directory))
