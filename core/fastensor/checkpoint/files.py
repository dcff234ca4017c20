"""Removing checkpoints, and making room for them, wherever they are."""

from __future__ import annotations

import os
import posixpath
import shutil

from fastensor.checkpoint import publish
from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.remote import refusals_as_os_errors


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint: a file, a directory with all it holds, or a symlink but not its target.

    Nothing happens if there is none.

    Raises:
        OSError: the filesystem refused.
    """
    target = locate(path)
    if isinstance(target, RemotePath):
        with refusals_as_os_errors():
            if target.filesystem.exists(target.path):
                target.filesystem.rm(target.path, recursive=True)
    elif isinstance(target, str):
        if os.path.isdir(target) and not os.path.islink(target):
            shutil.rmtree(target)
        elif os.path.lexists(target):
            publish.remove_file(target)


def make_parent(path: str | os.PathLike[str], *, durable: bool) -> None:
    """Create the directory that a checkpoint is to be in, with its missing parents.

    Raises:
        OSError: the filesystem refused.
    """
    target = locate(path)
    if isinstance(target, RemotePath):
        with refusals_as_os_errors():
            target.filesystem.makedirs(posixpath.dirname(target.path), exist_ok=True)
    elif isinstance(target, str):
        publish.make_directories(os.path.dirname(os.path.abspath(target)), durable=durable)
