"""The callback says how long training has waited for its data, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_models import make_module, make_trainer

from fastensor_lightning import DataWaitMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]


class Clock:
    """A clock that only stands still or jumps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("fastensor_lightning.data_wait_monitor.time", self)

    def perf_counter(self) -> float:
        return self.now


class SlowLoader:
    """Each batch takes a second, the last one ten."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for number in range(4):
            self.clock.now += 10 if number == 3 else 1
            yield [torch.randn(2, 4)]


class SizedSlowLoader(SlowLoader):
    def __len__(self) -> int:
        return 4


class BrokenLoader(SizedSlowLoader):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        yield [torch.randn(2, 4)]
        raise OSError("no more data")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def monitored(pl: Any, folder: Path, clock: Clock, **options: Any) -> tuple[Any, Any, DataWaitMonitor, list[Any]]:
    """A Trainer, a model whose steps take four seconds of computing, and what the logger gets."""
    base = import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    logged: list[dict[str, float]] = []

    class Logger(base):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
            logged.append({name: value for name, value in metrics.items() if name.startswith("data/")})

    class Model(type(make_module(pl))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 4
            return super().training_step(batch, batch_idx)

    monitor = DataWaitMonitor()
    given = {"logger": Logger(), "callbacks": [monitor], "enable_checkpointing": False, **options}
    return make_trainer(pl, folder, max_epochs=1, log_every_n_steps=1, **given), Model(), monitor, logged


def test_waits_are_logged(pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer, model, monitor, logged = monitored(pl, tmp_path, clock, profiler="simple")
    trainer.fit(model, SizedSlowLoader(clock))
    assert [metrics["data/wait_seconds"] for metrics in logged if "data/wait_seconds" in metrics] == [1, 1, 1, 10]
    (epoch,) = (metrics for metrics in logged if "data/wait_share" in metrics)
    assert epoch["data/wait_share"] == pytest.approx(13 / (13 + 4 * 4))
    assert epoch["data/wait_median_seconds"] == pytest.approx(1)
    assert epoch["data/wait_p99_seconds"] == pytest.approx(10)
    assert monitor.waits.seconds == 13
    assert not {"start", "stop"} & {*vars(trainer.profiler)}


def test_loaders_without_a_length_are_watched(pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes their batches one step ahead, and does not tell of the first one."""
    clock = Clock(monkeypatch)
    trainer, model, monitor, _ = monitored(pl, tmp_path, clock)
    trainer.fit(model, SlowLoader(clock))
    assert monitor.waits.seconds == 12
    assert monitor.waits.count == 4


def test_a_lightning_that_says_nothing_is_noticed(pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("fastensor_lightning.data_wait_monitor._FETCH", "another name")
    trainer, model, _, logged = monitored(pl, tmp_path, clock)
    with pytest.warns(UserWarning, match="does not say when it takes batches"):
        trainer.fit(model, SizedSlowLoader(clock))
    assert not any("data/wait_share" in metrics for metrics in logged)


def test_after_an_error_nothing_is_watched_any_more(pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer, model, _, _ = monitored(pl, tmp_path, clock)
    with pytest.raises(OSError, match="no more data"):
        trainer.fit(model, BrokenLoader(clock))
    assert not {"start", "stop"} & {*vars(trainer.profiler)}
