"""What is known of one range of bytes that is offloaded, from the forward pass until the graph lets go of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends.memory import Buffer
from fastensor.offload.slots import Place, Slot
from fastensor.select.transfer import Transfer


class Home(Enum):
    """Where the bytes are at home, whether or not they have been read as well."""

    QUEUED = auto()
    """In memory; they wait to be staged, or written."""
    RESTING = auto()
    """In host memory, where they stay while there is room."""
    WRITING = auto()
    """In memory, and being staged or written."""
    STORED = auto()
    """On the SSD."""
    KEPT = auto()
    """In memory for good: they were needed before they were written, or could not be."""
    BROKEN = auto()
    """Nowhere: they cannot be read."""
    RELEASED = auto()
    """Nobody wants them any more."""


@dataclass(slots=True)
class Move:
    """Pieces on their way, which one or several threads claim."""

    count: int
    """How many."""
    transfer: Transfer | None = None
    """Who hears how long it takes, if it goes to or from the SSD."""
    ready: torch.cuda.Event | None = None
    """Comes when the memory that they are moved to is free."""
    claimed: int = 0
    """How many somebody has begun to move."""
    moving: int = 0
    """How many are being moved now."""
    failure: BaseException | None = None
    """The first one."""

    @property
    def is_claimed(self) -> bool:
        return self.claimed == self.count

    @property
    def is_over(self) -> bool:
        return self.is_claimed and not self.moving

    def claim(self) -> int:
        """The next piece, for somebody who begins to move it now."""
        if not self.claimed and self.transfer is not None:
            self.transfer.started = time.perf_counter()
        self.claimed += 1
        self.moving += 1
        return self.claimed - 1

    def end_piece(self, failure: BaseException | None) -> None:
        """Somebody has moved one, or could not."""
        self.moving -= 1
        self.failure = self.failure or failure

    def stop(self) -> None:
        """Nobody claims any more of it."""
        self.claimed = self.count


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Cell:
    """A range of bytes of a storage. Changed with its mover's lock held."""

    nbytes: int
    origin: int
    """Where in the storage that it was saved from the range begins."""
    device: torch.device
    live: StorageWeakRef
    """That storage, which others may keep alive."""
    source: torch.UntypedStorage | None
    """The same, as long as the bytes are to be had from it."""
    ready: torch.cuda.Event | None = None
    """Comes when the bytes are there."""
    straight: bool = False
    """Whether they are written from the host's memory where they are, and not from a copy."""
    lead: int = 0
    """How many bytes in front of them are written and read, too, so that whole pages are."""
    mark: int = 0
    """Tells the tensor apart from others of its forward pass, and is the same for the same in others of the same
    form."""
    position: int = 0
    """In its forward pass."""
    home: Home = Home.QUEUED
    unread: int = 1
    """How many handles have not been unpacked."""
    blocks: list[Buffer] = field(default_factory=list)
    """The bytes in host memory, if they were staged."""
    slot: Slot | None = None
    pieces: list[tuple[int, Place]] = field(default_factory=list)
    """Positions in the bytes, those that lead included, and where they are in the slot."""
    crc32s: list[int] = field(default_factory=list)
    """Of the pieces."""
    transport: str = ""
    """The backend that has written it."""
    writing: Move | None = None
    reading: Move | None = None
    storage: torch.UntypedStorage | None = None
    """What it is read into."""
    memory: memoryview | None = None
    """Of ``storage``, if that is on the host."""
    prefetched: bool = False
    """Whether it was read before it was asked for, and has not been since."""
    awaited: int = 0
    """How many wait for it."""
    failure: BaseException | None = None
    """Why it could not be read: raised each time if it is broken, or else once."""

    @property
    def is_loaded(self) -> bool:
        """Whether it has been read."""
        return self.storage is not None and self.reading is None

    def piece_nbytes(self, index: int) -> int:
        """Without what pads the last one."""
        position, place = self.pieces[index]
        return min(place.extent.nbytes, self.lead + self.nbytes - position)

    def own_part(self, index: int) -> slice:
        """Which part of a piece is of the bytes themselves."""
        return slice(0 if index else self.lead, self.piece_nbytes(index))
