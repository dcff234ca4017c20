"""A dry run trains, and leaves no trace of that: parameters, buffers, gradients, optimizers and random generators are
afterwards what they were before."""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def undone(model: nn.Module | None, folder: str | None) -> Iterator[None]:
    """Undo, at the end, what training in the block has done to a model, to optimizers of torch that make steps there,
    with their parameters, and to the random generators of Python, NumPy and torch.

    What was there before is kept in nameless files, so that as much memory is free in the block as in training.

    Args:
        model: its parameters, buffers and gradients are restored; None if it is not known.
        folder: where the files are; None is the folder for temporary files.

    Raises:
        OSError: a file cannot be made or written.
    """
    with ExitStack() as restoring:
        before = _Before(folder, restoring)
        _note_generators(restoring)
        if model is not None:
            before.note_model(model)
        with ExitStack() as hooked:
            hook = register_optimizer_step_pre_hook(before.note_optimizer)
            hooked.callback(hook.remove)
            yield


class _Before:
    """What was there before the block.

    Args:
        folder: where files are.
        restoring: gets what restores it.
    """

    def __init__(self, folder: str | None, restoring: ExitStack) -> None:
        self._folder = folder
        self._restoring = restoring
        self._noted: dict[int, object] = {}
        """By identity what was noted already, which lives as long as this."""

    def note_model(self, model: nn.Module) -> None:
        """Note parameters, buffers and gradients."""
        for module in model.modules():
            self._restoring.callback(module._buffers.update, dict(module._buffers))
        gradients = [(one, one.grad) for one in model.parameters()]
        for parameter, gradient in gradients:
            self._restoring.callback(setattr, parameter, "grad", gradient)
        self._note([*model.parameters(), *model.buffers(), *(one for _, one in gradients if one is not None)])

    def note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer and its parameters, before its first step."""
        if not self._is_new(optimizer):
            return
        options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        tensors: list[torch.Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        states: dict[Any, dict[str, Any]] = {}
        for key, values in optimizer.state.items():
            tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
            states[key] = {
                name: value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for name, value in values.items()
            }
        self._restoring.callback(_restore_optimizer, optimizer, options, states)
        self._note(tensors)

    def _note(self, tensors: list[torch.Tensor]) -> None:
        """Note the values of tensors that were not noted before."""
        if not (new := [tensor for tensor in tensors if self._is_new(tensor)]):
            return
        file = self._restoring.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115  # closed there
        torch.save([_local(tensor).cpu() for tensor in new], file)

        def restore() -> None:
            file.seek(0)
            for tensor, value in zip(new, torch.load(file, weights_only=False), strict=True):
                _local(tensor).copy_(value)

        self._restoring.callback(restore)

    def _is_new(self, one: object) -> bool:
        is_new = id(one) not in self._noted
        self._noted[id(one)] = one
        return is_new


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or what this rank holds of a sharded one. It shares memory with it."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], states: dict[Any, dict[str, Any]]
) -> None:
    for group, before in zip(optimizer.param_groups, options, strict=True):
        parameters = group["params"]
        group.clear()
        group.update({"params": parameters} | before)
    optimizer.state.clear()
    optimizer.state.update(states)


def _note_generators(restoring: ExitStack) -> None:
    """Note the states of the random generators that training may use."""
    restoring.callback(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        restoring.callback(numpy.random.set_state, numpy.random.get_state())
    restoring.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available():
        restoring.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
