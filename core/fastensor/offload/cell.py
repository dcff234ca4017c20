"""What is known of one range of bytes that is offloaded, from the forward pass until the graph lets go of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends.memory import Buffer
from fastensor.offload.slots import Place, Slot
from fastensor.select.transfer import Transfer


class State(Enum):
    """Where the bytes are."""

    QUEUED = auto()
    """In memory; nothing has been done."""
    RESTING = auto()
    """In host memory, where they stay while there is room."""
    WRITING = auto()
    """In memory, and being written."""
    STORED = auto()
    """On the SSD."""
    READING = auto()
    """On the SSD, and being read."""
    LOADED = auto()
    """On the SSD, and in memory."""
    KEPT = auto()
    """In memory for good: they were needed before they were written, or could not be."""
    BROKEN = auto()
    """Lost: they cannot be read."""
    RELEASED = auto()
    """Nobody wants them any more."""


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
    """Comes when the bytes are there; when it is read, when the memory for them is free."""
    mark: int = 0
    """Tells the tensor apart from others of its step, and is the same for the same in other steps of the same form."""
    position: int = 0
    """In its step."""
    state: State = State.QUEUED
    unread: int = 1
    """How many handles have not been unpacked."""
    blocks: list[Buffer] = field(default_factory=list)
    """The bytes in host memory, if they were staged."""
    borrowed: int = 0
    """How many are copying from ``blocks``."""
    slot: Slot | None = None
    pieces: list[tuple[int, Place]] = field(default_factory=list)
    """Positions in the bytes, and where they are in the slot."""
    crc32s: list[int] = field(default_factory=list)
    """Of the pieces."""
    claimed: int = 0
    """How many pieces somebody has begun to move."""
    moving: int = 0
    """How many pieces are being moved now."""
    transport: str = ""
    transfer: Transfer | None = None
    """While it is being written."""
    failure: BaseException | None = None
    storage: torch.UntypedStorage | None = None
    """What it is read into."""
    memory: memoryview | None = None
    """Of ``storage``, if that is on the host."""
    prefetched: bool = False
    """Whether it was read before it was asked for."""

    def piece_nbytes(self, index: int) -> int:
        """Without what pads the last one."""
        position, place = self.pieces[index]
        return min(place.extent.nbytes, self.nbytes - position)
