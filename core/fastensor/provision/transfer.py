"""Batches from the memory of the host to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fastensor.backends.streams import Copies, Event, used_on_current, wait_for


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
        self._copies = Copies([device], "batches")
        self._pinned: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._copied: list[Sequence[Event]] = [(), ()]
        """Events after which each piece of pinned memory can be used again."""
        self._turn = 0

    def __call__(self, batch: Any) -> Any:
        """The batch, with its tensors on the device. Everything else stays as it is."""
        if self._copies.device is None:
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
        self._turn ^= 1
        wait_for(self._copied[self._turn])
        self._make_room(batch)
        self._used_nbytes = 0
        with self._copies.entered():
            copy = tree_map_only(torch.Tensor, self._copy, batch)
            self._copied[self._turn] = self._copies.events()
        self._copies.precede_current()
        tree_map_only(torch.Tensor, used_on_current, copy)
        return copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self._used_nbytes
        self._used_nbytes += _aligned_nbytes(tensor)
        pinned = self._pinned[self._turn][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor)
        copy = torch.empty_like(pinned, device=self._device)
        self._copies.copy(copy, pinned)
        return copy

    def _make_room(self, batch: Any) -> None:
        nbytes = sum(_aligned_nbytes(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        if nbytes > len(self._pinned[self._turn]):
            self._pinned[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64
