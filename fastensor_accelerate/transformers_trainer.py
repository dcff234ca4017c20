"""The seam of ``transformers.Trainer``, which does not call ``save_state``. TRL's trainers inherit it.

A Trainer's files keep their names and formats. Each is replaced whole. The Trainer removes old checkpoints when the new
one is written; with asynchronous saves that waits until the new one is durable.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastensor_accelerate.activation_offload import PreparedOffloads
from fastensor_accelerate.directories import publish_last
from fastensor_accelerate.seam import missing_seams
from fastensor_accelerate.states import StateSaver

_MODULE = "transformers.trainer"
_READS = (
    "_load_from_checkpoint",
    "_load_best_model",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_get_output_dir",  # called before a Trainer counts or removes checkpoints
)
"""What reads checkpoints, and so waits for the pending one."""
_SAVES = ("_save_checkpoint", "save_model")
_LOSS = "compute_loss_context_manager"
"""Makes the context in which a Trainer computes losses: whatever a loss is, what is saved for it is offloaded."""
_PUSH = "_push_from_checkpoint"
_ROTATE = ("rotate_checkpoints", "_rotate_checkpoints")
"""What removes old checkpoints: a function of the module, or a method of the Trainer before transformers 5.3."""
_own: dict[str, Callable[..., Any]] = {}
"""The Trainer's own methods by name, while they are intercepted."""


def intercept(saver_of: Callable[[Any], StateSaver], offloads_of: Callable[[Any], PreparedOffloads | None]) -> None:
    """Have every ``transformers.Trainer`` save and load by Fastensor, if transformers is imported.

    Args:
        saver_of: gives the saver of an Accelerator.
        offloads_of: gives the offloads of an Accelerator's models; None if it does not offload.

    Warns:
        UserWarning: this version of transformers has no such seam, and nothing is intercepted; or this version of PEFT
            has none, and PEFT itself writes and reads its adapters.
    """
    module = sys.modules.get(_MODULE)
    if module is None or _own or not hasattr(module, "Trainer"):
        return
    names = (*_READS, *_SAVES, _LOSS, "train")
    missing = missing_seams("transformers")
    missing += [f"Trainer.{name}" for name in (*names, _PUSH) if not hasattr(module.Trainer, name)]
    if not hasattr(*_rotation(module)):
        missing.append(_ROTATE[0])
    if missing:
        _warn("checkpoints of transformers.Trainer", missing)
        return
    if "peft" in sys.modules and (missing := missing_seams("peft")):  # transformers.trainer imports it if it is there
        _warn("adapters of PEFT", missing)
    for name in names:
        _own[name] = getattr(module.Trainer, name)
        method = functools.wraps(_own[name])(_method(name, saver_of, offloads_of))
        setattr(module.Trainer, name, method)


def _warn(what: str, missing: list[str]) -> None:
    warnings.warn(
        f"{what} are NOT saved or loaded by Fastensor: the installed version has no {', '.join(missing)}. The "
        "documentation names the versions that work",
        stacklevel=5,
    )


def restore() -> None:
    """Have Trainers save and load by themselves again."""
    while _own:
        name, method = _own.popitem()
        setattr(sys.modules[_MODULE].Trainer, name, method)


def _method(
    name: str, saver_of: Callable[[Any], StateSaver], offloads_of: Callable[[Any], PreparedOffloads | None]
) -> Callable[..., Any]:
    """What a method of the Trainer is replaced by."""

    def read(trainer: Any, *args: Any, **options: Any) -> Any:
        with saver_of(trainer.accelerator).loading():
            return _own[name](trainer, *args, **options)

    def save_model(trainer: Any, *args: Any, **options: Any) -> Any:
        with saver_of(trainer.accelerator).saving():
            return _own[name](trainer, *args, **options)

    def save_checkpoint(trainer: Any, *args: Any, **options: Any) -> Any:
        folder = os.path.join(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
        with saver_of(trainer.accelerator).saving_in_turn(folder) as afterwards, ExitStack() as undo:

            def put_off(owner: Any, attribute: str) -> None:
                now = getattr(owner, attribute)
                replace(owner, attribute, lambda *args, **options: afterwards.append(partial(now, *args, **options)))

            def replace(owner: Any, attribute: str, function: Callable[..., None]) -> None:
                is_own, before = attribute in vars(owner), getattr(owner, attribute)
                setattr(owner, attribute, function)
                undo.callback(setattr, owner, attribute, before) if is_own else undo.callback(delattr, owner, attribute)

            def write_hidden(path: str) -> None:
                write(f"{path}.saving")
                afterwards.append(partial(publish_last, f"{path}.saving", path))

            write = trainer.state.save_to_json
            replace(trainer.state, "save_to_json", write_hidden)  # without it, no Trainer resumes from the checkpoint
            put_off(trainer, _PUSH)
            put_off(*_rotation(sys.modules[_MODULE]))
            return _own[name](trainer, *args, **options)

    def train(trainer: Any, *args: Any, **options: Any) -> Any:
        result = _own[name](trainer, *args, **options)
        saver = saver_of(trainer.accelerator)
        saver.wait()
        saver.print_summary()
        if (offloads := offloads_of(trainer.accelerator)) is not None:
            offloads.close()
        return result

    def loss_context(trainer: Any, *args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            if (offloads := offloads_of(trainer.accelerator)) is not None:
                stack.enter_context(offloads.step(trainer.model_wrapped))
            stack.enter_context(_own[name](trainer, *args, **options))
            return stack.pop_all()

    named = {"save_model": save_model, "_save_checkpoint": save_checkpoint, "train": train, _LOSS: loss_context}
    return named.get(name, read)


def _rotation(module: Any) -> tuple[Any, str]:
    """The object that has what removes old checkpoints, and its name there."""
    function, method = _ROTATE
    return (module, function) if hasattr(module, function) else (module.Trainer, method)
