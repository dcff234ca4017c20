"""A callback that offloads activations to an SSD in every training step of a Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import check_flags, checks_keywords_with
from fastensor.files.replacing import replace_attribute
from fastensor.files.shown import given, shown
from fastensor.files.words import human_size
from fastensor.offload import ActivationOffload, OffloadConfig, OffloadEstimate, OffloadStatistics
from fastensor.offload.config import OffloadOptions, config_of, dry_run_config, with_default_folder
from fastensor_lightning.dry_run import save_and_log_nothing, undo_draws, undo_progress, undo_training
from fastensor_lightning.frameworks import load_classes, of_rank, say

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    Callback = type("Callback", load_classes("Callback", "lightning.pytorch", "pytorch_lightning"), {})

_DRY_RUN_STEPS = 3
_logger = logging.getLogger(__name__)


class SSDActivationOffload(Callback):
    """Larger batches and deeper models: training steps keep their saved activations on an SSD until the backward pass.

    Gradients are the same, to the last bit; see :class:`fastensor.offload.ActivationOffload`. Training steps are
    covered wherever Lightning runs them: automatic and manual optimization, accumulation, any precision, DDP, FSDP2
    (``ModelParallelStrategy``); validation is left alone. Parameters and buffers of the module stay where they are.

    By default, only as much goes as has to, for the rest to fit into memory; a run that fits is not slowed down.

    At the end of ``fit``, Lightning's log says what rank 0 has gained: how much memory its activations took, and would
    have taken; the time that it cost in each step; and what was written; or that all has fitted into memory. Each rank
    warns if nothing was offloaded although not all fits. :attr:`statistics` has more; ``print`` shows it.

    Args:
        directory: the folder on an SSD; or an :class:`OffloadConfig`, which has all options. Without any, files are in
            the Trainer's ``default_root_dir``. They have no names, and nothing of them is left when the process ends,
            however it ends. Each rank has files and budgets of its own.
        config: an :class:`OffloadConfig` instead of a folder and options.
        log: whether loggers get ``offload/written_bytes``, ``offload/read_bytes``, ``offload/stall_seconds`` and
            ``offload/prefetch_hit_rate`` of each training batch.
        dry_run: train for three batches only (more, if the Trainer's ``min_steps`` or ``min_epochs`` ask for them; or
            fewer, if there are no more), offloading everything to measure it, and print what stays in memory by
            the options, how much longer a step takes, and how long the drives last. :attr:`estimate` has the same.
            No checkpoint is saved and nothing is logged meanwhile. When ``fit`` returns, parameters and buffers of the
            module, its optimizers and schedulers, the Trainer's progress, and the random generators of Python, NumPy,
            torch and the loaders are what they were before.
        options: those of :class:`OffloadConfig`: ``min_bytes="1MiB"``, ``directories=("/nvme0", "/nvme1")``, and so on.

    Raises:
        TypeError: an argument is of the wrong kind, unknown, or given twice.
        ValueError: the value of an option is not possible.
        OffloadError: in ``fit``, no file can be made in a folder.
        UnsupportedContentError: in ``fit``, with ``FSDPStrategy``, which is FSDP version 1, and DeepSpeed's ZeRO stage
            3; and where a Trainer has several of these callbacks.

    >>> from lightning.pytorch import Trainer
    >>> offload = SSDActivationOffload("/var/tmp", min_bytes="1MiB")
    >>> trainer = Trainer(callbacks=[offload], logger=False, accelerator="cpu")
    """

    @checks_keywords_with(OffloadOptions.__annotations__)
    def __init__(
        self,
        directory: str | os.PathLike[str] | OffloadConfig | None = None,
        *,
        config: OffloadConfig | None = None,
        log: bool = False,
        dry_run: bool = False,
        **options: Unpack[OffloadOptions],
    ) -> None:
        super().__init__()
        check_flags(log=log, dry_run=dry_run)
        if isinstance(directory, OffloadConfig):
            if config is not None:
                raise TypeError("an OffloadConfig is given twice: as the first argument, and as config")
            directory, config = None, directory
        self.config = config_of(directory, config, options)
        self._is_dry_run = dry_run
        self.estimate: OffloadEstimate | None = None
        """Estimate of a dry run; None before that."""
        self._logs_each_batch = log
        self.statistics: OffloadStatistics | None = None
        """Statistics of the latest run; None before the first run."""
        self._offload: ActivationOffload | None = None
        self._undo = ExitStack()
        """Restores the Trainer's own ``train_step_context``, and after a dry run all that it has changed."""
        self._training = ExitStack()
        """Undoes what a dry run has trained."""
        self._checked = False

    @shown
    def __repr__(self) -> str:
        moved = "" if self.statistics is None else f", {human_size(self.statistics.written_bytes)} written"
        return f"({', '.join(given(self.config))}){moved}"

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        count = sum(isinstance(one, SSDActivationOffload) for one in trainer.callbacks)  # type: ignore[attr-defined]  # set later
        if stage == "fit" and count > 1:
            raise UnsupportedContentError(
                f"there are {count} SSDActivationOffload in this Trainer, of which the last would get all tensors. "
                "Leave one of them; its OffloadConfig takes several directories"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop()
        _refuse(trainer.strategy)
        config = with_default_folder(self.config, trainer.default_root_dir)
        self.estimate = None
        self._offload = offload = ActivationOffload(dry_run_config(config) if self._is_dry_run else config)
        if self._is_dry_run:
            undo_draws(trainer, self._undo)
            save_and_log_nothing(trainer, self._undo)
        offload.attach(pl_module)
        self.statistics = offload.statistics()
        self._checked = False
        original = trainer.precision_plugin.train_step_context

        @contextmanager
        def train_step_context() -> Iterator[None]:
            with offload.step(), original():
                yield

        self._undo.callback(replace_attribute(trainer.precision_plugin, "train_step_context", train_step_context))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._is_dry_run and self._offload is not None:
            undo_progress(trainer, self._undo)
            self._training = undo_training(trainer, pl_module, next(iter(self._offload.config.directories), None))
            self._undo.callback(self._training.close)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._offload is None:
            return
        before, self.statistics = self.statistics, self._offload.statistics()
        if not self._checked:
            self._checked = True
            self._check(trainer, self.statistics)
        if self._is_dry_run and self.statistics.steps >= _DRY_RUN_STEPS:
            self._print_estimate(trainer)
            trainer.should_stop = True
        if self._logs_each_batch and before is not None:
            metrics = self.statistics.metrics_since(before)
            pl_module.log_dict({f"offload/{name}": value for name, value in metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._is_dry_run:
            self._print_estimate(trainer)
            self._training.close()  # before Lightning moves the module to the CPU

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        offload = self._offload
        if offload is not None:
            offload.settle()  # what is still being written counts
        self._stop()
        if offload is None or self.statistics is None or self._is_dry_run:
            return
        if self.statistics.offloaded or self.statistics.recomputed or self.statistics.everything_fits:
            say(trainer, f"activation offload{of_rank(trainer)}: {self.statistics.in_words(self.config)}")
        else:
            _logger.warning("activation offload: %s", self.statistics.in_words(self.config))

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """The settings: threads and files begin anew in the process that unpickles the callback."""
        return {**self.__dict__, "_offload": None, "_undo": ExitStack(), "_training": ExitStack()}

    def _stop(self) -> None:
        """Restore the Trainer's context, and give files and threads back. Calling it again does nothing."""
        undo, self._undo = self._undo, ExitStack()
        offload, self._offload = self._offload, None
        with undo:
            if offload is not None:
                self.statistics = offload.statistics()
                offload.close()

    def _print_estimate(self, trainer: Trainer) -> None:
        """End the dry run. Calling it again does nothing.

        Raises:
            OffloadError: nothing was measured.
        """
        if self._offload is not None and self.estimate is None:
            self.estimate = self._offload.estimate(self.config)
            trainer.print(f"dry run of activation offload on rank {trainer.global_rank}:\n{self.estimate}")

    def _check(self, trainer: Trainer, found: OffloadStatistics) -> None:
        """After the first batch, warn if training steps do not run in the context, or nothing was offloaded."""
        if not found.steps:
            _logger.warning(
                "no activations are offloaded: %s does not run training steps in the precision plugin's "
                "train_step_context",
                type(trainer.strategy).__name__,
            )
        elif not (found.offloaded or found.recomputed or found.everything_fits):
            _logger.warning("activation offload, after the first batch: %s", found.in_words(self.config))


def _refuse(strategy: Any) -> None:
    """
    Raises:
        UnsupportedContentError: offloading is not safe with this strategy.
    """
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    reason = instead = ""
    if "FSDPStrategy" in kinds:
        reason, instead = "FSDP version 1", "ModelParallelStrategy with FSDP2 (fully_shard)"
    elif "DeepSpeedStrategy" in kinds and getattr(strategy, "zero_stage_3", False):
        reason, instead = "ZeRO stage 3", "DeepSpeed up to stage 2"
    if reason:
        raise UnsupportedContentError(
            f"SSDActivationOffload does not work with {type(strategy).__name__}: {reason} frees and refills the memory "
            f"of parameters that autograd has saved, and does not say which. Use {instead}, DDP, or activation "
            f"checkpointing"
        )
