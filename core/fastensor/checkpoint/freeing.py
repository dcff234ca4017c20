"""Freeing the space of replaced and removed files after the call that has replaced or removed them.

The filesystem does that when the last descriptor of a nameless file is closed. It takes ext4 about 0.1 s per GiB, and a
filesystem that is mounted with ``discard`` several times that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastensor.backends import posix
from fastensor.backends.afterwards import do_afterwards

_BLOCK_NBYTES = 512
"""The unit of ``st_blocks`` (stat(2))."""


@dataclass(slots=True, eq=False)
class Freeing:
    """How far the space of a file that has lost its name is freed."""

    nbytes: int = 0
    """The space. 0 if the file has other names, or was not there."""
    seconds: float | None = None
    """How long freeing took; None until it is done."""


@dataclass(slots=True, eq=False)
class _Job:
    """Closes a descriptor once, in the thread that comes first."""

    fd: int
    inode: tuple[int, int]
    """The device of the file, and its number there."""
    freeing: Freeing
    _claimed: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Close it, unless another thread does."""
        if not self._claimed.acquire(blocking=False):
            return
        started = time.perf_counter()
        try:
            posix.close_read_only(self.fd)
        finally:  # or others would wait for ever
            self.freeing.seconds = time.perf_counter() - started
            with contextlib.suppress(ValueError):  # in a forked child, none is pending
                _pending.remove(self)
            self._done.set()

    def finish(self) -> None:
        """Close it, or return when the thread that does is done."""
        self.run()
        self._done.wait()


_pending: list[_Job] = []
"""Jobs that are not done. Single calls change the list, so it needs no lock, which a fork or a signal handler might
find held."""


@contextmanager
def freeing_afterwards(path: str) -> Iterator[Freeing]:
    """Have the space of a file that loses its name in the block freed by another thread, after it.

    Freeing it at once would hold up the caller, and the sync of the directory that makes the new name durable. If the
    process ends before, the kernel frees it.
    """
    freeing = Freeing()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # not there, not readable, or a link: nothing to keep
        yield freeing
        return
    try:
        yield freeing
    finally:
        found = os.fstat(fd)
        freeing.nbytes = 0 if found.st_nlink else found.st_blocks * _BLOCK_NBYTES
        job = _Job(fd, (found.st_dev, found.st_ino), freeing)
        _pending.append(job)
        if found.st_nlink or not do_afterwards(job.run):
            job.run()


def wait_for_space() -> None:
    """Return when the space of all files replaced or removed so far in this process has been freed."""
    for job in list(_pending):
        job.finish()


def _forget() -> None:
    """In a forked child: its parent frees the space, which the child must not keep by descriptors of its own."""
    jobs = list(_pending)
    _pending.clear()
    for job in jobs:
        with contextlib.suppress(OSError):  # closed just before
            found = os.fstat(job.fd)
            if (found.st_dev, found.st_ino) == job.inode:  # or another file has its number
                os.close(job.fd)


os.register_at_fork(after_in_child=_forget)
