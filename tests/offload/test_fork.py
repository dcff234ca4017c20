"""Forks of a process that offloads: the child goes on by itself, the parent does not notice, and the child does
not wait for threads, or for locks of threads, that it lacks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import equal
from programs import run
from torch import nn

from fastensor.offload import ActivationOffload, OffloadError
from fastensor.offload.forward import ForwardPass
from fastensor.offload.jobs import THREADS

SECONDS = 30
"""After so many, a child that waits for what never comes is ended."""


def in_child(action: Callable[[], None]) -> Callable[[], int]:
    """Fork, and act there. Returns what waits for the child, and says how it ended."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            torch.set_num_threads(1)  # torch's own are not there
            action()
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Normed(nn.Module):
    """Saves activations, a buffer, and what is excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Buffer(torch.rand(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)) * self.scale) * self.scale)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x = Normed(), torch.randn(64, 64)
        self.expected = self.gradients(self.loss())

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self.x).square().sum()
        return found

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.autograd.grad(loss, [*self.model.parameters()])]

    def check_step(self, offload: ActivationOffload) -> None:
        with offload.step():
            loss = self.loss()
        offload.settle()
        assert equal(self.gradients(loss), self.expected)


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("options", [{}, {"exclude": ("second",)}, {"include": ("first",), "staging_bytes": 1}])
def test_a_child_trains_with_what_its_parent_has_used(make: Any, options: dict[str, Any]) -> None:
    training, offload = Training(), make(**options)
    offload.attach(training.model)
    training.check_step(offload)
    before = offload.statistics()

    def train() -> None:
        for _ in range(2):
            training.check_step(offload)
        found = offload.statistics()
        assert found.steps == 2
        assert found.written_bytes >= before.written_bytes > 0
        assert found.kept["buffer"] > 0
        assert ("module" in found.kept) == ("module" in before.kept)

    ended = in_child(train)
    training.check_step(offload)
    assert ended() == 0
    assert offload.statistics().steps == 2


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_fork_in_the_middle_of_a_step(
    make: Any, held_writes: Any, request: pytest.FixtureRequest, where: str
) -> None:
    """While writes are in flight. What the parent has saved is its own."""
    if where == "device":
        request.getfixturevalue("staged")
    training, offload = Training(), make(exclude=("second",))
    offload.attach(training.model)

    def go_on() -> None:
        held_writes.go = threading.Event()  # whoever holds the lock of the parent's does not live here
        held_writes.go.set()
        again = training.loss()
        assert equal(training.gradients(again), training.expected)
        try:
            training.gradients(loss)
        except OffloadError as error:
            assert "forked child" in str(error)
        else:
            raise AssertionError("the child has what it cannot have")
        training.check_step(offload)
        assert offload.statistics().written_bytes > 0

    with offload.step():
        loss = training.loss()
        # No thread is in the middle of torch's own code, whose locks the child would wait for.
        for _ in range(min(THREADS, offload.statistics().offloaded)):
            assert held_writes.each.acquire(timeout=60)
        ended = in_child(go_on)
        again = training.loss()
    assert ended() == 0
    held_writes.go.set()
    offload.settle()
    for one in (loss, again):
        assert equal(training.gradients(one), training.expected)
    training.check_step(offload)
    assert offload.statistics().failed_writes == 0


@contextmanager
def locked(offload: ActivationOffload) -> Iterator[None]:
    """Another thread holds all locks in the block."""
    forward_passes = [one for one in gc.get_objects() if type(one) is ForwardPass]
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as all_at_once:
            all_at_once.enter_context(offload._engine.swapper(torch.device("cpu"))._lock)
            all_at_once.enter_context(offload._engine._lock)
            for one in forward_passes:
                all_at_once.enter_context(one._lock)
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    assert forward_passes
    try:
        yield
    finally:
        go.set()
        thread.join()


def begin_anew(training: Training, offload: ActivationOffload, graphs: list[torch.Tensor]) -> None:
    again = training.loss()  # in the parent's step
    assert equal(training.gradients(again), training.expected)
    training.check_step(offload)
    graphs.clear()  # finalizers wait for nothing
    offload.close()


def use_what_stays(training: Training, offload: ActivationOffload, graphs: list[torch.Tensor]) -> None:
    assert equal(training.gradients(graphs.pop()), training.expected)


@pytest.mark.parametrize(("schedule", "go_on"), [("all", begin_anew), (1 << 30, use_what_stays)])
def test_a_fork_while_other_threads_hold_the_locks(make: Any, schedule: Any, go_on: Callable[..., None]) -> None:
    training, offload = Training(), make(schedule=schedule)
    with offload.step():
        graphs = [training.loss()]
        with locked(offload):
            ended = in_child(lambda: go_on(training, offload, graphs))
            assert ended() == 0
    assert equal(training.gradients(graphs.pop()), training.expected)


PROGRAM = """
import os, sys, torch
from fastensor.offload import ActivationOffload, OffloadConfig
torch.set_num_threads(1)
offload = ActivationOffload(OffloadConfig(schedule="all", directories=(sys.argv[1],), min_bytes=1))
x = torch.randn(1 << 18, requires_grad=True)

def use():
    with offload.step():
        loss = x.exp().sin().sum()
    offload.settle()
    loss.backward()

use()
with offload.step():
    loss = x.exp().sin().sum()
child = os.fork()
use()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_both_end_as_usual(tmp_path: Path) -> None:
    """The interpreters end by themselves, with threads that wait for work, and a graph that is never used."""
    run("-c", PROGRAM, tmp_path, timeout=2 * SECONDS)
    assert not list(tmp_path.iterdir())
