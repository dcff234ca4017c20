"""The codecs of :mod:`fastensor.offload.codecs` for memory of a GPU, on the GPU: the same bytes.

Triton packs a piece in one kernel, if it is installed and works; torch does so in several operations. All work is
queued on the current stream, except where a function says that it waits.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that stand for elements, by size."""
BITS_OF_INFINITY = {
    torch.float16: (0x7FFF, 0x7C00),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float32: (0x7FFFFFFF, 0x7F800000),
}
"""By dtype: all bits but the sign, and those of infinity."""
_GATHER_BITS = 0x0102040810204080
"""Eight bytes that are 0 or 1, as a little-endian number, times this: the highest byte has their bits, the first byte's
in the lowest place."""
_ROW_ELEMENTS = 128
_logger = logging.getLogger("fastensor")


def count(piece: torch.Tensor, itemsize: int, narrow: torch.dtype | None) -> torch.Tensor:
    """Number of stored elements that are not zero, and of finite ones that would become infinity: two int64."""
    stored, overflows = _stored(piece, itemsize, narrow)
    return torch.stack([torch.count_nonzero(stored), overflows])


def encode(
    piece: torch.Tensor, itemsize: int, narrow: torch.dtype | None, out: torch.Tensor, *, is_sparse: bool
) -> bool:
    """Encode a piece. The calling thread waits for the GPU.

    Args:
        piece: uint8, contiguous.
        itemsize: bytes of an element.
        narrow: the dtype that float32 is rounded to.
        out: gets the encoded bytes, which fill it.
        is_sparse: whether in CSR.

    Returns:
        Whether the encoded bytes have the size of ``out``, and no finite number has become infinity.
    """
    stored, overflows = _stored(piece, itemsize, narrow)
    whole = piece.numel() // itemsize * itemsize
    body = out[: out.numel() - (piece.numel() - whole)]
    out[body.numel() :] = piece[whole:]
    if not is_sparse:
        body.copy_(stored.view(torch.uint8))
        return not int(overflows)
    bitmap, values = _parts(body, stored.numel(), stored.element_size())
    pack = _torch_pack if (kernels := _kernels(piece.device.type)) is None else kernels.pack
    return pack(stored, bitmap, values) and not int(overflows)


def decode(
    encoded: torch.Tensor, itemsize: int, narrow: torch.dtype | None, out: torch.Tensor, *, is_sparse: bool
) -> bool:
    """Make a piece again. The calling thread waits for the GPU. Arguments as for :func:`encode`, the other way round.

    Returns:
        Whether the bitmap names as many values as there are.
    """
    whole = out.numel() // itemsize * itemsize
    elements, stored_itemsize = whole // itemsize, itemsize if narrow is None else narrow.itemsize
    body = encoded[: encoded.numel() - (out.numel() - whole)]
    out[whole:] = encoded[body.numel() :]
    found = out[:whole].view(INTEGERS[itemsize])
    stored = found if narrow is None else torch.empty(elements, dtype=INTEGERS[stored_itemsize], device=out.device)
    is_right = True
    if is_sparse:
        bitmap, values = _parts(body, elements, stored_itemsize)
        unpack = _torch_unpack if (kernels := _kernels(out.device.type)) is None else kernels.unpack
        is_right = unpack(bitmap, values, stored)
    else:
        stored.copy_(body.view(stored.dtype))
    if narrow is not None:
        found.view(torch.float32).copy_(stored.view(narrow))
    return is_right


def _parts(body: torch.Tensor, elements: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bitmap, and the values as integers, of an encoded piece without its tail."""
    rows = -(-elements // _ROW_ELEMENTS)
    return body[: rows * 16], body[rows * 16 :].view(INTEGERS[itemsize])


def _stored(piece: torch.Tensor, itemsize: int, narrow: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of a piece as they are stored, as integers; and how many finite ones have become infinity."""
    values = piece[: piece.numel() // itemsize * itemsize].view(INTEGERS[itemsize])
    if narrow is None:
        return values, torch.zeros((), dtype=torch.int64, device=piece.device)
    numbers = values.view(torch.float32)
    rounded = numbers.to(narrow)
    return rounded.view(torch.int16), torch.isinf(rounded).sum() - torch.isinf(numbers).sum()


def _torch_pack(stored: torch.Tensor, bitmap: torch.Tensor, values: torch.Tensor) -> bool:
    """Write the bitmap of elements, and those that are not zero. False if these are not as many as ``values``."""
    is_there = torch.zeros(bitmap.numel() * 8, dtype=torch.bool, device=stored.device)
    torch.ne(stored, 0, out=is_there[: stored.numel()])
    gathered = is_there.view(torch.int64) * _GATHER_BITS
    bitmap.copy_(gathered.view(torch.uint8).view(-1, 8)[:, 7])
    found = torch.masked_select(stored, is_there[: stored.numel()])
    if found.numel() != values.numel():
        return False
    values.copy_(found)
    return True


def _torch_unpack(bitmap: torch.Tensor, values: torch.Tensor, stored: torch.Tensor) -> bool:
    """Write elements from their bitmap and the values. False if the bitmap does not name as many."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    bits = (bitmap.unsqueeze(1) >> shifts) & 1
    is_there = bits.view(-1)[: stored.numel()].view(torch.bool)
    if int(is_there.sum()) != values.numel():
        return False
    stored.zero_().masked_scatter_(is_there, values)
    return True


@cache
def _kernels(device_type: str) -> Any:
    """The module with the kernels of Triton; None if torch is to do their work. Tried once, on a few elements."""
    if device_type != "cuda":
        return None
    try:
        from fastensor.offload import triton_codecs
    except ImportError:
        return None
    try:
        triton_codecs.try_out(torch.device(device_type))
    except Exception as error:  # noqa: BLE001  # Triton needs a compiler and a driver: there is no end of what it raises
        _logger.warning("Triton does not work here, so codecs use several operations of torch: %s", error)
        return None
    return triton_codecs
