"""Processes are really killed in mid-save: the path holds the old or the new content, whole, or none if new."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

import pytest
import torch
from disks import leftovers
from programs import Program

import fastensor

pytestmark = pytest.mark.crash

NUMEL, SMALL_NUMEL = 1 << 20, 700_000
NEVER = 10**9


class Saver:
    """The process of ``saver.py``, whose warm children are to die."""

    def __init__(self, path: Path, commands: IO[str], answers: IO[str], *, numel: int, new: bool) -> None:
        self.path = path
        self._commands = commands
        self._answers = answers
        self._numel = numel
        self._new = new

    def start(self, number: int, *, fatal: int = 0) -> int:
        """Let a child save; returns its process id."""
        print(number, fatal, file=self._commands, flush=True)
        word, pid = self._answers.readline().split()
        assert word == "saving"
        return int(pid)

    def wait(self) -> int:
        """Returns the exit code of the child; that of a killed one is negative."""
        word, code = self._answers.readline().split()
        assert word == "dead"
        return int(code)

    def content(self) -> int | None:
        """Which state the path holds, whole; None if there is none. Nothing else was left but one temporary."""
        left = leftovers(self.path.parent)
        assert len(left) <= 1
        assert {*os.listdir(self.path.parent)} <= {self.path.name, *left}
        if self._new and not self.path.exists():
            return None
        state = fastensor.load(self.path, verify=True)
        assert torch.equal(state["w"], torch.full((self._numel,), float(state["i"])))
        return int(state["i"])


@contextmanager
def saver(path: Path, *, numel: int, new: bool) -> Iterator[Saver]:
    script = Path(__file__).with_name("saver.py")
    with Program(script, path, numel, "new" if new else "overwrite") as process:
        yield Saver(path, process.stdin, process.stdout, numel=numel, new=new)
    assert process.returncode == 0
    fastensor.save({"done": True}, path)
    assert os.listdir(path.parent) == [path.name]


def seconds_of_one_save(saving: Saver) -> float:
    saving.start(0, fatal=NEVER)
    started = time.perf_counter()
    assert saving.wait() == 0
    return time.perf_counter() - started


def kill_at_random_moments(path: Path, tally: Counter[str], *, new: bool, times: int, seed: int) -> None:
    """Within the first three saves of a process, at whatever pace they go; later if that was too early to see both
    what was there before and what is saved."""
    rng = random.Random(seed)
    expected = {None} if new else {0, 1}
    found = set()
    with saver(path, numel=NUMEL, new=new) as saving:
        seconds = min(seconds_of_one_save(saving) for _ in range(3))
        for number in range(4 * times):
            if number >= times:
                if found >= expected:
                    break
                seconds *= 1.1
            pid = saving.start(number)
            select.select([], [], [], rng.uniform(0, 3 * seconds))  # the moment of the kill
            os.kill(pid, signal.SIGKILL)
            assert saving.wait() == -signal.SIGKILL
            found.add(saving.content())
            tally["processes killed"] += 1
    assert found >= expected


targets = pytest.mark.parametrize("new", [False, True], ids=["overwrite", "new"])


@targets
def test_killed_at_random_moments(tmp_path: Path, tally: Counter[str], new: bool) -> None:
    kill_at_random_moments(tmp_path / "x", tally, new=new, times=25, seed=0)


@pytest.mark.torture
@targets
def test_killed_at_many_random_moments(tmp_path: Path, tally: Counter[str], new: bool) -> None:
    kill_at_random_moments(tmp_path / "x", tally, new=new, times=200, seed=1)


@targets
def test_killed_before_the_nth_call(tmp_path: Path, tally: Counter[str], new: bool) -> None:
    """For every N: the moments that random ones hardly meet."""
    found = []
    with saver(tmp_path / "x", numel=SMALL_NUMEL, new=new) as saving:
        for fatal in count(1):
            for left in tmp_path.iterdir():  # what a killed one has left costs the next one calls to remove it
                left.unlink()
            if not new:
                fastensor.save({"w": torch.full((SMALL_NUMEL,), 0.0), "i": 0}, tmp_path / "x")
            saving.start(1, fatal=fatal)
            code = saving.wait()
            found.append(saving.content())
            if code == 0:
                break
            assert code == -signal.SIGKILL
            tally["processes killed"] += 1
    before = None if new else 0
    assert len(found) > 10
    assert found == [before] * found.count(before) + [1] * found.count(1), "once there, it stays"
    assert {before, 1} == set(found[:-1]), "some were killed after the rename"
