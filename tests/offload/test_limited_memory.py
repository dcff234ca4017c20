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
