"""Frameworks train and save on machines of their own. Where a cable is cut, all raise, and a checkpoint is whole."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import at_call, load
from hosts.machines import PATIENCE_SECONDS, Machines, after, meet
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.fsdp import fully_shard

import fastensor
from fastensor.checkpoint import agreement
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")
SHORT_SECONDS = 1.0
LONGER_SECONDS = 3.0
WORLD = 2
Error = (CheckpointException, RuntimeError, fastensor.CheckpointWriteError)
"""What a save fails with: the first two in collectives of torch."""


def be_impatient(seconds: float = SHORT_SECONDS) -> None:
    """All groups of this process wait no longer, from now on."""
    agreement.PATIENCE = timedelta(seconds=seconds)
    for group in _world.pg_map:
        _set_pg_timeout(agreement.PATIENCE, group)


@contextmanager
def raising(rank: int, folder: Path) -> Iterator[None]:
    """The block raises on this rank, and soon. Other ranks have raised as well when it is left."""
    started = time.monotonic()
    with pytest.raises(Error):
        yield
    assert time.monotonic() - started < PATIENCE_SECONDS
    meet(folder, "raised", rank, WORLD)


def bytes_in(folder: Path) -> dict[str, bytes]:
    """All files that are there, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- torch.distributed.checkpoint, FSDP2


@pytest.mark.parametrize(
    ("phase", "lost"), [("before", 1), ("writing", 1), ("writing", 0), ("publishing", 1), ("publishing", 0)]
)
def test_dcp_and_fsdp2(machines: Machines, tmp_path: Path, phase: str, lost: int) -> None:
    for seconds in (SHORT_SECONDS, 4 * SHORT_SECONDS, 16 * SHORT_SECONDS):
        folder = tmp_path / f"{seconds}"
        folder.mkdir()
        machines.run(range(WORLD), _save_shards, machines, folder, phase, lost, seconds)
        if (folder / "is cut").exists():  # else a rank was too slow to come to this phase
            return
    raise AssertionError("the cable was not cut")


def _save_shards(rank: int, machines: Machines, folder: Path, phase: str, lost: int, seconds: float) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / "x"

    def step() -> tuple[dict[str, Any], dict[str, Any]]:
        """The state after another step, and the same with whole tensors."""
        torch.manual_seed(rank)
        model(torch.randn(6, 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = get_model_state_dict(model)
        return state, {name: value.full_tensor().clone() for name, value in state.items()}

    state, before = step()
    dcp.save(state, storage_writer=FastensorStorageWriter(path))
    state, now = step()
    meet(folder, "saved", rank, WORLD)
    be_impatient(seconds)

    def cut() -> None:
        machines.cut(lost)
        (folder / "is cut").touch()

    with cutting(phase, cut, rank, lost), raising(rank, folder):
        dcp.save(state, storage_writer=FastensorStorageWriter(path))
    found = load({name: torch.zeros(value.shape) for name, value in now.items()}, FastensorStorageReader(path))
    expected = now if phase == "publishing" and (folder / "is cut").exists() else before
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    os._exit(0)  # the groups are of no more use


@contextmanager
def cutting(phase: str, cut: Callable[[], None], rank: int, lost: int) -> Iterator[None]:
    """In the block, the cable of the rank ``lost`` is cut when the save comes to a phase."""
    with pytest.MonkeyPatch.context() as patches:
        if phase == "before" and rank == lost:
            cut()
        elif phase == "publishing" and rank == 0:
            patches.setattr(FastensorStorageWriter, "finish", after(cut, FastensorStorageWriter.finish))
        elif phase == "writing" and rank == lost:
            with at_call("fsync", cut, required=False):
                yield
            return
        yield


# --- Accelerate


@pytest.mark.parametrize(
    "mode", [pytest.param("synchronous", marks=pytest.mark.torture), "asynchronous", "cooperative"]
)
def test_accelerate(machines: Machines, tmp_path: Path, mode: str) -> None:
    machines.run(range(WORLD), _save_states, machines, tmp_path, mode)


def _save_states(rank: int, machines: Machines, folder: Path, mode: str) -> None:
    from accelerators import training

    import fastensor_accelerate
    from fastensor_accelerate import FastensorConfig
    from fastensor_accelerate.attached import saver_of

    config = FastensorConfig(
        asynchronous=mode == "asynchronous", cooperative=mode == "cooperative", cooperative_timeout=PATIENCE_SECONDS
    )
    fastensor_accelerate.enable(config)
    found = training(folder / "project", total_limit=1)
    for _ in range(2):
        found.train()
        found.accelerator.save_state()
        found.accelerator.load_state()
    states = folder / "project" / "checkpoints"
    before = bytes_in(states)
    assert {name.partition("/")[0] for name in before} == {"checkpoint_1"}
    found.train()
    fastensor_accelerate.disable()
    fastensor_accelerate.enable(config)
    meet(folder, "saved", rank, WORLD)
    be_impatient(LONGER_SECONDS)  # which holds for groups that are made now
    saver_of(found.accelerator)._processes.all()
    meet(folder, "agreed", rank, WORLD)
    if rank == 1:
        machines.cut(1)
    meet(folder, "cut", rank, WORLD)
    with raising(rank, folder):
        found.accelerator.save_state()
        found.accelerator.load_state()  # raises what an asynchronous one has failed with
    assert bytes_in(states) == before
    os._exit(0)


@pytest.mark.torture
def test_accelerate_by_torchrun(machines: Machines, tmp_path: Path) -> None:
    machines.run(range(WORLD), _launch, machines, tmp_path)
    for rank in range(WORLD):
        assert f'"rank": {rank}, "processes": {WORLD}' in (tmp_path / "state" / f"seen_{rank}.json").read_text()
    fastensor.verify(tmp_path / "state" / "model.safetensors")


def _launch(rank: int, machines: Machines, folder: Path) -> None:
    from torch.distributed.run import main

    script = Path(__file__).parents[1] / "accelerate" / "job.py"
    main([
        "--nnodes", str(WORLD), "--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr",
        machines.address(0), "--master-port", os.environ["MASTER_PORT"], "-m", "fastensor_accelerate", str(script),
        str(folder / "state"),
    ])  # fmt: skip


# --- Lightning


@pytest.mark.parametrize("kind", ["cooperative", "sharded"])
def test_lightning(machines: Machines, tmp_path: Path, kind: str) -> None:
    machines.run(range(WORLD), {"cooperative": _fit_together, "sharded": _fit_shards}[kind], machines, tmp_path)


def _fit_together(rank: int, machines: Machines, folder: Path) -> None:
    from lightning_models import loader, make_module, make_trainer, without_entry_points

    from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # the Trainer is to believe that a launcher has started this process
    pl = importlib.import_module("lightning.pytorch")
    plugin = FastensorCheckpointIO(cooperative={"timeout": PATIENCE_SECONDS})

    class Cut(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(folder / "files" / "x.ckpt")
            if trainer.global_step < 2:
                return
            assert "2 ranks have written a part each" in plugin.last_save.reason
            before = bytes_in(folder / "files")
            meet(folder, "saved", rank, WORLD)
            be_impatient()
            plugin._cooperation["timeout"] = SHORT_SECONDS
            if rank == 1:
                machines.cut(1)
            meet(folder, "cut", rank, WORLD)
            with raising(rank, folder):
                trainer.save_checkpoint(folder / "files" / "x.ckpt")
            assert bytes_in(folder / "files") == before
            os._exit(0)

    options: Any = {"devices": 1, "num_nodes": WORLD, "strategy": "ddp", "enable_checkpointing": False}
    with without_entry_points():
        trainer = make_trainer(pl, folder, plugin, max_steps=3, callbacks=[CheckpointMonitor(), Cut()], **options)
        trainer.fit(make_module(pl), loader(2))
    raise AssertionError("the cable was not cut")


def _fit_shards(rank: int, machines: Machines, folder: Path) -> None:
    from sharded_trainers import fit, values_of

    from fastensor_lightning import FastensorCheckpointIO

    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    pl = importlib.import_module("lightning.pytorch")
    options: Any = {"devices": 1, "num_nodes": WORLD, "max_epochs": 1, "enable_checkpointing": False}
    trainer, module = fit(pl, folder, FastensorCheckpointIO(), **options)
    path = folder / "files" / "x"
    trainer.save_checkpoint(path)
    expected = values_of(trainer, module)
    trainer, module = fit(pl, folder, FastensorCheckpointIO(), path, **options)
    assert values_of(trainer, module) == expected
    before = bytes_in(folder / "files")
    meet(folder, "saved", rank, WORLD)
    be_impatient()
    if rank == 1:
        machines.cut(1)
    meet(folder, "cut", rank, WORLD)
    with raising(rank, folder):
        trainer.save_checkpoint(path)
    assert bytes_in(folder / "files") == before
    os._exit(0)
