"""Moving one range of bytes between its memory, staging blocks and its slot on the SSD. Without any lock.

A large range in host memory is written from where it was saved, in whole pages, as direct I/O wants them: the first
page may begin before the range, the last may end behind it. The range is read back to pages of its own, to the same
offset in the first page.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from isal import isal_zlib

from fastensor.backends.base import DeviceSlots, Slots
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer
from fastensor.errors import CorruptActivationError, OffloadError
from fastensor.offload.copying import bytes_of, copy_in, copy_out, crc32_of, pages_of, prepare, resized
from fastensor.offload.saved import SavedBytes, StoredBytes
from fastensor.offload.slots import ALIGNMENT, Slot

PIECE_NBYTES = BUFFER_NBYTES
"""The most bytes of a piece, which fits into a staging block."""


class StoppedError(OffloadError):
    """The bytes are not needed any more, so the rest of them was not moved."""


def stage(saved: SavedBytes, blocks: list[Buffer]) -> None:
    """Copy the range from its device to staging blocks."""
    assert saved.source is not None
    for number, block in enumerate(blocks):
        prepare(block, saved.device)
        begin = number * BUFFER_NBYTES
        copy_out(saved.source, saved.origin + begin, min(BUFFER_NBYTES, saved.nbytes - begin), block, saved.ready)


def unstage(saved: SavedBytes, target: torch.UntypedStorage, free: torch.cuda.Event | None) -> None:
    """Copy the range from its staging blocks to a storage on its device, whose memory is free once ``free`` is
    reached."""
    for number, block in enumerate(saved.blocks):
        begin = number * BUFFER_NBYTES
        copy_in(target, begin, min(BUFFER_NBYTES, saved.nbytes - begin), block, free)


def write(
    saved: SavedBytes,
    slot: Slot,
    backend: str,
    bounce: Buffer | None,
    *,
    checksum: bool,
    is_stopped: Callable[[], bool],
) -> int:
    """Write the range to a slot.

    Args:
        saved: a range whose bytes are in ``blocks``, or else in ``source``.
        slot: a place for ``saved.lead + saved.nbytes`` bytes.
        backend: the backend that writes.
        bounce: a staging block, if :func:`is_copied_to_write`.
        checksum: whether the CRC32 is wanted.
        is_stopped: asked before each piece.

    Returns:
        The CRC32 of the bytes, or 0.

    Raises:
        OSError: the disk does not take the bytes.
        OffloadError: the storage was resized.
        BackendUnavailableError: this backend cannot write to the slot.
        StoppedError: ``is_stopped`` says so.
    """
    slots = slot.file.opened[backend]
    if not saved.blocks and moves_device_memory(slots, saved.device):
        return _write_from_device(saved, slot, slots, checksum=checksum, is_stopped=is_stopped)
    crc32 = 0
    for position, nbytes in pieces(saved):
        _check(is_stopped)
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


def read_pieces(
    saved: SavedBytes,
    stored: StoredBytes,
    backend: str,
    target: torch.UntypedStorage,
    memory: memoryview | None,
    bounce: Buffer | None,
    free: torch.cuda.Event | None,
    todo: deque[tuple[int, int]],
    *,
    verify: bool,
    is_stopped: Callable[[], bool],
) -> dict[int, int]:
    """Read pieces of the range from its slot until none is left to do. Several threads may share the pieces.

    Args:
        saved: the range.
        stored: its copy on the SSD.
        backend: the backend that reads.
        target: a storage on the range's device.
        memory: the memory of ``target`` if that is in host memory, in whole pages; the range begins at ``saved.lead``.
        bounce: a staging block, if :func:`is_copied_to_read`.
        free: reached when the memory of ``target`` is free.
        todo: the :func:`pieces` that no thread has taken.
        verify: whether CRC32s are wanted.
        is_stopped: asked before each piece.

    Returns:
        The CRC32 of each piece that was read to host memory, by its offset in the slot.

    Raises:
        OSError: the disk does not give the bytes.
        BackendUnavailableError: this backend cannot read from the slot.
        StoppedError: ``is_stopped`` says so.
    """
    slots, begin = stored.slot.file.opened[backend], stored.slot.extent.begin
    crc32s: dict[int, int] = {}
    while todo:
        try:
            position, nbytes = todo.popleft()
        except IndexError:  # another thread has taken the last piece
            break
        _check(is_stopped)
        if moves_device_memory(slots, saved.device):
            assert isinstance(slots, DeviceSlots)
            _wait_for(free)
            slots.read_to_device(bytes_of(target, position, nbytes), begin + position)
            continue
        if memory is not None:
            data = memory[position : position + _whole(nbytes, ALIGNMENT)]
        else:
            assert bounce is not None
            prepare(bounce, saved.device)
            data = bounce.view[: _whole(nbytes, ALIGNMENT)]
        slots.read(data, begin + position)
        if verify:
            crc32s[position] = isal_zlib.crc32(data[0 if position else saved.lead : nbytes])
        if bounce is not None:
            copy_in(target, position, nbytes, bounce, free)
    return crc32s


def check(saved: SavedBytes, stored: StoredBytes, target: torch.UntypedStorage, crc32s: Mapping[int, int]) -> None:
    """Compare the CRC32 of a range that was read with that of the bytes that were written.

    Args:
        saved: the range.
        stored: its copy on the SSD.
        target: the storage that the range was read to.
        crc32s: CRC32s of all pieces, by offset in the slot; empty if the pieces were read to a device without host
            memory between.

    Raises:
        CorruptActivationError: the bytes are not what was written.
    """
    crc32 = 0
    if not crc32s:
        crc32 = crc32_of(bytes_of(target, 0, saved.nbytes))
    for position, nbytes in pieces(saved) if crc32s else ():
        own = nbytes if position else nbytes - saved.lead
        crc32 = isal_zlib.crc32_combine(crc32, crc32s[position], own)
    if crc32 != stored.crc32:
        raise CorruptActivationError(
            f"an activation of {saved.nbytes} bytes has changed on the disk of {stored.slot.file.folder}: its bytes at "
            f"offset {stored.slot.extent.begin} of the file have CRC32 {crc32:08x}, expected {stored.crc32:08x}. Do "
            "not trust this disk; take another folder. (Or the program has changed the tensor without autograd's "
            "knowledge, by .data or otherwise, while it was written.)"
        )


def is_copied_to_write(saved: SavedBytes, slot: Slot, backend: str) -> bool:
    """Whether pieces are copied to a staging block before they are written."""
    zero_copy = moves_device_memory(slot.file.opened[backend], saved.device) or saved.page_offset is not None
    return not saved.blocks and not zero_copy


def is_copied_to_read(saved: SavedBytes, stored: StoredBytes, backend: str, memory: memoryview | None) -> bool:
    """Whether pieces are read to a staging block, and copied from there."""
    return memory is None and not moves_device_memory(stored.slot.file.opened[backend], saved.device)


def moves_device_memory(slots: Slots, device: torch.device) -> bool:
    """Whether open slots move bytes of the device without host memory between."""
    return isinstance(slots, DeviceSlots) and device.type in slots.device_types


def _write_from_device(
    saved: SavedBytes, slot: Slot, slots: Slots, *, checksum: bool, is_stopped: Callable[[], bool]
) -> int:
    assert isinstance(slots, DeviceSlots)
    assert saved.source is not None
    _wait_for(saved.ready)
    crc32 = crc32_of(bytes_of(saved.source, saved.origin, saved.nbytes)) if checksum else 0
    for position, nbytes in pieces(saved):
        _check(is_stopped)
        slots.write_from_device(bytes_of(saved.source, saved.origin + position, nbytes), slot.extent.begin + position)
    return crc32


def pieces(saved: SavedBytes) -> Iterator[tuple[int, int]]:
    """Offset in the slot and number of bytes of each piece."""
    total = saved.lead + saved.nbytes
    for position in range(0, total, PIECE_NBYTES):
        yield position, min(PIECE_NBYTES, total - position)


def _in_host_memory(saved: SavedBytes, position: int, nbytes: int, bounce: Buffer | None) -> memoryview:
    """A piece in host memory, in multiples of ``ALIGNMENT``: arbitrary bytes may follow it."""
    if saved.blocks:
        begin = position % BUFFER_NBYTES
        return saved.blocks[position // BUFFER_NBYTES].view[begin : begin + _whole(nbytes, ALIGNMENT)]
    assert saved.source is not None
    if saved.page_offset is not None:
        return pages_of(saved.source, saved.origin - saved.lead + position, nbytes)
    assert bounce is not None
    prepare(bounce, saved.device)
    copy_out(saved.source, saved.origin + position, nbytes, bounce, saved.ready)
    return bounce.view[: _whole(nbytes, ALIGNMENT)]


def _whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _check(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StoppedError


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
