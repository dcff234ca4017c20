"""Writing files of remote filesystems: the only place that knows in what those of ``fsspec`` differ."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from fastensor.checkpoint.location import RemotePath

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_TEMPORARY_SUFFIX = ".fastensor-tmp"


@contextmanager
def replacing(target: RemotePath) -> Iterator[BinaryIO]:
    """A file that takes the target's place when the block is left, and never if it raises.

    Object stores show nothing of an upload before it is complete. Elsewhere a temporary is written and renamed, which
    is atomic where the filesystem's rename is.
    """
    filesystem = target.filesystem
    file = filesystem.open(target.path, "wb", autocommit=False)
    if _commits(file):
        try:
            yield cast(BinaryIO, file)
            file.close()
        except BaseException:
            _abandon(file)
            raise
        file.commit()
    else:
        _abandon(file)
        yield from _renaming(filesystem, target.path)


def _commits(file: Any) -> bool:
    """Whether the filesystem shows a file only when it is told to."""
    from fsspec.spec import AbstractBufferedFile

    commit = getattr(type(file), "commit", None)
    return commit is not None and commit is not AbstractBufferedFile.commit


def _abandon(file: Any) -> None:
    """Drop an upload. Closing the file, which also its collection does, would otherwise complete it."""
    with contextlib.suppress(Exception):
        file.discard()
    file.closed = True


def _renaming(filesystem: AbstractFileSystem, path: str) -> Iterator[BinaryIO]:
    temporary = f"{path}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}"
    file = filesystem.open(temporary, "wb")
    try:
        yield cast(BinaryIO, file)
        file.close()
        filesystem.mv(temporary, path)
    except BaseException:
        _abandon(file)
        with contextlib.suppress(Exception):
            filesystem.rm(temporary)
        raise
