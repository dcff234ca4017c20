"""Making the Nth system call fail, to show that every failure is survived."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from fastensor.backends import posix

_CALLS: tuple[tuple[Any, str], ...] = (
    (os, "open"),
    (os, "stat"),
    (os, "fstat"),
    (os, "pwrite"),
    (os, "preadv"),
    (os, "fsync"),
    (os, "ftruncate"),
    (os, "fchmod"),
    (os, "lseek"),
    (os, "rename"),
    (fcntl, "flock"),
    (fcntl, "fcntl"),
    (posix, "_call"),
)


@dataclass(slots=True)
class Fault:
    """What became of an injected fault."""

    calls: int = 0
    """Calls seen so far."""
    fired: str = ""
    """The call that failed; empty while none has."""


@contextmanager
def failing_call(number: int, code: int = errno.EIO) -> Iterator[Fault]:
    """Let the ``number``-th system call of Fastensor's I/O in the block fail with ``code``, counting from 1.

    Counted are the calls that open, look at, read, write, sync, lock, preallocate and rename files, from all threads
    of the process. Not for use by several threads at a time.
    """
    fault = Fault()
    lock = threading.Lock()

    def intercept(original: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
        with lock:
            fault.calls += 1
            fails = fault.calls == number
            if fails:
                fault.fired = name
        if fails:
            raise OSError(code, os.strerror(code))
        return original(*arguments, **options)

    with _patched(intercept):
        yield fault


@contextmanager
def _patched(intercept: Callable[..., Any]) -> Iterator[None]:
    patches = [
        mock.patch.object(module, name, partial(intercept, getattr(module, name), name)) for module, name in _CALLS
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
