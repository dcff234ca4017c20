"""Several processes save and load together, as many as before or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, join, load, save, sharded, whole
from programs import free_port, run_ranks
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.testing import failing_call


def test_sharded_states_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save_all, 2, tmp_path)
    run_ranks(_load_all, 3, tmp_path)
    for name in ("ours", "alone"):
        assert fastensor.verify(tmp_path / name).complete
    assert fastensor.verify(tmp_path / "torch").not_compared == (".metadata",)
    found = load({"rows": torch.zeros(37, 50)}, FileSystemReader(tmp_path / "ours"))
    assert torch.equal(found["rows"], torch.arange(37.0 * 50).view(37, 50) + 5000)


def _save_all(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    state = sharded(mesh, 5)
    save(state, FastensorStorageWriter(folder / "ours"), no_dist=False)
    save(state, FastensorStorageWriter(folder / "ours"), no_dist=False)  # replaces it
    save(state, FileSystemWriter(folder / "torch"), no_dist=False)
    save(state, FastensorStorageWriter(folder / "alone"), no_dist=False, use_collectives=False)
    sizes = [
        sum(path.stat().st_size for path in (folder / name).glob("*.distcp")) for name in ("ours", "torch", "alone")
    ]
    dist.barrier()
    if rank == 0:
        assert sizes[0] == sizes[1] < sizes[2]  # replicas are saved once
        assert sorted(path.name for path in (folder / "alone").glob("*.metadata")) == ["__0.metadata", "__1.metadata"]
    other = sharded(mesh, None)
    load(other, FastensorStorageReader(folder / "alone"), no_dist=False)
    assert_same(whole(other), whole(state))
    _train(mesh, folder)
    dist.destroy_process_group()


def _train(mesh: DeviceMesh, folder: Path) -> None:
    """A model of FSDP2 and its optimizer go on from the checkpoint as from memory."""

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 40))
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(6, 40)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begin()
    group = dist.new_group()  # the save's collectives must not mix with those of training
    writer = FastensorStorageWriter(folder / "training")
    for step in range(3):
        train(model, optimizer, step)
        states = get_state_dict(model, optimizer)
        state = dict(zip(("model", "optimizer"), states, strict=True))
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        train(model, optimizer, 100 + step)  # while it is written
        future.result()
    fresh, fresh_optimizer = begin()
    states = get_state_dict(fresh, fresh_optimizer)
    state = dict(zip(("model", "optimizer"), states, strict=True))
    load(state, FastensorStorageReader(folder / "training"), no_dist=False)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(fresh, fresh_optimizer, 102)
    for one, two in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())


def _load_all(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 3)
    expected = whole(sharded(mesh, 5))
    for name, reader in (
        ("ours", FastensorStorageReader),
        ("ours", FileSystemReader),
        ("torch", FastensorStorageReader),
    ):
        state = sharded(mesh, None)
        load(state, reader(folder / name), no_dist=False)
        assert_same(whole(state), expected)
    state = {"columns": sharded(mesh, None)["columns"]}
    load(state, FastensorStorageReader(folder / "ours"), no_dist=False)
    assert torch.equal(state["columns"].full_tensor(), expected["columns"])
    dist.destroy_process_group()


PLACEMENTS = {
    "rows and columns": [Shard(0), Shard(1)],
    "columns and rows": [Shard(1), Shard(0)],
    "rows twice": [Shard(0), Shard(0)],
    "replicated rows": [Replicate(), Shard(0)],
    "columns of replicas": [Shard(1), Replicate()],
    "replicas": [Replicate(), Replicate()],
}
"""On a mesh of two dimensions, as data parallelism with tensor, expert or context parallelism makes them."""


def test_meshes_of_two_dimensions(tmp_path: Path) -> None:
    run_ranks(_save_and_load_on_meshes, 4, tmp_path)
    for name in ("ours", "torch"):
        found = load({key: torch.zeros(7, 5) for key in PLACEMENTS}, FastensorStorageReader(tmp_path / name))
        assert_same(found, {key: torch.arange(35.0).view(7, 5) for key in PLACEMENTS})


def _save_and_load_on_meshes(rank: int, folder: Path) -> None:
    line = join(folder, rank, 4)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    values = torch.arange(35.0).view(7, 5)  # no rank has as much as another one, and some have nothing

    def state(mesh: DeviceMesh, values: torch.Tensor, placements: dict[str, Any]) -> dict[str, Any]:
        return {key: distribute_tensor(values, mesh, where) for key, where in placements.items()}

    saved = state(square, values, PLACEMENTS)
    save(saved, FastensorStorageWriter(folder / "ours"), no_dist=False)
    save(saved, FileSystemWriter(folder / "torch"), no_dist=False)
    nbytes = [sum(path.stat().st_size for path in (folder / name).glob("*.distcp")) for name in ("ours", "torch")]
    assert nbytes[0] == nbytes[1]
    reordered = dict(zip(PLACEMENTS, [*PLACEMENTS.values()][::-1], strict=True))
    others = [
        state(square, torch.zeros(7, 5), PLACEMENTS),
        state(square, torch.zeros(7, 5), reordered),
        state(line, torch.zeros(7, 5), {key: [Shard(1)] for key in PLACEMENTS}),
    ]
    for name, reader in (
        ("ours", FastensorStorageReader), ("ours", FileSystemReader), ("torch", FastensorStorageReader),
    ):  # fmt: skip
        for other in others:
            for one in other.values():
                one.to_local().zero_()
            load(other, reader(folder / name), no_dist=False)
            assert_same(whole(other), dict.fromkeys(PLACEMENTS, values))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_asynchronous_saves(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    run_ranks(_save_asynchronously, 1, tmp_path, kind, free_port())


def _save_asynchronously(rank: int, folder: Path, kind: AsyncCheckpointerType, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    join(folder, rank, 1)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    for path, options in (("own", {}), ("torch", {"async_stager": stager})):
        writer = FastensorStorageWriter(folder / path)
        state = {"x": torch.zeros(100_000), "step": 0}
        addresses = set()
        for step in range(3):
            state["x"].fill_(step)
            state["step"] = step
            future: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, **options)
            state["x"].fill_(-1)
            future.result()
            if writer._in_use is not None:
                addresses.add(id(writer._stager))
            found = load({"x": torch.zeros(100_000), "step": None}, FastensorStorageReader(folder / path))
            assert found["step"] == step
            assert bool((found["x"] == step).all())
        assert len(addresses) == (path == "own")
        assert len(list((folder / path).iterdir())) == 2
    stager.close()
    dist.destroy_process_group()


def test_a_rank_that_fails_fails_all_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(_fail, 2, tmp_path)


def _fail(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    writer = FastensorStorageWriter(folder / "x")
    save(sharded(mesh, 1), writer, no_dist=False)
    before = sorted(os.listdir(folder / "x"))
    for failing in (0, 1):
        with (
            failing_call(1 if rank == failing else 10**9, name="pwrite") as fault,
            pytest.raises(dcp.api.CheckpointException) as caught,
        ):
            save(sharded(mesh, 2), writer, no_dist=False)
        assert bool(fault.fired) == (rank == failing)
        assert list(caught.value.failures) == [failing]
    dist.barrier()
    state = sharded(mesh, None)
    load(state, FastensorStorageReader(folder / "x"), no_dist=False)
    assert state["step"] == 1
    assert set(before) <= set(os.listdir(folder / "x"))
    dist.barrier()
    save(sharded(mesh, 3), writer, no_dist=False)  # removes what is left of the failed ones
    dist.barrier()
    assert len(os.listdir(folder / "x")) == len(before)
    dist.destroy_process_group()
