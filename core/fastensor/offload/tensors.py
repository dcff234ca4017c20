"""Saved tensors: which of them are never offloaded, the bytes of a storage that are moved for the others, and the
tensors that are made of these again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Alignment of memory that torch allocates. Kernels find the bytes aligned as they were."""
MOVABLE_DEVICES = {"cpu", "cuda"}
_SAME_VALUES = frozenset((
    "T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "Alias", "Select", "Slice", "Split",
    "SplitWithSizes", "Unbind", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "Detach", "ToCopy", "Unfold", "Diagonal",
    "Movedim", "Flatten", "_ToTorchTensor",
))  # fmt: skip
"""Operations that only move, cast or view their input. The names of their autograd nodes add ``Backward0``; that of
``DTensor.to_local`` adds ``Backward``."""
_SPARSE_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def reason_to_keep(tensor: torch.Tensor) -> str:
    """Reason for which a saved tensor of any size stays in memory; empty if there is none.

    The graph itself keeps leaves that require gradients alive, and with them all tensors that share their memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # compilers pass fake ones, too
        return "subclass"
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
        return "parameter"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_neg():
        return "layout"
    if tensor.device.type not in MOVABLE_DEVICES or tensor.is_inference():
        return "device"
    return ""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that :func:`reason_to_keep` does not keep. None if the tensor has no memory whose bytes
    could be moved: zeros that forward-mode differentiation never writes down, and wrappers of functional transforms."""
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values, for every layout and class; 0 if its sizes are symbols.

    >>> nbytes_of(torch.zeros(8)), nbytes_of(torch.eye(8).to_sparse()), nbytes_of(torch.eye(8).to_sparse_csr())
    (32, 32, 32)
    """
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor.nbytes
    with torch._C.DisableTorchFunctionSubclass():  # subclasses may say nothing about themselves
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout in _SPARSE_COMPRESSED:
            tensor = tensor.values()
        count: object = tensor.numel()  # nbytes is not there for every layout
        return count * tensor.dtype.itemsize if isinstance(count, int) else 0


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """True if a tensor, or its base, is a copy of a parameter, such as autocast makes in each step. Found by walking
    the graph back to the parameter."""
    base = tensor if tensor._base is None else tensor._base
    return _is_made_of_parameter(tensor) or (base is not tensor and _is_made_of_parameter(base))


def _is_made_of_parameter(tensor: torch.Tensor) -> bool:
    node = tensor.grad_fn
    while node is not None:
        if isinstance(variable := getattr(node, "variable", None), torch.Tensor):
            return isinstance(variable, torch.nn.Parameter)
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SAME_VALUES:
            return False
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


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
