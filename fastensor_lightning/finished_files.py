"""Keeping what a Trainer does with a checkpoint, after it has saved it, from running ahead of the file.

Lightning looks at its files itself, without asking the plugin that saves them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import fastensor
from fastensor.files.replacing import replace_attribute, wrap_method
from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
from fastensor_lightning.sharded import PendingShards

_logger = logging.getLogger(__name__)


def see_finished_files(plugin: FastensorCheckpointIO, callbacks: Iterable[Any], undo: ExitStack) -> None:
    """Let ``ModelCheckpoint``s link to finished files only, and know of those that are to come or to go, until ``undo``
    is closed."""
    for callback in callbacks:
        if hasattr(callback, "file_exists"):
            undo.callback(wrap_method(callback, "file_exists", partial(_file_exists, plugin)))
        if hasattr(callback, "_link_checkpoint"):
            undo.callback(replace_attribute(callback, "_link_checkpoint", partial(_link, plugin)))


def _file_exists(plugin: FastensorCheckpointIO, original: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
    """Rank 0 answers for all ranks, as in the original."""
    expected = plugin._will_exist(filepath) if trainer.is_global_zero else None
    if expected is None:
        return original(filepath, trainer)
    return bool(trainer.strategy.reduce_boolean_decision(expected, all=False))


def _link(plugin: FastensorCheckpointIO, trainer: Any, filepath: str, linkpath: str) -> None:
    if trainer.is_global_zero:
        plugin._link(filepath, linkpath)
    trainer.strategy.barrier()  # as in the original


class WaitingLoggers:
    """Loggers whose ``after_save_checkpoint`` is called when the file is finished, in the thread that trains, until
    ``undo`` is closed."""

    def __init__(self, plugin: FastensorCheckpointIO, loggers: Iterable[Any], undo: ExitStack) -> None:
        self._plugin = plugin
        self._waiting: deque[tuple[fastensor.SaveHandle | PendingShards, partial[None]]] = deque()
        for logger in loggers:
            undo.callback(wrap_method(logger, "after_save_checkpoint", self._later))

    def call_those_whose_files_are_finished(self) -> None:
        """Call the loggers whose files are finished, in the order of the saves. For failed saves, none is called.

        Loggers look at whatever a ``ModelCheckpoint`` names when they are called: none of it may be unfinished.
        """
        while self._waiting and self._is_finished(*self._waiting[0]):
            handle, call = self._waiting.popleft()
            if handle.stage == "durable":
                call()
            else:
                _logger.warning("loggers are not called for %s: the save was %s", handle.path, handle.stage)

    def _is_finished(self, handle: fastensor.SaveHandle | PendingShards, call: partial[None]) -> bool:
        (callback,) = call.args
        last, best = getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", "")
        names = {last, best, *getattr(callback, "best_k_models", ())}
        return handle.done() and not any(self._plugin._will_exist(name) for name in names if name)

    def _later(self, original: Callable[[Any], None], checkpoint_callback: Any) -> None:
        latest = self._plugin._latest
        if latest is None:  # it was saved synchronously
            original(checkpoint_callback)
        else:
            self._waiting.append((latest, partial(original, checkpoint_callback)))
            self.call_those_whose_files_are_finished()
