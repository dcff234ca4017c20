"""Activation offload in training with Accelerate: steps of prepared models, and a hook for modules."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown
from fastensor.offload import ActivationOffload, OffloadConfig, OffloadStatistics
from fastensor.offload.config import with_default_folder
from fastensor.offload.modules import UncopiedHook

_IN_COMPILED_CODE = (
    "a module whose activations fastensor offloads is inside of compiled code, which saves all of its tensors when it "
    "ends. Attach what torch.compile returns; or detach the model, or remove the hook, and run the compiled code in "
    "`with ActivationOffload().step()`"
)
_logger = logging.getLogger("fastensor")


@checks_keywords
def attach(model: nn.Module, config: OffloadConfig | None = None) -> ActivationOffload:
    """Offload what each forward pass of a model saves for its backward pass, whoever calls the model.

    Call it with what ``Accelerator.prepare`` has returned, or before. A loss that is computed outside of the model is
    covered by ``with offload.step(): loss = criterion(model(x), y)``, where ``offload`` is what this function returns.
    Forward passes under ``no_grad`` are left alone. Copies of the model, pickled ones as well, are not attached.

    End it by :func:`detach`: a model whose offload was closed otherwise raises. After Ctrl-C in a forward pass, what
    the thread saves is offloaded until the model's next forward pass with gradients, or :func:`detach`.

    Args:
        model: the model, prepared or not, compiled or not.
        config: how many bytes go where; its patterns fit names of modules of the unwrapped model.

    Returns:
        The offload; that of the earlier call if the model, or the one that it wraps, is attached already.

    Raises:
        ValueError: the model is attached with other options; or a pattern fits no module.
        OffloadError: FSDP version 1 or DeepSpeed's ZeRO stage 3 frees and refills the memory of the model's parameters.

    >>> model = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid())
    >>> offload = attach(model, OffloadConfig(schedule="all", min_bytes=1 << 16))
    >>> model(torch.randn(64, 512)).mean().backward()
    >>> offload.statistics().offloaded
    2
    >>> detach(model)
    """
    if (attached := _attached_to(model)) is not None:
        if config is not None and config != attached.offload.config:
            raise ValueError(
                f"this {type(model).__name__} is attached with {attached.offload.config}; call "
                "fastensor_accelerate.detach(model) before you attach it with other options"
            )
        return attached.offload
    offload = ActivationOffload(config)
    offload.attach(extract_model_from_parallel(model, keep_torch_compile=False))
    steps = _ForwardSteps(offload)
    enter = model.register_forward_pre_hook(_ForwardHook(steps, _ForwardSteps.enter), prepend=True)
    leave = model.register_forward_hook(_ForwardHook(steps, _ForwardSteps.leave), always_call=True)
    steps.handles = (enter, leave)
    return offload


@checks_keywords
def detach(model: nn.Module) -> None:
    """Let forward passes of a model be as they were, and close its offload. Graphs that still live raise if they need
    bytes that are not in memory. Nothing happens if the model is not attached."""
    if (attached := _attached_to(model)) is not None:
        for handle in attached.handles:
            handle.remove()
        attached.end()
        attached.offload.close()


@checks_keywords
class ActivationOffloadHook(ModelHook):  # type: ignore[misc]  # Accelerate has no types
    """A hook of Accelerate that runs a module's forward pass in a step of an activation offload.

    ``add_hook_to_module(module, ActivationOffloadHook(offload), append=True)`` adds it beside other hooks. It is in
    place of the forward method that the other hooks call, so that an exception in the forward pass leaves nothing
    behind. Hooks of several modules may share one offload. A module that computes its activations anew in the backward
    pass (activation checkpointing) must be inside of the module with the hook, not around it.

    A hook offloads nothing any more if another one was added without ``append=True``, which is logged once. A deep copy
    of the module has a hook that offloads nothing. A module with a hook of Accelerate cannot be pickled; remove the
    hook before.

    For prepared models :func:`attach` is simpler: it leaves ``forward`` as it is, and models can be pickled.

    Args:
        offload: where the activations go; None makes an offload with default options. The hook does not close it.

    >>> from accelerate.hooks import add_hook_to_module, remove_hook_from_module
    >>> module, offload = nn.Linear(512, 512), ActivationOffload(OffloadConfig(schedule="all", min_bytes=1 << 16))
    >>> _ = add_hook_to_module(module, ActivationOffloadHook(offload), append=True)
    >>> module(torch.randn(64, 512)).mean().backward()
    >>> offload.statistics().offloaded
    1
    >>> _ = remove_hook_from_module(module)
    """

    def __init__(self, offload: ActivationOffload | None = None) -> None:
        self.offload: ActivationOffload | None = offload or ActivationOffload()
        """None in the hook of a copied module."""

    @shown
    def __repr__(self) -> str:
        return ", offloads nothing" if self.offload is None else f" of {self.offload!r}"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the forward pass of a module into steps. Accelerate calls this when the hook is added."""
        inner: Any = module
        forward = inner._old_forward
        inner._old_forward = functools.update_wrapper(partial(_forward_in_step, self, module, forward), forward)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo :meth:`init_hook`. Accelerate calls this when the hook is removed."""
        inner: Any = module
        if isinstance(inner._old_forward, partial) and inner._old_forward.args[:1] == (self,):
            *_, inner._old_forward = inner._old_forward.args
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffloadHook:
        copy = type(self)(self.offload)
        copy.offload = None
        return copy

    def __reduce__(self) -> Any:
        raise TypeError(
            "a module with an ActivationOffloadHook cannot be pickled: call "
            "accelerate.hooks.remove_hook_from_module(module) before, or save its state_dict()"
        )


def _forward_in_step(
    hook: ActivationOffloadHook, module: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    if hook.offload is not None and hook not in _hooks_of(module):
        hook.offload = None
        _logger.warning(
            "activations of %s are not offloaded any more: another hook was added to it without append=True",
            type(module).__name__,
        )
    if hook.offload is None or not _is_wanted(hook.offload):
        return forward(*args, **options)
    with hook.offload.step():
        return forward(*args, **options)


def _hooks_of(module: nn.Module) -> list[ModelHook]:
    """Accelerate's hooks of a module."""
    found, hooks = [getattr(module, "_hf_hook", None)], []
    while found:
        hook = found.pop()
        if isinstance(hook, SequentialHook):
            found += hook.hooks
        else:
            hooks.append(hook)
    return hooks


def _is_wanted(offload: ActivationOffload) -> bool:
    """True if a forward pass that begins in this thread is to have a step."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_IN_COMPILED_CODE)
    return not offload.is_in_step


class _ForwardSteps:
    """The steps of the forward passes of an attached model, in any threads."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self.handles: tuple[RemovableHandle, ...] = ()
        self._here = threading.local()

    def enter(self, *arguments: Any) -> None:
        """Begin a step, unless the thread is in one: that of the caller, or one that is left of a forward pass that an
        interrupt has ended, after which torch calls no hooks. This forward pass ends that one."""
        if _is_wanted(self.offload):
            with ExitStack() as step:
                step.enter_context(self.offload.step())
                self._here.step = step.pop_all()

    def leave(self, *arguments: Any) -> None:
        """End the step of this thread, if there is one. Also called after exceptions. Without gradients nothing has
        begun, and this may be a call that the model makes of itself."""
        if torch.is_grad_enabled():
            self.end()

    def end(self) -> None:
        """End the step of this thread, if there is one."""
        step = self._here.__dict__.pop("step", None)
        if step is not None:
            step.close()


@dataclass(frozen=True, slots=True)
class _ForwardHook(UncopiedHook):
    """A hook of an attached model."""

    steps: _ForwardSteps
    do: Callable[..., None]

    def __call__(self, *arguments: Any) -> None:
        self.do(self.steps)


def _attached_to(model: nn.Module) -> _ForwardSteps | None:
    """The steps of a model, or of the one that DistributedDataParallel or a compiled model holds, if it is attached."""
    for module in (model, extract_model_from_parallel(model, keep_torch_compile=False)):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _ForwardHook):
                return hook.steps
    return None


@dataclass(slots=True)
class _Prepared:
    """A prepared model and its offload."""

    model: nn.Module
    offload: ActivationOffload
    name: str
    """The prefix of its metrics: ``offload``, ``offload_1``, …, as Accelerate numbers the files of models."""
    logged: OffloadStatistics
    """Statistics that trackers have."""
    is_checked: bool = False
    """True if it was looked at after a backward pass."""


class PreparedOffloads:
    """The offloads of the models that one Accelerator has prepared. For one thread at a time.

    Args:
        accelerator: whose models they are.
        config: how many bytes go where. Without ``directories``, files are in the project's folder, if there is one.
            Each model has an offload, with budgets of its own.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig) -> None:
        self._accelerator = accelerator
        self._config = with_default_folder(config, accelerator.project_dir)
        self._models: list[_Prepared] = []
        self._said_none = False

    def add(self, model: nn.Module) -> None:
        """Attach a model. Nothing happens if that was done before; a script's own :func:`attach` keeps its options.

        Raises:
            ValueError: a pattern of the options fits no module.
            OffloadError: the model is sharded by FSDP version 1 or DeepSpeed's ZeRO stage 3.
        """
        if any(known.model is model for known in self._models):
            return
        attached = _attached_to(model)
        name = f"offload_{len(self._models)}" if self._models else "offload"
        offload = attach(model, self._config_of(name)) if attached is None else attached.offload
        self._models.append(_Prepared(model, offload, name, offload.statistics()))

    def _config_of(self, name: str) -> OffloadConfig:
        """The configuration of a model's offload: traces of further models have its name in theirs."""
        if self._config.trace is None or not self._models:
            return self._config
        stem, ending = os.path.splitext(self._config.trace)
        return dataclasses.replace(self._config, trace=f"{stem}-{name}{ending}")

    def step(self, model: nn.Module) -> AbstractContextManager[None]:
        """A step of the offload of a model, for what is computed around its forward pass. The model is added.

        Raises:
            ValueError, OffloadError: as :meth:`add`.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        self.add(model)
        (offload,) = (known.offload for known in self._models if known.model is model)
        return offload.step() if _is_wanted(offload) else nullcontext()

    def check(self) -> None:
        """After a backward pass: say once if a model that has run offloads nothing, or no model has run."""
        for known in self._models:
            if known.is_checked or not (found := known.offload.statistics()).steps:
                continue
            known.is_checked = True
            if not (found.offloaded or found.recomputed or found.everything_fits):
                kind, words = type(known.model).__name__, found.in_words(known.offload.config)
                _logger.warning("activation offload of %s, after the first backward pass: %s", kind, words)
        if not self._said_none and not any(known.is_checked for known in self._models):
            self._said_none = True
            _logger.warning(
                "no activations are offloaded so far: no model that was prepared for training while Fastensor was "
                "enabled has been called with gradients; or its engine (%s) does not leave models to Accelerate",
                self._accelerator.distributed_type.value,
            )

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, for trackers. A model that has not run since has no entries, which would
        replace those of the same step in a tracker."""
        metrics: dict[str, float] = {}
        for known in self._models:
            found = known.offload.statistics()
            if found.steps > known.logged.steps:
                since = found.metrics_since(known.logged)
                metrics |= {f"{known.name}/{name}": value for name, value in since.items()}
                known.logged = found
        return metrics

    def close(self) -> None:
        """Detach all models. Print what the offloads have done, in the main process, and warn in each process if a
        model has offloaded nothing. Calling it again does nothing."""
        while self._models:
            known = self._models.pop(0)
            known.offload.settle()  # what is still being written counts
            found, kind = known.offload.statistics(), type(known.model).__name__
            detach(known.model)
            words = found.in_words(known.offload.config)
            if found.offloaded or found.recomputed or found.everything_fits:
                if self._accelerator.is_main_process:
                    print(f"fastensor: activation offload of {kind}: {words}", file=sys.stderr)
            elif found.steps:
                _logger.warning("activation offload of %s: %s", kind, words)
            elif any(parameter.requires_grad for parameter in known.model.parameters()):
                _logger.warning(
                    "no activations of %s were offloaded: no forward pass with gradients has called the model that "
                    "Accelerator.prepare has returned",
                    kind,
                )
