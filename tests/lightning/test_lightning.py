"""The plugin and the callback in Trainers and Fabric, of both packages."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_models import fit, loader, make_module, make_trainer
from programs import free_port
from torch import nn

import fastensor
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.fixture
def log(pl: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The Trainer's."""
    monkeypatch.setattr(logging.getLogger(pl.__name__), "propagate", True)
    return caplog


def test_saves_what_stock_lightning_and_torch_load(pl: Any, tmp_path: Path) -> None:
    trainer = fit(pl, tmp_path, FastensorCheckpointIO())
    path = trainer.checkpoint_callback.best_model_path
    plain = torch.load(path, weights_only=False)
    assert torch.equal(plain["state_dict"]["layer.weight"], trainer.model.layer.weight)
    assert plain["state_dict"]["layer.weight"].data_ptr() == plain["state_dict"]["tied.weight"].data_ptr()
    module = type(make_module(pl)).load_from_checkpoint(path, weights_only=False)
    assert torch.equal(module.layer.weight, trainer.model.layer.weight)
    assert fit(pl, tmp_path, None, ckpt_path=path, max_epochs=3).current_epoch == 3


def test_loads_what_stock_lightning_saved(pl: Any, tmp_path: Path) -> None:
    path = fit(pl, tmp_path).checkpoint_callback.best_model_path
    trainer = fit(pl, tmp_path, FastensorCheckpointIO(), ckpt_path=path, max_epochs=3)
    assert trainer.current_epoch == 3


def test_resuming_gives_the_same_weights_as_not_stopping(pl: Any, tmp_path: Path) -> None:
    def run(plugin: Any, folder: Path) -> torch.Tensor:
        pl.seed_everything(1, verbose=False)
        module, data = make_module(pl), loader()
        make_trainer(pl, folder, plugin, max_epochs=2).fit(module, data)
        first = next(folder.rglob("*.ckpt"))
        resumed = make_module(pl)
        make_trainer(pl, folder, plugin, max_epochs=4).fit(resumed, data, ckpt_path=first)
        weight: torch.Tensor = resumed.layer.weight.detach()
        return weight

    assert torch.equal(run(None, tmp_path / "stock"), run(FastensorCheckpointIO(), tmp_path / "ours"))


def test_top_k_last_link_and_test_with_the_best(pl: Any, tmp_path: Path) -> None:
    callback = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(
        dirpath=tmp_path / "made" / "by" / "us", monitor="score", save_top_k=2, save_last="link", every_n_train_steps=2
    )
    trainer = fit(pl, tmp_path, FastensorCheckpointIO(), callbacks=[callback], max_epochs=4, val_check_interval=1)
    files = sorted(p.name for p in (tmp_path / "made" / "by" / "us").iterdir())
    assert len([name for name in files if not name.startswith("last")]) == 2
    trainer.test(dataloaders=loader(), ckpt_path="best", weights_only=False)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_path_leads_where_it_does_without_the_plugin(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """``fsspec`` takes ``~`` for the user's home, and Lightning what ``fsspec`` takes."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    names = ["~/runs/x.ckpt", "file://~/runs/y.ckpt", Path("~/runs/z.ckpt"), "runs/x.ckpt"]
    found = []
    for folder, plugin in (("stock", None), ("ours", FastensorCheckpointIO(asynchronous=asynchronous))):
        trainer = fit(pl, tmp_path / folder, plugin, callbacks=[], enable_checkpointing=False)
        for name in names:
            trainer.save_checkpoint(name)
            other = FastensorCheckpointIO() if plugin is None else None
            assert fit(pl, tmp_path / folder, other, ckpt_path=str(name), max_epochs=3).current_epoch == 3
        found.append(sorted(str(path) for path in tmp_path.glob("[hw]*/**/*.ckpt")))
        for name in names:
            trainer.strategy.remove_checkpoint(name)
        assert not list(tmp_path.glob("[hw]*/**/*.ckpt"))
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_saving_last_never_replaces_the_best_through_a_link(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO()
    plugin.save_checkpoint({"a": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    plugin.save_checkpoint({"a": 2}, tmp_path / "last.ckpt")
    assert plugin.load_checkpoint(tmp_path / "best.ckpt") == {"a": 1}
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"a": 2}


def test_learning_rate_finder_saves_restores_and_removes(pl: Any, tmp_path: Path) -> None:
    tuner = importlib.import_module(f"{pl.__name__}.tuner").Tuner
    trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO())
    module = make_module(pl)
    module.lr = 1e-3
    tuner(trainer).lr_find(module, loader(), num_training=5)
    assert not list(tmp_path.rglob(".lr_find*"))


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    plugin = FastensorCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    fabric.save(tmp_path / "deep" / "x.ckpt", {"model": model, "optimizer": optimizer, "step": 7})
    assert plugin.last_save is not None
    state = {"model": nn.Linear(3, 3), "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "deep" / "x.ckpt", state)
    assert state["step"] == 7
    assert torch.equal(state["model"].weight, model.weight)  # type: ignore[union-attr]
    assert torch.load(tmp_path / "deep" / "x.ckpt")["step"] == 7


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.torture)])
def test_two_processes(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves, both load. The plugin is pickled."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(start_method=start)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[FastensorCheckpointIO()])
    fabric.launch(_save_and_load_on_every_rank, str(tmp_path / "x.ckpt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0", "rank1", "x.ckpt"]


def _save_and_load_on_every_rank(fabric: Any, path: str) -> None:
    fabric.save(path, {"w": torch.arange(5)})
    loaded = fabric.load(path)
    assert torch.equal(loaded["w"], torch.arange(5))
    Path(path).with_name(f"rank{fabric.global_rank}").touch()


def test_monitor_logs_and_shows_every_save(pl: Any, tmp_path: Path) -> None:
    logger = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger(tmp_path)
    shown: dict[str, Any] = {}

    class Recorder(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            shown.update(trainer.progress_bar_metrics)

    monitor = CheckpointMonitor(details=True)
    trainer = fit(pl, tmp_path, FastensorCheckpointIO(), logger=logger, callbacks=[monitor, Recorder()], max_epochs=3)
    metrics = (Path(logger.log_dir) / "metrics.csv").read_text()
    for name in ("save_seconds", "save_bytes", "shared_bytes", "save_bytes_per_second"):
        assert f"checkpoint/{name}" in metrics
    assert str(float(os.path.getsize(trainer.checkpoint_callback.best_model_path))) in metrics
    assert shown["save_s"] > 0
    assert shown["save_MiB/s"] > 0
    assert not trainer.strategy.checkpoint_io._monitors
    pickle.loads(pickle.dumps(monitor))


def test_monitor_explains_saves_and_loads(pl: Any, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    plugin = FastensorCheckpointIO()
    path = fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(explain=True)]).checkpoint_callback.best_model_path
    assert f"{path} was saved by numpy: by size" in log.text
    assert "was loaded by" not in log.text
    fit(pl, tmp_path, plugin, ckpt_path=path, max_epochs=3, callbacks=[CheckpointMonitor(explain=True)])
    assert log.text.count(f"{path} was loaded by numpy: ") == 1
    assert plugin.last_load is not None
    assert (plugin.last_load.path, plugin.last_load.backend) == (path, "numpy")
    log.clear()
    fit(pl, tmp_path, plugin, ckpt_path=path, max_epochs=3, callbacks=[CheckpointMonitor()])
    assert "numpy" not in log.text


def test_monitor_with_another_plugin_says_so(pl: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="FastensorCheckpointIO"):
        fit(pl, tmp_path, callbacks=[CheckpointMonitor()])


def test_monitor_finds_the_plugin_inside_a_wrapper(pl: Any, tmp_path: Path) -> None:
    wrapper = importlib.import_module(f"{pl.__name__}.plugins").AsyncCheckpointIO(FastensorCheckpointIO())
    logger = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger(tmp_path)
    trainer = fit(pl, tmp_path, wrapper, callbacks=[CheckpointMonitor()], logger=logger, max_epochs=3)
    metrics = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "checkpoint/save_bytes" in metrics
    assert str(float(os.path.getsize(trainer.checkpoint_callback.best_model_path))) in metrics


def test_monitor_logs_only_in_the_thread_that_trains(pl: Any, tmp_path: Path) -> None:
    threads = []
    base = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger

    class Watched(base):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "checkpoint/save_bytes" in metrics:
                threads.append(threading.get_ident())
            super().log_metrics(metrics, step)

    class InThread(FastensorCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            thread = threading.Thread(target=super().save_checkpoint, args=(checkpoint, path, storage_options))
            thread.start()
            thread.join()

    fit(pl, tmp_path, InThread(), callbacks=[CheckpointMonitor()], logger=Watched(tmp_path), max_epochs=3)
    assert threads == [threading.get_ident()] * 3


def test_storage_options(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(backend="direct")
    plugin.save_checkpoint({"a": 1}, tmp_path / "x", storage_options={"durable": False, "backend": "numpy"})
    assert plugin.last_save is not None
    assert (plugin.last_save.durable, plugin.last_save.backend) == (False, "numpy")
    for wrong in ({"compression": 1}, "fast", 3):
        with pytest.raises(TypeError, match=r"backend.*durable"):
            plugin.save_checkpoint({"a": 1}, tmp_path / "x", storage_options=wrong)


def test_map_location_and_weights_only_options(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(map_location="meta")
    plugin.save_checkpoint({"a": torch.ones(2), "p": Path("x")}, tmp_path / "x")
    assert plugin.load_checkpoint(tmp_path / "x", weights_only=False)["a"].device.type == "meta"
    assert plugin.load_checkpoint(tmp_path / "x", "cpu", weights_only=False)["a"].device.type == "cpu"
    with pytest.raises(fastensor.UnsafeCheckpointError, match="Path"):
        plugin.load_checkpoint(tmp_path / "x")
    stock = importlib.import_module("lightning.fabric.plugins.io.torch_io").TorchCheckpointIO()
    for io in (plugin, stock):
        with pytest.raises(FileNotFoundError, match=f"^Checkpoint file not found: {tmp_path / 'missing'}$"):
            io.load_checkpoint(tmp_path / "missing")


def test_remove(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO()
    (tmp_path / "sharded" / "inner").mkdir(parents=True)
    (tmp_path / "sharded" / "inner" / "x").write_text("x")
    plugin.remove_checkpoint(tmp_path / "sharded")
    plugin.save_checkpoint({"a": 1}, tmp_path / "x")
    (tmp_path / "last").symlink_to("x")
    plugin.remove_checkpoint(tmp_path / "last")
    assert os.listdir(tmp_path) == ["x"]
    plugin.remove_checkpoint(tmp_path / "x")
    plugin.remove_checkpoint(tmp_path / "x")
    plugin.teardown()
    assert not os.listdir(tmp_path)


def test_file_urls_and_remote_ones(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO()
    plugin.save_checkpoint({"a": 1}, f"file://{tmp_path}/x")
    assert plugin.load_checkpoint(f"file://{tmp_path}/x") == {"a": 1}
    assert (tmp_path / "x").exists()
    plugin.save_checkpoint({"a": 1}, f"file://{tmp_path}/run#3?x")
    assert (tmp_path / "run#3?x").exists()
    plugin.save_checkpoint({"a": 2}, "memory://bucket/x")
    assert plugin.load_checkpoint("memory://bucket/x", weights_only=False) == {"a": 2}
    plugin.remove_checkpoint("memory://bucket/x")


def test_picklable_without_monitors() -> None:
    plugin = FastensorCheckpointIO(backend="numpy", verify=False)
    monitor = CheckpointMonitor()
    plugin._begin_run(monitor)
    copy = pickle.loads(pickle.dumps(plugin))
    assert (copy.backend, copy.verify, copy._monitors) == ("numpy", False, [])
    plugin._end_run(monitor)
    assert not plugin._monitors
