"""A dry run in a Trainer leaves no trace: no checkpoint, no line of a logger, and nothing that was trained."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from fastensor.offload.undone import undone
from fastensor_lightning.frameworks import load_classes, package_of
from fastensor_lightning.methods import replace_method

_Checkpoints = load_classes("Checkpoint", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")


def leave_no_trace(trainer: Any, module: Any, folder: str | None) -> ExitStack:
    """Have a Trainer save no checkpoints and log nothing.

    Returns:
        Ends that when it is closed, and restores the module, its optimizers and random generators, and what
        :func:`note_progress` has noted.

    Args:
        trainer: begins ``fit``.
        module: is trained.
        folder: where nameless files keep what is restored; None is the folder for temporary files.
    """
    loggers = importlib.import_module(f"{package_of(trainer)}.loggers.logger")
    with ExitStack() as undo:
        undo.enter_context(undone(module, folder))
        for name in ("callbacks", "loggers", "should_stop"):
            undo.callback(setattr, trainer, name, getattr(trainer, name))
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, _Checkpoints)]
        trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]
        for name in ("save_checkpoint", "remove_checkpoint"):
            undo.callback(replace_method(trainer.strategy, name, _do_nothing))
        return undo.pop_all()


def note_progress(trainer: Any, undo: ExitStack) -> None:
    """Note how far the Trainer is when training begins: its loops, schedulers, callbacks and loaders.

    Args:
        trainer: has loaded the checkpoint that training goes on from.
        undo: gets what restores that.
    """
    for loop in _loops(trainer.fit_loop):
        undo.callback(vars(loop).update, _progress_of(loop))
    loaders = trainer.fit_loop._combined_loader.flattened
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for one in (*schedulers, *trainer.callbacks, *loaders, trainer.datamodule, trainer.precision_plugin):
        if hasattr(one, "load_state_dict") and (state := one.state_dict()):
            undo.callback(one.load_state_dict, copy.deepcopy(state))


def _loops(loop: Any) -> Iterator[Any]:
    """A loop, and those inside of it."""
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "restarting"):
            yield from _loops(inner)


def _progress_of(loop: Any) -> dict[str, Any]:
    """The counts and flags of a loop."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(loop).items()
        if isinstance(value, (int, float, str)) or name.endswith("_progress")
    }


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of what would leave a trace."""
