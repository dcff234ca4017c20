"""Switching Fastensor on and off: for all Accelerators of a process, or for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from accelerate import Accelerator
from torch.nn import Module

from fastensor.files.arguments import checks_keywords, checks_keywords_with, keywords_of
from fastensor.files.replacing import wrap_method
from fastensor.files.shown import shown
from fastensor.offload.modules import is_fsdp2
from fastensor_accelerate import attached, transformers_trainer
from fastensor_accelerate.attached import offloads_of, saver_of
from fastensor_accelerate.config import FastensorConfig
from fastensor_accelerate.states import savers

_Own: TypeAlias = Callable[..., Any]
"""Accelerate's own method."""
_undo = ExitStack()
"""Gives Accelerate its own methods back."""


@checks_keywords
def enable(config: FastensorConfig | None = None) -> None:
    """Have every Accelerator of this process save and load its states by Fastensor, and offload activations if the
    options say so.

    Call it at any time, in the main thread, on every process of a job; before models are prepared if their activations
    are to be offloaded. It is harmless if Fastensor is enabled already: then Accelerators that have not saved, loaded,
    logged or offloaded yet get the new options.

    Args:
        config: the options; None takes them from the environment, as ``fastensor-accelerate launch`` sets it.

    Raises:
        ConfigError: the environment has an unknown option, or a value that means nothing.

    >>> import fastensor_accelerate
    >>> fastensor_accelerate.enable()
    >>> fastensor_accelerate.disable()
    """
    was_enabled = is_enabled()
    attached.options = FastensorConfig.from_environment() if config is None else config
    if not was_enabled:
        for name, method in {"__init__": _init, **_METHODS}.items():
            _undo.callback(wrap_method(Accelerator, name, method))
        for saver in savers:  # of before disable()
            if not isinstance(saver.accelerator, FastensorAccelerator):
                saver.config = attached.options
    transformers_trainer.intercept()


def disable() -> None:
    """Have Accelerators save and load by themselves again, after pending states are published, and detach their models.
    Harmless if Fastensor is not enabled.

    Raises:
        Exception: what the save of a pending state has failed with.
    """
    attached.options = None
    _undo.close()
    transformers_trainer.restore()
    with ExitStack() as closing:  # all of them, whatever the others raise
        for saver in tuple(savers):
            closing.callback(saver.close)
            closing.callback(saver.close_offloads)


def is_enabled() -> bool:
    """True if :func:`enable` is in effect."""
    return attached.options is not None


def _save_state(
    own: _Own,
    self: Accelerator,
    output_dir: str | None = None,
    safe_serialization: bool = True,
    **save_model_func_kwargs: Any,
) -> Path:
    return saver_of(self).save_state(
        partial(own, self), output_dir, safe_serialization=safe_serialization, **save_model_func_kwargs
    )


def _load_state(
    own: _Own,
    self: Accelerator,
    input_dir: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    return saver_of(self).load_state(partial(own, self), input_dir, load_kwargs=load_kwargs, **options)


def _save(own: _Own, self: Accelerator, *args: Any, **options: Any) -> None:
    with saver_of(self).saving():
        own(self, *args, **options)


def _save_model(own: _Own, self: Accelerator, *args: Any, **options: Any) -> None:
    saver = saver_of(self)
    with saver.saving() if saver.config.link_unchanged else nullcontext():
        own(self, *args, **options)


def _prepare_model(
    own: _Own, self: Accelerator, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> Module:
    prepared: Module = own(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    if not evaluation_mode and (offloads := offloads_of(self)) is not None:
        offloads.add(prepared)
    return prepared


def _prepare(own: _Own, self: Accelerator, *objects: Any, **options: Any) -> Any:
    """Accelerate's own ``prepare``, which shards models by FSDP2 without :meth:`prepare_model`."""
    prepared = own(self, *objects, **options)
    if (offloads := offloads_of(self)) is not None:
        for one in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(one, Module) and any(map(is_fsdp2, one.modules())):
                offloads.add(one)
    return prepared


def _backward(own: _Own, self: Accelerator, *args: Any, **options: Any) -> None:
    own(self, *args, **options)
    if (offloads := offloads_of(self)) is not None:
        offloads.check()


def _log(
    own: _Own, self: Accelerator, values: dict[str, Any], step: int | None = None, *args: Any, **options: Any
) -> None:
    if step is not None:
        saver_of(self).step = step
    if (offloads := offloads_of(self)) is not None:
        values = {**offloads.metrics(), **values}  # in one call: trackers may count calls as steps
    own(self, values, step, *args, **options)


def _free_memory(own: _Own, self: Accelerator, *objects: Any) -> Any:
    if offloads_of(self) is not None:
        saver_of(self).close_offloads()
    return own(self, *objects)


def _end_training(own: _Own, self: Accelerator) -> None:
    saver = saver_of(self)
    try:
        saver.close()
    finally:
        saver.close_offloads()
        own(self)
    saver.print_summary()


def _init(own: _Own, self: Accelerator, *args: Any, **options: Any) -> None:
    own(self, *args, **options)
    transformers_trainer.intercept()  # a Trainer makes its Accelerator before the first step


_METHODS: dict[str, Callable[..., Any]] = {
    "save_state": _save_state,
    "load_state": _load_state,
    "save": _save,
    "save_model": _save_model,
    "prepare": _prepare,
    "prepare_model": _prepare_model,
    "backward": _backward,
    "free_memory": _free_memory,
    "log": _log,
    "end_training": _end_training,
}
"""Methods that are replaced: each gets Accelerate's own, and then the Accelerator."""


class FastensorAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """An Accelerator that saves and loads its states by Fastensor, and offloads activations if the options say so,
    without :func:`enable`.

    Args:
        args, kwargs: as for ``accelerate.Accelerator``.
        fastensor_config: the options; None takes them from the environment.

    Raises:
        ConfigError: the environment has an unknown option, or a value that means nothing.
    """

    @checks_keywords_with(keywords_of(Accelerator.__init__))
    def __init__(self, *args: Any, fastensor_config: FastensorConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = FastensorConfig.from_environment() if fastensor_config is None else fastensor_config
        attached.attach_saver(self, config)

    @shown
    def __repr__(self) -> str:
        return f" on {self.device}, process {self.process_index} of {self.num_processes}"


for _name, _method in _METHODS.items():
    wrap_method(FastensorAccelerator, _name, _method)
