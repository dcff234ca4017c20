"""The system calls that Fastensor's I/O consists of, and how a test gets between the two."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

from fastensor.files import posix

OS_CALLS = (
    *("open", "close", "dup", "stat", "lstat", "fstat", "lseek", "scandir", "statvfs", "mkdir", "readlink"),
    *("pwrite", "write", "preadv", "fsync", "sync", "ftruncate", "posix_fadvise"),
    *("rename", "link", "unlink", "symlink", "fchmod", "fchown"),
    *("listxattr", "getxattr", "setxattr", "removexattr"),
)
"""Attributes of ``os``."""
FCNTL_CALLS = ("fcntl", "flock")
"""Attributes of ``fcntl``."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that is about to be made."""

    name: str
    """As in ``os`` or ``fcntl``, or, for what only the C library has, as there (``fallocate64``)."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def perform(self) -> Any:
        """Make it, and return what it returns."""
        return self.function(*self.arguments, **self.options)


Interceptor: TypeAlias = Callable[[Call], Any]
"""Makes the call, or does something else; what it returns or raises is what the caller gets. May be called by several
threads at once. What it calls itself is intercepted, too, but for :meth:`Call.perform`."""


@contextmanager
def intercepted(by: Interceptor) -> Iterator[None]:
    """Send every call that opens, looks at, moves, syncs, locks, names or closes files through ``by``.

    Those of the whole process that are made from Python: what libraries do in C passes unseen. Blocks may be nested;
    the inner one comes first. Not to be entered by several threads at a time.
    """
    with ExitStack() as patches:
        for module, names in ((os, OS_CALLS), (fcntl, FCNTL_CALLS)):
            for name in names:
                replacement = partial(_divert, by, name, getattr(module, name))
                patches.enter_context(mock.patch.object(module, name, replacement))
        patches.enter_context(mock.patch.object(posix, "_call", partial(_divert_to_c, by, posix._call)))
        yield


def _divert(by: Interceptor, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return by(Call(name, function, arguments, options))


def _divert_to_c(by: Interceptor, function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    return by(Call(name, partial(function, name), arguments, {}))
