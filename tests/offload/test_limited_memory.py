"""Training in a cgroup with little more memory than all activations take: the kernel kills what takes too much."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from programs import run

ROOT = Path(__file__).parents[2]
LIMIT = 1000 << 20
TRAIN = """
import os
import random
import sys

import torch

from fastensor.offload import ActivationOffload, OffloadConfig

group, folder, returns, least_rows = sys.argv[1:]
config = OffloadConfig(
    directories=(folder,), staging_bytes="16MiB", prefetch_bytes="16MiB", return_freed_memory=returns == "returned"
)
weights = [torch.full((1024,), 1.1, requires_grad=True) for _ in range(100)]
data = torch.randn(2048, 1024)  # each weight saves as many bytes: 800 MiB in all
rows = random.Random(0)
with open(f"{group}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
with ActivationOffload(config) as offload:
    for _ in range(3):
        batch = data[: rows.randrange(int(least_rows), 2049)]
        with offload.step():
            for weight in weights:
                batch = (batch * weight).tanh()
            loss = batch.square().mean()
        del batch
        loss.backward()
"""


@pytest.mark.parametrize(
    ("freed", "least_rows", "status"),
    [
        pytest.param("returned", 2048, 0, marks=pytest.mark.torture, id="batches-of-one-size"),
        pytest.param("returned", 1024, 0, id="batches-of-all-sizes"),
        pytest.param("kept", 2048, -signal.SIGKILL, id="freed-memory-is-kept"),
    ],
)
def test_freed_memory_is_there_for_the_next_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: str, least_rows: int, status: int
) -> None:
    """What the C library keeps in holes counts against the limit, too, and does not fit for the next tensors."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from measuring import memory_limit

    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    with memory_limit(LIMIT) as group:
        if group is None:
            pytest.skip("no cgroup can be made here")
        found = run(program, group, tmp_path, freed, least_rows, check=False)
    assert found.returncode == status, found.stderr


RECOMPUTE = """
import re
import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from fastensor.offload import ActivationOffload, OffloadConfig

folder, how, room, tests = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
sys.path.insert(0, tests)
from recomputing import plans_that_recompute

torch.set_num_threads(1)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(Block() for _ in range(16)))
data = torch.randn(2048, 128)
room_of = {"memory_bytes": "24MiB"} if how == "divided" else {"staging_bytes": "8MiB", "prefetch_bytes": "8MiB"}
config = OffloadConfig(directories=(folder,), recompute=False if how == "move" else "auto", **room_of)
offload = None if how == "keep" else ActivationOffload(config)
if offload is not None:
    offload.attach(model)
if room:
    (used,) = re.findall(r"^VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.M)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(used) << 10) + room, resource.RLIM_INFINITY))
with plans_that_recompute() if how == "recompute" else nullcontext():
    for _ in range(4):
        with nullcontext() if offload is None else offload.step():
            loss = model(data).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        print(loss.item())
    del loss
if how == "divided":  # a tensor has 4 MiB: one that moves alone, one that is needed at once
    assert offload.statistics().peak_memory_bytes <= 32 << 20
if how == "recompute":
    assert offload.statistics().recomputed == 16 * 2
"""
SAVED = 16 * 2048 * 1280 * 4
"""Bytes that its blocks save."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Those of a training without a limit."""
    folder = tmp_path_factory.mktemp("unlimited")
    (folder / "train.py").write_text(RECOMPUTE)
    return run(folder / "train.py", folder, "keep", 0, ROOT / "tests").stdout


@pytest.mark.parametrize("how", ["keep", "move", "auto", "recompute", "divided"])
def test_blocks_that_are_computed_again_take_no_more_than_was_planned(tmp_path: Path, losses: str, how: str) -> None:
    """By the processors, the disk, or both: training fits into two thirds of what its activations take."""
    program = tmp_path / "train.py"
    program.write_text(RECOMPUTE)
    found = run(program, tmp_path, how, 2 * SAVED // 3, ROOT / "tests", check=False)
    if how == "keep":
        assert found.returncode != 0
        assert "memory" in found.stderr
    else:
        assert (found.returncode, found.stdout) == (0, losses), found.stderr
