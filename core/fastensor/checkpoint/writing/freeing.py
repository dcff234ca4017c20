"""The space of files that were replaced or removed is freed by a thread, after the call has returned.

The filesystem frees the space when the last descriptor of a nameless file is closed. That takes ext4 about 0.1 s per
GiB, and several times as long if the filesystem is mounted with ``discard``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastensor.checkpoint.writing.report import Freeing
from fastensor.files import posix
from fastensor.files.afterwards import do_afterwards
from fastensor.files.forks import first_in_children

_FEW_NBYTES = 32 << 20
"""So much may be freed while the next file is written: if each save waited, ten of 10 MiB would take a tenth longer."""
_BLOCK_NBYTES = 512
"""The unit of ``st_blocks`` (stat(2))."""


@dataclass(slots=True, eq=False)
class _PendingClose:
    """A descriptor that is to be closed once, by the first thread that asks. Others wait until that is done."""

    fd: int
    inode: tuple[int, int]
    """Device and inode number of the file."""
    freeing: Freeing
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Close the descriptor, or wait for the thread that closes it."""
        with self._lock:
            if self.freeing.seconds is not None:
                return
            started = time.perf_counter()
            try:
                posix.close_read_only(self.fd)
            finally:  # else another thread would close what has this number by now
                self.freeing.seconds = time.perf_counter() - started
                with contextlib.suppress(ValueError):  # in a forked child, none is pending
                    _pending.remove(self)


_pending: list[_PendingClose] = []
"""Jobs that are not done. Each change is one call, so the list needs no lock, which a fork or a signal handler might
find held."""


@contextmanager
def freeing_afterwards(path: str) -> Iterator[Freeing]:
    """Have another thread free a file's space after the block, if the file loses its name in the block.

    Freeing the space at once would delay the caller, and the sync of the directory that makes the new name durable. If
    the process ends before, the kernel frees the space.
    """
    freeing = Freeing()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # missing, not readable, or a link: there is no space to free
        yield freeing
        return
    try:
        yield freeing
    finally:
        found = os.fstat(fd)
        freeing.nbytes = 0 if found.st_nlink else found.st_blocks * _BLOCK_NBYTES
        job = _PendingClose(fd, (found.st_dev, found.st_ino), freeing)
        _pending.append(job)
        if found.st_nlink or not do_afterwards(job.run):
            job.run()


def wait_for_space() -> None:
    """Return when the space of all files replaced or removed so far in this process has been freed."""
    for job in list(_pending):
        job.run()


def make_room(fd: int, nbytes: int) -> None:
    """Return when the space of all files replaced or removed so far in this process has been freed; or before, if that
    is a few MiB, and there is room beside it.

    Args:
        fd: of a new file. Space is reserved for it, if not all has been freed.
        nbytes: the size that it will have; 0 if that is not known, and all is to be freed.
    """
    unfreed = sum(max(job.freeing.nbytes, 1 << 20) for job in list(_pending))  # so that few files stay open
    if unfreed > _FEW_NBYTES or (unfreed and not (nbytes and _is_reserved(fd, nbytes))):
        wait_for_space()


def _is_reserved(fd: int, nbytes: int) -> bool:
    try:
        return posix.preallocate(fd, nbytes)
    except OSError:  # if there is no room afterwards either, who writes to the file says so
        return False


def _forget() -> None:
    """In a forked child: close the copies of the descriptors, which would keep the space that the parent frees."""
    jobs = list(_pending)
    _pending.clear()
    for job in jobs:
        with contextlib.suppress(OSError):  # the parent closed it just before the fork
            found = os.fstat(job.fd)
            if (found.st_dev, found.st_ino) == job.inode:  # else the number is another file's by now
                os.close(job.fd)


first_in_children(_forget)
