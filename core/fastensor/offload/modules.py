"""An attached model: which of its modules runs now, and which storages are its parameters and buffers."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastensor.errors import OffloadError
from fastensor.offload.blocks import BlockForward, RunsBlocks, find_blocks
from fastensor.offload.config import Recompute

_logger = logging.getLogger("fastensor")


def decision(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool | None:
    """True if the tensors that a module saves are offloaded, by its name; None if the module around it decides.

    >>> decision("layers.0", ["layers.*"], []), decision("head", ["layers.*"], []), decision("layers.0", [], ["*.0"])
    (True, None, False)
    """
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return False
    return True if any(fnmatchcase(name, pattern) for pattern in include) else None


class UncopiedHook:
    """A hook of a module that copies of the module do not have. Pickled ones as well have in the hook's place a
    function of the standard library that takes any arguments and does nothing. So copies are not attached, and can be
    loaded where Fastensor is not installed."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(), "__exit__")


class PersistentStorages:
    """The storages of a model's parameters and buffers, from the start of a step.

    FSDP2 registers another tensor in a parameter's place while the parameter is unsharded. The storage of that one is
    shrunk to 0 bytes afterwards, and filled again before the backward pass. So parameters of FSDP2 are looked up again
    if they were replaced since the last question: whatever is saved of an unsharded parameter is saved while it is
    registered.

    Args:
        model: the model; None has no storages.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._found: set[int] = set()
        self._sharded: list[tuple[dict[str, nn.Parameter | None], str]] = []
        """Places at which parameters of FSDP2 are registered."""
        self._seen: list[weakref.ref[nn.Parameter] | None] = []
        """Parameters that were registered there when they were looked up last."""
        if model is None:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            self._found |= _storages_of(tensor)
        modules = {inner for outer in model.modules() if is_fsdp2(outer) for inner in outer.modules()}
        self._sharded = [(module._parameters, name) for module in modules for name in module._parameters]
        self._seen = [None] * len(self._sharded)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        if self._sharded and storage._cdata not in self._found:
            self._look_again()
        return storage._cdata in self._found

    def _look_again(self) -> None:
        for index, (parameters, name) in enumerate(self._sharded):
            parameter, seen = parameters[name], self._seen[index]
            if parameter is not None and (seen is None or seen() is not parameter):
                self._seen[index] = weakref.ref(parameter)
                self._found |= _storages_of(parameter)


def is_fsdp2(module: nn.Module) -> bool:
    """True if ``torch.distributed.fsdp.fully_shard`` was applied to the module itself."""
    return _is_of_fsdp(module, "FSDPModule")


def _is_of_fsdp(module: nn.Module, name: str) -> bool:
    """True if a module is of a class of ``torch.distributed.fsdp``. That takes long to import; unless somebody has
    imported it, no module is."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, name))


def _storages_of(tensor: torch.Tensor) -> set[int]:
    """The identities of the storages of a tensor, or of the tensors that it wraps, as DTensor does."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return set[int]().union(*(_storages_of(getattr(tensor, name)) for name in names))
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided:
        return {tensor.untyped_storage()._cdata}
    return set()


@dataclass(frozen=True, slots=True)
class _Hook(UncopiedHook):
    """A hook of one module.

    In a compiled region the hook breaks the graph, if gradients are computed: compiled code saves its tensors when it
    ends, so code before and after the module must not be compiled together with the module.
    """

    call: Callable[..., None]

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            torch._dynamo.graph_break(
                msg="a pattern of include or exclude in fastensor's OffloadConfig fits this module of a compiled region"
            )
        self.call(*arguments)


class _Running(threading.local):
    """The modules that run in this thread, outermost first, and whether their tensors are offloaded; and the step that
    runs blocks. An attribute that is there from the start is what Dynamo of every torch can trace."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, bool]] = []
        self.step: RunsBlocks | None = None


class AttachedModel:
    """Hooks in a model, until they are removed. Forward passes may run in several threads. Copies of the model have no
    hooks.

    Args:
        model: the model. Its parameters and buffers are looked up at each step, because they may be replaced.
        include: patterns of names of modules.
        exclude: patterns of names of modules.
        recompute: which blocks may be computed again: ``"auto"``, patterns of names of modules, or False.

    Raises:
        ValueError: a pattern fits no module.
        OffloadError: FSDP version 1 or DeepSpeed's ZeRO stage 3 frees and refills the memory of the model's parameters;
            or a pattern fits a module of TorchScript, which calls no hooks.
    """

    def __init__(
        self, model: nn.Module, include: Sequence[str], exclude: Sequence[str], recompute: Recompute = False
    ) -> None:
        _refuse(model)
        self.model = model
        self._default = not include
        self._running = _Running()
        self._handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        patterns = recompute if isinstance(recompute, tuple) else ()
        for pattern in (*include, *exclude, *patterns):
            if not any(fnmatchcase(name, pattern) for name in modules):
                kind, some = type(model).__name__, list(modules)[:20]
                raise ValueError(f"no module of {kind} is called {pattern!r}; there are {some}")
        decisions = {name: decision(name, include, exclude) for name in modules}
        decided = {name: modules[name] for name, wanted in decisions.items() if wanted is not None}
        blocks = find_blocks(model, patterns) if recompute else {}
        _refuse_scripted(decided | blocks)
        if recompute and not blocks:
            _logger.warning(
                "no blocks of %s can be computed again: 'auto' looks for modules of one class in a ModuleList or "
                "Sequential. Name others by patterns, as in recompute=('encoder.*',)",
                type(model).__name__,
            )
        for name, module in decided.items():
            enter = _Hook(partial(self._enter, decisions[name] is True))
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(_Hook(self._leave), always_call=True))
        if blocks:  # torch's checkpoint imports this when it is called first, when memory may be short
            import_module("torch._dynamo")
        self.blocks = [BlockForward(name, module, self._current_step) for name, module in blocks.items()]
        """The blocks that may be computed again."""

    @contextmanager
    def running(self, step: RunsBlocks) -> Iterator[None]:
        """Have a step run the model's blocks, in this thread."""
        before, self._running.step = self._running.step, step
        try:
            yield
        finally:
            self._running.step = before

    def _current_step(self) -> RunsBlocks | None:
        return self._running.step

    @property
    def wants(self) -> bool:
        """True if tensors that are saved now, in this thread, are offloaded."""
        stack = self._running.stack
        return stack[-1][1] if stack else self._default

    def unallocated_gradients(self) -> int:
        """Bytes of the gradients that parameters do not have yet, and that the backward pass will allocate."""
        wanting = (one for one in self.model.parameters() if one.requires_grad and one.grad is None)
        return sum(getattr(one, "_local_tensor", one).nbytes for one in wanting)  # FSDP2 has shards on each rank

    def remove(self) -> None:
        """Take the hooks out. Calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()
        while self.blocks:
            self.blocks.pop().remove()

    def _enter(self, wanted: bool, module: nn.Module, arguments: Any) -> None:
        self._running.stack.append((module, wanted))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Leave the module, and modules inside that were not left. Also called if another hook has raised before the
        module was entered."""
        stack = self._running.stack
        at = next((at for at in reversed(range(len(stack))) if stack[at][0] is module), len(stack))
        del stack[at:]


def _refuse_scripted(modules: Mapping[str, nn.Module]) -> None:
    """Raise OffloadError if a module calls no hooks."""
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise OffloadError(
                f"include, exclude or recompute fits {name!r}, a module of TorchScript, which does not say when its "
                "modules run. Let the pattern fit a module of Python around it"
            )


def _refuse(model: nn.Module) -> None:
    """Raise OffloadError if the model's strategy frees memory that autograd has saved, and cannot be told which."""
    reason = instead = ""
    for name, module in model.named_modules():
        if _is_of_fsdp(module, version_1 := "FullyShardedDataParallel"):
            reason, instead = (
                f"{name or type(module).__name__} is a {version_1} (FSDP version 1)",
                "FSDP2 (fully_shard)",
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            reason, instead = f"{name} is a parameter of DeepSpeed's ZeRO stage 3", "ZeRO up to stage 2"
    if reason:
        raise OffloadError(
            f"activations of this model cannot be offloaded: {reason}, which frees and refills memory that autograd "
            f"has saved, and does not say which. Use {instead}, DDP, or activation checkpointing"
        )
