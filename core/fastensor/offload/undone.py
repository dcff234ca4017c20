"""A dry run trains, and leaves no trace of that: parameters, buffers, gradients, optimizers and random generators are
afterwards what they were before."""

from __future__ import annotations

import copy
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
        for optimizer in optimizers:
            before.note_optimizer(optimizer)
        with ExitStack() as hooked:
            hook = register_optimizer_step_pre_hook(before.note_optimizer)
            hooked.callback(hook.remove)
            yield


class _Before:
    """Values before the block.

    Args:
        file: gets values.
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
            self._note(parameter)
            self._note(parameter.grad)
        for buffer in model.buffers():
            self._note(buffer)

    def note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer and its parameters, unless that was done before."""
        if threading.get_ident() != self._thread or not self._is_new(optimizer):
            return
        options = [
            self._noted_values({name: value for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]
        states = {key: self._noted_values(values) for key, values in optimizer.state.items()}
        self._restoring.callback(_restore_optimizer, optimizer, options, states)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._note(parameter)

    def _noted_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """The same tensors, whose values are noted, and copies of what is no tensor."""
        for value in values.values():
            self._note(value)
        return {
            name: value if isinstance(value, torch.Tensor) else copy.deepcopy(value) for name, value in values.items()
        }

    def _note(self, one: Any) -> None:
        """Note the value of a tensor that was not noted before."""
        if isinstance(one, torch.Tensor) and not is_lazy(one) and self._is_new(one):
            begin = self._file.seek(0, io.SEEK_END)
            torch.save(_local(one).cpu().clone(), self._file)
            self._restoring.callback(_restore, one, self._file, begin, self._file.tell() - begin)

    def _is_new(self, one: object) -> bool:
        is_new = id(one) not in self._noted
        self._noted[id(one)] = one
        return is_new


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


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], states: dict[Any, dict[str, Any]]
) -> None:
    del optimizer.param_groups[len(options) :]
    for group, before in zip(optimizer.param_groups, options, strict=True):
        parameters = group["params"]
        group.clear()
        group.update({"params": parameters} | before)
    optimizer.state.clear()
    optimizer.state.update(states)


def note_generators(restoring: ExitStack) -> None:
    """Note the states of the default random generators."""
    restoring.callback(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        restoring.callback(numpy.random.set_state, numpy.random.get_state())
    restoring.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available():
        restoring.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
