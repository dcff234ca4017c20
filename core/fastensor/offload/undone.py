"""A dry run trains, and leaves no trace of that: parameters, buffers, gradients, optimizers and random generators are
afterwards what they were before."""

from __future__ import annotations

import io
import random
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def undone(
    model: nn.Module | None, folder: str | None, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[None]:
    """Undo, at the end, what training of this thread in the block has done to a model, to optimizers of torch with
    their parameters, and to the default random generators of Python, NumPy and torch.

    What was there before is kept in a nameless file, so that as much memory is free in the block as in training.
    Parameters and buffers that the block adds stay.

    Args:
        model: its parameters, buffers and gradients are restored; None if it is not known.
        folder: where the file is; None is the folder for temporary files.
        optimizers: are restored as they are now. Others are restored as they were at their first step in the block.

    Raises:
        OSError: the file cannot be made or written.
    """
    with ExitStack() as restoring:
        before = _Before(restoring.enter_context(tempfile.TemporaryFile(dir=folder)), restoring)
        note_generators(restoring)
        if model is not None:
            before.note_model(model)
        for one in optimizers:
            before.note_optimizer(one)
        with ExitStack() as hooked:
            hook = register_optimizer_step_pre_hook(before.note_optimizer)
            hooked.callback(hook.remove)
            yield


class _Before:
    """Values before the block.

    Args:
        file: gets values of tensors.
        restoring: gets what restores them, each by itself.
    """

    def __init__(self, file: BinaryIO, restoring: ExitStack) -> None:
        self._file = file
        self._restoring = restoring
        self._thread = threading.get_ident()
        self._noted: dict[int, object] = {}
        """By identity what was noted already, which lives as long as this."""

    def note_model(self, model: nn.Module) -> None:
        """Note parameters, buffers and gradients."""
        for module in model.modules():
            self._restoring.callback(module._buffers.update, dict(module._buffers))
        for parameter in model.parameters():
            self._restoring.callback(setattr, parameter, "grad", parameter.grad)
            self._note(parameter, parameter.grad)
        self._note(*model.buffers())

    def note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer and its parameters, unless that was done before."""
        if threading.get_ident() == self._thread:
            self._note(optimizer.state, optimizer.param_groups)

    def _note(self, *values: object) -> None:
        """Note tensors, and what dicts and lists hold, unless that was done before."""
        for one in values:
            if id(one) in self._noted or not isinstance(one, torch.Tensor | dict | list):
                continue
            self._noted[id(one)] = one
            if isinstance(one, torch.Tensor):
                self._note_tensor(one)
            elif isinstance(one, list):
                self._restoring.callback(one.__setitem__, slice(None), list(one))
                self._note(*one)
            else:
                self._restoring.callback(_refill, one, dict(one))
                self._note(*one.values())

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if not is_lazy(tensor):
            begin = self._file.seek(0, io.SEEK_END)
            torch.save(_local(tensor).cpu().clone(), self._file)
            self._restoring.callback(_restore, tensor, self._file, begin, self._file.tell() - begin)


def _refill(one: dict[Any, Any], before: dict[Any, Any]) -> None:
    one.clear()
    one.update(before)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or what this rank holds of a sharded one, without dimensions along which it repeats the same memory.
    It shares memory with it."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    if local.layout != torch.strided:
        return local
    return local[tuple(slice(None) if stride else slice(1) for stride in local.stride())]


def _restore(tensor: torch.Tensor, file: BinaryIO, begin: int, nbytes: int) -> None:
    file.seek(begin)
    _local(tensor).copy_(torch.load(io.BytesIO(file.read(nbytes)), weights_only=False))


def note_generators(restoring: ExitStack) -> None:
    """Note the states of the default random generators."""
    restoring.callback(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        restoring.callback(numpy.random.set_state, numpy.random.get_state())
    restoring.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available():
        restoring.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
