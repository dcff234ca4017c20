"""Moving the pieces of a range between its memory, staging blocks and slots on the SSD. Without any lock.

A large range in host memory is written from where it was saved, in whole pages, as direct I/O wants them: the first
page may begin before the range, the last may end behind it. The range is read back to pages of its own, to the same
offset in the first page. A piece that a codec makes smaller is encoded into a bounce block first.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from isal import isal_zlib

from fastensor.backends.base import DeviceSlots, Slots
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer
from fastensor.backends.memory import storage_on
from fastensor.backends.streams import Event, event_now
from fastensor.errors import CorruptActivationError
from fastensor.offload import codecs, copying
from fastensor.offload.codecs import DamagedPieceError, Encoding
from fastensor.offload.copying import bytes_of, copy_in, copy_out, crc32_of, pages_of, resized
from fastensor.offload.host_memory import HostMemory
from fastensor.offload.saved import SavedBytes, StoredBytes, StoredPiece
from fastensor.offload.slots import ALIGNMENT, FileSlot, moves_device_memory

PIECE_NBYTES = BUFFER_NBYTES
"""The most bytes of a piece, which fits into a staging block."""
Piece: TypeAlias = tuple[int, int]
"""Offset from the first byte that is moved, which may be in front of the range, and number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One read of a range to new memory. Several threads may share it."""

    saved: SavedBytes
    stored: StoredBytes
    """The copy to read."""
    target: torch.UntypedStorage
    """The new memory, on the range's device."""
    memory: memoryview | None
    """The memory of ``target`` if that is in host memory, in whole pages; the range begins at ``saved.lead``."""
    free: Event | None
    """Reached when the memory of ``target`` is free."""
    todo: deque[Piece]
    """Pieces that no thread has taken."""
    helpers: list[Future[None]] = field(default_factory=list)
    """Jobs that read pieces, too, with the backend that has written the range. Complete once the lock was held."""

    @classmethod
    def of(cls, saved: SavedBytes, host: HostMemory) -> Reading:
        """The read of a range that is in a slot. Call it with the lock of ``host`` held.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read into.
        """
        assert saved.stored is not None
        target, memory = new_memory(saved, host)
        reading = cls(saved, saved.stored, target, memory, event_now(saved.device), deque())
        reading.todo.extend(pieces(saved))
        return reading

    @property
    def is_one_piece(self) -> bool:
        """True if one thread reads all of it."""
        return self.saved.lead + self.saved.nbytes <= PIECE_NBYTES


def new_memory(saved: SavedBytes, host: HostMemory) -> tuple[torch.UntypedStorage, memoryview | None]:
    """Memory on a range's device for the range and its lead; and its bytes, in whole pages, if it is in host memory.
    Call it with the lock of ``host`` held.

    Raises:
        MemoryError, torch.OutOfMemoryError, OSError: there is no memory.
    """
    if copying.is_staged(saved.device):
        return storage_on(saved.device, saved.nbytes), None
    return host.storage(saved.lead + saved.nbytes)


def pieces(saved: SavedBytes) -> Iterator[Piece]:
    """The pieces in which a range is written and read, in order, with what is in front of it."""
    total = saved.lead + saved.nbytes
    for position in range(0, total, PIECE_NBYTES):
        yield position, min(PIECE_NBYTES, total - position)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A piece in host memory, as it is written."""

    data: memoryview
    """In whole units of ``ALIGNMENT``."""
    own: memoryview
    """The part of ``data`` that is the range's: its bytes, or encoded bytes."""
    memory_nbytes: int
    """Bytes of the range in the piece."""
    encoding: Encoding | None = None
    """None if the bytes are as they are in memory."""


def sampled_ratio(saved: SavedBytes, wanted: Set[str]) -> float:
    """An estimate of how many times smaller codecs make a range in host memory.

    Raises:
        OffloadError: the storage was resized.
    """
    leads = ((position, nbytes, 0 if position else saved.lead) for position, nbytes in pieces(saved))
    memory = [_own_bytes(saved, position, nbytes - lead) for position, nbytes, lead in leads]
    return codecs.sampled_ratio(memory, saved.dtype, wanted)


def outgoing(saved: SavedBytes, piece: Piece, wanted: Set[str], bounce: Buffer | None) -> Outgoing:
    """What is written of a piece, from ``blocks`` or else from ``source``.

    Args:
        saved: the range.
        piece: one of its :func:`pieces`.
        wanted: the codecs that may be used. If there are any, the range is in host memory.
        bounce: a block, if codecs are wanted or :func:`is_copied_to_write`.

    Raises:
        OffloadError: the storage was resized.
    """
    position, nbytes = piece
    lead = 0 if position else saved.lead
    if wanted:
        assert bounce is not None
        bounce.prepare(saved.device)
        memory = _own_bytes(saved, position, nbytes - lead)
        if (encoded := codecs.encode(memory, saved.dtype, wanted, bounce.as_tensor())) is not None:
            encoding, size = encoded
            return Outgoing(bounce.view[: whole(size)], bounce.view[:size], memory.numel(), encoding)
    data = _in_host_memory(saved, position, nbytes, bounce)
    return Outgoing(data, data[lead:nbytes], nbytes - lead)


def write(saved: SavedBytes, piece: Outgoing, slot: FileSlot, slots: Slots, *, checksum: bool) -> StoredPiece:
    """Write a piece of a range.

    Args:
        saved: the range.
        piece: one of its pieces.
        slot: a place for ``piece.data``.
        slots: the slot's file, opened by the backend that writes.
        checksum: whether to take the CRC32.

    Raises:
        OSError: the disk does not take the bytes.
        OffloadError: the storage was resized.
        BackendUnavailableError: this backend cannot write to the slot.
    """
    crc32 = int(isal_zlib.crc32(piece.own)) if checksum else 0
    try:
        slots.write(piece.data, slot.extent.begin)
    except OSError as error:
        if error.errno == errno.EFAULT and saved.source is not None:
            raise resized(saved.source, saved.origin + saved.nbytes) from error
        raise
    return StoredPiece(slot, piece.memory_nbytes, len(piece.own), crc32, piece.encoding)


def write_from_device(saved: SavedBytes, piece: Piece, slot: FileSlot, slots: Slots, *, checksum: bool) -> StoredPiece:
    """Write a piece from the memory of its device. Arguments and errors as for :func:`write`."""
    assert moves_device_memory(slots, saved.device)
    position, nbytes = piece
    _wait_for(saved.ready)
    memory = _own_bytes(saved, position, nbytes)
    slots.write_from_device(memory, slot.extent.begin)
    return StoredPiece(slot, nbytes, nbytes, crc32_of(memory) if checksum else 0)


def read(reading: Reading, piece: Piece, bounce: Buffer | None, backend: str, *, verify: bool) -> None:
    """Read a piece of a range from its slot. Several threads may read pieces at once.

    Args:
        reading: the read.
        piece: one of the :func:`pieces`.
        bounce: a block, if :func:`is_copied_to_read`.
        backend: the one that reads.
        verify: whether the CRC32 is compared, before anything is decoded.

    Raises:
        OSError: the disk does not give the bytes.
        CorruptActivationError: the bytes are not what was written.
        BackendUnavailableError: this backend cannot read from the slot.
    """
    saved, (position, nbytes) = reading.saved, piece
    stored = reading.stored.pieces[position // PIECE_NBYTES]
    slots, lead = stored.slot.file.opened[backend], 0 if position else saved.lead
    if stored.encoding is None and moves_device_memory(slots, saved.device):
        _read_to_device(reading, position, stored, slots, verify=verify)
        return
    through = None if stored.encoding is None and reading.memory is not None else bounce
    if through is not None:
        through.prepare(saved.device)
        data, own = through.view[: whole(stored.nbytes)], through.view[: stored.nbytes]
    else:
        assert reading.memory is not None
        data = reading.memory[position : position + whole(nbytes)]
        own = data[lead:nbytes]
    slots.read(data, stored.slot.extent.begin)
    if verify:
        _compare(saved, stored, int(isal_zlib.crc32(own)))
    if through is not None:
        _take_in(reading, position + lead, stored, through.as_tensor()[: stored.nbytes])


def _read_to_device(reading: Reading, position: int, stored: StoredPiece, slots: DeviceSlots, *, verify: bool) -> None:
    _wait_for(reading.free)
    target = bytes_of(reading.target, position, stored.nbytes)
    slots.read_to_device(target, stored.slot.extent.begin)
    if verify:
        _compare(reading.saved, stored, crc32_of(target))


def _take_in(reading: Reading, begin: int, stored: StoredPiece, data: torch.Tensor) -> None:
    """Copy a piece to its place in the target, decoded if it was encoded."""
    is_host = reading.memory is not None
    if stored.encoding is None:
        copy_in(reading.target, begin, data, reading.free)
        return
    nbytes = stored.memory_nbytes
    target = bytes_of(reading.target, begin, nbytes) if is_host else torch.empty(nbytes, dtype=torch.uint8)
    try:
        codecs.decode(data, stored.encoding, target)
    except DamagedPieceError as error:
        raise _changed_on_disk(reading.saved, stored, f"cannot be decoded ({error})") from error
    if not is_host:
        copy_in(reading.target, begin, target, reading.free)


def _compare(saved: SavedBytes, stored: StoredPiece, crc32: int) -> None:
    if crc32 != stored.crc32:
        raise _changed_on_disk(saved, stored, f"have CRC32 {crc32:08x}, expected {stored.crc32:08x}")


def _changed_on_disk(saved: SavedBytes, stored: StoredPiece, found: str) -> CorruptActivationError:
    return CorruptActivationError(
        f"an activation of {saved.nbytes} bytes has changed on the disk of {stored.slot.file.folder}: its bytes at "
        f"offset {stored.slot.extent.begin} of the file {found}. Do not trust this disk; take another folder. (Or the "
        "program has changed the tensor without autograd's knowledge, by .data or otherwise, while it was written.)"
    )


def is_copied_to_write(saved: SavedBytes, wanted: Set[str]) -> bool:
    """True if pieces are encoded or copied to a bounce block before they are written from host memory."""
    return bool(wanted) or (not saved.blocks and saved.page_offset is None)


def is_copied_to_read(reading: Reading, backend: str) -> bool:
    """True if pieces are read to a bounce block, and come from there."""
    stored, device = reading.stored.pieces, reading.saved.device
    if any(piece.encoding is not None for piece in stored):
        return True
    return reading.memory is None and not all(
        moves_device_memory(piece.slot.file.opened[backend], device) for piece in stored
    )


def _own_bytes(saved: SavedBytes, position: int, nbytes: int) -> torch.Tensor:
    """Bytes of a range from a position of its pieces on, uint8, where they are. Nothing in front of the range."""
    if saved.blocks:
        begin = position % BUFFER_NBYTES
        return saved.blocks[position // BUFFER_NBYTES].as_tensor()[begin : begin + nbytes]
    assert saved.source is not None
    return bytes_of(saved.source, saved.origin + max(position - saved.lead, 0), nbytes)


def _in_host_memory(saved: SavedBytes, position: int, nbytes: int, bounce: Buffer | None) -> memoryview:
    """A piece in host memory, in multiples of ``ALIGNMENT``: arbitrary bytes may follow it."""
    if saved.blocks:
        begin = position % BUFFER_NBYTES
        return saved.blocks[position // BUFFER_NBYTES].view[begin : begin + whole(nbytes)]
    assert saved.source is not None
    if saved.page_offset is not None:
        return pages_of(saved.source, saved.origin - saved.lead + position, nbytes)
    assert bounce is not None
    bounce.prepare(saved.device)
    copy_out(saved.source, saved.origin + position, nbytes, bounce, saved.ready)
    return bounce.view[: whole(nbytes)]


def whole(nbytes: int) -> int:
    """A size in whole units of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _wait_for(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
