"""Processes are really killed in mid-save: the path holds the old or the new content, whole."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastensor
from fastensor.checkpoint.publish import TEMPORARY_SUFFIX

NUMEL = 4 << 20

SAVER = """
import os, sys, torch, fastensor
torch.set_num_threads(1)
path, numel = sys.argv[1], int(sys.argv[2])
states = [{"w": torch.full((numel,), float(i)), "i": i} for i in range(2)]
fastensor.save(states[0], path)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        print("saving", os.getpid(), flush=True)
        for i in range(1000):
            fastensor.save(states[(i + int(line)) % 2], path)
        os._exit(0)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def kill_repeatedly(path: Path, times: int, seed: int) -> set[int]:
    """Kill saving processes, forked from a warm parent, at random moments; returns the contents that were found."""
    rng = random.Random(seed)
    found = set()
    parent = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path), str(NUMEL)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin
    assert parent.stdout
    try:
        for number in range(times):
            print(number, file=parent.stdin, flush=True)
            word, pid = parent.stdout.readline().split()
            assert word == "saving"
            select.select([], [], [], rng.uniform(0, 0.2))  # the moment of the kill
            os.kill(int(pid), signal.SIGKILL)
            assert parent.stdout.readline().strip() == "dead"
            state = fastensor.load(path, verify=True)
            assert torch.equal(state["w"], torch.full((NUMEL,), float(state["i"])))
            found.add(state["i"])
            left = [name for name in os.listdir(path.parent) if name.endswith(TEMPORARY_SUFFIX)]
            assert len(left) <= 1
    finally:
        parent.stdin.close()
        parent.wait()
        parent.stdout.close()
    fastensor.save({"done": True}, path)
    assert os.listdir(path.parent) == [path.name]
    return found


def test_killed_at_random_moments(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path / "x", times=25, seed=0) == {0, 1}


@pytest.mark.torture
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path / "x", times=300, seed=1) == {0, 1}
