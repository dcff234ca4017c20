"""A save removes the files of the checkpoint that it replaces and what failed saves have left, and nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import join, load, save, stamped, step_of, unstamped
from programs import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter


def step_in(folder: Path) -> int:
    return step_of(load(unstamped(), FastensorStorageReader(folder)))


def test_a_save_without_collectives_removes_no_checkpoint_of_all_ranks(tmp_path: Path) -> None:
    writer = FastensorStorageWriter(tmp_path / "all")
    save(stamped(1), writer)
    save(stamped(2), writer, checkpoint_id=tmp_path / "alone", use_collectives=False)
    assert step_in(tmp_path / "all") == 1
    save(stamped(3), writer, checkpoint_id=tmp_path / "other")
    assert fastensor.verify(tmp_path / "alone").complete


def test_shards_stay_where_no_metadata_are_seen(tmp_path: Path) -> None:
    """The directory may be on the disk of this node, or a network filesystem may not show ``.metadata`` yet."""
    writer = FastensorStorageWriter(tmp_path / "1")
    save(stamped(1), writer)
    os.rename(tmp_path / "1" / ".metadata", tmp_path / "elsewhere")
    save(stamped(2), writer, checkpoint_id=tmp_path / "2")
    os.rename(tmp_path / "elsewhere", tmp_path / "1" / ".metadata")
    assert step_in(tmp_path / "1") == 1


def test_other_ranks_remove_nothing(tmp_path: Path) -> None:
    run_ranks(_save_with_a_rank_that_sees_no_metadata, 2, tmp_path)


def _save_with_a_rank_that_sees_no_metadata(rank: int, folder: Path) -> None:
    """Rank 1 writes to another directory, as on another node's disk."""
    join(folder, rank, 2)
    here = folder / f"node-{rank}"
    writer = FastensorStorageWriter(here)
    state = {f"of-{rank}": torch.full((9,), rank)}
    save(state, writer, no_dist=False)
    before = {name: (here / name).read_bytes() for name in os.listdir(here) if name.endswith(".distcp")}
    save(state, writer, no_dist=False, checkpoint_id=folder / f"again-{rank}")
    assert len(before) == 1
    assert all((here / name).read_bytes() == data for name, data in before.items())
    dist.destroy_process_group()


class Fails(DefaultSavePlanner):
    """Fails when the values are asked for."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("no values")


def test_failed_saves_leave_nothing_for_the_next_one(tmp_path: Path) -> None:
    run_ranks(_fail_on_rank_1, 2, tmp_path)


def _fail_on_rank_1(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    writer = FastensorStorageWriter(folder / "x")
    state = {f"of-{rank}": torch.full((9,), rank)}
    for _ in range(2):
        with pytest.raises(dcp.api.CheckpointException, match="no values"):
            save(state, writer, no_dist=False, planner=Fails() if rank == 1 else None)
        assert [name.split("_")[2] for name in os.listdir(folder / "x")] == ["0"]  # what rank 0 has written
        dist.barrier()
    save(state, writer, no_dist=False, checkpoint_id=folder / "y")
    assert os.listdir(folder / "x") == []
    dist.destroy_process_group()


class Waits(DefaultSavePlanner):
    """Waits until another save has ended."""

    def __init__(self, begun: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self.begun, self.other = begun, other

    def resolve_data(self, write_item: Any) -> Any:
        self.begun.set()
        assert self.other.wait(60)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("other", ["x", "y"])
def test_saves_that_overlap(tmp_path: Path, other: str) -> None:
    """The first one fails, and what is there is whole."""
    writer = FastensorStorageWriter(tmp_path / "x")
    save(stamped(1), writer)
    begun, ended = threading.Event(), threading.Event()
    future: Any = dcp.async_save(stamped(2), storage_writer=writer, planner=Waits(begun, ended), no_dist=True)
    assert begun.wait(60)
    save(stamped(3), writer, checkpoint_id=tmp_path / other)
    ended.set()
    with pytest.raises(dcp.api.CheckpointException, match="another save began with this writer"):
        future.result(60)
    assert step_in(tmp_path / other) == 3
    assert step_in(tmp_path / "x") == (3 if other == "x" else 1)
    assert fastensor.verify(tmp_path / "x").complete


def test_a_save_without_collectives_where_all_ranks_have_saved(tmp_path: Path) -> None:
    save(stamped(1), FastensorStorageWriter(tmp_path))
    with pytest.raises(fastensor.UnsupportedContentError, match="every load would read that instead"):
        save(stamped(2), FastensorStorageWriter(tmp_path), use_collectives=False)
    assert step_in(tmp_path) == 1
    assert len(os.listdir(tmp_path)) == 2


def test_a_save_of_all_ranks_where_ranks_have_saved_alone(tmp_path: Path) -> None:
    save(stamped(1), FastensorStorageWriter(tmp_path), use_collectives=False)
    (tmp_path / "__7.metadata").write_bytes((tmp_path / "__0.metadata").read_bytes())
    save(stamped(2), FastensorStorageWriter(tmp_path))
    assert step_in(tmp_path) == 2
    assert len(os.listdir(tmp_path)) == 2


def test_times_are_those_of_the_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this machine may be wrong."""
    young = tmp_path / "__1_0123456789abcdef_0.distcp"
    young.touch()
    monkeypatch.setattr("time.time", lambda: 1e12)
    save(stamped(1), FastensorStorageWriter(tmp_path))
    assert young.exists()
