"""The callback that a Trainer with the plugin gets by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastensor_lightning.checkpoint_monitor import CheckpointMonitor, find_plugin

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class AutomaticMonitor(CheckpointMonitor):
    """Does what runs with :class:`FastensorCheckpointIO` need a callback for, and says in a line what saves have cost.

    It logs nothing else. In runs without the plugin, and in those that a :class:`CheckpointMonitor` watches, it does
    nothing.
    """

    _says_more = False

    def __init__(self) -> None:
        super().__init__(progress_bar=False, log=False)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._forget_run()
        self._plugin = None
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
        monitors = (one for one in callbacks if isinstance(one, CheckpointMonitor))
        first = min(monitors, key=lambda one: isinstance(one, AutomaticMonitor))  # one that was added by hand, if any
        if first is self and find_plugin(trainer) is not None:
            super().setup(trainer, pl_module, stage)
