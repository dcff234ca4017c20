"""Staging a state in the memory that has held the one before.

torch's ``StateDictStager`` makes each container and each tensor object anew, which takes as long as copying the bytes
if tensors are some MiB large. A state that is built as the one before needs only the bytes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fastensor.stitch.shape import is_dense

_VALUES = (int, float, complex, bool, str, bytes, type(None))


class OtherStructureError(Exception):
    """The state is not built as the one before."""


@torch.no_grad()
def staged_again(before: Any, value: Any) -> Any:
    """A copy of a state whose tensors are those of an earlier copy, with new contents.

    Args:
        before: the earlier copy. It is not to be used any more.
        value: the state.

    Raises:
        OtherStructureError: the state has other keys, classes, shapes, strides, dtypes or placements, or tensors of
            classes that are not known here. Contents of ``before`` are undefined.

    >>> before = {"step": 1, "weights": [torch.zeros(2)]}
    >>> staged_again(before, {"step": 2, "weights": [torch.ones(2)]})
    {'step': 2, 'weights': [tensor([1., 1.])]}
    >>> before["weights"][0]
    tensor([1., 1.])
    """
    kind = type(value)
    if kind in _VALUES:
        return value
    if kind is not type(before):
        raise OtherStructureError
    if kind is torch.Tensor:
        _fill(before, value)
        return before
    if kind is DTensor:
        if before._spec != value._spec:
            raise OtherStructureError
        _fill(before._local_tensor, value._local_tensor)
        return before
    if isinstance(value, torch.Tensor):
        raise OtherStructureError
    if kind is dict:
        if list(before) != list(value):
            raise OtherStructureError
        return {key: staged_again(before[key], one) for key, one in value.items()}
    if kind in (list, tuple):
        if len(before) != len(value):
            raise OtherStructureError
        return kind(map(staged_again, before, value))
    if kind.__module__.partition(".")[0] == "torch" or hasattr(value, "__dict__"):
        raise OtherStructureError  # there may be tensors inside
    return copy.deepcopy(value)


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    if (
        type(target) is not type(source)
        or type(source) is not torch.Tensor
        or target.dtype != source.dtype
        or target.shape != source.shape
        or source.layout is not torch.strided
        or target.stride() != source.stride()
        or not is_dense(tuple(target.shape), target.stride())
    ):
        raise OtherStructureError
    target.detach().copy_(source)
