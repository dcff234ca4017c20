"""The folder that files are to be saved to, and the filesystem that it is on."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field, replace

from fastensor.backends import posix, registry
from fastensor.errors import BackendUnavailableError
from fastensor.select.machine import StorageKind, identity, storage_kind
from fastensor.select.rule import RESIDENT_FRACTION

PREFIX = ".fastensor-doctor-"
"""What all that is created in the folder begins with, as far as it has a name."""
_PROBE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Space:
    """How much fits, as the filesystem tells (``statvfs``). Quotas show only where it counts them in."""

    free_nbytes: int
    """For this user."""
    total_nbytes: int
    files_left: int | None
    """How many more files there can be; None if there is no such limit."""


@dataclass(frozen=True, slots=True)
class DirectIO:
    """Transfers around the page cache (O_DIRECT)."""

    accepted: bool
    reason: str
    """Why not; empty if they are."""
    memory_alignment: int | None
    """In bytes; None if the filesystem has no direct I/O."""
    offset_alignment: int | None


@dataclass(frozen=True, slots=True)
class PageCache:
    """Whether it can be seen what the page cache holds, and changed: a file was written, and then evicted from it."""

    written_fraction: float
    """How much of it was resident when it had been written."""
    evicted_fraction: float
    """How much when it had been evicted."""

    works: bool
    """Whether both are as they should be: then loads know what is in it, and cold reads can be measured."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What was found out about a folder. What is None could not be found out, because of the error."""

    path: str
    error: str = ""
    """Why it cannot be used; empty if it can."""
    filesystem: str = ""
    """Its kind, as the kernel calls it."""
    disk: str = ""
    """What it is on, as far as that is on this machine."""
    kept_by: StorageKind = "disk"
    """Who keeps its files: a disk of this machine, memory until the next boot, or another machine or program."""
    space: Space | None = None
    direct: DirectIO | None = None
    page_cache: PageCache | None = None
    machine: dict[str, str] = field(default_factory=dict)
    """What timings are kept apart by."""


def examine(path: str) -> Folder:
    """Look at a folder, and try it with a small file that never has a name, or not for long."""
    machine = identity(path)
    kind = machine.get("filesystem", "")
    found = Folder(
        os.path.abspath(path),
        filesystem=kind,
        disk=machine.get("disk", ""),
        kept_by=storage_kind(kind),
        machine=machine,
    )
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return replace(found, error="it is no folder")
        found = replace(found, space=_space(os.statvfs(path)))
        with tempfile.TemporaryFile(prefix=PREFIX, dir=path, buffering=0) as file:
            return _try(found, file.fileno())
    except FileNotFoundError:
        return replace(found, error="there is no such folder")
    except OSError as error:
        return replace(found, error=f"no file can be written there ({error.strerror})")


def _space(found: os.statvfs_result) -> Space | None:
    if not found.f_blocks:  # it does not count
        return None
    files_left = found.f_favail if found.f_files else None
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files_left)


def _try(found: Folder, fd: int) -> Folder:
    """Fill in what an empty, open file there tells."""
    posix.write_fully(fd, memoryview(bytes(_PROBE_NBYTES)), 0)
    posix.sync_file(fd)
    return replace(found, page_cache=_page_cache(fd), direct=_direct_io(fd))


def _page_cache(fd: int) -> PageCache:
    written = posix.resident_fraction(fd, _PROBE_NBYTES)
    evicted = posix.evict(fd, _PROBE_NBYTES)
    return PageCache(written, evicted, evicted < RESIDENT_FRACTION <= written)


def _direct_io(fd: int) -> DirectIO:
    """What the filesystem says, and whether a transfer is then accepted."""
    limits = posix.direct_limits(fd)
    memory, offset = (limits.memory_alignment, limits.offset_alignment) if limits else (None, None)
    try:
        registry.get("direct").open_reader(fd, _PROBE_NBYTES, ()).close()
    except BackendUnavailableError as error:
        return DirectIO(False, str(error), memory, offset)
    return DirectIO(True, "", memory, offset)
