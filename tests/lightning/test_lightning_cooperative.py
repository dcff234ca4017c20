"""Trainers of two processes, whose ranks save one file together."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disks import leftovers
from lightning_models import act_as_rank, loader, make_trainer, without_entry_points
from programs import free_port, run_ranks
from states import assert_equal
from torch import Tensor, nn

import fastensor
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO, data_parallel
from fastensor_lightning.checkpoint_monitor import AutomaticMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]

BRANDS = ["lightning.pytorch", "pytorch_lightning"]
WIDTH = 160_000
"""Makes checkpoints of about 10 MB, of which each rank writes a part."""


def start(rank: int, program: Callable[[Any, int, Path], Any], brand: str, port: int, folder: Path) -> None:
    act_as_rank(rank, port)
    torch.set_num_threads(1)
    program(importlib.import_module(brand), rank, folder)
    torch.distributed.destroy_process_group()


def run(program: Callable[[Any, int, Path], Any], brand: str, folder: Path) -> None:
    pytest.importorskip(brand)
    run_ranks(start, 2, program, brand, free_port(), folder)


def make_model(pl: Any) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc]
        """Its buffers, and what it hands its callbacks, are other ones on each rank."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.layers(batch[0] + self.global_rank).square().mean()
            self.log("loss", loss)
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rank"] = self.global_rank

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Model()


def fit_and_resume(pl: Any, rank: int, folder: Path) -> None:
    plugin = FastensorCheckpointIO(cooperative={"timeout": 30.0})
    saver = pl.callbacks.ModelCheckpoint(
        folder / "c", monitor="loss", every_n_train_steps=1, save_top_k=2, filename="{step}", save_last="link"
    )
    timer = pl.callbacks.Timer()
    callbacks = [CheckpointMonitor(), saver, timer]
    trainer = make_trainer(pl, folder, plugin, devices=2, strategy="ddp", max_steps=3, callbacks=callbacks)
    torch.manual_seed(5)
    model = make_model(pl)
    trainer.fit(model, loader(2))
    assert plugin.last_save is not None
    assert "2 ranks have written a part each" in plugin.last_save.reason
    assert "save_checkpoint" not in vars(trainer.strategy)
    assert not leftovers(folder / "c")
    means = [torch.empty(WIDTH) for _ in range(2)]
    torch.distributed.all_gather(means, model.layers[1].running_mean)
    assert not torch.equal(*means)
    found = torch.load(folder / "c" / "last.ckpt", weights_only=False)
    fastensor.verify(folder / "c" / "last.ckpt")
    assert found["rank"] == 0
    weights = {name: value.detach() for name, value in model.state_dict().items() if "running" not in name}
    for name, value in weights.items():
        assert torch.equal(found["state_dict"][name], value)
    assert torch.equal(found["state_dict"]["layers.1.running_mean"], means[0])
    assert_equal(found["optimizer_states"][0]["state"], trainer.optimizers[0].state_dict()["state"])
    _save_alone(trainer, plugin, folder)

    resumed = make_trainer(pl, folder, plugin, devices=2, strategy="ddp", max_steps=4, callbacks=[CheckpointMonitor()])
    resumed.fit(make_model(pl), loader(2), ckpt_path=folder / "c" / "last.ckpt")
    assert resumed.global_step == 4
    assert plugin.last_load.verified


def _save_alone(trainer: Any, plugin: FastensorCheckpointIO, folder: Path) -> None:
    """Outside of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_checkpoint(folder / "final.ckpt")
    fastensor.verify(folder / "final.ckpt")


@pytest.mark.parametrize("brand", BRANDS)
def test_ranks_save_together(brand: str, tmp_path: Path) -> None:
    run(fit_and_resume, brand, tmp_path)


class Slots(dict):  # type: ignore[type-arg]
    """What an optimizer of the user keeps for a weight."""


def drift_of_weights(model: Any, rank: int) -> str:
    """A rank's weights have changed outside of the optimizer."""
    with torch.no_grad():
        model.layers[0].weight += rank
    return "state_dict.layers.0.weight"


def drift_of_the_optimizer(model: Any, rank: int) -> str:
    state, weight = model.optimizers().state, model.layers[0].weight
    state[weight] = Slots(momentum_buffer=state[weight]["momentum_buffer"] + rank)
    return "optimizer_states.0.state.0"


def part_ways(drift: Callable[[Any, int], str], pl: Any, rank: int, folder: Path) -> None:
    """The monitor is the one that a Trainer gets by itself."""
    plugin = FastensorCheckpointIO(cooperative=True)
    trainer = make_trainer(
        pl, folder, plugin, devices=2, strategy="ddp", max_steps=1, callbacks=[AutomaticMonitor()],
        enable_checkpointing=False,
    )  # fmt: skip
    model = make_model(pl)

    class Drift(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            name = drift(model, rank)
            with pytest.raises(fastensor.ReplicaMismatchError, match=f"rank 1 .*'{name}'"):
                trainer.save_checkpoint(folder / "x.ckpt")
            assert not (folder / "x.ckpt").exists()

    trainer.callbacks.append(Drift())
    trainer.fit(model, loader(2))


@pytest.mark.parametrize("drift", [drift_of_weights, drift_of_the_optimizer])
def test_ranks_that_have_parted(tmp_path: Path, drift: Callable[[Any, int], str]) -> None:
    run(partial(part_ways, drift), BRANDS[0], tmp_path)


def leave_to_rank_0(pl: Any, rank: int, folder: Path) -> None:
    plugin = FastensorCheckpointIO(cooperative=True)
    with without_entry_points():
        trainer = make_trainer(pl, folder, plugin, devices=2, strategy="ddp", max_steps=1)
    if rank == 0:
        with pytest.warns(UserWarning, match=r"rank 0 saves alone.*CheckpointMonitor"):
            trainer.fit(make_model(pl), loader(2))
    else:
        trainer.fit(make_model(pl), loader(2))
    assert (plugin.last_save is not None) == (rank == 0)


def test_without_a_monitor_rank_0_saves_alone(tmp_path: Path) -> None:
    run(leave_to_rank_0, BRANDS[0], tmp_path)


def consolidate(pl: Any, rank: int, folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plugin = FastensorCheckpointIO(cooperative=True)
    callbacks = [CheckpointMonitor()]
    trainer = make_trainer(pl, folder, plugin, devices=2, strategy="ddp", max_steps=1, callbacks=callbacks)
    model = make_model(pl)
    model.configure_optimizers = lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.warns(UserWarning, match="ZeroRedundancyOptimizer collects its state"):
        trainer.fit(model, loader(2))
    assert (plugin.last_save is not None) == (rank == 0)


def test_sharded_optimizers_are_left_to_rank_0(tmp_path: Path) -> None:
    run(consolidate, BRANDS[0], tmp_path)


def test_a_single_process(tmp_path: Path) -> None:
    pl = pytest.importorskip(BRANDS[0])
    plugin = FastensorCheckpointIO(cooperative=True)
    trainer = make_trainer(pl, tmp_path, plugin, max_steps=1, callbacks=[CheckpointMonitor()])
    trainer.fit(make_model(pl), loader(2))
    assert plugin.last_save is not None


@pytest.mark.parametrize("brand", BRANDS)
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_sharded_strategies_are_refused(brand: str, name: str) -> None:
    strategy = getattr(pytest.importorskip(f"{brand}.strategies"), name)
    trainer = SimpleNamespace(strategy=object.__new__(strategy), world_size=2)
    with pytest.raises(TypeError, match=rf"cooperative=True\) is for DDP.* found {name}"):
        data_parallel.save_together(FastensorCheckpointIO(cooperative=True), trainer)


@pytest.mark.parametrize("brand", BRANDS)
def test_wrappers_are_refused(brand: str) -> None:
    """All ranks would save past them."""
    wrapper = pytest.importorskip(f"{brand}.plugins").AsyncCheckpointIO(FastensorCheckpointIO(cooperative=True))
    strategy = pytest.importorskip(f"{brand}.strategies").DDPStrategy(checkpoint_io=wrapper)
    trainer = SimpleNamespace(strategy=strategy, world_size=2)
    with pytest.raises(TypeError, match=r"cooperative=True\) is inside of AsyncCheckpointIO, .* leave cooperative out"):
        data_parallel.save_together(wrapper.checkpoint_io, trainer)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="cooperative and asynchronous contradict"):
        FastensorCheckpointIO(cooperative=True, asynchronous=True)
    with pytest.raises(TypeError, match=r"cooperative is a dict with keys among \['timeout', 'check_replicas'\]"):
        FastensorCheckpointIO(cooperative={"timeouts": 3})  # type: ignore[typeddict-unknown-key]
