"""Ranks are really killed while they save, and while they publish: a complete checkpoint of one step can be loaded."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from checkpoints import load, save, stamped, step_of, unstamped
from programs import Program
from torch.distributed.checkpoint import FileSystemReader

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

MOST_CALLS = 50
"""About as many as a rank makes in three saves."""


@pytest.mark.parametrize("way", ["save", "async"])
def test_some(tmp_path: Path, way: str, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "x", way, 6, tally)


@pytest.mark.torture
@pytest.mark.parametrize("way", ["save", "async"])
def test_many(tmp_path: Path, way: str, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "x", way, 90, tally)


def kill_ranks(folder: Path, way: str, times: int, tally: Counter[str]) -> None:
    moments = random.Random(f"{way}{times}")
    save(stamped(0), FastensorStorageWriter(folder))
    step = 0
    steps_gained = Counter[int]()
    with Program(Path(__file__).with_name("saver.py"), folder) as saver:
        for number in range(times):
            call = moments.randrange(1, MOST_CALLS)
            print(number, step + 1, moments.randrange(2), call, way, file=saver.stdin, flush=True)
            word, code = saver.stdout.readline().split()
            assert word == "dead"
            assert int(code) in (0, -9)
            tally["ranks killed"] += code == "-9"
            found = loaded(folder)
            assert step <= found <= step + 3
            steps_gained[found - step] += 1
            step = found
    assert len(steps_gained) > 1
    save(stamped(step), FastensorStorageWriter(folder))


def loaded(folder: Path) -> int:
    """The step of the checkpoint, by both readers."""
    steps = {step_of(load(unstamped(), reader(folder))) for reader in (FastensorStorageReader, FileSystemReader)}
    assert fastensor.verify(folder).complete
    (step,) = steps
    return step
