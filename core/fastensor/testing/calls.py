"""Intercepting the system calls of Fastensor's I/O in tests."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.files import posix

OS_CALLS = (
    *("open", "close", "dup", "stat", "lstat", "fstat", "lseek", "scandir", "statvfs", "fstatvfs", "mkdir", "readlink"),
    *("pwrite", "write", "pread", "preadv", "copy_file_range", "fsync", "sync", "ftruncate", "posix_fadvise"),
    *("pwritev", "memfd_create"),
    *("rename", "link", "unlink", "symlink", "fchmod", "fchown"),
    *("listxattr", "getxattr", "setxattr", "removexattr"),
)
"""Functions of ``os`` that are intercepted."""
FCNTL_CALLS = ("fcntl", "flock", "ioctl")
"""Functions of ``fcntl`` that are intercepted."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that is about to be made."""

    name: str
    """The name in ``os`` or ``fcntl``; for a call that only the C library has, the name there (``fallocate64``)."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def perform(self) -> Any:
        """Make the call. Returns its result."""
        return self.function(*self.arguments, **self.options)


Interceptor: TypeAlias = Callable[[Call], Any]
"""Makes the call, or does something else. The caller gets what the interceptor returns or raises. Several threads may
call an interceptor at once. Its own calls are intercepted, too, except :meth:`Call.perform`."""


@contextmanager
def intercepted(by: Interceptor) -> Iterator[None]:
    """Send every call that opens, examines, moves, syncs, locks, names or closes files through ``by``.

    Calls of all threads are intercepted if they are made from Python, not those of libraries in C. Blocks may be
    nested; the inner one comes first. Only one thread may enter such blocks at a time. Garbage is not looked for within
    the block: objects of others, left in cycles before, would close their files here. So would earlier saves, whose
    files are closed first.
    """
    with ExitStack() as patches:
        if gc.isenabled():
            wait_for_space()
            gc.disable()
            patches.callback(gc.enable)
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
