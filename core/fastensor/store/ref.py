"""The ref of a stored tensor: what a store needs to read it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.stitch.shape import is_dense, is_shape

Format: TypeAlias = Literal["npy", "pt"]
"""The containers of a store: NumPy's and torch's."""
PLAIN_KINDS = ("Tensor", "Parameter")
"""Kinds of tensors that consist of their elements alone."""
_NAME = re.compile(r"[0-9a-f]{32}\.(npy|pt)")


@checks_keywords
@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor in a :class:`TensorStore`: its file, and what the file does not say about it.

    A ref is valid in every process, for every store of the same directory, until the tensor is deleted. It can be
    pickled, and consists of plain values:

    >>> import json
    >>> from dataclasses import asdict
    >>> ref = TensorRef(f"{7:032x}.npy", "npy", "Tensor", "bfloat16", (2, 3), None, "cpu", False, 12, 0x1234, "direct")
    >>> TensorRef(**json.loads(json.dumps(asdict(ref)))) == ref
    True

    Raises:
        ValueError: the values contradict each other, or the name is not that of a file of a store.
        UnsupportedContentError: this torch does not have the dtype.
    """

    file: str
    """Name of the file in the store's directory."""
    format: Format
    kind: str
    """``Tensor``, ``Parameter``, a layout such as ``sparse_coo``, ``quantized``, or the name of a subclass."""
    dtype: str
    """The name in torch, such as ``bfloat16``."""
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """Strides of the tensor, in elements; None means contiguous."""
    device: str
    """Kind of the device of the tensor that was stored, such as ``cuda``."""
    requires_grad: bool
    nbytes: int
    """Size of the elements."""
    crc32: int | None
    """CRC32 of the elements as they are in the file; None if it was not computed."""
    backend: str
    """The backend that wrote the file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON has lists
        object.__setattr__(self, "stride", None if self.stride is None else tuple(self.stride))
        if reason := _contradiction(self):
            raise ValueError(f"not a ref of a tensor: {reason}")

    @property
    def plain(self) -> bool:
        """True if the tensor consists of its elements alone."""
        return self.kind in PLAIN_KINDS

    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise UnsupportedContentError(f"dtype {self.dtype!r}, which torch {torch.__version__} does not have")
        return found


def _contradiction(ref: TensorRef) -> str:
    name = _NAME.fullmatch(ref.file)
    if name is None or name[1] != ref.format:
        return f"file {ref.file!r}, format {ref.format!r}"
    if not all(type(size) is int and size >= 0 for size in ref.shape) or not is_shape(ref.shape):
        return f"shape {ref.shape}"
    if (stride := ref.stride) is not None and not (
        len(stride) == len(ref.shape)
        and all(type(step) is int and step >= 0 for step in stride)
        and is_dense(ref.shape, stride)
    ):
        return f"strides {ref.stride} with shape {ref.shape}"
    itemsize = ref.torch_dtype().itemsize
    if (ref.plain or ref.format == "npy") and ref.nbytes != math.prod(ref.shape) * itemsize:
        return f"{ref.nbytes} bytes for shape {ref.shape} of {ref.dtype}"
    return ""
