"""What jobs do: move one piece of a cell from where it is to where it belongs. Without the lock; any thread may.

What is large, and on the host, is written straight from where it was saved, in whole pages, as direct I/O wants them:
the first may begin before it, the last may end behind it. It comes back to pages of its own, to the same place in the
first.
"""

from __future__ import annotations

import errno

import torch
from isal import isal_zlib

from fastensor.backends.arena import BLOCK_NBYTES
from fastensor.errors import CorruptActivationError
from fastensor.offload.cell import Cell
from fastensor.offload.copying import bytes_of, copy_in, copy_out, crc32_of, pages_of, prepare, resized
from fastensor.offload.depot import Depot


def stage(cell: Cell) -> None:
    """Copy all of it to its blocks."""
    assert cell.source is not None
    for number, block in enumerate(cell.blocks):
        prepare(block, cell.device)
        begin = number * BLOCK_NBYTES
        copy_out(cell.source, cell.origin + begin, min(BLOCK_NBYTES, cell.nbytes - begin), block, cell.ready)


def unstage(cell: Cell, number: int) -> None:
    """Copy one of its blocks to where it is read to."""
    assert cell.storage is not None
    begin = number * BLOCK_NBYTES
    copy_in(cell.storage, begin, min(BLOCK_NBYTES, cell.nbytes - begin), cell.blocks[number], _free(cell))


def write(cell: Cell, index: int, depot: Depot, *, checksum: bool) -> int:
    """Write a piece to the slot. Returns its CRC32, or 0 without ``checksum``.

    Raises:
        OSError: the disk does not take it.
        OffloadError: the storage was resized.
        BackendUnavailableError: it is not to be had this way.
    """
    position, place = cell.pieces[index]
    nbytes = cell.piece_nbytes(index)
    if cell.blocks:
        begin = position % BLOCK_NBYTES
        data = cell.blocks[position // BLOCK_NBYTES].view[begin : begin + place.extent.nbytes]
        return _write(cell, index, data, depot, checksum=checksum)
    assert cell.source is not None
    if depot.slots.moves(cell.transport, cell.device):
        values = bytes_of(cell.source, cell.origin + position, nbytes)
        _wait_for(cell.ready)
        depot.slots.write_from_device(cell.transport, place, values)
        return crc32_of(values) if checksum else 0
    if cell.straight:
        pages = pages_of(cell.source, cell.origin - cell.lead + position, nbytes)
        try:
            return _write(cell, index, pages, depot, checksum=checksum)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise resized(cell.source, cell.origin + cell.nbytes) from error
            raise
    with depot.bounce_block(cell.device) as block:
        copy_out(cell.source, cell.origin + position, nbytes, block, cell.ready)
        return _write(cell, index, block.view[: place.extent.nbytes], depot, checksum=checksum)


def read(cell: Cell, index: int, depot: Depot, *, verify: bool) -> None:
    """Read a piece from the slot.

    Raises:
        OSError: the disk does not give it.
        CorruptActivationError: it is not what was written.
        BackendUnavailableError: it is not to be had this way.
    """
    assert cell.storage is not None
    position, place = cell.pieces[index]
    nbytes = cell.piece_nbytes(index)
    if depot.slots.moves(cell.transport, cell.device):
        values = bytes_of(cell.storage, position, nbytes)
        _wait_for(_free(cell))
        depot.slots.read_to_device(cell.transport, place, values)
        if verify:
            _check(cell, index, crc32_of(values))
    elif cell.memory is not None:
        target = cell.memory[position : position + place.extent.nbytes]
        depot.slots.read(cell.transport, place, target)
        if verify:
            _check(cell, index, isal_zlib.crc32(target[cell.own_part(index)]))
    else:
        with depot.bounce_block(cell.device) as block:
            depot.slots.read(cell.transport, place, block.view[: place.extent.nbytes])
            if verify:
                _check(cell, index, isal_zlib.crc32(block.view[:nbytes]))
            copy_in(cell.storage, position, nbytes, block, _free(cell))


def _write(cell: Cell, index: int, data: memoryview, depot: Depot, *, checksum: bool) -> int:
    """Write memory of the host, in which something may follow what belongs to the piece."""
    crc32 = isal_zlib.crc32(data[cell.own_part(index)]) if checksum else 0
    depot.slots.write(cell.transport, cell.pieces[index][1], data)
    return int(crc32)


def _free(cell: Cell) -> torch.cuda.Event | None:
    """Comes when the memory that it is read into is free."""
    assert cell.reading is not None
    return cell.reading.ready


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


def _check(cell: Cell, index: int, found: int) -> None:
    if found == cell.crc32s[index]:
        return
    place = cell.pieces[index][1]
    raise CorruptActivationError(
        f"an activation of {cell.nbytes} bytes has changed on the disk of {place.file.folder}: "
        f"{cell.piece_nbytes(index)} bytes at offset {place.extent.begin} have CRC32 {found:08x}, expected "
        f"{cell.crc32s[index]:08x}. The disk is not to be trusted; take another folder. (Or the program has "
        f"changed it meanwhile unseen by autograd, by .data or otherwise)"
    )
