"""The folder: its filesystem, its space, and what the filesystem can do."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from fastensor.backends import registry
from fastensor.cli.checkup import Advice
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.files.words import human_size
from fastensor.select.context import RESIDENT_FRACTION
from fastensor.select.machine import StorageKind, identity, storage_kind

PREFIX = ".fastensor-doctor-"
"""Prefix of the names of everything that is created in the folder."""
_PROBE_NBYTES = 1 << 20
_LITTLE_NBYTES = 1 << 30
_FEW_FILES = 100
MAKE_WRITABLE = "have the folder made writable, free space or quota, or name another one"
_REMEDIES = {
    "there is no such folder": "create it, or name another one",
    "it is no folder": "name the folder that it is in",
}


@dataclass(frozen=True, slots=True)
class Space:
    """The space of the filesystem (``statvfs``). Quotas show only where the filesystem counts them in."""

    free_nbytes: int
    """Free bytes for this user."""
    total_nbytes: int
    files_left: int | None
    """Number of files that can still be made; None without such a limit."""


@dataclass(frozen=True, slots=True)
class DirectIO:
    """Transfers around the page cache (O_DIRECT)."""

    accepted: bool
    reason: str
    """Reason for which the filesystem refuses direct I/O; empty if it does not."""
    memory_alignment: int | None
    """In bytes; None if the filesystem has no direct I/O."""
    offset_alignment: int | None


@dataclass(frozen=True, slots=True)
class BlockSharing:
    """Blocks that files have in common (FICLONERANGE): saves do not write again what has not changed."""

    accepted: bool
    reason: str
    """Reason for which files share none; empty if they can."""


@dataclass(frozen=True, slots=True)
class PageCache:
    """Result of a test of the page cache: a file was written, found in it, and evicted."""

    written_fraction: float
    """The part of the file that was resident after writing."""
    evicted_fraction: float
    """The part that was resident after the eviction."""

    works: bool
    """True if both are as they should be. Then loads know what is cached, and cold reads can be measured."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Findings about a folder; None for those that the error prevented."""

    path: str
    error: str = ""
    """Reason for which the folder cannot be used; empty if it can."""
    filesystem: str = ""
    """The kind of the filesystem, as the kernel calls it."""
    disk: str = ""
    """The model of the disk, if it is one of this machine."""
    kept_by: StorageKind = "disk"
    """Kind of storage: a disk of this machine, memory until the next boot, or another machine or program."""
    space: Space | None = None
    direct: DirectIO | None = None
    page_cache: PageCache | None = None
    shared_blocks: BlockSharing | None = None
    machine: dict[str, str] = field(default_factory=dict)
    """The identity by which dictionaries are kept apart."""


def examine(path: str) -> Folder:
    """Look at a folder, and try it with a small temporary file."""
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
        new = partial(tempfile.TemporaryFile, prefix=PREFIX, dir=path, buffering=0)
        with new() as file, new() as another:
            return _try(found, file.fileno(), another.fileno())
    except FileNotFoundError:
        return replace(found, error="there is no such folder")
    except OSError as error:
        return replace(found, error=f"no file can be written there ({error.strerror})")


def _space(found: os.statvfs_result) -> Space | None:
    if not found.f_blocks:  # the filesystem does not count blocks
        return None
    files_left = found.f_favail if found.f_files else None
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files_left)


def _try(found: Folder, fd: int, another: int) -> Folder:
    """Add what can be found out with two empty, open files in the folder."""
    posix.write_fully(fd, memoryview(bytes(_PROBE_NBYTES)), 0)
    posix.sync_file(fd)
    shared_blocks = _shared_blocks(fd, another, found.filesystem)
    return replace(found, page_cache=_page_cache(fd), direct=_direct_io(fd), shared_blocks=shared_blocks)


def _shared_blocks(fd: int, another: int, filesystem: str) -> BlockSharing:
    if not posix.may_share_blocks(fd):
        where = filesystem or "this filesystem"
        return BlockSharing(False, f"files share no blocks on {where}; on XFS and btrfs they can")
    try:
        posix.share_blocks(fd, 0, another, 0, _PROBE_NBYTES)
    except OSError as error:
        return BlockSharing(False, f"{filesystem} refuses ({error.strerror}); XFS can if made with -m reflink=1")
    return BlockSharing(True, "")


def _page_cache(fd: int) -> PageCache:
    written = posix.resident_fraction(fd, _PROBE_NBYTES)
    evicted = posix.evict(fd, _PROBE_NBYTES)
    return PageCache(written, evicted, evicted < RESIDENT_FRACTION <= written)


def _direct_io(fd: int) -> DirectIO:
    """The limits that the filesystem states, and whether it accepts a transfer."""
    limits = posix.direct_limits(fd)
    memory, offset = (limits.memory_alignment, limits.offset_alignment) if limits else (None, None)
    try:
        registry.get("direct").open_reader(fd, _PROBE_NBYTES, ()).close()
    except BackendUnavailableError as error:
        return DirectIO(False, str(error), memory, offset)
    return DirectIO(True, "", memory, offset)


def facts(found: Folder) -> dict[str, str]:
    """The rows of the table; empty where nothing was found out."""
    kept = {"disk": "", "memory": ", in memory", "server": ", kept elsewhere"}[found.kept_by]
    disk = f" on {found.disk}" if found.disk else ""
    return {
        "folder": found.path,
        "filesystem": f"{found.filesystem or 'unknown'}{kept}{disk}",
        "free": _describe_space(found.space) if found.space else "",
        "O_DIRECT": _describe_direct(found.direct) if found.direct else "",
        "page cache": _describe_page_cache(found.page_cache) if found.page_cache else "",
        "sharing": _describe_shared_blocks(found.shared_blocks) if found.shared_blocks else "",
    }


def _describe_space(space: Space) -> str:
    files = "" if space.files_left is None else f", {space.files_left} more files"
    return f"{human_size(space.free_nbytes)} of {human_size(space.total_nbytes)}{files}"


def _describe_direct(direct: DirectIO) -> str:
    if not direct.accepted:
        return f"no: {direct.reason}"
    return f"yes, in blocks of {direct.offset_alignment} bytes from memory aligned to {direct.memory_alignment}"


def _describe_shared_blocks(shared: BlockSharing) -> str:
    return "yes, of blocks: saves write what has changed" if shared.accepted else f"no: {shared.reason}"


def _describe_page_cache(cache: PageCache) -> str:
    if cache.works:
        return "can be seen and emptied"
    return (
        f"cannot be seen or emptied: {cache.written_fraction:.0%} of a file are in it after writing, and "
        f"{cache.evicted_fraction:.0%} after the eviction"
    )


def advise(found: Folder) -> Iterator[Advice]:
    """Advice about what keeps files from being saved there, from being durable, or from being moved fast."""
    where, in_memory = found.path, found.kept_by == "memory"
    if found.error:
        yield Advice("error", f"{where}: {found.error}", _REMEDIES.get(found.error, MAKE_WRITABLE))
    if in_memory:
        what = f"{where} is on {found.filesystem}, in memory: nothing there survives the next boot, durable or not"
        yield Advice("warning", what, "save what is to be kept to a disk")
    if found.kept_by == "server":
        what = f"{where} is on {found.filesystem}, kept by another machine or program, on whose fsync saves depend"
        yield Advice("warning", what, "find out whether it syncs (an NFS export that is async does not)")
    if found.space is not None and found.space.free_nbytes < _LITTLE_NBYTES:
        what = f"only {human_size(found.space.free_nbytes)} are free at {where}"
        yield Advice("warning", what, "free some: a checkpoint and the one that replaces it need room at a time")
    if found.space is not None and found.space.files_left is not None and found.space.files_left < _FEW_FILES:
        what = f"there can be only {found.space.files_left} more files at {where}"
        yield Advice("warning", what, "remove some: the filesystem runs out of inodes")
    if found.direct is not None and not found.direct.accepted and not in_memory:
        what = f"no direct I/O at {where}: {found.direct.reason}"
        yield Advice("warning", what, "use a filesystem that has it, such as ext4 or XFS: large files are faster there")
    if found.page_cache is not None and not found.page_cache.works and not in_memory:
        what = f"the page cache of {where} cannot be seen or emptied"
        yield Advice("warning", what, "name a backend if loads are slow: they take every file for cached")
