"""Packing a tensor for a file, and unpacking it again. Pure: no files."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastensor.errors import UnsupportedContentError
from fastensor.stitch import npy, torch_zip
from fastensor.stitch.shape import is_dense, is_same_layout, row_major
from fastensor.stitch.source import Plan
from fastensor.store.ref import Format, TensorRef

_PROTOCOL = 2
"""The pickle protocol that ``torch.save`` uses."""
_PLAIN = {Tensor: "Tensor", torch.nn.Parameter: "Parameter"}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes by width that torch copies bit by bit, whatever the bits mean."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor that can be stored. Borrows its memory."""

    values: Tensor
    """The contents of the file. Dense tensors are contiguous, or contiguous when transposed."""
    kind: str
    """As in :class:`TensorRef`."""
    stride: tuple[int, ...] | None
    """As in :class:`TensorRef`."""
    requires_grad: bool
    nbytes: int
    not_for_npy: str = ""
    """Reason for which NumPy's container cannot hold the tensor; empty if it can. torch's can hold everything."""
    planned: torch_zip.TorchZip | None = None
    """The plan of the file, if the tensor is not dense."""

    def plan(self, container: Format) -> Plan:
        """The plan of the file."""
        if container == "npy":
            return npy.plan(self.values)
        return self.planned or _plan_for_torch(_alone(self.values))

    def ref(self, file: str, container: Format, backend: str, crc32: int | None) -> TensorRef:
        """The ref of the tensor, once the tensor is in that file."""
        return TensorRef(
            file, container, self.kind, str(self.values.dtype).removeprefix("torch."), tuple(self.values.shape),
            self.stride, self.values.device.type, self.requires_grad, self.nbytes, crc32, backend,
        )  # fmt: skip


def pack(tensor: Tensor) -> Packed:
    """The tensor in the form in which it is stored.

    A dense tensor is copied if neither it nor its transpose is contiguous. Lazy conjugates are resolved.

    Raises:
        UnsupportedContentError: the tensor has no values, or its storage is freed.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, found {type(tensor).__name__}")
    if tensor.is_nested:
        raise UnsupportedContentError("a nested tensor cannot be stored: store its .values() and .offsets()")
    if tensor.device.type == "meta":
        raise UnsupportedContentError("a tensor on the meta device has no values that could be stored")
    if tensor.layout == torch.strided and not tensor.is_quantized and type(tensor) in _PLAIN:
        return _pack_dense(tensor)
    kind = _kind_of(tensor)
    reason = npy.reason_to_refuse(tensor) or f"is a {kind}"
    planned = _plan_for_torch(tensor)
    return Packed(
        tensor, kind, None, tensor.requires_grad, sum(storage.nbytes() for storage in planned.storages), reason, planned
    )


def _pack_dense(tensor: Tensor) -> Packed:
    if not tensor.numel():
        values, stride = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach(), None
    else:
        _check_storage(tensor)
        values = tensor.detach().resolve_conj().resolve_neg()
        kept = is_dense(values.shape, values.stride()) and values.stride() != row_major(values.shape)
        stride = values.stride() if kept else None
        if npy.reason_to_refuse(values):
            values = as_integers(values).contiguous().view(values.dtype)
    reason = npy.reason_to_refuse(values)
    return Packed(values, _PLAIN[type(tensor)], stride, tensor.requires_grad, values.nbytes, reason)


def _check_storage(tensor: Tensor) -> None:
    """Refuse a tensor whose storage is freed: sharded training frees storages of tensors that live on."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * tensor.itemsize:
        raise UnsupportedContentError("a tensor whose storage has been freed cannot be stored")


def unpack(values: Tensor, ref: TensorRef) -> Tensor:
    """The tensor as it was before :func:`pack`.

    Args:
        values: the contents of the file, on the right device. The result may share their memory.
        ref: strides, kind and ``requires_grad``.
    """
    if ref.stride is not None:
        values = _with_strides(values, ref.stride)
    if ref.kind == "Parameter":
        return torch.nn.Parameter(values, ref.requires_grad)
    return values if values.requires_grad == ref.requires_grad else values.requires_grad_(ref.requires_grad)


def elements(data: Tensor, header: npy.NpyHeader, dtype: torch.dtype) -> Tensor:
    """The tensor whose elements are the bytes ``data``. Shares their memory.

    Args:
        data: a one-dimensional tensor of uint8.
        header: the header of the file.
        dtype: a dtype as wide as the one in the header.
    """
    values = data.view(dtype)
    if header.fortran_order:
        return values.reshape(header.shape[::-1]).permute(tuple(reversed(range(len(header.shape)))))
    return values.reshape(header.shape)


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory, as integers, which torch copies bit by bit."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def _with_strides(values: Tensor, stride: Sequence[int]) -> Tensor:
    if is_same_layout(values.shape, values.stride(), stride):
        return values.as_strided(values.shape, stride)
    result = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    as_integers(result).copy_(as_integers(values))
    return result


def _plan_for_torch(values: Tensor) -> torch_zip.TorchZip:
    return torch_zip.plan(values, pickle_module=pickle, pickle_protocol=_PROTOCOL)


def _alone(values: Tensor) -> Tensor:
    """The same tensor with a storage of its own, without other elements: torch stores storages whole."""
    storage = values.untyped_storage()
    begin = int(values.storage_offset()) * values.itemsize
    if storage.nbytes() == values.nbytes:
        return values
    own = storage[begin : begin + values.nbytes]
    return values.new_empty(0).set_(own, 0, values.shape, values.stride())


def _kind_of(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return type(tensor).__name__
