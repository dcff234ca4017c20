"""The ``.npy`` container of one tensor (NumPy's format, version 1.0): planning a file, and the header that it has.

A file is a magic string, a version, the length of the header, the header (a Python dict as text, padded with spaces),
and the tensor's bytes. A planned file equals what ``numpy.save`` writes for the same values, except for more padding:
the data begin at 4096, where direct I/O can read them.

NumPy has fewer dtypes than torch. Tensors of other dtypes, such as bfloat16 and 8-bit floats, are stored as unsigned
integers of the same width. The caller has to keep their dtype elsewhere.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastensor.errors import UnsupportedContentError
from fastensor.stitch.image import Header, Image, Payload
from fastensor.stitch.shape import is_same_layout, row_major
from fastensor.stitch.source import Plan

DATA_BEGIN = 4096
"""Offset of the data in planned files."""
_MAGIC = b"\x93NUMPY\1\0"
"""The magic string, and the version. The length of the header follows."""
_LENGTH = struct.Struct("<H")
_MOST_DIMENSIONS = 32
"""NumPy before 2.0 reads no more; since 2.0 it reads 64."""
_ORDER = "<" if sys.byteorder == "little" else ">"
_KINDS = {
    torch.bool: "b", torch.uint8: "u", torch.uint16: "u", torch.uint32: "u", torch.uint64: "u",
    torch.int8: "i", torch.int16: "i", torch.int32: "i", torch.int64: "i",
    torch.float16: "f", torch.float32: "f", torch.float64: "f", torch.complex64: "c", torch.complex128: "c",
}  # fmt: skip
"""NumPy's letters for the dtypes that it shares with torch."""
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a file."""

    descr: str
    """The dtype as NumPy writes it, such as ``<f4``."""
    fortran_order: bool
    """True if the first index changes fastest."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None = None) -> NpyHeader:
        """The header of a tensor with these strides; None means row by row."""
        stride = row_major(shape) if stride is None else stride
        return cls(descr_of(dtype), not _is_by_rows(shape, stride) and _is_by_columns(shape, stride), tuple(shape))

    def encode(self) -> bytes:
        """All bytes in front of the data."""
        text = f"{{'descr': '{self.descr}', 'fortran_order': {self.fortran_order}, 'shape': {self.shape}, }}"
        prefix = _MAGIC + _LENGTH.pack(DATA_BEGIN - len(_MAGIC) - _LENGTH.size)
        return (prefix + text.encode()).ljust(DATA_BEGIN - 1) + b"\n"


def descr_of(dtype: torch.dtype) -> str:
    """NumPy's name for a dtype, or for integers of the same width.

    >>> descr_of(torch.float32)[1:], descr_of(torch.bool), descr_of(torch.bfloat16)[1:]
    ('f4', '|b1', 'u2')
    """
    kind = _KINDS.get(dtype, "u")
    return f"{'|' if dtype.itemsize == 1 else _ORDER}{kind}{dtype.itemsize}"


def reason_to_refuse(tensor: torch.Tensor) -> str:
    """Reason for which a tensor cannot be stored, as the end of a sentence that begins with "it"; empty if it can."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return "is not dense"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.dtype not in _KINDS and tensor.dtype.itemsize not in _WIDTHS:
        return f"is of {tensor.dtype}"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values"
    if tensor.dim() > _MOST_DIMENSIONS:
        return f"has {tensor.dim()} dimensions, and NumPy takes {_MOST_DIMENSIONS}"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative"
    if not (_is_by_rows(tensor.shape, tensor.stride()) or _is_by_columns(tensor.shape, tensor.stride())):
        return "is not contiguous"
    return ""


def plan(tensor: torch.Tensor) -> Plan:
    """Lay out the file of one tensor.

    Args:
        tensor: dense, and contiguous, or contiguous when transposed. It is borrowed.

    Raises:
        UnsupportedContentError: the container cannot hold it.
    """
    if reason := reason_to_refuse(tensor):
        raise UnsupportedContentError(f"a .npy file cannot hold a tensor that {reason}")
    header = NpyHeader.of(tensor.dtype, tensor.shape, tensor.stride())
    segments: list[Header | Payload] = [Header(0, header.encode())]
    storage = tensor.untyped_storage()
    if tensor.nbytes:
        before = int(tensor.storage_offset()) * tensor.itemsize
        behind = storage.nbytes() - before - tensor.nbytes
        segments.append(Payload(DATA_BEGIN, tensor.nbytes, 0, before=before, behind=behind))
    return Plan(Image(segments), (storage,))


def _is_by_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return is_same_layout(shape, stride, row_major(shape))


def _is_by_columns(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return is_same_layout(shape, stride, row_major(shape[::-1])[::-1])
