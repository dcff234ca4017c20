"""A callback that shows what checkpoints cost, and keeps a Trainer's own steps from running ahead of its files."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import fastensor
from fastensor.files.arguments import check_flags, checks_keywords
from fastensor.files.replacing import replace_attribute, wrap_method
from fastensor.files.shown import shown
from fastensor.files.words import MIB
from fastensor.select.share import Sharing
from fastensor_lightning.checkpoint_io import CHECKPOINT_IO_CLASSES, FastensorCheckpointIO
from fastensor_lightning.data_parallel import check_strategy, save_together, share_choice
from fastensor_lightning.frameworks import load_classes, package_of, say
from fastensor_lightning.saved_in_run import SavedInRun
from fastensor_lightning.sharded import PendingShards

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    Callback = type("Callback", load_classes("Callback", "lightning.pytorch", "pytorch_lightning"), {})

_logger = logging.getLogger(__name__)


@checks_keywords
class CheckpointMonitor(Callback):
    """Logs what every save of :class:`FastensorCheckpointIO` costs, and says at the end of ``fit`` what all have cost.

    Loggers get ``checkpoint/stall_seconds`` (how long training stood still), ``checkpoint/save_seconds`` (until the
    file was durable), ``checkpoint/save_bytes``, ``checkpoint/shared_bytes`` (those of them that were not written,
    because they have not changed) and ``checkpoint/save_bytes_per_second`` at the step of the save, on the rank that
    saves. The progress bar shows ``stall_s`` of the latest save, from the next training batch on.
    Loggers are not made for several threads: what another thread has saved is logged at the end of the next batch, or
    of the run.

    A Trainer with the plugin does what follows by itself, by a callback that Lightning finds by an entry point. With
    this monitor, that one does nothing.

    With ``asynchronous=True``, Lightning's own steps see the checkpoints as if they had been saved when they were asked
    for: ``ModelCheckpoint(save_last="link")`` links to a file that is durable, ``file_exists`` (its version counter)
    knows of files that are still to come or go, and ``after_save_checkpoint`` of loggers, which may upload, is called
    in the thread that trains once the file is finished, at the end of a batch or of the run.

    With ``cooperative=True``, all ranks of DDP save: during a run, the strategy calls the plugin on each of them.

    With DDP, ranks that have the same kind of devices and filesystem choose backends by what the lowest of them has
    learned: it is sent to the others when a run begins, after each save of the Trainer's, and when the run ends. The
    timings are those of the filesystem of the first ``ModelCheckpoint``'s folder.

    Args:
        progress_bar: whether to show the latest save in the progress bar.
        details: whether to show there as well ``save_s`` (until the file was durable) and ``save_MiB/s``.
        log: whether loggers get the numbers.
        explain: whether to say in the Trainer's log which backend each file was saved or loaded by on rank 0, and why.

    Raises:
        TypeError: in ``setup``, if the Trainer saves with another plugin; or with a cooperative one, or one with a
            ``base``, and its ranks do not hold the same state.
    """

    _says_more = True
    """True if the end of ``fit`` is worth more than a line."""

    def __init__(
        self, *, progress_bar: bool = True, details: bool = False, log: bool = True, explain: bool = False
    ) -> None:
        super().__init__()
        check_flags(progress_bar=progress_bar, details=details, log=log, explain=explain)
        self._progress_bar = progress_bar
        self._details = details
        self._logs = log
        self._explain = explain
        self._to_show: fastensor.SaveReport | None = None
        self._to_log: deque[tuple[int | None, fastensor.SaveReport]] = deque()
        self._saved = SavedInRun()
        self._thread = 0
        self._undo = ExitStack()
        self._loggers: WaitingLoggers | None = None
        self._trainer: Any = None
        self._plugin: FastensorCheckpointIO | None = None
        self._sharing: Sharing | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._forget_run()
        plugin = find_plugin(trainer)
        if plugin is None:
            raise TypeError(
                f"CheckpointMonitor watches FastensorCheckpointIO, but this Trainer saves with "
                f"{type(trainer.strategy.checkpoint_io).__name__}; pass plugins=[FastensorCheckpointIO()] to it"
            )
        check_strategy(plugin, trainer.strategy)
        self._plugin, self._trainer = plugin, trainer
        self._thread = threading.get_ident()
        plugin._begin_run(self)
        self._undo.callback(plugin._end_run, self)
        self._sharing = share_choice(plugin, trainer)
        if self._sharing is not None:  # all ranks call save_checkpoint, and leave it together
            self._undo.callback(self._sharing.end)
            self._undo.callback(wrap_method(trainer, "save_checkpoint", partial(_save_and_sync, self._sharing)))
        if plugin.cooperative:
            self._undo.callback(save_together(plugin, trainer))
        if plugin.asynchronous:
            self._loggers = WaitingLoggers(plugin, trainer.loggers, self._undo)
            see_finished_files(plugin, trainer.checkpoint_callbacks, self._undo)

    @shown
    def __repr__(self) -> str:
        return (
            f"(progress_bar={self._progress_bar}, details={self._details}, log={self._logs}, explain={self._explain})"
        )

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._plugin is not None:
            self._plugin._left_out.begin(pl_module)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Wait for pending saves and log them, before loggers are closed.

        All ranks wait: they may look for files next, as ``test(ckpt_path="last")`` does.
        """
        if self._plugin is not None:
            self._plugin._wait()
            if self._plugin.asynchronous:
                trainer.strategy.barrier()
        if self._sharing is not None:
            self._sharing.sync()
        self._undo.close()
        self._log(trainer)
        self._loggers = self._trainer = self._sharing = None
        if stage == "fit":
            self._say_what_was_saved(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Wait for pending saves and log them, before loggers are closed.

        Other callbacks may still save, so failures of earlier saves are logged here, and not raised by the next save.
        ``ModelCheckpoint`` and loggers wait for finished files until the plugin is torn down.
        """
        if self._plugin is not None:
            self._plugin._wait()
            self._plugin._log_failures()
        self._log(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self._log(trainer)
        report, self._to_show = self._to_show, None
        if report is None or not self._progress_bar:
            return
        shown = {"stall_s": report.stall_seconds}
        if self._details:
            shown |= {"save_s": report.seconds, "save_MiB/s": report.bytes_per_second / MIB}
        pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)

    def __getstate__(self) -> dict[str, Any]:
        run = dict.fromkeys(("_loggers", "_trainer", "_plugin", "_sharing"))
        return {**self.__dict__, "_undo": ExitStack(), **run}

    def _on_interrupted_run(self) -> None:
        """An exception has ended a run, and no callback can save any more. That exception is the one to be seen."""
        try:
            if self._trainer.state.fn == "fit":
                self._say_what_was_saved(self._trainer)
        except Exception as error:
            _logger.error("what the checkpoints have cost is not known: %s", error, exc_info=error)
        self._forget_run()

    def _forget_run(self) -> None:
        """Drop the state of the run before."""
        self._undo.close()
        self._loggers = self._trainer = self._sharing = None
        self._to_show, self._saved = None, SavedInRun()
        self._to_log.clear()

    def _say_what_was_saved(self, trainer: Trainer) -> None:
        saved, self._saved = self._saved, SavedInRun()
        if not trainer.is_global_zero:
            return
        waited = 0.0 if self._plugin is None else self._plugin._waited_seconds
        for line in saved.lines(waited, more=self._says_more):
            say(trainer, line)

    def _on_save(self, report: fastensor.SaveReport, step: int | None) -> None:
        """Note a save that is finished, and the global step that it is of, if it is the Trainer's."""
        self._to_show = report
        self._saved.add(report)
        self._to_log.append((step, report))
        if threading.get_ident() == self._thread:
            self._log(self._trainer)

    def _on_load(self, report: fastensor.LoadReport) -> None:
        if self._explain and self._trainer.is_global_zero:
            _explain(self._trainer, "loaded", report)

    def _log(self, trainer: Trainer) -> None:
        while self._to_log:
            step, report = self._to_log.popleft()
            metrics = {
                "checkpoint/stall_seconds": report.stall_seconds,
                "checkpoint/save_seconds": report.seconds,
                "checkpoint/save_bytes": float(report.nbytes),
                "checkpoint/shared_bytes": float(report.shared_nbytes),
                "checkpoint/save_bytes_per_second": report.bytes_per_second,
            }
            for logger in trainer.loggers if self._logs else ():
                logger.log_metrics(metrics, step=trainer.global_step if step is None else step)
            if self._explain:
                _explain(trainer, "saved", report)
        if self._loggers is not None:
            self._loggers.call_those_whose_files_are_finished()


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


def _explain(trainer: Trainer, done: str, report: fastensor.SaveReport | fastensor.LoadReport) -> None:
    log = logging.getLogger(package_of(trainer))
    log.info("%s was %s by %s: %s", report.path, done, report.backend, report.reason)


def _save_and_sync(sharing: Sharing, save: Callable[..., None], *arguments: Any, **options: Any) -> None:
    save(*arguments, **options)
    sharing.sync()


def find_plugin(trainer: Trainer) -> FastensorCheckpointIO | None:
    """The Trainer's plugin, also from inside wrappers such as AsyncCheckpointIO; None if it has another one."""
    plugin: object = trainer.strategy.checkpoint_io
    while isinstance(plugin, CHECKPOINT_IO_CLASSES):
        if isinstance(plugin, FastensorCheckpointIO):
            return plugin
        plugin = getattr(plugin, "checkpoint_io", None)
    return None


def see_finished_files(plugin: FastensorCheckpointIO, callbacks: Iterable[Any], undo: ExitStack) -> None:
    """Let ``ModelCheckpoint``s link to finished files only, and know of those that are to come or to go, until ``undo``
    is closed. Lightning looks at its files itself, without asking the plugin that saves them."""
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
