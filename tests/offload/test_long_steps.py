"""One ``step()`` around many forward and backward passes: the last costs what the first did, in work and in memory."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fastensor.offload
from fastensor.offload import ActivationOffload, OffloadConfig, hooks, planner
from fastensor.offload.forward import PrefetchSchedule
from fastensor.offload.jobs import Jobs
from fastensor.offload.saved import SavedBytes
from fastensor.offload.statistics import Counters
from fastensor.offload.swapper import Swapper

HERE = os.path.dirname(fastensor.offload.__file__)
Pass = Callable[[], object]


class Passes:
    """One forward pass, and what becomes of it."""

    def __init__(self) -> None:
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])
        self.x = torch.randn(16, 16)
        self.graphs: list[torch.Tensor] = []
        self.latest: deque[torch.Tensor] = deque(maxlen=3)

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.net(self.x).square().mean()
        return found

    def backward(self) -> None:
        self.loss().backward()

    def two_backward(self) -> None:
        first, second = self.loss(), self.loss()
        first.backward()
        second.backward()

    def nothing(self) -> None:
        self.loss()

    def beside_a_graph_that_stays(self) -> None:
        if not self.graphs:
            self.graphs.append(self.loss())
        self.backward()
        self.graphs[0].backward(retain_graph=True)

    def graphs_that_stay(self) -> None:
        """For three passes: all of them are unpacked in each."""
        self.latest.append(self.loss())
        for graph in self.latest:
            graph.backward(retain_graph=True)

    def tensors_that_stay(self) -> None:
        """Saved by more and more graphs."""
        self.graphs.append((self.net[0].weight * self.x).sum())
        self.backward()

    def half_of_a_graph(self) -> None:
        """The rest is never used, and goes."""
        middle = self.net[:4](self.x)
        (middle.sum() + self.net[4:](middle).sum()).detach()
        middle.sum().backward()


KINDS = [name for name in vars(Passes) if not name.startswith("_") and name != "loss"]


@pytest.fixture
def tidy(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Offloads that look often for ranges to forget."""
    monkeypatch.setattr(hooks, "_LEAST_TO_TIDY", 8)
    return make


def lines_run(action: Pass) -> int:
    """How many lines of the package this thread runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"staging_bytes": 1}, {}])
def test_each_pass_is_as_much_work_as_the_first(
    tidy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Which lines run depends on how fast the disk is just now, and on which jobs threads have taken. So no write
    begins before its pass has ended, and all end before the next one; but a pass that may have one pending tensor waits
    for them."""
    held: deque[tuple[Future[Any], Pass]] = deque()
    submit, wait_for = Jobs.submit, Swapper._wait_for

    def hold(self: Jobs, pool: Any, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if pool == "read":
            return submit(self, pool, job, *arguments)
        held.append((Future(), partial(job, *arguments)))
        return held[-1][0]

    def write_all() -> None:
        while held:
            write, job = held.popleft()
            if write.set_running_or_notify_cancel():
                write.set_result(job())

    def wait_for_all(self: Swapper, *arguments: Any) -> None:
        writer.submit(write_all).result()
        wait_for(self, *arguments)

    monkeypatch.setattr(Jobs, "submit", hold)
    monkeypatch.setattr(Swapper, "_wait_for", wait_for_all)
    offload: ActivationOffload = tidy(**options)
    passes = Passes()
    run: Pass = getattr(passes, kind)
    found = []
    with ThreadPoolExecutor(1) as writer, offload.step():
        for number in range(70):
            if 5 <= number < 15 or number >= 60:  # before, the latest graphs are fewer
                found.append(lines_run(run))
            else:
                run()
            writer.submit(write_all).result()
    early, late = median(found[:10]), median(found[10:])
    assert early > 100
    assert late < 1.1 * early


@pytest.mark.parametrize(
    "kind",
    [
        "backward",
        pytest.param("two_backward", marks=pytest.mark.torture),
        pytest.param("nothing", marks=pytest.mark.torture),
        "beside_a_graph_that_stays",
        pytest.param("graphs_that_stay", marks=pytest.mark.torture),
        "half_of_a_graph",
    ],
)
def test_passes_leave_nothing_behind(tidy: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MOST_FORMS", 2)  # which ones there are depends on timing
    offload: ActivationOffload = tidy(staging_bytes=1, backend="numpy")  # what is learned of backends is kept for long
    run: Pass = getattr(Passes(), kind)

    def held() -> int:
        gc.collect()  # memory of freed tuples that Python keeps for the next ones would count
        only = tracemalloc.Filter(True, f"{HERE}/*")
        return sum(one.size for one in tracemalloc.take_snapshot().filter_traces([only]).statistics("filename"))

    tracemalloc.start()
    try:
        with offload.step():
            sizes = []
            for number in range(60):
                run()
                if number % 40 in range(10, 20):
                    sizes.append(held())
    finally:
        tracemalloc.stop()
    assert max(sizes[-10:]) - max(sizes[:10]) < 16_384, sizes


def test_passes_of_one_step_are_learned_from(make: Any) -> None:
    """What is known of the last one is known of the next, as if each had been a step."""
    passes = Passes()
    offload: ActivationOffload = make()
    with offload.step():
        for _ in range(4):
            before = offload.statistics()
            loss = passes.loss()
            offload.settle()
            loss.backward()
        found = offload.statistics()
    assert found.misses - before.misses <= 1, "the first, which nothing has announced"
    assert found.kept["externally referenced"] >= 2 * passes.x.nbytes


@pytest.mark.parametrize("schedule", ["all", 0.5])
def test_passes_of_one_step_are_whole(make: Any, schedule: Any) -> None:
    """However many ranges they save together: ranges of passes that are over are forgotten between passes."""
    net = nn.Sequential(*[layer for _ in range(hooks._LEAST_TO_TIDY // 3) for layer in (nn.Linear(16, 16), nn.Tanh())])
    offload: ActivationOffload = make(schedule=schedule)
    with offload.step():
        for _ in range(12):
            net(torch.randn(16, 16)).square().mean().backward()
    offload._engine.planner.plan_ended()
    (form,) = offload._engine.planner._forms.values()
    assert form.passes == 12


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_many_passes_are_the_same(make: Any, kind: str) -> None:
    def run(offload: ActivationOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        passes = Passes()
        with offload.step() if offload else torch.enable_grad():
            for _ in range(12):
                getattr(passes, kind)()
            for graph in passes.graphs:
                graph.backward()
        return [one.grad for one in passes.net.parameters() if one.grad is not None]

    found, expected = run(make(staging_bytes=1, prefetch_bytes=3000)), run(None)
    assert len(found) == len(expected) == (0 if kind == "nothing" else len(expected))
    assert all(map(torch.equal, found, expected))


def test_what_the_backward_pass_has_got_itself_is_no_other_reference(tmp_path: Any, held_writes: Any) -> None:
    """A tensor is needed by one node while it is written, and will be by another when that is done."""
    swapper = Swapper(OffloadConfig(schedule="all", directories=(str(tmp_path),), backend="direct"), Counters())
    storage = torch.ones(40_000, dtype=torch.uint8).untyped_storage()
    saved = SavedBytes(40_000, 0, storage.device, StorageWeakRef(storage), storage, unread=2)  # type: ignore[no-untyped-call]
    swapper.admit(saved)
    del storage
    held_writes.begun.wait(60)
    got, _ = swapper.bring(saved)
    held_writes.go.set()
    swapper.settle()
    assert saved.is_away
    again, _ = swapper.bring(saved)
    assert again.data_ptr() == got.data_ptr()
    assert not swapper.externally_referenced
    swapper.close()


def test_what_was_read_ahead_for_nothing_makes_room(tmp_path: Any) -> None:
    swapper = Swapper(OffloadConfig(schedule="all", directories=(str(tmp_path),), prefetch_bytes=50_000), Counters())
    ranges = []
    for value in range(3):
        storage = torch.full((40_000,), value, dtype=torch.uint8).untyped_storage()
        ranges.append(SavedBytes(40_000, 0, storage.device, StorageWeakRef(storage), storage))  # type: ignore[no-untyped-call]
        swapper.admit(ranges[-1])
        del storage
    swapper.settle()
    first, second, third = ranges
    assert swapper.read_ahead(first, [second]) == 1
    swapper.settle()
    storage, _ = swapper.bring(third)
    assert set(storage.tolist()[:40_000]) == {2}
    assert swapper.memory_usage()["loaded"] == 40_000
    swapper.bring(first, upcoming=[third])
    assert swapper.memory_usage()["loaded"] == 80_000, "what is needed at once comes on top"
    swapper.close()


def test_the_order_of_what_comes_next_is_looked_at_once_for_several_tensors(make: Any) -> None:
    """And yet the read of each tensor but the first has begun when the tensor is needed."""
    offload = make(prefetch_bytes=20 * 40_000)
    x = torch.rand(10_000, requires_grad=True)
    expected = torch.autograd.grad(chain(x).sum(), x)[0]
    with offload.step():
        y = chain(x).sum()
    offload.settle()
    looks, look = [], PrefetchSchedule.upcoming

    def upcoming(*arguments: Any) -> Any:
        looks.append(arguments)
        return look(*arguments)

    with mock.patch.object(PrefetchSchedule, "upcoming", upcoming):
        (gradient,) = torch.autograd.grad(y, x)
    assert torch.equal(gradient, expected)
    found = offload.statistics()
    assert found.offloaded == 100
    assert found.misses == 1
    assert found.prefetch_hits + found.prefetch_late == 99
    assert len(looks) < 40  # at the end, where little is left, for each


def test_a_graph_is_read_ahead_beside_what_was_read_ahead_of_another(make: Any) -> None:
    """As in adversarial training, whose first backward pass needs half of its graph only. What was read ahead of the
    other half stays in memory, and the second graph is read ahead all the same."""
    offload = make(prefetch_bytes=300 * 40_000)
    x = torch.rand(10_000, requires_grad=True)
    with offload.step():
        middle = chain(x, 50)
        y = chain(middle)
    offload.settle()
    torch.autograd.grad(y.sum(), middle, retain_graph=True)
    offload.settle()
    assert offload.memory_usage()["loaded"] > 40 * 40_000
    with offload.step():
        z = chain(x).sum()
    offload.settle()
    before = offload.statistics().misses
    z.backward()
    assert offload.statistics().misses - before <= 3


def chain(x: torch.Tensor, length: int = 100) -> torch.Tensor:
    for _ in range(length):
        x = x.sigmoid()
    return x
