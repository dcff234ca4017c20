"""Augmented CSR on a GPU, in one kernel each way. Import it only where Triton is installed.

Kernels have no annotations, because Triton compiles those, too.

Each program takes a block of elements. Where a block's values begin is the sum of the counts of the blocks before,
which a first small kernel counts.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_launching = threading.Lock()
"""Triton compiles a kernel when it is launched first, and does not say that several threads may do so at once."""


@triton.jit
def _count_values(stored, counts, elements, BLOCK: tl.constexpr):
    """Count the elements of each block that are not zero."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    element = tl.load(stored + index, mask=index < elements, other=0)
    tl.store(counts + block, tl.sum((element != 0).to(tl.int32), 0))


@triton.jit
def _pack_block(
    stored,
    bitmap,
    bitmap_nbytes,
    values,
    value_count,
    ends,
    elements,
    BLOCK: tl.constexpr,
):
    """The bits of a block, and its elements that are not zero."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    element = tl.load(stored + index, mask=index < elements, other=0)
    is_there = (element != 0).to(tl.int32)
    eights = tl.reshape(is_there, (BLOCK // 8, 8))
    bits = tl.sum(eights << tl.arange(0, 8)[None, :], 1)
    byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(bitmap + byte, bits.to(tl.uint8), mask=byte < bitmap_nbytes)
    place = tl.load(ends + block) - tl.sum(is_there, 0) + tl.cumsum(is_there, 0) - 1
    tl.store(values + place, element, mask=(is_there != 0) & (place < value_count))


@triton.jit
def _count_bits(bitmap, counts, elements, BLOCK: tl.constexpr):
    """Count the bits of each block that are set."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bitmap + index // 8, mask=index < elements, other=0).to(tl.int32)
    tl.store(counts + block, tl.sum((byte >> (index % 8)) & 1, 0))


@triton.jit
def _unpack_block(
    bitmap,
    values,
    value_count,
    ends,
    stored,
    elements,
    BLOCK: tl.constexpr,
):
    """The elements of a block."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bitmap + index // 8, mask=index < elements, other=0).to(tl.int32)
    is_there = (byte >> (index % 8)) & 1
    place = tl.load(ends + block) - tl.sum(is_there, 0) + tl.cumsum(is_there, 0) - 1
    element = tl.load(values + place, mask=(is_there != 0) & (place < value_count), other=0)
    tl.store(stored + index, element, mask=index < elements)


def pack(stored: torch.Tensor, bitmap: torch.Tensor, values: torch.Tensor) -> bool:
    """Write the bitmap of elements, and those that are not zero. False if these are not as many as ``values``. The
    calling thread waits."""
    elements, blocks = stored.numel(), triton.cdiv(stored.numel(), _BLOCK)
    if not elements:
        return not values.numel()
    counts = torch.empty(blocks, dtype=torch.int32, device=stored.device)
    with _launching:
        _count_values[(blocks,)](stored, counts, elements, BLOCK=_BLOCK)
        ends = counts.cumsum(0, dtype=torch.int32)
        _pack_block[(blocks,)](stored, bitmap, bitmap.numel(), values, values.numel(), ends, elements, BLOCK=_BLOCK)
    return int(ends[-1]) == values.numel()


def unpack(bitmap: torch.Tensor, values: torch.Tensor, stored: torch.Tensor) -> bool:
    """Write elements from their bitmap and the values. False if the bitmap does not name as many. The calling thread
    waits."""
    elements, blocks = stored.numel(), triton.cdiv(stored.numel(), _BLOCK)
    if not elements:
        return not values.numel()
    counts = torch.empty(blocks, dtype=torch.int32, device=stored.device)
    with _launching:
        _count_bits[(blocks,)](bitmap, counts, elements, BLOCK=_BLOCK)
        ends = counts.cumsum(0, dtype=torch.int32)
        _unpack_block[(blocks,)](bitmap, values, values.numel(), ends, stored, elements, BLOCK=_BLOCK)
    return int(ends[-1]) == values.numel()


def try_out(device: torch.device) -> None:
    """Pack and unpack a few elements.

    Raises:
        Exception: Triton cannot compile, or load what it has compiled.
        RuntimeError: the elements have changed.
    """
    stored = torch.tensor([0, 7, 0, -1] * 300, dtype=torch.int32, device=device)
    bitmap = torch.empty(160, dtype=torch.uint8, device=device)
    values, again = torch.empty(600, dtype=torch.int32, device=device), torch.empty_like(stored)
    if not (pack(stored, bitmap, values) and unpack(bitmap, values, again) and torch.equal(stored, again)):
        raise RuntimeError("elements have changed")
