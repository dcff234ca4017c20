"""Ranks on machines of their own save one file together, and a cable is cut: all raise in time, and a file is whole."""

from __future__ import annotations

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
from checkpoints import at_call
from disks import leftovers
from hosts.machines import PATIENCE_SECONDS, PORT, Machines, after, meet

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.cooperative import saving
from fastensor.checkpoint.cooperative.ranks import Ranks

TIMEOUT_SECONDS = 0.5
WORLD = 3
PHASES = ("before", "comparing", "writing", "syncing", "publishing")


def state(step: int) -> dict[str, Any]:
    """A part for each of three ranks."""
    return {"large": torch.full((3 << 18,), float(step)), "step": step}


def step_in(path: Path) -> int:
    found = fastensor.load(path, verify=True)
    (step,) = {float(one) for one in (found["large"].min(), found["large"].max(), found["step"])}
    return int(step)


def join(machines: Machines, rank: int, store_of: int) -> None:
    """Join a group whose store is in the process of a rank."""
    store = dist.TCPStore(
        machines.address(store_of), PORT, WORLD, rank == store_of, timedelta(seconds=PATIENCE_SECONDS)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


@contextmanager
def cutting(phase: str, cut: Callable[[], None], rank: int, lost: int) -> Iterator[None]:
    """In the block, the cable of the rank ``lost`` is cut when its save comes to a phase."""
    with pytest.MonkeyPatch.context() as patches:
        if phase == "before" and rank == lost:
            cut()
        elif phase == "comparing" and rank == lost:
            patches.setattr(saving, "replica_of", after(cut, saving.replica_of))
        elif phase == "publishing" and rank == 0:
            patches.setattr(Ranks, "decide_to_publish", after(cut, Ranks.decide_to_publish))
        elif phase in ("writing", "syncing") and rank == lost:
            with at_call({"writing": "pwrite", "syncing": "fsync"}[phase], cut, required=False):
                yield
            return
        yield


@pytest.mark.parametrize(
    ("store_of", "lost"),
    [
        pytest.param(0, 2, marks=pytest.mark.torture, id="rank-2"),
        pytest.param(0, 0, marks=pytest.mark.torture, id="rank-0-with-the-store"),
        pytest.param(2, 0, id="rank-0-from-the-store"),
    ],
)
def test_a_cable_is_cut(machines: Machines, tmp_path: Path, store_of: int, lost: int) -> None:
    machines.run(range(WORLD), _be_cut_off, machines, tmp_path, store_of, lost)


def _be_cut_off(rank: int, machines: Machines, folder: Path, store_of: int, lost: int) -> None:
    join(machines, rank, store_of)
    (folder / "files").mkdir(exist_ok=True)
    path = folder / "files" / "x.ckpt"
    step = 1
    cooperative.save(state(step), path, timeout=PATIENCE_SECONDS)
    for phase in PHASES:
        is_cut = folder / f"{phase} is cut"

        def cut(is_cut: Path = is_cut) -> None:
            machines.cut(lost)
            is_cut.touch()

        timeout = TIMEOUT_SECONDS
        while not is_cut.exists():  # again if a rank is too slow to come to this phase
            meet(folder, f"{phase} comes {timeout}", rank, WORLD)
            error = ""
            started = time.monotonic()
            with cutting(phase, cut, rank, lost):
                try:
                    cooperative.save(state(step + 1), path, timeout=timeout)
                except fastensor.CheckpointWriteError as caught:
                    error = str(caught)
            assert time.monotonic() - started < PATIENCE_SECONDS
            meet(folder, f"{phase} over {timeout}", rank, WORLD)
            timeout *= 2
        found = step_in(path)
        if found == step:
            assert error, "a rank takes a file for saved that is not in place"
        else:  # rank 0 does not need the others, nor a network to its own store
            assert phase == "publishing" or (phase == "syncing" and lost == 0)
            assert found == step + 1
            assert not error or "perhaps the file is in place" in error
        assert not leftovers(path.parent)
        meet(folder, f"{phase} seen", rank, WORLD)
        if rank == lost:
            machines.join(lost)
        meet(folder, f"{phase} joined", rank, WORLD)
        step = found + 1
        cooperative.save(state(step), path, timeout=PATIENCE_SECONDS)
        assert step_in(path) == step
    meet(folder, "over", rank, WORLD)  # or the store goes before all have their answers
    os._exit(0)  # the group's own connections do not know that the cable is back


def test_a_cable_is_cut_before_the_first_save(machines: Machines, tmp_path: Path) -> None:
    machines.run(range(WORLD), _be_cut_off_at_first, machines, tmp_path)


def _be_cut_off_at_first(rank: int, machines: Machines, folder: Path) -> None:
    join(machines, rank, 0)
    if rank == 2:
        machines.cut(2)
    path = folder / "x.ckpt"
    with pytest.raises(fastensor.CheckpointWriteError, match=r"rank 2 (cannot reach the store|did not come)"):
        cooperative.save(state(1), path, timeout=TIMEOUT_SECONDS)
    with pytest.raises(fastensor.CheckpointReadError, match=r"rank 2 (cannot reach the store|did not come)"):
        cooperative.load(path, timeout=TIMEOUT_SECONDS)
    meet(folder, "failed", rank, WORLD)
    if rank == 2:
        machines.join(2)
    meet(folder, "joined", rank, WORLD)
    cooperative.save(state(2), path, timeout=PATIENCE_SECONDS)
    assert cooperative.load(path, timeout=PATIENCE_SECONDS)["step"] == 2
    meet(folder, "over", rank, WORLD)
    os._exit(0)
