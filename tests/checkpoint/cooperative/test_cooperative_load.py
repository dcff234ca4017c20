"""Ranks load one file together, which their machine reads once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, join, state_of_all_kinds
from programs import run_ranks

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.files import posix


def test_all_ranks_load_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {**state_of_all_kinds(), "more": torch.randn(4 << 20)}
    fastensor.save(state, tmp_path / "x")
    fastensor.save({"w": torch.arange(5)}, tmp_path / "x.safetensors")
    (tmp_path / "damaged").write_bytes((tmp_path / "x").read_bytes()[:-1000])
    (tmp_path / "empty").touch()
    run_ranks(_load, 3, tmp_path)


def _load(rank: int, folder: Path) -> None:
    join(folder, rank, 3)
    _read_once(rank, folder / "x")
    found, report = cooperative.load_with_report(folder / "x")
    assert_same(found, fastensor.load(folder / "x"))
    assert (report.verified, report.backend) == (True, "numpy")
    assert cooperative.load(folder / "x", keys=["plain"]).keys() == {"plain"}
    assert torch.equal(cooperative.load(folder / "x.safetensors")["w"], torch.arange(5))
    for name in ("missing", "damaged", "empty"):
        with pytest.raises((FileNotFoundError, fastensor.CorruptCheckpointError)):
            cooperative.load(folder / name)
    for world in ([0, 1], [2]):
        group = dist.new_group(world)
        if rank in world:
            _, report = cooperative.load_with_report(folder / "x", group=group)
            assert (report.backend == "numpy") or rank == 2
    for members in ([0, 1, 2], [1, 2]):
        group = dist.new_group(members)
        if rank == 0:
            error = fastensor.CheckpointReadError if rank in members else ValueError
            with pytest.raises(error, match=r"ranks 1, 2 did not come within 0\.2 s|this rank is not in the group"):
                cooperative.load(folder / "x", group=group, timeout=0.2)
            cooperative.load(folder / "x")  # alone: all have been there before
        with (folder / "x").open("rb") as file:
            assert_same(cooperative.load(file, group=None if rank else dist.group.WORLD), found)
    cooperative.save(7, folder / "seven")  # does not mind that others have loaded less often
    dist.barrier()
    dist.destroy_process_group()


def _read_once(rank: int, path: Path) -> None:
    """The disk delivers every byte once. Files in memory have no disk."""
    with path.open("rb") as file:
        resident = [1.0]
        cooperative.load(path)  # or else pages of libraries may come from the disk meanwhile
        dist.barrier()
        if rank == 0:
            os.fsync(file.fileno())
            resident = [posix.evict(file.fileno(), path.stat().st_size)]
        dist.broadcast_object_list(resident)
        before = _bytes_from_disk()
        cooperative.load(path)
        read: list[int] = [0] * 3
        dist.all_gather_object(read, _bytes_from_disk() - before)
        if posix.memory_filesystem(file.fileno()) is None:
            assert 0.9 * (1 - resident[0]) < sum(read) / path.stat().st_size < 1.5


def _bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
