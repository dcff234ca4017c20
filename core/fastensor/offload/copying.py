"""Bytes between a storage, wherever it is, and host memory. Both functions return when they have been copied.

On a GPU, copies go on a stream of the calling thread's own, behind what is known to be needed first.
"""

from __future__ import annotations

import threading

import torch

from fastensor.backends.memory import Buffer, copy_memory
from fastensor.backends.to_device import entered
from fastensor.errors import OffloadError

_streams = threading.local()


def copy_out(
    source: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy a part of a storage to the start of a block.

    Args:
        source: where the bytes are; nobody changes them.
        begin: of them, in the storage.
        nbytes: how many.
        block: where to.
        after: comes when they are there.
    """
    check_bounds(source, begin + nbytes)
    _prepare(block, source.device)
    if source.device.type == "cpu":
        copy_memory(block.address, source.data_ptr() + begin, nbytes)
        return
    _copy(block.as_tensor()[:nbytes], _bytes_of(source)[begin : begin + nbytes], source.device, after)


def copy_in(
    target: torch.UntypedStorage, begin: int, nbytes: int, block: Buffer, after: torch.cuda.Event | None
) -> None:
    """Copy the start of a block to a part of a storage, whose memory is free once ``after`` has come."""
    _prepare(block, target.device)
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
        raise OffloadError(
            f"a storage of which {end} bytes were saved for the backward pass has {storage.nbytes()} now: it was "
            "resized (FSDP does so with parameters; it cannot be used with activation offload)"
        )


def _prepare(block: Buffer, device: torch.device) -> None:
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
    with entered(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    return streams[device]
