"""Two jobs that save to one place by mistake: one of them is told, and no state is lost, mixed or left half."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerators import MODES, by, training
from programs import Program

from fastensor_accelerate import FastensorConfig
from fastensor_accelerate.directories import states_in
from fastensor_accelerate.saving import StateSave

JOB = Path(__file__).with_name("lone_job.py")
modes = pytest.mark.parametrize("config", MODES)
places = pytest.mark.parametrize("named", [True, False], ids=["named", "explicit"])


def start(folder: Path, config: FastensorConfig, named: bool, *, saves: int, pauses: bool, seed: int = 0) -> Program:
    """A job of one process. It says ``saving`` in each save if it pauses there, until it gets a line; in the end, it
    prints what its saves have raised. Jobs with other seeds have other weights."""
    mode = "asynchronous" if config.asynchronous else "synchronous"
    options = (mode, int(named), saves, int(pauses), seed)
    return Program(JOB, folder, *options, accelerate=True, ACCELERATE_USE_CPU="true")


def outcomes(job: Program) -> list[Any]:
    out, err = job.communicate("\n")
    assert job.returncode == 0, err
    found: list[Any] = json.loads(out.splitlines()[-1])
    return found


def loaded(folder: Path, named: bool) -> int:
    """How many states there are. Each is whole."""
    states = states_in(str(folder / "checkpoints")) if named else [str(folder)]
    found = training()
    with by(FastensorConfig()):
        for state in states:
            found.accelerator.load_state(state)
    return len(states)


def seed_of(state: Path | str) -> int:
    """The seed of the job that has saved a state."""
    found = safetensors.torch.load_file(Path(state) / "model.safetensors")
    (seed,) = (one for one in (0, 1) if torch.equal(found["first.bias"], training(seed=one).models[0].first.bias))
    return seed


@modes
@pytest.mark.parametrize("total_limit", [None, 1])
def test_another_job_saves_the_state_after_the_name_was_found_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig, total_limit: int | None
) -> None:
    prepare = StateSave.prepare

    def prepare_late(self: StateSave) -> None:
        assert outcomes(start(tmp_path, FastensorConfig(), True, saves=1, pauses=False, seed=1)) == [None]
        prepare(self)

    monkeypatch.setattr(StateSave, "prepare", prepare_late)
    found = training(tmp_path, total_limit=total_limit)
    with by(config):
        if total_limit is None:
            with pytest.raises(ValueError, match="already exists"):
                found.accelerator.save_state()
        else:
            found.accelerator.save_state()
    assert seed_of(tmp_path / "checkpoints" / "checkpoint_0") == (1 if total_limit is None else 0)


@places
@modes
def test_the_second_job_is_told_and_the_first_one_goes_on(tmp_path: Path, config: FastensorConfig, named: bool) -> None:
    first = start(tmp_path, config, named, saves=1, pauses=True)
    assert first.stdout.readline() == "saving\n"
    (raised,) = outcomes(start(tmp_path, config, named, saves=1, pauses=False))
    assert raised[0] == "CheckpointWriteError"
    assert "another process is saving to the same path; give each job a directory of its own" in raised[1]
    assert outcomes(first) == [None]
    assert loaded(tmp_path, named) == 1
    assert not [name for name in os.listdir(tmp_path) if "fastensor" in name]


@places
@modes
def test_what_a_killed_job_has_left_is_in_nobodys_way(tmp_path: Path, config: FastensorConfig, named: bool) -> None:
    with start(tmp_path, config, named, saves=1, pauses=True) as first:
        assert first.stdout.readline() == "saving\n"
        first.send_signal(signal.SIGKILL)
    assert outcomes(start(tmp_path, config, named, saves=1, pauses=False)) == [None]
    assert loaded(tmp_path, named) == 1
    left = tmp_path / "checkpoints.saving" / "checkpoint_0"
    assert left.is_symlink() == (named and config.asynchronous)


@pytest.mark.torture
@places
@modes
def test_two_jobs_that_save_again_and_again(
    tmp_path: Path, config: FastensorConfig, named: bool, tally: Counter[str]
) -> None:
    jobs = [start(tmp_path, config, named, saves=30, pauses=False, seed=seed) for seed in range(2)]
    said = [outcomes(job) for job in jobs]
    for raised in said[0] + said[1]:
        tally[f"saves of two jobs: {raised[0] if raised else 'done'}"] += 1
        assert raised is None or raised[0] in ("CheckpointWriteError", "ValueError"), raised
        assert raised is None or "another process is saving" in raised[1] or "already exists" in raised[1], raised
    assert loaded(tmp_path, named) >= 1
    for number, (first, second) in enumerate(zip(*said, strict=True)) if named else ():
        assert None in (first, second)
        assert seed_of(tmp_path / "checkpoints" / f"checkpoint_{number}") == (0 if first is None else 1)
        assert first != second, "both were told that this state is theirs"
