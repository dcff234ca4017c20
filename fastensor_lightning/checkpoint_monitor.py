"""A callback that shows what checkpoints cost: in the Trainer's loggers and in its progress bar."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import fastensor
from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
from fastensor_lightning.frameworks import load_classes

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    Callback = type("Callback", load_classes("Callback", "lightning.pytorch", "pytorch_lightning"), {})

_MEGABYTE = 1e6


class CheckpointMonitor(Callback):
    """Logs seconds, bytes and bandwidth of every save of :class:`FastensorCheckpointIO`.

    Loggers get ``checkpoint/save_seconds``, ``checkpoint/save_bytes`` and ``checkpoint/save_bytes_per_second`` at the
    step of the save, on the rank that saves. The progress bar shows ``save_s`` and ``save_MB/s`` of the latest save,
    from the next training batch on. Loggers are not made for several threads: a save that another plugin moved to a
    thread of its own is logged at the end of the next batch, or of the run.

    Args:
        progress_bar: whether to show the latest save in the progress bar.

    Raises:
        TypeError: in ``setup``, if the Trainer saves with another plugin.
    """

    def __init__(self, *, progress_bar: bool = True) -> None:
        super().__init__()
        self._progress_bar = progress_bar
        self._unsubscribe: Callable[[], None] | None = None
        self._to_show: fastensor.SaveReport | None = None
        self._to_log: deque[tuple[int, fastensor.SaveReport]] = deque()
        self._thread = 0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        plugin = _find_plugin(trainer)
        self._stop()
        self._thread = threading.get_ident()
        self._unsubscribe = plugin.subscribe(lambda report: self._on_save(trainer, report))

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._stop()
        self._log(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self._log(trainer)
        report, self._to_show = self._to_show, None
        if report is None or not self._progress_bar:
            return
        shown = {"save_s": report.seconds, "save_MB/s": report.bytes_per_second / _MEGABYTE}
        pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unsubscribe": None}

    def _on_save(self, trainer: Trainer, report: fastensor.SaveReport) -> None:
        self._to_show = report
        self._to_log.append((trainer.global_step, report))
        if threading.get_ident() == self._thread:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        while self._to_log:
            step, report = self._to_log.popleft()
            metrics = {
                "checkpoint/save_seconds": report.seconds,
                "checkpoint/save_bytes": float(report.nbytes),
                "checkpoint/save_bytes_per_second": report.bytes_per_second,
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def _stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


def _find_plugin(trainer: Trainer) -> FastensorCheckpointIO:
    """The Trainer's plugin, also from inside wrappers such as AsyncCheckpointIO."""
    plugin: Any = trainer.strategy.checkpoint_io
    while not isinstance(plugin, FastensorCheckpointIO):
        inner = getattr(plugin, "checkpoint_io", None)
        if inner is None:
            raise TypeError(
                f"CheckpointMonitor watches FastensorCheckpointIO, but this Trainer saves with "
                f"{type(plugin).__name__}; pass plugins=[FastensorCheckpointIO()] to the Trainer"
            )
        plugin = inner
    return plugin
