"""The seam of ``transformers.Trainer``, which does not call ``save_state``. TRL's trainers inherit it.

A Trainer's files keep their names and formats. Each is replaced whole. The Trainer removes old checkpoints when the new
one is written; with asynchronous saves that waits until the new one is durable. A save is asynchronous only if nothing
but the Trainer reads the checkpoint when it is saved: a Trainer has no place where others wait for it.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from fastensor.files.replacing import wrap_method
from fastensor_accelerate.attached import offloads_of, saver_of
from fastensor_accelerate.directories import publish_last
from fastensor_accelerate.seam import missing_seams

_MODULE = "transformers.trainer"
_READS = (
    "_load_from_checkpoint",
    "_load_best_model",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_get_output_dir",  # called before a Trainer counts or removes checkpoints
)
"""Methods that read checkpoints, and so wait for the pending one."""
_PUSH = "_push_from_checkpoint"
_ROTATE = ("rotate_checkpoints", "_rotate_checkpoints")
"""Functions that remove old checkpoints: of the module, or of the Trainer before transformers 5.3."""
_OVERRIDDEN = ("_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "save_model")
"""Methods of a Trainer that save, after which a subclass may read what was saved."""
_KNOWN = ("transformers", "trl", "peft")
"""Packages whose methods read no checkpoint that the method of their parent has just saved. Callbacks are judged by
:func:`_reads_in_on_save`."""
_UPLOADS = {
    "ClearMLCallback": "_log_model",
    "FlyteCallback": "sync_checkpoints",
    "MLflowCallback": "_log_artifacts",
    "SwanLabCallback": "_log_model",
    "WandbCallback": "_log_model",
}
"""By class name, callbacks of transformers that may upload checkpoints, and the attribute that says whether they do."""
_NOT_NOW = ("false", "none", "end")
"""Values of that attribute, in lower case, with which nothing is uploaded when a checkpoint is saved."""
_undo: list[Callable[[], None]] = []
"""Give Trainers their own methods back, which are intercepted while there are any."""


def intercept() -> None:
    """Have every ``transformers.Trainer`` save and load by Fastensor, if transformers is imported.

    Warns:
        UserWarning: this version of transformers has no such seam, and nothing is intercepted; or this version of PEFT
            has none, and PEFT itself writes and reads its adapters.
    """
    module = sys.modules.get(_MODULE)
    if module is None or _undo or not hasattr(module, "Trainer"):
        return
    missing = missing_seams("transformers")
    missing += [f"Trainer.{name}" for name in (*_METHODS, _PUSH) if not hasattr(module.Trainer, name)]
    if not hasattr(*_rotation(module)):
        missing.append(_ROTATE[0])
    if missing:
        _warn("checkpoints of transformers.Trainer", missing)
        return
    if "peft" in sys.modules and (missing := missing_seams("peft")):  # transformers.trainer imports it if it is there
        _warn("adapters of PEFT", missing)
    for name, method in _METHODS.items():
        _undo.append(wrap_method(module.Trainer, name, method))


def _warn(what: str, missing: list[str]) -> None:
    warnings.warn(
        f"{what} are NOT saved or loaded by Fastensor: the installed version has no {', '.join(missing)}. The "
        "documentation names the versions that work",
        stacklevel=5,
    )


def restore() -> None:
    """Have Trainers save and load by themselves again."""
    while _undo:
        _undo.pop()()


def _read(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    with saver_of(trainer.accelerator).loading():
        return own(trainer, *args, **options)


def _save_model(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    # A Trainer that pushes copies checkpoints over what is saved here, in place: in this process or in a later one.
    with saver_of(trainer.accelerator).saving(links=False):
        return own(trainer, *args, **options)


def _save_checkpoint(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    folder = os.path.join(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
    saver = saver_of(trainer.accelerator)
    reader = reader_of(trainer) if saver.config.asynchronous else None
    links = not trainer.args.push_to_hub  # which copies what is in the checkpoint over other files, in place
    with saver.saving_in_turn(folder, reader=reader, links=links) as afterwards, ExitStack() as undo:

        def put_off(now: Callable[..., None], *args: Any, **options: Any) -> None:
            as_it_is = [_copy(trainer) if one is trainer else one for one in args]
            afterwards.append(partial(now, *as_it_is, **options))

        def write_hidden(write: Callable[[str], None], path: str) -> None:
            write(f"{path}.saving")
            afterwards.append(partial(publish_last, f"{path}.saving", path))

        # without the state, no Trainer resumes from the checkpoint
        undo.callback(wrap_method(trainer.state, "save_to_json", write_hidden))
        undo.callback(wrap_method(trainer, _PUSH, put_off))
        undo.callback(wrap_method(*_rotation(sys.modules[_MODULE]), put_off))
        return own(trainer, *args, **options)


def _train(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    result = own(trainer, *args, **options)
    saver = saver_of(trainer.accelerator)
    saver.wait()
    saver.print_summary()
    saver.close_offloads()
    return result


def _loss_context(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    with ExitStack() as stack:
        if (offloads := offloads_of(trainer.accelerator)) is not None:
            stack.enter_context(offloads.step(trainer.model_wrapped))
        stack.enter_context(own(trainer, *args, **options))
        return stack.pop_all()


_METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_READS, _read),
    "_save_checkpoint": _save_checkpoint,
    "save_model": _save_model,
    "compute_loss_context_manager": _loss_context,  # whatever a loss is, what is saved for it is offloaded
    "train": _train,
}


def reader_of(trainer: Any) -> str | None:
    """Say what may read a Trainer's checkpoint as soon as it is saved, beside the Trainer itself; None if nothing may.

    A callback is told of it. A subclass, or a model with a method of its own, goes on when the method of its parent has
    returned. What is pushed is read as well.
    """
    if trainer.args.push_to_hub:
        return "what pushes it to the Hub"
    for callback in trainer.callback_handler.callbacks:
        if _reads_in_on_save(callback):
            return f"on_save of {type(callback).__name__}"
    for owner, names in ((trainer, _OVERRIDDEN), (trainer.model, ("save_pretrained",))):
        for name in names:
            if hasattr(owner, name) and _definer(owner, name) not in _KNOWN:
                return f"{name} of {type(owner).__name__}"
    return None


def _reads_in_on_save(callback: Any) -> bool:
    known = _definer(callback, "on_save") in _KNOWN
    name = next((kind.__name__ for kind in type(callback).__mro__ if "on_save" in vars(kind)), "")
    if not known or name not in _UPLOADS:
        return not known or name != "TrainerCallback"
    upload = getattr(callback, _UPLOADS[name], "unknown")
    return str(getattr(upload, "value", upload)).lower() not in _NOT_NOW


def _definer(owner: Any, name: str) -> str:
    """The package that defines an object's method; an empty string if the object has been given one of its own, or if
    that is not known. A module may pass on the methods of another one, as compiled models and those of FSDP do."""
    if name in vars(owner):
        return ""
    for kind in type(owner).__mro__:
        if name in vars(kind):
            return kind.__module__.partition(".")[0]
    inner = getattr(getattr(owner, name, None), "__self__", owner)
    return _definer(inner, name) if isinstance(inner, torch.nn.Module) and inner is not owner else ""


def _copy(trainer: Any) -> Any:
    """A Trainer in the state that it is in now, for what is done later."""
    copied = copy.copy(trainer)
    copied.state = copy.copy(trainer.state)
    return copied


def _rotation(module: Any) -> tuple[Any, str]:
    """The object that has what removes old checkpoints, and its name there."""
    function, method = _ROTATE
    return (module, function) if hasattr(module, function) else (module.Trainer, method)
