"""Slots on SSDs: parts of one nameless file in each folder, used again and again.

Nothing is left on the disk when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from fastensor.backends import registry
from fastensor.backends.base import DeviceSlots, Extent, SlotBackend, Slots
from fastensor.backends.registry import announce, why_unavailable
from fastensor.errors import BackendUnavailableError, OffloadError
from fastensor.files import posix
from fastensor.files.launchers import local_processes
from fastensor.files.ranges import FreeRanges
from fastensor.offload.config import OffloadConfig, folders_to_try
from fastensor.select.machine import StorageKind, identity, storage_kind
from fastensor.select.transfer import is_to_blame

ALIGNMENT = 4096
"""Offsets and lengths of slots are multiples of this, as any disk accepts for direct I/O."""
_GROWTH_NBYTES = 64 << 20
"""Bytes by which a file grows."""
_SHARE_OF_FREE_SPACE = 0.9
_WHERE = "(directories of OffloadConfig, --fastensor_offload_directories of fastensor-accelerate)"
_logger = logging.getLogger("fastensor")
_of_parents: list[ExitStack] = []
"""In forked children: files of the parent, which must not be closed, not even by the garbage collector."""


@dataclass(slots=True)
class SlotFile:
    """One nameless file, and which of its parts are free."""

    folder: str
    fd: int
    limit: int
    """The most units of ``ALIGNMENT`` that the file may have."""
    free: FreeRanges
    """The free ones."""
    opened: dict[str, Slots] = field(default_factory=dict)
    """The file opened by each backend that can."""
    reserved_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class FileSlot:
    """A part of one of the files, which holds one range of bytes."""

    file: SlotFile
    extent: Extent


class SlotFiles:
    """The files of one process. Use it in one thread at a time; open slots of a file may be used in any thread.

    Args:
        config: the folders, and the most bytes.

    Raises:
        OffloadError: no file can be made in a folder.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._resources = ExitStack()
        try:
            folders = _folders(config)
            self.files = [self._open(*one) for one in zip(folders, _limits(folders, config), strict=True)]
        except BaseException:
            self._resources.close()
            raise
        weakref.finalize(self, self._resources.close).atexit = False
        self.backends = self._usable_backends(config)
        """The names of the backends that can write to every file, the preferred one first."""
        self._turn = 0

    @property
    def used_nbytes(self) -> int:
        return sum(file.limit - file.free.free for file in self.files) * ALIGNMENT

    @property
    def reserved_nbytes(self) -> int:
        """Bytes that the files take on the disks."""
        return sum(file.reserved_nbytes for file in self.files)

    def allocate(self, nbytes: int) -> FileSlot | None:
        """A place for ``nbytes``, in the files in turn; None if no file has room.

        Raises:
            OSError: the space cannot be reserved: ENOSPC, EDQUOT, EFBIG, or an error of the disk.
        """
        self._turn += 1
        first = self._turn % len(self.files)
        units, failure = -(-nbytes // ALIGNMENT), None
        for file in (*self.files[first:], *self.files[:first]):
            begin = file.free.take(units)
            if begin is None:
                continue
            try:
                _reserve(file, (begin + units) * ALIGNMENT)
            except OSError as error:
                file.free.add(begin, units)
                failure = error.with_traceback(None)
                continue
            return FileSlot(file, Extent(begin * ALIGNMENT, (begin + units) * ALIGNMENT))
        if failure is not None:
            raise failure
        return None

    def free(self, slot: FileSlot) -> None:
        """Give a place back. Nothing reads or writes it any more."""
        slot.file.free.add(slot.extent.begin // ALIGNMENT, (slot.extent.end - slot.extent.begin) // ALIGNMENT)

    def direct_backends(self, device: torch.device) -> tuple[str, ...]:
        """The names of the backends that move bytes between the device and every file by themselves."""
        return tuple(
            name for name in self.backends if all(moves_device_memory(file.opened[name], device) for file in self.files)
        )

    def record_fallback(self, backend: str, reason: str) -> None:
        """Stop using a backend that has turned out not to work here."""
        announce(backend, reason)
        self.backends = tuple(name for name in self.backends if name != backend)

    def forget(self) -> None:
        """In a forked child: close the child's descriptors of the parent's files."""
        _of_parents.append(self._resources.pop_all())
        for file in self.files:
            for slots in file.opened.values():
                slots.close()
            posix.close_read_only(file.fd)

    def close(self) -> None:
        """Give the space back. No thread uses a slot any more."""
        self._resources.close()

    def _open(self, folder: str, limit: int) -> SlotFile:
        fd = _open_nameless(folder)
        self._resources.callback(posix.close_read_only, fd)
        units = limit // ALIGNMENT
        return SlotFile(folder, fd, units, FreeRanges(units))

    def _usable_backends(self, config: OffloadConfig) -> tuple[str, ...]:
        usable = []
        for name in registry.names_with_slots() if config.backend == registry.AUTO else (config.backend, "numpy"):
            if name in usable:
                continue
            try:
                if reason := why_unavailable(name):
                    raise BackendUnavailableError(reason)
                backend = registry.get(name)
                assert isinstance(backend, SlotBackend)
                for file in self.files:
                    file.opened[name] = slots = backend.open_slots(file.fd)
                    self._resources.callback(slots.close)
                    if ALIGNMENT % slots.alignment:
                        raise BackendUnavailableError(f"it asks for an alignment of {slots.alignment} bytes")
            except Exception as error:
                if not is_to_blame(error):
                    raise
                if name == config.backend:
                    announce(name, str(error) if isinstance(error, BackendUnavailableError) else f"it raised {error!r}")
                continue
            usable.append(name)
        return tuple(usable)


def moves_device_memory(slots: Slots, device: torch.device) -> TypeGuard[DeviceSlots]:
    """True if open slots move bytes of the device without host memory between. Asked for each piece, so without
    isinstance, which takes Python 3.11 longer than a small piece takes the disk."""
    return device.type in getattr(slots, "device_types", ())


def check_folders(config: OffloadConfig) -> None:
    """Make sure that files can be made in the folders that a configuration names, which is tried. Logs a warning for a
    folder that is not on a disk.

    Raises:
        OffloadError: no file can be made in a folder.
    """
    if config.target == "ssd":
        for folder in config.directories:
            posix.close_read_only(_open_nameless(folder))
        _warn_of_disks(config.directories)


def _open_nameless(folder: str) -> int:
    try:
        return posix.open_nameless(folder)
    except OSError as error:
        what = "create it, or name" if isinstance(error, FileNotFoundError) else "name"
        raise OffloadError(
            f"no file for activations can be made in {folder} ({error.strerror}); {what} another folder on an SSD "
            f"{_WHERE}"
        ) from error


def _warn_of_disks(folders: Sequence[str]) -> None:
    for folder in folders:
        kind = identity(folder).get("filesystem", "")
        if warning := wrong_disk(folder, storage_kind(kind), kind):
            _logger.warning("%s; name a folder on an SSD %s", warning, _WHERE)


def wrong_disk(folder: str, storage: StorageKind, kind: str) -> str:
    """A warning about a folder that is not on a disk of this machine; an empty string if it is.

    >>> wrong_disk("/tmp", "memory", "tmpfs")
    '/tmp is on tmpfs, which is in memory: what is offloaded there still takes memory'
    """
    if storage == "memory":
        return f"{folder} is on {kind}, which is in memory: what is offloaded there still takes memory"
    if storage == "server":
        return f"{folder} is on {kind}, which another machine serves: it may be much slower than an SSD of this one"
    return ""


def _folders(config: OffloadConfig) -> Sequence[str]:
    """The folders for the files. Logs a warning for one that is not on a disk, unless the configuration names it."""
    folders = folders_to_try(config)
    if config.directories:
        return folders
    kinds = [identity(folder).get("filesystem", "") for folder in folders]
    on_disk = [at for at, kind in enumerate(kinds) if storage_kind(kind) == "disk"]
    best = next((at for at in on_disk if os.access(folders[at], os.W_OK)), 0)
    _warn_of_disks(folders[best : best + 1])
    return folders[best : best + 1]


def _limits(folders: Sequence[str], config: OffloadConfig) -> Sequence[int]:
    """The most bytes of each file. Folders on one filesystem share its free space.

    Raises:
        OffloadError: a folder is missing.
    """
    if config.ssd_bytes is not None:
        return [config.ssd_bytes // len(folders)] * len(folders)
    try:
        devices = [os.stat(folder).st_dev for folder in folders]
        spaces = [os.statvfs(folder) for folder in folders]
    except OSError as error:
        raise OffloadError(f"no file for activations can be made in {error.filename} ({error.strerror})") from error
    sharing = Counter(devices)
    return [
        int(space.f_bavail * space.f_frsize * _SHARE_OF_FREE_SPACE) // sharing[device] // local_processes()
        for space, device in zip(spaces, devices, strict=True)
    ]


def _reserve(file: SlotFile, end: int) -> None:
    """Reserve space on the disk for what is in front of ``end``, and for more if there is room."""
    if end <= file.reserved_nbytes:
        return
    for more in (-(-end // _GROWTH_NBYTES) * _GROWTH_NBYTES, end):
        try:
            posix.preallocate(file.fd, more)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or more == end:
                raise
            continue
        file.reserved_nbytes = more
        return
