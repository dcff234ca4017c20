"""A dry run in a Trainer leaves no trace: no checkpoint, no line of a logger, and nothing that was trained."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastensor.files.replacing import replace_attribute
from fastensor.offload.undone import note_generators, undone
from fastensor_lightning.frameworks import load_classes, package_of

_Checkpoints = load_classes("Checkpoint", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")


def save_and_log_nothing(trainer: Any, undo: ExitStack) -> None:
    """Have a Trainer save no checkpoints and log nothing. The check of validation before training is left out.

    Args:
        trainer: begins ``fit``.
        undo: ends that when it is closed.
    """
    loggers = importlib.import_module(f"{package_of(trainer)}.loggers.logger")
    for name in ("loggers", "should_stop", "num_sanity_val_steps"):
        undo.callback(setattr, trainer, name, getattr(trainer, name))
    trainer.num_sanity_val_steps = 0
    trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]
    for one in trainer.callbacks:
        if isinstance(one, _Checkpoints):
            for name in dir(one):
                if name.startswith("on_"):
                    undo.callback(replace_attribute(one, name, _do_nothing))
    for name in ("save_checkpoint", "remove_checkpoint"):
        undo.callback(replace_attribute(trainer.strategy, name, _do_nothing))


def undo_draws(trainer: Any, undo: ExitStack) -> None:
    """Note the states of random generators, those of loaders included.

    Args:
        trainer: begins ``fit``. It draws from them before training begins.
        undo: restores them when it is closed.
    """
    note_generators(undo)
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    sources = [trainer.fit_loop._data_source.instance, val_loop._data_source.instance]
    generators = {id(one): one for loader in tree_leaves(sources) for one in _generators(loader)}
    for generator in generators.values():
        undo.callback(generator.set_state, generator.get_state())


def undo_progress(trainer: Any, undo: ExitStack) -> None:
    """Note how far a Trainer is when training begins: its loops, schedulers, callbacks and loaders.

    Args:
        trainer: has loaded the checkpoint that training goes on from.
        undo: restores that when it is closed.
    """
    for loop in _loops(trainer.fit_loop):
        undo.callback(vars(loop).update, _progress_of(loop))
    loaders = trainer.fit_loop._combined_loader.flattened
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for one in (*schedulers, *trainer.callbacks, *loaders, trainer.datamodule, trainer.precision_plugin):
        if hasattr(one, "load_state_dict") and (state := one.state_dict()):
            undo.callback(one.load_state_dict, copy.deepcopy(state))


def undo_training(trainer: Any, module: Any, folder: str | None) -> ExitStack:
    """Restores, when it is closed, what training does to a module, its optimizers and the default random generators.

    Args:
        trainer: begins to train.
        module: is trained.
        folder: where a nameless file keeps what is restored; None is the folder for temporary files.
    """
    with ExitStack() as undo:
        undo.enter_context(undone(module, folder, trainer.optimizers))
        return undo.pop_all()


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


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators of a loader and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    for one in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(found := getattr(one, "generator", None), torch.Generator):
            yield found


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of what would leave a trace."""
