"""Copies between storages on any device and host memory.

On a GPU, each thread copies on a stream of its own, after the events that it is given.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastensor.backends.buffers import Buffer
from fastensor.backends.memory import copy_memory
from fastensor.backends.threads import uninterrupted
from fastensor.backends.to_device import DeviceTarget, entered
from fastensor.errors import OffloadError
from fastensor.offload.geometry import ALIGNMENT

STAGED_FIRST = {"cuda"}
"""Device types whose tensors are copied to host memory first, so that the device memory is free early."""
READ_IN_PLACE = {"cpu"}
"""Device types whose memory every backend reads into. For others there are staging blocks between."""
PAGE_NBYTES = 4096
ZERO_COPY_NBYTES = 256 << 10
"""Smaller storages are copied before they are written: none by default, whose ``min_bytes`` is as large. Kernels change
some small storages after autograd has saved them, without its knowledge (running statistics of batch normalization), so
that the checksum would be that of other bytes."""
_streams = threading.local()


def is_staged_first(device: torch.device) -> bool:
    return device.type in STAGED_FIRST


def is_read_in_place(device: torch.device) -> bool:
    return device.type in READ_IN_PLACE


def page_offset_of(tensor: torch.Tensor, span: range) -> int | None:
    """Bytes between the start of a memory page and the range that is moved for a tensor, if the range is written
    without a copy. None if the range is copied first. A part of a storage is copied, because others may change the
    rest of the storage meanwhile, as the cells of recurrent networks do; so is a range that begins in the middle of a
    unit of alignment."""
    storage = tensor.untyped_storage()
    if is_staged_first(storage.device) or len(span) < ZERO_COPY_NBYTES:
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


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """An event that is reached when the work queued on the device's current stream so far is done. None on the host."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """A part of a storage as a uint8 tensor that shares its memory.

    Raises:
        OffloadError: the storage has become shorter than that.
    """
    check_bounds(storage, begin + nbytes)
    return _bytes_of(storage)[begin : begin + nbytes]


def crc32_of(values: torch.Tensor) -> int:
    """The CRC32 of a uint8 tensor, computed on its device. The calling thread waits."""
    stream = _stream_of(values.device) if values.is_cuda else None
    return DeviceTarget(values, stream).checksum()


def copy_out(
    source: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy a part of a storage to the start of a block.

    Args:
        source: the storage, which no thread changes meanwhile.
        begin: offset in the storage.
        nbytes: number of bytes.
        block: the target, prepared.
        after: reached when the bytes are there.
    """
    check_bounds(source, begin + nbytes)
    if source.device.type == "cpu":
        copy_memory(block.address, _address_of(source) + begin, nbytes)
        return
    _copy(block.as_tensor()[:nbytes], _bytes_of(source)[begin : begin + nbytes], source.device, after)


def copy_in(
    target: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy the start of a block to a part of a storage, whose memory is free once ``after`` is reached."""
    if target.device.type == "cpu":
        copy_memory(target.data_ptr() + begin, block.address, nbytes)
        return
    _copy(_bytes_of(target)[begin : begin + nbytes], block.as_tensor()[:nbytes], target.device, after)


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


def prepare(block: Buffer, device: torch.device) -> None:
    """Touch a block, and pin it for a GPU, before it is used."""
    block.prepare(device if device.type == "cuda" else None)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def queued(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Queue the work of the block on this thread's stream of a device, after an event, and wait for it in the end.
    Does nothing for a device without streams."""
    if device.type != "cuda":
        yield
        return
    stream = _stream_of(device)
    if after is not None:
        stream.wait_event(after)
    try:
        with entered(stream):
            yield
    finally:  # an interrupt must not give memory back that is copied from, or to
        uninterrupted(stream.synchronize)


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device, after: torch.cuda.Event | None) -> None:
    with queued(device, after):
        target.copy_(source, non_blocking=device.type == "cuda")


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    return streams[device]
