"""Where activations are on SSDs: one nameless file in each folder, whose parts are used again and again.

Nothing of it is left when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from fastensor.backends import posix, registry
from fastensor.backends.base import DeviceSlots, SlotBackend, Slots
from fastensor.backends.fallback import announce, why_unavailable
from fastensor.errors import BackendUnavailableError, OffloadError
from fastensor.offload.config import TRANSPORTS, OffloadConfig, folders_to_try, processes_here
from fastensor.offload.extents import Extent, Extents
from fastensor.select.machine import Keeper, identity, keeper

PIECE_NBYTES = 4 << 20
"""Moved at a time; parts of the files but the last one of a slot are multiples of this."""
ALIGNMENT = 4096
"""Of parts of the files: what any disk asks for."""
_STRIPE_NBYTES = 8 << 20
"""What is smaller lies in one file."""
_GROWTH_NBYTES = 64 << 20
"""Space is reserved in steps of so much."""
_SHARE_OF_FREE_SPACE = 0.9
_logger = logging.getLogger("fastensor")


_of_parents: list[ExitStack] = []
"""In forked children: what is not to be closed, not even when it is collected."""


@dataclass(slots=True)
class SlotFile:
    """One of the files, and how it is used."""

    folder: str
    fd: int
    extents: Extents
    opened: dict[str, Slots] = field(default_factory=dict)
    """By backend."""
    reserved_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece is."""

    file: SlotFile
    extent: Extent


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor's bytes are: one part of each of one or several files, one behind the other."""

    parts: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.extent.nbytes for part in self.parts)

    def pieces(self) -> Iterator[tuple[int, Place]]:
        """Cut into what is moved at a time: the position in the bytes, and where they are; the files in turn."""
        begin, columns = 0, []
        for part in self.parts:
            columns.append(
                [
                    (
                        begin + at,
                        Place(part.file, Extent(part.extent.begin + at, min(PIECE_NBYTES, part.extent.nbytes - at))),
                    )
                    for at in range(0, part.extent.nbytes, PIECE_NBYTES)
                ]
            )
            begin += part.extent.nbytes
        for row in range(max(map(len, columns))):
            for column in columns:
                yield from column[row : row + 1]


class SlotFiles:
    """The files of one process. Used by one thread at a time, but for what moves pieces.

    Args:
        config: where, and how much.

    Raises:
        OffloadError: no file can be made there.
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
        self.transports = self._transports(config)
        """Backends that can write to all of the files."""
        self._device_types = {name: self._moved_by(name) for name in self.transports}
        self._turn = 0

    @property
    def used_nbytes(self) -> int:
        return sum(file.extents.used_nbytes for file in self.files)

    @property
    def reserved_nbytes(self) -> int:
        """What the files take of the disks."""
        return sum(file.reserved_nbytes for file in self.files)

    def allocate(self, nbytes: int) -> Slot | None:
        """A place for so many bytes; None if there is none left.

        Raises:
            OSError: the space cannot be reserved: ENOSPC, EDQUOT, EFBIG or what the disk is up to.
        """
        striped = [self.files] if nbytes >= _STRIPE_NBYTES and len(self.files) > 1 else []
        self._turn += 1
        first = self._turn % len(self.files)
        failure: OSError | None = None
        for files in (*striped, *([file] for file in (*self.files[first:], *self.files[:first]))):
            try:
                if (slot := self._place(nbytes, files)) is not None:
                    return slot
            except OSError as error:
                failure = error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # it holds this frame
        return None

    def _place(self, nbytes: int, files: Sequence[SlotFile]) -> Slot | None:
        """A place in these files."""
        share = -(-nbytes // len(files) // PIECE_NBYTES) * PIECE_NBYTES
        places: list[Place] = []
        try:
            for file, begin in zip(files, range(0, nbytes, share), strict=False):
                extent = file.extents.allocate(min(share, nbytes - begin))
                if extent is None:
                    self.free(Slot(tuple(places)))
                    return None
                places.append(Place(file, extent))
                _reserve(file)
        except BaseException:
            self.free(Slot(tuple(places)))
            raise
        return Slot(tuple(places))

    def free(self, slot: Slot) -> None:
        """A place is not used any more: nothing reads or writes it."""
        for place in slot.parts:
            place.file.extents.free(place.extent)

    def write(self, transport: str, place: Place, data: memoryview) -> None:
        """Fill a piece. Any thread may. See :meth:`fastensor.backends.base.Slots.write`."""
        place.file.opened[transport].write(data, place.extent.begin)

    def read(self, transport: str, place: Place, buffer: memoryview) -> None:
        """Read a piece. Any thread may. See :meth:`fastensor.backends.base.Slots.read`."""
        place.file.opened[transport].read(buffer, place.extent.begin)

    def moves(self, transport: str, device: torch.device) -> bool:
        """Whether a backend moves bytes between such a device and the files by itself."""
        return device.type in self._device_types[transport]

    def write_from_device(self, transport: str, place: Place, values: torch.Tensor) -> None:
        """As :meth:`write`, by a backend that can. See :class:`fastensor.backends.base.DeviceSlots`."""
        slots = place.file.opened[transport]
        assert isinstance(slots, DeviceSlots)
        slots.write_from_device(values, place.extent.begin)

    def read_to_device(self, transport: str, place: Place, values: torch.Tensor) -> None:
        """As :meth:`read`, likewise."""
        slots = place.file.opened[transport]
        assert isinstance(slots, DeviceSlots)
        slots.read_to_device(values, place.extent.begin)

    def give_up(self, transport: str, reason: str) -> None:
        """A backend has turned out not to work here."""
        announce(transport, reason)
        self.transports = tuple(name for name in self.transports if name != transport)

    def forget(self) -> None:
        """In a forked child: let go of the files, which are its parent's, but of those that a library has opened, which
        may wait for threads that the child lacks."""
        _of_parents.append(self._resources.pop_all())
        for file in self.files:
            for name, slots in file.opened.items():
                if name != "gds":
                    slots.close()
            posix.close_read_only(file.fd)

    def close(self) -> None:
        """Give the space back. Nothing is moved any more."""
        self._resources.close()

    def _open(self, folder: str, limit: int) -> SlotFile:
        try:
            fd = posix.open_nameless(folder)
        except OSError as error:
            raise OffloadError(f"no file for activations can be made in {folder} ({error.strerror})") from error
        self._resources.callback(posix.close_read_only, fd)
        return SlotFile(folder, fd, Extents(ALIGNMENT, limit))

    def _transports(self, config: OffloadConfig) -> tuple[str, ...]:
        usable = []
        for name in TRANSPORTS if config.backend == registry.AUTO else (config.backend, "numpy"):
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
            except BackendUnavailableError as error:
                if name == config.backend:
                    announce(name, str(error))
                continue
            usable.append(name)
        return tuple(usable)

    def _moved_by(self, transport: str) -> Set[str]:
        """Kinds of devices whose bytes a backend moves by itself, to and from all of the files."""
        slots = [file.opened[transport] for file in self.files]
        kinds = [one.device_types if isinstance(one, DeviceSlots) else frozenset[str]() for one in slots]
        return frozenset.intersection(*map(frozenset, kinds))


def wrong_disk(folder: str, kept_by: Keeper, kind: str) -> str:
    """What is to be said about a folder that is not on a disk of this machine; empty if it is.

    >>> wrong_disk("/tmp", "memory", "tmpfs")
    '/tmp is on tmpfs, which is in memory: what is offloaded there still takes memory'
    """
    if kept_by == "memory":
        return f"{folder} is on {kind}, which is in memory: what is offloaded there still takes memory"
    if kept_by == "server":
        return f"{folder} is on {kind}, which another machine serves: it may be much slower than an SSD of this one"
    return ""


def _folders(config: OffloadConfig) -> Sequence[str]:
    """Where files are to be. Says so if that is no disk."""
    folders = folders_to_try(config)
    kinds = [identity(folder).get("filesystem", "") for folder in folders]
    if not config.directories:
        usable = [at for at, kind in enumerate(kinds) if keeper(kind) == "disk" and os.access(folders[at], os.W_OK)]
        best = usable[0] if usable else 0
        folders, kinds = folders[best : best + 1], kinds[best : best + 1]
    for folder, kind in zip(folders, kinds, strict=True):
        if warning := wrong_disk(folder, keeper(kind), kind):
            _logger.warning("%s; name a folder on an SSD in OffloadConfig(directories=...)", warning)
    return folders


def _limits(folders: Sequence[str], config: OffloadConfig) -> Sequence[int]:
    """How large each file may become. Folders on one filesystem share what is free there.

    Raises:
        OffloadError: there is no such folder.
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
        int(space.f_bavail * space.f_frsize * _SHARE_OF_FREE_SPACE) // sharing[device] // processes_here()
        for space, device in zip(spaces, devices, strict=True)
    ]


def _reserve(file: SlotFile) -> None:
    """Let the file hold all that is allocated, and more where there is room."""
    if file.extents.end <= file.reserved_nbytes:
        return
    for end in (-(-file.extents.end // _GROWTH_NBYTES) * _GROWTH_NBYTES, file.extents.end):
        try:
            posix.preallocate(file.fd, end)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or end == file.extents.end:
                raise
            continue
        file.reserved_nbytes = end
        return
