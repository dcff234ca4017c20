"""Asynchronous saves under faults, kills and crowds: what is loaded is what some state really was, whole."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import select
import signal
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.asynchronous.trainer import states
from disks import content, leftovers
from programs import Program, run

import fastensor
from fastensor import AsyncWriter, FastensorError
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.checkpoint import ordering
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.testing import failing_call, short_call

pytestmark = pytest.mark.crash

OLD = {"w": torch.full((1000,), 1)}
NEW = {"w": torch.full(((2 << 20) + 5000,), 2, dtype=torch.uint8), "b": torch.ones(5)}
MOST_CALLS = 300


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, 0])
def test_the_nth_call_fails(tmp_path: Path, name: str, code: int, tally: Counter[str]) -> None:
    """0 in place of an error: the call moves only a part."""
    path, raised = tmp_path / name, 0
    for number in range(1, MOST_CALLS):
        fastensor.save(OLD, path)
        failure: Any = None
        writer = AsyncWriter()
        with short_call(number) if not code else failing_call(number, code) as fault:
            try:
                writer.save(NEW, path)
                writer.wait()
            except FastensorError as error:
                failure = error
            wait_for_space()
        tally["calls failed"] += 1
        writer.close()
        found = content(path)
        if failure is None:
            assert found == 2, fault
        else:
            raised += 1
            assert isinstance(failure, OSError)
            assert (failure.errno, str(path) in str(failure)) == (code, True), fault
            assert found == (2 if "the new file is in place" in str(failure) else 1), fault
        assert not leftovers(tmp_path), fault
        assert not ordering._pending
        if not fault.fired:
            break
    else:
        pytest.fail(f"a save takes more than {MOST_CALLS} calls")
    assert raised == 0 if not code else raised >= 5
    assert number > 8


def digest(state: Any) -> bytes:
    return hashlib.blake2b(state["w"].numpy().data).digest()


class Trained:
    """The states of the training, by their steps."""

    def __init__(self) -> None:
        self._states = states()
        self._digests: list[bytes] = []

    def at(self, step: int) -> bytes:
        missing = max(step + 1 - len(self._digests), 0)
        self._digests += [digest(state) for state in islice(self._states, missing)]
        return self._digests[step]

    def check(self, state: Any) -> int:
        step = int(state["step"])
        assert state["seen"] == [step], "a mixture of steps"
        assert digest(state) == self.at(step), f"not the state of step {step}"
        return step


def have_trained(found: list[int], kills: int) -> bool:
    """Whether kills came late enough to see something."""
    return found[-1] > 10 and len(set(found)) > kills // 3


def kill_trainings(path: Path, times: int, seed: int, tally: Counter[str]) -> list[int]:
    """The steps that were found after each kill. There are more kills than that where the first came too early."""
    rng, trained, found, latest = random.Random(seed), Trained(), [0], 0.15
    script = Path(__file__).with_name("trainer.py")
    with Program(script, path) as process:
        for number in range(4 * times):
            if number >= times and have_trained(found, times):
                break
            print(seed * 1000 + number, file=process.stdin, flush=True)
            word, pid = process.stdout.readline().split()
            assert word == "training"
            assert process.stdout.readline() == f"resumed {found[-1]}\n"
            select.select([], [], [], rng.uniform(0, latest))  # the moment of the kill
            os.kill(int(pid), signal.SIGKILL)
            assert process.stdout.readline() == f"dead {-signal.SIGKILL}\n"
            tally["trainings killed"] += 1
            found.append(trained.check(fastensor.load(path)) if path.exists() else 0)
            assert found[-1] >= found[-2], "a step was lost that had been there"
            if found[-1] == found[-2]:  # on a slow machine it comes later, so that there is something to see
                latest = min(1.5 * latest, 5.0)
    assert process.returncode == 0
    return found


@pytest.mark.parametrize("times", [15, pytest.param(150, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_trainings_are_killed_and_resumed(tmp_path: Path, times: int, tally: Counter[str]) -> None:
    path = tmp_path / "x.ckpt"
    found = kill_trainings(path, times, times, tally)
    assert have_trained(found, times), "the kills came too early to see anything"
    fastensor.save({}, path)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_several_writers_and_readers(tmp_path: Path, rounds: int, tally: Counter[str]) -> None:
    """Whatever is read is whole, and what one thread saves, it reads."""
    paths = [tmp_path / name for name in "abc"]
    problems: list[BaseException] = []
    writers = [AsyncWriter(staging_bytes=4 * BUFFER_NBYTES, when_busy=policy) for policy in ("wait", "latest")]

    def state(number: int) -> dict[str, Any]:
        return {"w": torch.full((200_000 + 7 * number,), number), "number": number}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for number in range(rounds):
                path = rng.choice(paths)
                match rng.randrange(6):
                    case 0:
                        fastensor.save(state(number), path)
                    case 1:
                        rng.choice(writers).remove(path)
                    case 2:
                        own = tmp_path / f"own{seed}"
                        writers[0].save(state(number), own)
                        assert fastensor.load(own)["number"] == number
                    case 3:
                        read(path)
                    case _:
                        rng.choice(writers).save(state(number), path)
                tally["concurrent operations"] += 1
        except BaseException as problem:
            problems.append(problem)
            raise

    def read(path: Path) -> None:
        try:
            found = fastensor.load(path, verify=True)
        except FileNotFoundError:
            return
        assert torch.equal(found["w"], state(found["number"])["w"])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
        assert writer.statistics().peak_staging_bytes <= 4 * BUFFER_NBYTES
    assert not problems
    assert not ordering._pending
    assert not leftovers(tmp_path)
    for path in paths:
        read(path)


GROWTH = """
import os, sys, torch, fastensor
from fastensor.checkpoint.writing.freeing import wait_for_space
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def descriptors():
    wait_for_space()  # replaced files are open until their blocks are free
    return len(os.listdir("/proc/self/fd"))
state = {"w": torch.zeros(1 << 20), "list": list(range(1000))}
writer = fastensor.AsyncWriter()
for number in range(int(sys.argv[2])):
    state["w"].add_(1)
    writer.save(state, os.path.join(sys.argv[1], str(number % 3)))
    writer.remove(os.path.join(sys.argv[1], str((number + 1) % 3)))
    if number == 100:
        writer.wait()
        before = resident(), descriptors()
writer.wait()
print(resident() - before[0], descriptors() - before[1], writer.statistics().durable)
"""


def test_memory_and_descriptors_stay_flat(tmp_path: Path) -> None:
    grown, descriptors, durable = map(int, run("-c", GROWTH, tmp_path, 500).stdout.split())
    assert grown < 8 << 20
    assert (descriptors, durable) == (0, 500)
