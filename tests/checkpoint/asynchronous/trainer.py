"""A process that trains, saves asynchronously after every step, and is killed. Run by ``test_async.py``.

Argument: the path. For each line of its input, which is a seed, it forks a child that resumes from the path, with
failures injected into the calls that saving makes.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import torch

import fastensor
from fastensor.testing.calls import Call, intercepted

NUMEL = 3 << 20
FAULTS_PER_CALL = 0.01
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def initial_state() -> dict[str, Any]:
    return {"step": 0, "w": torch.zeros(NUMEL, dtype=torch.uint8), "seen": [0]}


def train_one_step(state: dict[str, Any]) -> None:
    """In place, as optimizers do, and so that every state depends on all before it."""
    state["step"] += 1
    state["w"].mul_(3).add_(state["step"] % 256)
    state["w"][state["step"] % NUMEL] += 7
    state["seen"][0] = state["step"]


def states() -> Iterator[dict[str, Any]]:
    """What the training has at its steps, one after the other; the same object, changed."""
    state = initial_state()
    for _ in count():
        yield state
        train_one_step(state)


class Faults:
    """Lets calls fail at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, call: Call) -> Any:
        if self._rng.random() < FAULTS_PER_CALL:
            code = self._rng.choice(CODES)
            raise OSError(code, os.strerror(code))
        return call.perform()


def train(path: str, seed: int) -> None:
    state = fastensor.load(path) if os.path.exists(path) else initial_state()
    print("resumed", state["step"], flush=True)
    writer = fastensor.AsyncWriter(when_busy=random.Random(seed).choice(("wait", "skip", "latest")))  # type: ignore[arg-type]
    with intercepted(Faults(seed)):
        while True:
            train_one_step(state)
            with suppress(fastensor.FastensorError):  # an earlier one has failed
                writer.save(state, path)


def main() -> None:
    path = sys.argv[1]
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print("training", os.getpid(), flush=True)
            train(path, int(line))
        print("dead", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
