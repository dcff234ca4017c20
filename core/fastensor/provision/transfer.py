"""Batches from the memory of the host to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DeviceCopies:
    """Copies the tensors of batches to a device, while it computes.

    For a GPU of CUDA, there are two pieces of pinned memory by turns: a tensor is copied to one of them, and from there
    in a stream of its own. The stream that is current when a batch is copied waits for it; the host does not. When the
    call returns, the batch that was given is not used any more. Copies belong to the caller.

    Args:
        device: another one than the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        """When each piece of pinned memory can be used again."""
        self._turn = 0

    def __call__(self, batch: Any) -> Any:
        """The batch, with its tensors on the device. Everything else stays as it is."""
        if self._stream is None:
            return mapped(lambda tensor: tensor.to(self._device), batch)
        self._turn ^= 1
        if (before := self._copied[self._turn]) is not None:
            before.synchronize()
        self._make_room(batch)
        self._used_nbytes = 0
        with torch.cuda.stream(self._stream):
            copy = mapped(self._copy, batch)
            self._copied[self._turn] = self._stream.record_event()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        mapped(lambda tensor: tensor.record_stream(current), copy)
        return copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self._used_nbytes
        self._used_nbytes += _aligned_nbytes(tensor)
        pinned = self._pinned[self._turn][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return pinned.copy_(tensor).to(self._device, non_blocking=True)

    def _make_room(self, batch: Any) -> None:
        sizes: list[int] = []
        mapped(lambda tensor: sizes.append(_aligned_nbytes(tensor)), batch)
        if sum(sizes) > len(self._pinned[self._turn]):
            self._pinned[self._turn] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)


def mapped(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The batch with each tensor in lists, tuples and dicts replaced by what the function returns for it."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(function, value) for value in batch)
    return batch


def _aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64
