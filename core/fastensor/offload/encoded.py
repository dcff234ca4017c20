"""Moving one range of bytes through a codec, between its memory and its slot on the SSD. Without any lock.

Each piece is encoded into a staging block, and written behind the one before, at the next multiple of ``ALIGNMENT``. So
a writer thread holds one encoded piece at a time, and reader threads may share the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from isal import isal_zlib

from fastensor.backends.base import Slots
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer
from fastensor.errors import CorruptActivationError
from fastensor.offload import codecs, copying, moving
from fastensor.offload.codecs import DamagedPieceError, MeasuredEncoding
from fastensor.offload.copying import bytes_of, queued
from fastensor.offload.moving import Piece, Reading, whole
from fastensor.offload.saved import EncodedPiece, SavedBytes, StoredBytes
from fastensor.offload.slots import FileSlot


def measure(saved: SavedBytes, wanted: Set[str]) -> MeasuredEncoding | None:
    """The encoding that makes a range the smallest; None if none makes it smaller.

    Args:
        saved: the range, in ``blocks`` or else in ``source``.
        wanted: the codecs that may be used.

    Raises:
        OffloadError: the storage was resized.
        torch.OutOfMemoryError: the device has no memory to look at the range.
    """
    if not codecs.candidates(saved.dtype, wanted):
        return None
    parts = [_memory_of(saved, piece) for piece in moving.pieces(saved, lead=0)]
    with queued(parts[0].device, saved.ready):
        return codecs.measure(parts, saved.dtype, wanted)


def slot_nbytes(measured: MeasuredEncoding) -> int:
    """The size of the slot for a range."""
    return sum(map(whole, measured.sizes))


def write(
    saved: SavedBytes,
    measured: MeasuredEncoding,
    slot: FileSlot,
    slots: Slots,
    bounce: Buffer,
    todo: Iterable[Piece],
    *,
    checksum: bool,
) -> tuple[EncodedPiece, ...]:
    """Encode a range from ``blocks`` or else from ``source``, and write it to a slot.

    Args:
        saved: the range.
        measured: how it is encoded.
        slot: a place for :func:`slot_nbytes`.
        slots: the slot's file, opened by the backend that writes.
        bounce: a staging block.
        todo: the pieces of the range, without its lead, in order.
        checksum: whether to take the CRC32 of each encoded piece, and not 0.

    Raises:
        NotAsMeasuredError: the memory has changed since it was measured.
        OSError, OffloadError, BackendUnavailableError: as for :func:`fastensor.offload.moving.write`.
        torch.OutOfMemoryError: the device has no memory to encode the range.
    """
    written: list[EncodedPiece] = []
    offset = 0
    bounce.prepare(saved.device)
    for piece, nbytes in zip(todo, measured.sizes, strict=True):
        memory, block = _memory_of(saved, piece), bounce.as_tensor()[:nbytes]
        if memory.device.type == "cpu":
            codecs.encode(memory, measured.encoding, block)
        else:
            with queued(memory.device, saved.ready):
                encoded = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
                codecs.encode(memory, measured.encoding, encoded)
                block.copy_(encoded, non_blocking=True)
        crc32 = int(isal_zlib.crc32(bounce.view[:nbytes])) if checksum else 0
        slots.write(bounce.view[: whole(nbytes)], slot.extent.begin + offset)
        written.append(EncodedPiece(offset, nbytes, crc32))
        offset += whole(nbytes)
    return tuple(written)


def read(
    reading: Reading, stored: StoredBytes, slots: Slots, bounce: Buffer, todo: Iterable[Piece], *, verify: bool
) -> None:
    """Read encoded pieces of a range from its slot, and decode them. Several threads may do so at once.

    Args:
        reading: the read.
        stored: the range's encoded copy on the SSD.
        slots: the slot's file, opened by the backend that reads.
        bounce: a staging block.
        todo: the pieces of the range, without its lead.
        verify: whether CRC32s are compared, before anything is decoded.

    Raises:
        OSError: the disk does not give the bytes.
        CorruptActivationError: the bytes are not what was written.
        BackendUnavailableError: this backend cannot read from the slot.
    """
    assert stored.encoding is not None
    saved = reading.saved
    for begin, nbytes in todo:
        piece = stored.pieces[begin // moving.PIECE_NBYTES]
        bounce.prepare(saved.device)
        slots.read(bounce.view[: whole(piece.nbytes)], stored.slot.extent.begin + piece.offset)
        if verify and (crc32 := isal_zlib.crc32(bounce.view[: piece.nbytes])) != piece.crc32:
            raise moving.changed_on_disk(saved, stored, piece.offset, crc32, piece.crc32)
        encoded, target = bounce.as_tensor()[: piece.nbytes], bytes_of(reading.target, saved.lead + begin, nbytes)
        try:
            with queued(target.device, reading.free):
                codecs.decode(encoded.to(target.device, non_blocking=True), stored.encoding, target)
        except DamagedPieceError as error:
            raise CorruptActivationError(
                f"an activation of {saved.nbytes} bytes has changed on the disk of {stored.slot.file.folder}: its "
                f"encoded bytes at offset {stored.slot.extent.begin + piece.offset} of the file cannot be decoded "
                f"({error}). Do not trust this disk; take another folder"
            ) from error


def _memory_of(saved: SavedBytes, piece: Piece) -> torch.Tensor:
    """The bytes of a piece, uint8, where they are."""
    begin, nbytes = piece
    if saved.blocks:
        offset = begin % BUFFER_NBYTES
        return saved.blocks[begin // BUFFER_NBYTES].as_tensor()[offset : offset + nbytes]
    assert saved.source is not None
    return copying.bytes_of(saved.source, saved.origin + begin, nbytes)
