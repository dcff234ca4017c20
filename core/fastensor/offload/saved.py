"""The record of one offloaded range of bytes, and the budgets that such ranges count against."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends.buffers import Buffer
from fastensor.backends.streams import Event
from fastensor.errors import OffloadError
from fastensor.offload.codecs import Encoding
from fastensor.offload.slots import FileSlot


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a range in a slot of its own."""

    slot: FileSlot
    memory_nbytes: int
    """Bytes of the range in the piece."""
    nbytes: int
    """Bytes that were written for them."""
    crc32: int
    """CRC32 of these bytes; 0 if nothing is verified."""
    encoding: Encoding | None = None
    """Encoding of the bytes; None if they are as they were in memory."""


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A complete copy on the SSD."""

    backend: str
    """The backend that has written the slots."""
    pieces: tuple[StoredPiece, ...]
    """In order."""

    @property
    def nbytes(self) -> int:
        """Bytes that were written."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class SavedBytes:
    """A range of bytes of a storage that autograd has saved, from the forward pass until no graph needs it.

    The bytes are in every place that is not None or empty: ``loaded``, ``source``, ``blocks``, ``stored``. Change the
    record with the lock of its :class:`~fastensor.offload.swapper.Swapper` held.
    """

    nbytes: int
    origin: int
    """Offset of the range in the storage that was saved."""
    device: torch.device
    original: StorageWeakRef
    """The storage that was saved, which others may keep alive."""
    source: torch.UntypedStorage | None
    """The same storage, until a copy of the bytes is complete."""
    page_offset: int | None = None
    """Bytes between the start of a memory page and the range, if the range is written without a copy in whole pages.
    None if the range is copied to a staging block first."""
    ready: Event | None = None
    """Reached when the device has computed the bytes."""
    copied: Sequence[Event] = ()
    """While the bytes are being copied to ``blocks``, events that are reached when they are there."""
    address: int = 0
    """Address of the storage when that was queued."""
    arrived: Sequence[Event] = ()
    """Reached when the latest copies from ``blocks`` to ``loaded`` are done."""
    dtype: torch.dtype = torch.uint8
    """Dtype of the tensor that was saved first. It says what codecs may do with the bytes."""
    mark: int = 0
    """Equal for the same saved tensor in forward passes of the same form."""
    position: int = 0
    """Index in the forward pass."""
    blocks: list[Buffer] = field(default_factory=list)
    """A copy in host memory, of a range that was on a device."""
    stored: StoredBytes | None = None
    """A copy on the SSD."""
    loaded: torch.UntypedStorage | None = None
    """A copy that was read back. It begins ``lead`` bytes before the range."""
    write: Future[None] | None = None
    """The job that copies the bytes out, until that job has ended."""
    read: Future[torch.UntypedStorage | None] | None = None
    """The job that reads the bytes back, until that job has ended."""
    unread: int = 1
    """Saved tensors on this range that the backward pass has not asked for."""
    prefetched: bool = False
    """True if ``loaded`` was read ahead, and has not been asked for since."""
    was_needed: bool = False
    """True if a backward pass has got ``source``, and may keep it alive."""
    released: bool = False
    """True if no graph needs the bytes any more."""
    failure: OffloadError | None = None
    """Reason for which the bytes are lost."""

    @property
    def lead(self) -> int:
        """Bytes in front of the range that are written and read with it."""
        return self.page_offset or 0

    @property
    def is_away(self) -> bool:
        """True if the bytes have to be copied back before they can be used."""
        return self.source is None and (bool(self.blocks) or self.stored is not None)

    @property
    def is_to_be_read(self) -> bool:
        """True if the bytes are away, and nothing brings them back yet."""
        return self.is_away and self.loaded is None and self.read is None


class ByteBudget:
    """Ranges that take memory of one kind, within a limit that is checked whenever one is added.

    Args:
        limit: the most bytes that the ranges may take together. A range that is larger may be there alone, unless the
            limit is 0.
        note: is told the bytes whenever there are more.

    >>> import torch
    >>> def saved(nbytes):
    ...     storage = torch.UntypedStorage(nbytes)
    ...     return SavedBytes(nbytes, 0, storage.device, StorageWeakRef(storage), storage)
    >>> budget, first, second = ByteBudget(100), saved(80), saved(30)
    >>> budget.add(first, 80)
    >>> budget.fits(30), budget.fits(20)
    (False, True)
    >>> budget.add(second, 30)
    Traceback (most recent call last):
    AssertionError: 110 bytes are held, and 100 allowed
    """

    def __init__(self, limit: int = sys.maxsize, note: Callable[[int], None] | None = None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._note = note
        self._held: dict[SavedBytes, int] = {}

    def __contains__(self, saved: SavedBytes) -> bool:
        return saved in self._held

    def oldest_first(self) -> list[SavedBytes]:
        """The ranges, the one that was added or used longest ago first."""
        return list(self._held)

    def fits(self, nbytes: int) -> bool:
        """True if a range that takes ``nbytes`` may be added."""
        return self.nbytes + nbytes <= self.limit or (self.limit > 0 and not self._held)

    def add(self, saved: SavedBytes, nbytes: int, *, beyond: bool = False) -> None:
        """Count a range, which takes ``nbytes``.

        Args:
            beyond: whether the limit may be exceeded.
        """
        self.remove(saved)
        total = self.nbytes + nbytes
        assert beyond or self.fits(nbytes), f"{total} bytes are held, and {self.limit} allowed"
        self._held[saved] = nbytes
        self.nbytes = total
        if self._note is not None:
            self._note(total)

    def use(self, saved: SavedBytes) -> None:
        """Make a range the newest."""
        self._held[saved] = self._held.pop(saved)

    def remove(self, saved: SavedBytes) -> None:
        """Stop counting a range. Does nothing if the range was not counted."""
        self.nbytes -= self._held.pop(saved, 0)
