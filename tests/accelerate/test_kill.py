"""Processes are really killed in mid-save: there is always a whole state, and never an older one than before."""

from __future__ import annotations

import importlib.util
import os
import random
import select
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from accelerators import by
from programs import Program

from fastensor_accelerate import FastensorConfig
from fastensor_accelerate.directories import states_in

SCRIPT = Path(__file__).with_name("state_saver.py")
NEVER = 10**9
LONGEST_SECONDS = 0.3
"""After so long, a process has saved several states."""


class Saver:
    """The process of ``state_saver.py``, whose children are to die."""

    def __init__(self, folder: Path, kind: str, process: Program) -> None:
        self.folder = folder
        self._named = kind == "named"
        self._process = process
        spec = importlib.util.spec_from_file_location("state_saver", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._training: Any = module.Training(str(folder) if self._named else None)

    def start(self, first: int, fatal: int = 0) -> int:
        """Let a child save; returns its process id."""
        print(first, fatal, file=self._process.stdin, flush=True)
        word, pid = self._process.stdout.readline().split()
        assert word == "saving"
        return int(pid)

    def wait(self) -> int:
        """Returns the exit code of the child."""
        word, code = self._process.stdout.readline().split()
        assert word == "dead"
        return int(code)

    def value(self) -> int:
        """That of the newest state. All that is in ``checkpoints`` is whole, and there are two states at most."""
        found = []
        states = states_in(str(self.folder / "checkpoints")) if self._named else [str(self.folder)]
        assert 1 <= len(states) <= 2
        with by(FastensorConfig()):
            for state in states:
                self._training.accelerator.load_state(state)
                found.append(self._training.value())
                assert not self._named or Path(state).name == f"checkpoint_{found[-1]}"
        assert self._named or (self.folder / "foreign").read_text() == "mine"
        return found[-1]


@contextmanager
def saver(folder: Path, kind: str, mode: str) -> Iterator[Saver]:
    (folder / "foreign").write_text("mine")
    with Program(SCRIPT, folder, kind, mode, accelerate=True) as process:
        saving = Saver(folder, kind, process)
        saving.start(0, NEVER)
        assert saving.wait() == 0
        assert saving.value() == 1
        yield saving
    assert process.returncode == 0


def kill_before_each(saving: Saver, tally: Counter[str], step: int) -> None:
    """Before every ``step``-th call of two saves, until they take no more calls."""
    value, found = saving.value(), set()
    for fatal in count(1, step):
        saving.start(value + 1, fatal)
        code = saving.wait()
        before, value = value, saving.value()
        assert before <= value <= before + 2
        found.add(value - before)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        tally["processes killed while they saved a state"] += 1
    assert value == before + 2
    assert found == {0, 1, 2}


def kill_at_random_moments(saving: Saver, tally: Counter[str], times: int, seed: int) -> None:
    rng = random.Random(seed)
    value = saving.value()
    for _ in range(times):
        pid = saving.start(value + 1)
        select.select([], [], [], rng.uniform(0, LONGEST_SECONDS))  # the moment of the kill
        os.kill(pid, signal.SIGKILL)
        assert saving.wait() == -signal.SIGKILL
        before, value = value, saving.value()
        assert before <= value
        tally["processes killed while they saved a state"] += 1


ways = pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind in ("named", "explicit") for mode in ("synchronous", "asynchronous")]
)


@ways
def test_killed_in_a_save(tmp_path: Path, tally: Counter[str], kind: str, mode: str) -> None:
    with saver(tmp_path, kind, mode) as saving:
        kill_before_each(saving, tally, 61)
        kill_at_random_moments(saving, tally, 3, seed=0)


@pytest.mark.torture
@ways
def test_killed_before_every_call_and_at_many_moments(
    tmp_path: Path, tally: Counter[str], kind: str, mode: str
) -> None:
    with saver(tmp_path, kind, mode) as saving:
        kill_before_each(saving, tally, 1)
        kill_at_random_moments(saving, tally, 100, seed=1)
