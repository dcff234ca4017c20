"""Ranks are really killed while they save, and while they publish: a complete checkpoint of one step can be loaded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import load, save, stamped, step_of, unstamped
from programs import Program
from torch.distributed.checkpoint import FileSystemReader

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

pytestmark = pytest.mark.crash

MOST_CALLS = 50
"""About as many as a rank makes in three saves."""


RANKS = pytest.mark.parametrize("world", [2, 3, 4])


@pytest.mark.parametrize(("way", "world"), [("save", 3), ("async", 4)])
def test_some(tmp_path: Path, way: str, world: int, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "x", way, world, 4, tally)


@pytest.mark.torture
@RANKS
@pytest.mark.parametrize("way", ["save", "async"])
def test_many(tmp_path: Path, way: str, world: int, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "x", way, world, 60, tally)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.torture), 4])
def test_some_that_save_one_file_together(tmp_path: Path, world: int, tally: Counter[str]) -> None:
    kill_cooperating_ranks(tmp_path, world, 6, tally)


@pytest.mark.torture
@RANKS
def test_many_that_save_one_file_together(tmp_path: Path, world: int, tally: Counter[str]) -> None:
    kill_cooperating_ranks(tmp_path, world, 90, tally)


def kill_ranks(folder: Path, way: str, world: int, times: int, tally: Counter[str]) -> None:
    save(stamped(0), FastensorStorageWriter(folder))
    step = kill_while_saving(folder, way, world, times, loaded, tally)
    save(stamped(step), FastensorStorageWriter(folder))


def kill_cooperating_ranks(tmp_path: Path, world: int, times: int, tally: Counter[str]) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    path = folder / "x.ckpt"
    fastensor.save(stamped(0), path)
    kill_while_saving(folder, "cooperative", world, times, lambda _: step_of(fastensor.load(path, verify=True)), tally)
    fastensor.save(stamped(0), path)
    assert [one.name for one in folder.iterdir()] == ["x.ckpt"]


def kill_while_saving(
    folder: Path, way: str, world: int, times: int, step_in: Callable[[Path], int], tally: Counter[str]
) -> int:
    """Kill one of the ranks at random moments of three saves. Returns the step of the checkpoint that is there then."""
    moments = random.Random(f"{way}{world}{times}")
    step = 0
    steps_gained = Counter[int]()
    with Program(Path(__file__).with_name("saver.py"), folder, world) as saver:
        for _ in range(times):
            call = moments.randrange(1, MOST_CALLS)
            print(step + 1, moments.randrange(world), call, way, file=saver.stdin, flush=True)
            word, code = saver.stdout.readline().split()
            assert word == "dead"
            assert int(code) in (0, -9)
            tally[f"one of {world} ranks killed ({way})"] += code == "-9"
            found = step_in(folder)
            assert step <= found <= step + 3
            steps_gained[found - step] += 1
            step = found
    assert len(steps_gained) > 1
    return step


def loaded(folder: Path) -> int:
    """The step of the checkpoint, by both readers."""
    steps = {step_of(load(unstamped(), reader(folder))) for reader in (FastensorStorageReader, FileSystemReader)}
    report = fastensor.verify(folder)  # all but what the killed ones have left, which the next save removes
    assert report.uncompared == len(report.not_compared)
    assert all(name.endswith((".distcp", ".fastensor-tmp")) for name in report.not_compared)
    (step,) = steps
    return step
