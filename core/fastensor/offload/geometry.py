"""Bytes of a storage that are moved for a saved tensor, and the tensor that is made of them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Alignment of memory that torch allocates. Kernels find the bytes aligned as they were."""
_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class View:
    """A dense tensor's place in a storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Bytes from the start of the storage that was saved."""
    conjugated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        offset = tensor.storage_offset() * tensor.dtype.itemsize
        conjugated = tensor.dtype.is_complex and tensor.is_conj()  # is_conj lets other threads run first
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(offset), conjugated)

    def on(self, storage: torch.UntypedStorage, origin: int) -> torch.Tensor:
        """The tensor on a storage whose first byte is byte ``origin`` of the storage that was saved."""
        offset = (self.offset - origin) // self.dtype.itemsize
        tensor = empty(self.dtype, storage.device).data.set_(storage, offset, self.shape, self.stride)
        return tensor.conj() if self.conjugated else tensor


def empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements, the same one each time: not to be changed."""
    found = _empty.get((dtype, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is torch.Tensor:  # and not a compiler's fake
            _empty[dtype, device] = found
    return found


def spanned(tensor: torch.Tensor) -> range:
    """The bytes of the storage from the tensor's first to its last element."""
    itemsize = tensor.dtype.itemsize
    begin = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return range(begin, begin + tensor.nbytes)
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(begin, begin + (steps + 1) * itemsize if tensor.numel() else begin)


def bytes_to_move(span: range, storage_nbytes: int) -> range:
    """The bytes that are moved for a tensor: its whole storage, which other tensors may share, unless the tensor spans
    less than half of the storage.

    >>> bytes_to_move(range(1000, 1100), 10_000), bytes_to_move(range(1000, 9000), 10_000)
    (range(960, 1100), range(0, 10000))
    """
    if 2 * len(span) > storage_nbytes:
        return range(storage_nbytes)
    return range(span.start // ALIGNMENT * ALIGNMENT, span.stop)
