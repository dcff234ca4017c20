"""Moving one range of bytes between its memory, staging blocks and its slot on the SSD. Without any lock.

A large range in host memory is written from where it was saved, in whole pages, as direct I/O wants them: the first
page may begin before the range, the last may end behind it. The range is read back to pages of its own, to the same
offset in the first page.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

import torch
from isal import isal_zlib

from fastensor.backends.base import DeviceSlots, Slots
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer
from fastensor.backends.memory import storage_on
from fastensor.backends.streams import Event, event_now
from fastensor.errors import CorruptActivationError
from fastensor.offload import copying
from fastensor.offload.copying import bytes_of, copy_in, copy_out, crc32_of, pages_of, resized
from fastensor.offload.host_memory import HostMemory
from fastensor.offload.saved import SavedBytes, StoredBytes
from fastensor.offload.slots import ALIGNMENT, FileSlot

PIECE_NBYTES = BUFFER_NBYTES
"""The most bytes of a piece, which fits into a staging block."""
Piece: TypeAlias = tuple[int, int]
"""Offset in the slot, and number of bytes."""


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
    crc32s: dict[int, int] = field(default_factory=dict)
    """CRC32s of pieces that were read to host memory, by offset in the slot."""
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
        reading.todo.extend(reading.pieces())
        return reading

    @property
    def is_one_piece(self) -> bool:
        """True if one thread reads all of it."""
        return self.saved.lead + self.saved.nbytes <= PIECE_NBYTES

    def pieces(self) -> Iterator[Piece]:
        """The pieces in which the range is read from its slot. An encoded range has no lead."""
        return pieces(self.saved, lead=0 if self.stored.encoding is not None else self.saved.lead)


def new_memory(saved: SavedBytes, host: HostMemory) -> tuple[torch.UntypedStorage, memoryview | None]:
    """Memory on a range's device for the range and its lead; and its bytes, in whole pages, if it is in host memory.
    Call it with the lock of ``host`` held.

    Raises:
        MemoryError, torch.OutOfMemoryError, OSError: there is no memory.
    """
    if copying.is_staged(saved.device):
        return storage_on(saved.device, saved.nbytes), None
    return host.storage(saved.lead + saved.nbytes)


def pieces(saved: SavedBytes, *, lead: int) -> Iterator[Piece]:
    """The pieces in which a range is written and read, in order, with so many bytes in front of it."""
    total = lead + saved.nbytes
    for position in range(0, total, PIECE_NBYTES):
        yield position, min(PIECE_NBYTES, total - position)


def stage(saved: SavedBytes) -> Sequence[Event]:
    """Queue copies of a range from its device to its staging blocks. Returns events that are reached when the copies
    are done; none if they are."""
    assert saved.source is not None
    return copying.queue_out(saved.source, saved.origin, saved.nbytes, saved.blocks, saved.ready)


def unstage(saved: SavedBytes, target: torch.UntypedStorage) -> Sequence[Event]:
    """Queue copies of a range from its staging blocks to new memory on its device. Returns events, as :func:`stage`."""
    return copying.queue_in(target, saved.lead, saved.nbytes, saved.blocks, event_now(saved.device))


def write(
    saved: SavedBytes, slot: FileSlot, slots: Slots, bounce: Buffer | None, todo: Iterable[Piece], *, checksum: bool
) -> int:
    """Write a range to a slot, from ``blocks`` or else from ``source``.

    Args:
        saved: the range.
        slot: a place for ``saved.lead + saved.nbytes`` bytes.
        slots: the slot's file, opened by the backend that writes.
        bounce: a staging block, if :func:`is_copied_to_write`.
        todo: the :func:`pieces`, in order.
        checksum: whether to return the CRC32 of the bytes, and not 0.

    Raises:
        OSError: the disk does not take the bytes.
        OffloadError: the storage was resized.
        BackendUnavailableError: this backend cannot write to the slot.
    """
    if not saved.blocks and _moves_device_memory(slots, saved.device):
        return _write_from_device(saved, slot, slots, todo, checksum=checksum)
    crc32 = 0
    for position, nbytes in todo:
        data = _in_host_memory(saved, position, nbytes, bounce)
        own = data[0 if position else saved.lead : nbytes]
        crc32 = isal_zlib.crc32(own, crc32) if checksum else 0
        try:
            slots.write(data, slot.extent.begin + position)
        except OSError as error:
            if error.errno == errno.EFAULT and saved.source is not None:
                raise resized(saved.source, saved.origin + saved.nbytes) from error
            raise
    return int(crc32)


def read(
    reading: Reading, stored: StoredBytes, slots: Slots, bounce: Buffer | None, todo: Iterable[Piece], *, verify: bool
) -> None:
    """Read pieces of a range from its slot. Several threads may do so at once.

    Args:
        reading: the read, whose ``crc32s`` get those of the pieces.
        stored: the range's copy on the SSD.
        slots: the slot's file, opened by the backend that reads.
        bounce: a staging block, if :func:`is_copied_to_read`.
        todo: the pieces.
        verify: whether CRC32s are wanted.

    Raises:
        OSError: the disk does not give the bytes.
        BackendUnavailableError: this backend cannot read from the slot.
    """
    saved, begin = reading.saved, stored.slot.extent.begin
    for position, nbytes in todo:
        if _moves_device_memory(slots, saved.device):
            _wait_for(reading.free)
            slots.read_to_device(bytes_of(reading.target, position, nbytes), begin + position)
            continue
        if reading.memory is not None:
            data = reading.memory[position : position + whole(nbytes)]
        else:
            assert bounce is not None
            bounce.prepare(saved.device)
            data = bounce.view[: whole(nbytes)]
        slots.read(data, begin + position)
        if verify:
            reading.crc32s[position] = isal_zlib.crc32(data[0 if position else saved.lead : nbytes])
        if bounce is not None:
            copy_in(reading.target, position, nbytes, bounce, reading.free)


def check(reading: Reading, stored: StoredBytes) -> None:
    """Compare the CRC32 of a range that was read completely with that of the bytes that were written.

    Raises:
        CorruptActivationError: the bytes are not what was written.
    """
    saved, crc32 = reading.saved, 0
    if not reading.crc32s:  # read to a device, without host memory between
        crc32 = crc32_of(bytes_of(reading.target, 0, saved.nbytes))
    for position, nbytes in pieces(saved, lead=saved.lead) if reading.crc32s else ():
        own = nbytes if position else nbytes - saved.lead
        crc32 = isal_zlib.crc32_combine(crc32, reading.crc32s[position], own)
    if crc32 != stored.crc32:
        raise changed_on_disk(saved, stored, 0, crc32, stored.crc32)


def changed_on_disk(
    saved: SavedBytes, stored: StoredBytes, offset: int, crc32: int, expected: int
) -> CorruptActivationError:
    """The error to raise if bytes at an offset of a slot have another CRC32 than was written."""
    return CorruptActivationError(
        f"an activation of {saved.nbytes} bytes has changed on the disk of {stored.slot.file.folder}: its bytes at "
        f"offset {stored.slot.extent.begin + offset} of the file have CRC32 {crc32:08x}, expected {expected:08x}. Do "
        "not trust this disk; take another folder. (Or the program has changed the tensor without autograd's "
        "knowledge, by .data or otherwise, while it was written.)"
    )


def is_copied_to_write(saved: SavedBytes, slots: Slots) -> bool:
    """True if pieces are copied to a staging block before they are written."""
    return not saved.blocks and saved.page_offset is None and not _moves_device_memory(slots, saved.device)


def is_copied_to_read(reading: Reading, slots: Slots) -> bool:
    """True if pieces are read to a staging block, and copied from there."""
    return reading.memory is None and not _moves_device_memory(slots, reading.saved.device)


def _moves_device_memory(slots: Slots, device: torch.device) -> TypeGuard[DeviceSlots]:
    """True if open slots move bytes of the device without host memory between. Asked for each piece, so without
    isinstance, which takes Python 3.11 longer than a small piece takes the disk."""
    return device.type in getattr(slots, "device_types", ())


def _write_from_device(
    saved: SavedBytes, slot: FileSlot, slots: DeviceSlots, todo: Iterable[Piece], *, checksum: bool
) -> int:
    assert saved.source is not None
    _wait_for(saved.ready)
    crc32 = crc32_of(bytes_of(saved.source, saved.origin, saved.nbytes)) if checksum else 0
    for position, nbytes in todo:
        slots.write_from_device(bytes_of(saved.source, saved.origin + position, nbytes), slot.extent.begin + position)
    return crc32


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
