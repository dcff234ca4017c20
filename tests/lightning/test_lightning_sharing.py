"""Trainers of two processes, whose ranks choose backends by what rank 0 has learned."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_models import act_as_rank, fit, loader, make_module, make_trainer
from programs import free_port, run_ranks

import fastensor
from fastensor.select import share
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO, data_parallel

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]

BRANDS = ["lightning.pytorch", "pytorch_lightning"]


def start(rank: int, program: Callable[[Any, int, Path], Any], brand: str, port: int, folder: Path) -> None:
    act_as_rank(rank, port)
    pl = importlib.import_module(brand)
    log = logging.FileHandler(folder / f"{rank}.log")
    logging.getLogger(brand).addHandler(log)
    (folder / f"{rank}.json").write_text(json.dumps(program(pl, rank, folder)))
    log.close()
    torch.distributed.destroy_process_group()  # gloo aborts now and then if it is left to the end of the process


def run(program: Callable[[Any, int, Path], Any], brand: str, folder: Path) -> list[Any]:
    """What each of two ranks returns."""
    pytest.importorskip(brand)
    run_ranks(start, 2, program, brand, free_port(), folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def fit_and_validate(pl: Any, rank: int, folder: Path) -> Any:
    """Saves at each of the first steps of one long epoch."""
    selector = fastensor.Selector(paper=True)
    known: list[str] = []

    class Last(pl.callbacks.Checkpoint):  # type: ignore[misc]  # comes after what saves
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            known.append(selector.dictionary.to_json())

    saver = pl.callbacks.ModelCheckpoint(
        folder / "c", every_n_train_steps=1, save_top_k=-1, save_weights_only=True, filename="{step}"
    )
    callbacks = [CheckpointMonitor(explain=True), saver, Last()]
    plugin = FastensorCheckpointIO(backend=selector)
    trainer = make_trainer(pl, folder, plugin, devices=2, strategy="ddp", max_steps=2, callbacks=callbacks)
    module = make_module(pl)
    trainer.fit(module, loader(2))
    explored = selector.statistics().explored
    trainer.validate(module, loader(), ckpt_path=folder / "c" / "step=2.ckpt", verbose=False)
    assert selector.explore, "it is the user's again"
    assert "save_checkpoint" not in vars(trainer)
    return [known, explored, selector.dictionary.to_json()]


@pytest.mark.parametrize("brand", BRANDS)
def test_ranks_choose_by_what_rank_0_has_learned(brand: str, tmp_path: Path) -> None:
    """Rank 0 saves, and so learns; all of them load with what it knows, also in the middle of an epoch."""
    leader, other = run(fit_and_validate, brand, tmp_path)
    assert leader[0] == other[0]
    assert ["write cpu durable" in one for one in leader[0]] == [True, True]
    assert leader[0][0] != leader[0][1]
    assert leader[1] == 2
    assert other[1] == 0
    assert leader[2] == other[2]
    assert "read cpu" in leader[2]
    log = (tmp_path / "0.log").read_text()
    assert f"{tmp_path}/c/step=1.ckpt was saved by numpy: to measure it once for " in log
    assert f"{tmp_path}/c/step=2.ckpt was loaded by " in log
    assert "loaded by" not in (tmp_path / "1.log").read_text()


@pytest.mark.parametrize("brand", BRANDS)
@pytest.mark.parametrize("given", [True, False])
def test_sharing_begins_before_loads_and_is_for_the_folder_of_the_checkpoints(
    brand: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``dirpath`` that was not given is inside of the logger's folder."""
    pl = pytest.importorskip(brand)
    events: list[Any] = []

    class Plugin(FastensorCheckpointIO):
        def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            events.append("loads")
            return super().load_checkpoint(*arguments, **options)

    monkeypatch.setattr(share, "share_choice", lambda backend, folder, device: events.append(folder))
    monkeypatch.setattr(data_parallel, "is_data_parallel", lambda strategy: True)
    path = fit(pl, tmp_path).checkpoint_callback.best_model_path
    logger = importlib.import_module(f"{brand}.loggers").CSVLogger(tmp_path / "logs", version=7)
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "c" if given else None)
    fit(pl, tmp_path, Plugin(), path, max_epochs=3, callbacks=[CheckpointMonitor(), saver], logger=logger)
    assert events == [str(tmp_path / ("c" if given else "logs")), "loads"]


@pytest.mark.parametrize("brand", BRANDS)
@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy", "FSDPStrategy", "SingleDeviceStrategy"])
def test_other_strategies_share_nothing(brand: str, name: str) -> None:
    """Their ranks may hold parts, even if they are made of DDP."""
    strategy = getattr(pytest.importorskip(f"{brand}.strategies"), name)
    trainer = SimpleNamespace(strategy=object.__new__(strategy))
    assert data_parallel.share_choice(FastensorCheckpointIO(), trainer) is None


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of them, for who asks."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)


def of_a_trainer() -> dict[str, Any]:
    return {"pytorch-lightning_version": "2.6", "global_step": 1}


@pytest.mark.usefixtures("two_ranks")
def test_without_a_monitor_ranks_learn_by_themselves_and_that_is_said_once(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO()
    with pytest.warns(UserWarning, match=r"callbacks=\[fastensor_lightning.CheckpointMonitor"):
        plugin.save_checkpoint(of_a_trainer(), tmp_path / "x")
    with warnings.catch_warnings(action="error"):
        plugin.save_checkpoint(of_a_trainer(), tmp_path / "x")


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.filterwarnings("error")
def test_where_nothing_would_be_shared_nothing_is_said(tmp_path: Path) -> None:
    FastensorCheckpointIO(backend="numpy").save_checkpoint(of_a_trainer(), tmp_path / "x")
    FastensorCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "x")
    plugin = FastensorCheckpointIO()
    monitor = CheckpointMonitor()
    plugin._begin_run(monitor)
    plugin._end_run(monitor)
    plugin.save_checkpoint(of_a_trainer(), tmp_path / "x")  # the run is over


@pytest.mark.filterwarnings("error")
def test_a_single_process_shares_with_no_other(tmp_path: Path) -> None:
    FastensorCheckpointIO().save_checkpoint(of_a_trainer(), tmp_path / "x")
