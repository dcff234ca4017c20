"""Calls that make plain tensors, run in one step for torch's restricted unpickler: opcode by opcode, they take most of
the time of a load of many small tensors. It takes milliseconds to import this."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastensor.stitch.plain_call import Memo, PlainCall

if TYPE_CHECKING:
    from fastensor.checkpoint.reading.storages import Storages


class OneStepMemo(Memo):
    """The memo of torch's unpickler. Where torch takes the function that rebuilds plain tensors from it, it gets the
    tensor instead, and goes on reading behind the call, if that is an ordinary one.

    Args:
        program: the pickle.
        file: reads it for torch.
        storages: of the same archive.
    """

    def __init__(self, program: bytes, file: io.BytesIO, storages: Storages) -> None:
        super().__init__(program, _source_of)
        self._file = file
        self._storages = storages
        self._rebuild = torch._utils._rebuild_tensor_v2

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number)
        if value is self._rebuild and (call := self.call_at(self._file.tell())):
            self._file.seek(call.end)
            return _rebuilt(call, self._storages)
        return value


def _source_of(memo: Memo, numbers: Sequence[int]) -> tuple[torch.dtype, str] | None:
    """The dtype and the location of a storage. See :class:`Memo`."""
    word, kind, location, hooks = map(memo.get, numbers)
    if type(kind) is not torch.serialization.StorageType or type(location) is not str:
        return None
    return (kind.dtype, location) if word == "storage" and hooks is OrderedDict else None


def _rebuilt(call: PlainCall, storages: Storages) -> torch.Tensor:
    """A tensor as ``torch._utils._rebuild_tensor_v2`` makes it where there are no fake tensors."""
    dtype, location = call.source
    storage = storages.get(call.key, dtype, location, call.numel)
    tensor = torch.empty((0,), dtype=dtype, device=storage.device)
    tensor.set_(storage, call.offset, call.shape, call.stride)
    tensor.requires_grad = call.requires_grad
    tensor._backward_hooks = OrderedDict()
    return tensor
