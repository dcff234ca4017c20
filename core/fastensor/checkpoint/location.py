"""Paths, URLs and open files, as users give them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias
from weakref import WeakSet

from fastensor.errors import UnknownFilesystemError, caught_as
from fastensor.files.forks import first_in_children

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://"
NO_LOCAL_FILE = "it is no file of this machine"
"""The reason, for reports, for which no backend moves a file."""
Location: TypeAlias = str | os.PathLike[str] | BinaryIO
"""A path, a URL that ``fsspec`` knows, or an open binary file."""


class RemotePath(NamedTuple):
    """A file of a filesystem that only ``fsspec`` reaches."""

    url: str
    filesystem: AbstractFileSystem
    path: str
    """Inside the filesystem."""


class Target(NamedTuple):
    """The file that a save writes."""

    path: str
    """The given path, with symlinks followed."""
    is_descriptor: bool = False
    """True if the path names an open file of this process: ``/dev/fd/3``, ``/proc/self/fd/3``."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)


def locate(location: Location, storage_options: Mapping[str, Any] | None = None) -> str | RemotePath | BinaryIO:
    """The kind of a location: a local path (``file://`` URLs are such), a remote one, or an open file.

    Args:
        location: as users give it.
        storage_options: what ``fsspec`` needs besides a URL, such as an account. Ignored for paths.

    Raises:
        UnknownFilesystemError: ``fsspec`` does not know the URL's protocol, or lacks the package for it.
        TypeError: the location is none of these.
    """
    if isinstance(location, str | os.PathLike):
        text: Any = os.fspath(location)
        if isinstance(text, str):
            is_url = "://" in text and re.match(_URL, text)
            return _resolve_url(text, storage_options or {}) if is_url else text
    elif hasattr(location, "read") or hasattr(location, "write"):
        return location
    error = TypeError(
        f"expected a path of type str or os.PathLike[str], a URL, or an open binary file; "
        f"found {type(location).__name__}"
    )
    raise caught_as(error, AttributeError)  # torch looks for methods of a file


def as_in_fsspec(path: str | os.PathLike[str]) -> str:
    """A path as ``fsspec`` and Lightning take it: absolute, without a slash at its end, ``~`` being the user's home.

    URLs of remote filesystems are left as they are.

    Raises:
        UnknownFilesystemError: ``fsspec`` does not know the URL's protocol, or lacks the package for it.
    """
    found = _resolve_url(os.fspath(path), {})
    return found.url if isinstance(found, RemotePath) else found


def _resolve_url(url: str, storage_options: Mapping[str, Any]) -> str | RemotePath:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, path = url_to_fs(url, **storage_options)
    except (ValueError, ImportError) as error:
        raise UnknownFilesystemError(
            f"{url}: fsspec cannot reach it ({error}); expected a path, or a URL such as s3://bucket/name whose "
            f"package (s3fs for s3, gcsfs for gs) is installed"
        ) from error
    if isinstance(filesystem, LocalFileSystem):
        return str(path)
    keep_in_children(filesystem)
    return RemotePath(url, filesystem, path)


_used: WeakSet[Any] = WeakSet()
"""Remote filesystems that this process has used."""
_of_parent: list[Any] = []
"""In a forked child: the parent's remote filesystems. If one went, HTTP's would close its connections, by an event loop
that shares its ``epoll`` with the parent's: the parent would wait for ever for what comes in by them."""


def keep_in_children(filesystem: Any) -> None:
    """Have a remote filesystem not go in forked children."""
    _used.add(filesystem)


def _keep_those_of_parent() -> None:
    _of_parent.extend(_used)
    _used.clear()


first_in_children(_keep_those_of_parent)


def name_of(location: Location) -> str:
    """The name of a location in messages and reports."""
    if isinstance(location, str | os.PathLike):
        return os.fsdecode(location)  # bytes are refused where the location is used
    name = getattr(location, "name", None)
    return name if isinstance(name, str) else f"<{type(location).__name__}>"


def can(file: object, question: str, method: str) -> bool:
    """True if a file object can do something: by the answer to ``question``, or, without one, by having the method."""
    answer = getattr(file, question, None)
    return hasattr(file, method) if answer is None else bool(answer())
