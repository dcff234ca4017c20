"""Copies between storages on any device and host memory. On a GPU they are queued on streams of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from fastensor.backends import streams
from fastensor.backends.buffers import Buffer, runs_of
from fastensor.backends.memory import copy_memory
from fastensor.backends.streams import Copies, Event, wait_for
from fastensor.backends.to_device import DeviceTarget
from fastensor.errors import OffloadError
from fastensor.offload.tensors import ALIGNMENT

STAGED = {"cuda"}
"""Device types whose tensors go through staging blocks, out and in, so that device memory is free early. Backends write
from the memory of others, and read into it."""
PAGE_NBYTES = 4096
ZERO_COPY_NBYTES = 256 << 10
"""Smaller storages are copied before they are written: none by default, whose ``min_bytes`` is as large. Kernels change
some small storages after autograd has saved them, without its knowledge (running statistics of batch normalization), so
that the checksum would be that of other bytes."""


def is_staged(device: torch.device) -> bool:
    return device.type in STAGED


def page_offset_of(tensor: torch.Tensor, span: range) -> int | None:
    """Bytes between the start of a memory page and the range that is moved for a tensor, if the range is written
    without a copy. None if the range is copied first. A part of a storage is copied, because others may change the
    rest of the storage meanwhile, as the cells of recurrent networks do; so is a range that begins in the middle of a
    unit of alignment."""
    storage = tensor.untyped_storage()
    if is_staged(storage.device) or len(span) < ZERO_COPY_NBYTES:
        return None
    has_overlap = not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor)
    fills = tensor.nbytes == storage.nbytes() and not has_overlap
    offset = storage.data_ptr() % PAGE_NBYTES
    return offset if fills and offset % ALIGNMENT == 0 else None


def pages_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> memoryview:
    """Whole pages of host memory that hold a range of a storage. The first page may begin before the storage, the last
    may end behind it. Read them only, and only while the storage is alive.

    Raises:
        OffloadError: the storage has been resized, or has no memory.
    """
    address = _address_of(storage) + begin
    if address % PAGE_NBYTES:
        raise resized(storage, begin + nbytes)
    check_bounds(storage, begin + nbytes)
    whole = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    return memoryview((ctypes.c_char * whole).from_address(address)).cast("B")


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """A part of a storage as a uint8 tensor that shares its memory.

    Raises:
        OffloadError: the storage has become shorter than that.
    """
    check_bounds(storage, begin + nbytes)
    return _bytes_of(storage)[begin : begin + nbytes]


def crc32_of(values: torch.Tensor) -> int:
    """The CRC32 of a uint8 tensor, computed on its device. The calling thread waits."""
    return DeviceTarget(values, Copies([values.device], "offload checksum")).checksum()


def queue_out(
    source: torch.UntypedStorage, begin: int, nbytes: int, blocks: Sequence[Buffer], after: Event | None
) -> Sequence[Event]:
    """Queue copies of a part of a storage to blocks, from the start of the first one on.

    Args:
        source: the storage, which nothing changes or frees before the events that are returned are reached.
        begin: offset in the storage.
        nbytes: number of bytes.
        blocks: the targets.
        after: reached when the bytes are there.

    Returns:
        Events that are reached when the blocks hold the bytes; none if they do now.
    """
    copies = Copies([source.device], "offload out").follow(after)
    for block in blocks:
        block.prepare(source.device)
    values = bytes_of(source, begin, nbytes)
    with copies.entered():
        for memory, part in _side_by_side(blocks, values):
            copies.copy(memory, part)
        return copies.events()


def queue_in(
    target: torch.UntypedStorage, begin: int, nbytes: int, blocks: Sequence[Buffer], after: Event | None
) -> Sequence[Event]:
    """Queue copies of blocks to a part of a storage, whose memory is free once ``after`` is reached.

    Returns:
        Events that are reached when the storage holds the bytes. Before the storage is dropped, its stream has to wait
        for them, or :func:`keep_until_filled` is called.
    """
    copies = Copies([target.device], "offload in").follow(after)
    values = bytes_of(target, begin, nbytes)
    with copies.entered():
        for memory, part in _side_by_side(blocks, values):
            copies.copy(part, memory)
        return copies.events()


def keep_until_filled(storage: torch.UntypedStorage) -> None:
    """Have the memory of a storage, once nobody holds it, not be used again before the copies are done that
    :func:`queue_in` has queued."""
    Copies([storage.device], "offload in").keep(_bytes_of(storage))


def wait_until_left(device: torch.device) -> None:
    """Wait until nothing is under way that :func:`queue_out` has queued."""
    wait_for(Copies([device], "offload out").events(), even_if_failed=True)


def _side_by_side(blocks: Sequence[Buffer], values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Memory of blocks, and the values that it is for, in as few parts as there are runs of neighbours."""
    begin = 0
    for run in runs_of(blocks):
        memory = run.as_tensor()
        part = values[begin : begin + memory.numel()]
        yield memory[: part.numel()], part
        begin += part.numel()


def copy_out(source: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: Event | None) -> None:
    """Copy a part of a storage, which fits, to the start of a block. See :func:`queue_out`."""
    if is_host(source.device):
        check_bounds(source, begin + nbytes)
        copy_memory(block.address, _address_of(source) + begin, nbytes)
    else:
        wait_for(queue_out(source, begin, nbytes, [block], after))


def copy_in(target: torch.UntypedStorage, begin: int, memory: torch.Tensor, after: Event | None) -> None:
    """Copy host memory, uint8, to a part of a storage, whose memory is free once ``after`` is reached."""
    if is_host(target.device):
        copy_memory(target.data_ptr() + begin, memory.data_ptr(), memory.numel())
        return
    copies = Copies([target.device], "offload in").follow(after)
    try:
        with copies.entered():
            copies.copy(bytes_of(target, begin, memory.numel()), memory)
    finally:  # an interrupt must not give memory back that is used
        wait_for(copies.events(), even_if_failed=True)


def is_host(device: torch.device) -> bool:
    """True if threads copy to and from the device's memory themselves."""
    return device.type == "cpu" and not streams.are_on(device)


def _address_of(storage: torch.UntypedStorage) -> int:
    """The address of host memory that is moved. If there is none, no backend is to blame."""
    try:
        return storage.data_ptr()
    except RuntimeError as error:
        raise OffloadError(f"the memory of a saved tensor cannot be reached: {error}") from error


def check_bounds(storage: torch.UntypedStorage, end: int) -> None:
    """Raise OffloadError if the storage has fewer than ``end`` bytes."""
    if storage.nbytes() < end:
        raise resized(storage, end)


def resized(storage: torch.UntypedStorage, end: int) -> OffloadError:
    """The error to raise if a storage was resized."""
    return OffloadError(
        f"a storage of which {end} bytes were saved for the backward pass has {storage.nbytes()} now: it was "
        "resized. FSDP does so with parameters: attach a model of FSDP2 before the step (ActivationOffload.attach); "
        "FSDP version 1 cannot be used with activation offload"
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
