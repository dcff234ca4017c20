"""Which module's forward runs, and whether what it saves is offloaded; and what of a model is alive anyway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastensor.errors import OffloadError

_RESHARDED = {"FSDPModule", "FullyShardedDataParallel"}
"""Classes whose parameters' memory comes and goes."""


def decision(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool | None:
    """Whether a module's name says something about what it saves; None if that is up to the module around it.

    >>> decision("layers.0", ["layers.*"], []), decision("head", ["layers.*"], []), decision("layers.0", [], ["*.0"])
    (True, None, False)
    """
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return False
    return True if any(fnmatchcase(name, pattern) for pattern in include) else None


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook of one module.

    Copies of the module, pickled ones as well, have in its place a function of the standard library that takes anything
    and does nothing: they are not attached, and can be loaded where Fastensor is not installed.

    In a compiled region it breaks the graph, wherever gradients are computed: compiled code saves its tensors when it
    ends, and what runs before and after the module must not be in the same piece of it.
    """

    call: Callable[..., None]

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            torch._dynamo.graph_break(
                msg="a pattern of include or exclude in fastensor's OffloadConfig fits this module of a compiled region"
            )
        self.call(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(), "__exit__")


class AttachedModel:
    """Hooks in a model, until they are removed. Forwards may run in several threads. Copies of the model have none.

    Args:
        model: whose parameters and buffers are not offloaded. They are looked up at each step: they may be replaced.
        include: patterns of modules.
        exclude: patterns of modules.

    Raises:
        ValueError: a pattern fits no module.
        OffloadError: FSDP or DeepSpeed's ZeRO stage 3 frees and refills the memory of the model's parameters; or a
            pattern fits a module of TorchScript, which calls no hooks.
    """

    def __init__(self, model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> None:
        _refuse(model)
        self._model = model
        self._default = not include
        self._running = threading.local()
        self._handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        for pattern in (*include, *exclude):
            if not any(fnmatchcase(name, pattern) for name in modules):
                kind, some = type(model).__name__, list(modules)[:20]
                raise ValueError(f"no module of {kind} is called {pattern!r}; there are {some}")
        decisions = {name: decision(name, include, exclude) for name in modules}
        decided = {name: modules[name] for name, wanted in decisions.items() if wanted is not None}
        _refuse_scripted(decided)
        for name, module in decided.items():
            enter = _Hook(partial(self._enter, decisions[name] is True))
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(_Hook(self._leave), always_call=True))

    @property
    def wants(self) -> bool:
        """Whether what is saved now, in this thread, is to be offloaded."""
        stack = self._stack()
        return stack[-1][1] if stack else self._default

    def storages(self) -> set[int]:
        """The identities of the storages of parameters and buffers, as they are now."""
        found = set()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided:
                found.add(tensor.untyped_storage()._cdata)
        return found

    def remove(self) -> None:
        """Take the hooks out. Calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _stack(self) -> list[tuple[nn.Module, bool]]:
        """Of this thread: the modules that run, and what is decided about each."""
        stack: list[tuple[nn.Module, bool]] = self._running.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, wanted: bool, module: nn.Module, arguments: Any) -> None:
        self._stack().append((module, wanted))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Also called if another hook has raised before the module was entered, or one inside of it was left."""
        stack = self._stack()
        at = next((at for at in reversed(range(len(stack))) if stack[at][0] is module), len(stack))
        del stack[at:]


def _refuse_scripted(modules: Mapping[str, nn.Module]) -> None:
    """
    Raises:
        OffloadError: one of these modules calls no hooks.
    """
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise OffloadError(
                f"include or exclude fits {name!r}, a module of TorchScript, which does not tell when its modules run. "
                "Let the pattern fit a module of Python around it"
            )


def _refuse(model: nn.Module) -> None:
    """
    Raises:
        OffloadError: what autograd saves of this model may be freed by somebody else.
    """
    reason = ""
    for name, module in model.named_modules():
        if kinds := _RESHARDED & {kind.__name__ for kind in type(module).__mro__}:
            reason = f"{name or type(module).__name__} is a {kinds.pop()} (FSDP)"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            reason = f"{name} is a parameter of DeepSpeed's ZeRO stage 3"
    if reason:
        raise OffloadError(
            f"activations of this model cannot be offloaded: {reason}, which frees and refills memory that autograd "
            f"has saved. Use DDP, ZeRO up to stage 2, or activation checkpointing"
        )
