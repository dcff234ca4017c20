"""A callback that shows how long training waits for its data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fastensor.files.arguments import checks_keywords
from fastensor.files.replacing import wrap_method
from fastensor.files.shown import shown
from fastensor.provision import ProvisionedLoader
from fastensor.provision.metrics import Waits, table
from fastensor_lightning.frameworks import load_classes

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    Callback = type("Callback", load_classes("Callback", "lightning.pytorch", "pytorch_lightning"), {})

_FETCH = "train_dataloader_next"
"""End of the name of the action by which Lightning tells its profiler that it takes a batch from the loader."""


@checks_keywords
class DataWaitMonitor(Callback):
    """Logs how long training stands still because the next batch has not come yet. Works with any loader.

    Loggers get ``data/wait_seconds`` at steps at which they are given anything: what the last batch was waited for; and
    for each epoch ``data/wait_share``, the part of the epoch's time that was spent waiting,
    ``data/wait_median_seconds`` and ``data/wait_p99_seconds``. All is of rank 0. Validation is left out, and so is the
    first batch of a loader without a length, of which Lightning does not tell.

    At the end of each epoch that comes from a :class:`~fastensor.provision.DataService`, rank 0 prints what its loader
    was given: batches, samples, how many of them the cache had, what was read, and the waits.

    Args:
        progress_bar: whether to show the last wait in the progress bar.
        table: whether to print the table.
    """

    def __init__(self, *, progress_bar: bool = True, table: bool = True) -> None:
        super().__init__()
        self._progress_bar = progress_bar
        self._table = table
        self.waits = Waits()
        """Waits of this process, in the epoch that is running, or was last."""
        self._began: float | None = None
        self._is_told = False
        """True if Lightning has said when it takes a batch."""
        self._epoch_began = 0.0
        self._waited = 0.0
        """Seconds since the last batch."""
        self._undo = ExitStack()

    @shown
    def __repr__(self) -> str:
        return f"(progress_bar={self._progress_bar}, table={self._table})"

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._stop()
        if stage == "fit":
            self._call_before(trainer.profiler, "start", self._on_fetch)  # type: ignore[attr-defined]
            self._call_before(trainer.profiler, "stop", self._on_fetched)  # type: ignore[attr-defined]

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.waits = Waits()
        self._epoch_began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.waits = self.waits.with_wait(self._waited)
        pl_module.log(
            "data/wait_seconds", self._waited, prog_bar=self._progress_bar, on_step=True, on_epoch=False,
            batch_size=1, rank_zero_only=True,
        )  # fmt: skip
        self._waited = 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._table and isinstance(loader := trainer.train_dataloader, ProvisionedLoader):
            rows = {f"epoch {trainer.current_epoch}, rank {trainer.global_rank}": loader.stats().epoch}
            pl_module.print(table(rows))
        if not self._is_told:
            warnings.warn(
                "this version of Lightning does not say when it takes batches: no waits are known", stacklevel=2
            )
            return
        shares = {
            "data/wait_share": self.waits.seconds / (time.perf_counter() - self._epoch_began),
            "data/wait_median_seconds": self.waits.quantile(0.5),
            "data/wait_p99_seconds": self.waits.quantile(0.99),
        }
        pl_module.log_dict(shares, on_step=False, on_epoch=True, batch_size=1, rank_zero_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_undo": ExitStack()}

    def _on_fetch(self) -> None:
        self._began = time.perf_counter()

    def _on_fetched(self) -> None:
        if self._began is not None:
            self._is_told = True
            self._waited += time.perf_counter() - self._began
            self._began = None

    def _call_before(self, profiler: Any, name: str, then: Callable[[], None]) -> None:
        def method(original: Callable[[str], None], action_name: str) -> None:
            if action_name.endswith(_FETCH):
                then()
            original(action_name)

        self._undo.callback(wrap_method(profiler, name, method))

    def _stop(self) -> None:
        self._began = None
        self._undo.close()
