"""Bytes of storages, wherever those are, and how they get to host memory and back.

On a GPU, copies go on a stream of the calling thread's own, behind what is known to be needed first.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from fastensor.backends.memory import Buffer, copy_memory
from fastensor.backends.threads import uninterrupted
from fastensor.backends.to_device import DeviceTarget, entered
from fastensor.errors import OffloadError
from fastensor.offload.geometry import ALIGNMENT

STAGED_FIRST = {"cuda"}
"""Kinds of devices whose memory is to be free as soon as the bytes are in the host's."""
READ_IN_PLACE = {"cpu"}
"""Kinds of devices whose memory any backend reads into; for others there are pieces of host memory between."""
PAGE_NBYTES = 4096
STRAIGHT_FROM = 1 << 20
"""Storages that are smaller are copied before they are written: kernels change some small ones after autograd has saved
them, unseen by it (running statistics of batch normalization), so that a checksum would be one of other bytes."""
_streams = threading.local()


def is_staged_first(device: torch.device) -> bool:
    return device.type in STAGED_FIRST


def is_read_in_place(device: torch.device) -> bool:
    return device.type in READ_IN_PLACE


def lead_of(tensor: torch.Tensor, span: range) -> int | None:
    """How many bytes lie between the start of a page and what is moved for a tensor, if that is written straight from
    there. None if it is copied first: what is a part of a storage is, because others may change the rest meanwhile (as
    the cells of recurrent networks do), and what is in the same pages."""
    storage = tensor.untyped_storage()
    if is_staged_first(storage.device) or len(span) < STRAIGHT_FROM:
        return None
    fills = tensor.nbytes == storage.nbytes() and not torch._debug_has_internal_overlap(tensor)
    lead = storage.data_ptr() % PAGE_NBYTES
    return lead if fills and lead % ALIGNMENT == 0 else None


def pages_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> memoryview:
    """Memory of the host from the start of a page on, which may begin before the storage and end behind it: what is
    there as well is in the same pages. To be read from, while the storage is alive.

    Raises:
        OffloadError: the storage has been resized.
    """
    if (storage.data_ptr() + begin) % PAGE_NBYTES:
        raise resized(storage, begin + nbytes)
    check_bounds(storage, begin + nbytes)
    whole = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    return memoryview((ctypes.c_char * whole).from_address(storage.data_ptr() + begin)).cast("B")


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """Comes when all is done that was queued on the device's current stream so far."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """A part of a storage as a tensor of uint8 that shares its memory.

    Raises:
        OffloadError: the storage has become shorter than that.
    """
    check_bounds(storage, begin + nbytes)
    return _bytes_of(storage)[begin : begin + nbytes]


def crc32_of(values: torch.Tensor) -> int:
    """The CRC32 of bytes that are there, computed where they are; the thread waits for it."""
    stream = _stream_of(values.device) if values.is_cuda else None
    return DeviceTarget(values, stream).checksum()


def copy_out(
    source: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy a part of a storage to the start of a block.

    Args:
        source: where the bytes are; nobody changes them.
        begin: of them, in the storage.
        nbytes: how many.
        block: where to; prepared.
        after: comes when they are there.
    """
    check_bounds(source, begin + nbytes)
    if source.device.type == "cpu":
        copy_memory(block.address, source.data_ptr() + begin, nbytes)
        return
    _copy(block.as_tensor()[:nbytes], _bytes_of(source)[begin : begin + nbytes], source.device, after)


def copy_in(
    target: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy the start of a block to a part of a storage, whose memory is free once ``after`` has come."""
    if target.device.type == "cpu":
        copy_memory(target.data_ptr() + begin, block.address, nbytes)
        return
    _copy(_bytes_of(target)[begin : begin + nbytes], block.as_tensor()[:nbytes], target.device, after)


def check_bounds(storage: torch.UntypedStorage, end: int) -> None:
    """
    Raises:
        OffloadError: the storage has become shorter than that.
    """
    if storage.nbytes() < end:
        raise resized(storage, end)


def resized(storage: torch.UntypedStorage, end: int) -> OffloadError:
    """To be raised."""
    return OffloadError(
        f"a storage of which {end} bytes were saved for the backward pass has {storage.nbytes()} now: it was "
        "resized (FSDP does so with parameters; it cannot be used with activation offload)"
    )


def prepare(block: Buffer, device: torch.device) -> None:
    """Have a block touched, and pinned for a device, before anything is in it."""
    block.prepare(device if device.type == "cuda" else None)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device, after: torch.cuda.Event | None) -> None:
    if device.type != "cuda":
        target.copy_(source)
        return
    stream = _stream_of(device)
    if after is not None:
        stream.wait_event(after)
    try:
        with entered(stream):
            target.copy_(source, non_blocking=True)
    finally:  # an interrupt must not give memory back that is copied from, or to
        uninterrupted(stream.synchronize)


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    return streams[device]
