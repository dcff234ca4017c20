"""Where activations are on SSDs: one nameless file in each folder, whose parts are used again and again.

Nothing of it is left when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from fastensor.backends import posix, registry
from fastensor.backends.base import SlotBackend, Slots
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
    """The files of one process. Used by one thread at a time, but for :meth:`write` and :meth:`read`.

    Args:
        config: where, and how much.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._resources = ExitStack()
        try:
            self.files = [self._open(folder, config) for folder in _folders(config)]
        except BaseException:
            self._resources.close()
            raise
        weakref.finalize(self, self._resources.close).atexit = False
        self.transports = self._transports(config)
        """Backends that can write to all of the files."""
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
        files = self.files if nbytes >= _STRIPE_NBYTES else [self.files[self._turn % len(self.files)]]
        self._turn += 1
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

    def give_up(self, transport: str, reason: str) -> None:
        """A backend has turned out not to work here."""
        announce(transport, reason)
        self.transports = tuple(name for name in self.transports if name != transport)

    def close(self) -> None:
        """Give the space back. Nothing is moved any more."""
        self._resources.close()

    def _open(self, folder: str, config: OffloadConfig) -> SlotFile:
        try:
            fd = posix.open_nameless(folder)
        except OSError as error:
            raise OffloadError(f"no file for activations can be made in {folder} ({error.strerror})") from error
        self._resources.callback(posix.close_read_only, fd)
        space = os.statvfs(folder)
        limit = int(space.f_bavail * space.f_frsize * _SHARE_OF_FREE_SPACE)
        if config.ssd_bytes is not None:
            limit = config.ssd_bytes // max(len(config.directories), 1)
        else:
            limit //= processes_here()
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
