"""Saved tensors that are never offloaded: their memory would not be freed, or their bytes are not all that they are."""

from __future__ import annotations

import torch

MOVABLE_DEVICES = {"cpu", "cuda"}
_SAME_VALUES = frozenset((
    "T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "Alias", "Select", "Slice", "Split",
    "SplitWithSizes", "Unbind", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "Detach", "ToCopy", "Unfold", "Diagonal",
    "Movedim", "Flatten", "_ToTorchTensor",
))  # fmt: skip
"""Operations that only move, cast or view their input. The names of their autograd nodes add ``Backward0``; that of
``DTensor.to_local`` adds ``Backward``."""
_SPARSE_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


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
