"""Schedules: what stays in memory, what leaves, and that nothing changes the gradients."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.errors import OffloadError
from fastensor.files.words import human_size
from fastensor.offload import ActivationOffload, OffloadConfig, hooks, host_memory, limits, planner, scheduler, swapper
from fastensor.offload.config import SHARES_OF_TRANSFERS
from fastensor.offload.forward import ForwardPass, PrefetchSchedules
from fastensor.offload.planner import PassRecord, SavedTensor
from fastensor.offload.scheduler import TransferRates

LAYERS, WIDTH, BATCH = 6, 64, 256
EACH = BATCH * WIDTH * 4
"""Bytes of one activation."""
SAVED = LAYERS + 1
"""Activations that a pass saves: the batch, and what each layer gives."""
EXAMINED = planner._PLANNED_AT[-1]
"""Passes until one is not examined: each is planned when the next one begins."""


class Net(nn.Module):
    """Each layer saves its output, and the next one the same memory as its input."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x


def batch(rows: int = BATCH) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def train(
    net: nn.Module, offload: ActivationOffload | None, rows: int = BATCH, *, settle: bool = False
) -> list[torch.Tensor]:
    """The gradients of one step. With ``settle`` the backward pass begins when all is written, or else what it needs
    first may be taken back."""
    net.zero_grad()
    if offload is None:
        net(batch(rows)).square().sum().backward()
    else:
        with offload.step():
            loss = net(batch(rows)).square().sum()
        if settle:
            offload._engine.settle()
        loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how much memory is free, at each look."""

    def set_free(nbytes: int) -> None:
        monkeypatch.setattr(limits, "_free_memory", lambda device: nbytes)

    monkeypatch.setattr(limits, "_LOOK_AGAIN_SECONDS", -1.0)
    return set_free


def free_for(count: int, reserved: int) -> int:
    """How much memory is free where ``count`` activations may stay, beside ``reserved`` bytes for transfers."""
    return int((count + limits.OPERATION_TENSORS) * EACH / limits._SHARE_OF_FREE_MEMORY) + reserved + 16


def test_a_run_that_fits_is_left_alone(make: Any, free: Any) -> None:
    net, offload = Net(), make(schedule="auto")
    expected = train(net, None)
    free(1 << 40)
    for _ in range(3):
        assert same(train(net, offload), expected)
    found = offload.statistics()
    assert not found.offloaded
    assert found.everything_fits
    assert offload.memory_usage()["reserved_on_ssd"] == 0
    assert "which fit into memory" in found.in_words(offload.config)
    assert "all fit into" in str(offload.plan())
    assert re.search(r"\ntwice the batch, planned alike: .* a step, at most .*B in memory", str(offload.plan()))


def test_the_first_pass_keeps_what_has_room(make: Any) -> None:
    offload = make(schedule=2 * EACH + 10)
    net = Net()
    expected = train(net, None)
    assert same(train(net, offload), expected)
    assert offload.statistics().kept["fits"] == 2 * EACH
    assert offload.statistics().offloaded > 0


@pytest.mark.parametrize("stay", [0, 2])
def test_the_peaks_of_memory_are_counted_with_and_without_offloading(make: Any, stay: int) -> None:
    offload = make(schedule=stay * EACH, staging_bytes=EACH, prefetch_bytes=EACH)
    net = Net()
    for layer in net.layers:
        layer.register_forward_hook(lambda *_: offload._engine.settle())  # each activation is written before the next
    for _ in range(3):
        train(net, offload, settle=True)
    found = offload.statistics()
    assert found.peak_saved_bytes == SAVED * EACH
    assert stay * EACH < found.peak_memory_bytes <= (stay + 3) * EACH, "one goes, one is needed, one is read ahead"
    assert f"of memory in place of {human_size(SAVED * EACH)}, at " in str(found)
    offload.settle()
    train(net, None)
    assert offload._engine.swapper(torch.device("cpu")).saved_bytes() == (0, 0)
    assert offload._engine.planner.kept_bytes() == 0


def test_without_need_both_peaks_are_the_same(make: Any) -> None:
    offload = make(schedule=1 << 30)
    for _ in range(2):
        train(Net(), offload)
    assert offload.statistics().peak_saved_bytes == offload.statistics().peak_memory_bytes == SAVED * EACH


@pytest.mark.parametrize(
    ("schedule", "available", "holes", "returns"),
    [
        ("all", 1 << 50, 0, True),
        (2 * EACH, 1 << 50, 0, False),
        (2 * EACH, 0, 0, True),
        (2 * EACH, 1 << 50, 1 << 40, True),
        (0.3, 1 << 50, 1 << 40, False),
        ("auto", 1 << 50, 1 << 40, False),
        ("auto", 0, 0, True),
    ],
)
def test_freed_memory_is_returned_where_nothing_stays_or_memory_is_short_or_there_is_more_than_has_room(
    make: Any, free: Any, monkeypatch: pytest.MonkeyPatch, schedule: Any, available: int, holes: int, returns: bool
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(limits, "free_heap_bytes", lambda: holes)
    monkeypatch.setattr(host_memory, "_malloc_trim", lambda: trimmed.append)
    monkeypatch.setattr(host_memory, "available_memory", lambda: available)
    monkeypatch.setattr(swapper, "_MOST_IDLE_BYTES", 2 * EACH)
    monkeypatch.setattr(swapper, "_LEAST_USE", EACH)
    free(3 * EACH)  # of which the two budgets take two
    offload, net = make(schedule=schedule, staging_bytes=EACH, prefetch_bytes=EACH), Net()
    for _ in range(3):
        train(net, offload, settle=True)
    assert offload.statistics().offloaded
    offload._engine.swapper(torch.device("cpu"))._jobs.shut_down()  # jobs that have begun have ended
    assert bool(trimmed) == returns
    trimmed.clear()
    offload.close()
    assert len(trimmed) == 1


def test_freed_memory_is_returned_in_passes_that_are_not_examined(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(host_memory, "_malloc_trim", lambda: trimmed.append)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    monkeypatch.setattr(swapper, "_LEAST_USE", EACH)
    offload, net = make(schedule=1 << 30), Net()
    for _ in range(EXAMINED):
        train(net, offload)
    trimmed.clear()
    with offload.step():
        loss = net(batch()).square().sum()
    assert offload.statistics().kept["unexamined"] >= SAVED * EACH
    forward = len(trimmed)
    loss.backward()
    assert len(trimmed) > forward > 0


def test_what_stays_is_freed_with_its_graph(make: Any) -> None:
    """At once, whoever holds which lock: the next step needs the memory."""
    offload = make(schedule=1 << 40)
    found: list[StorageWeakRef] = []

    def keep(tensor: torch.Tensor) -> None:
        found.append(StorageWeakRef(tensor.untyped_storage()))

    net = Net()
    for layer in net.layers[1:]:
        layer.register_forward_hook(lambda layer, inputs, output: keep(inputs[0]))
    for end in ("is dropped", "is used", "outlives the offload"):
        found.clear()
        with offload.step():
            loss = net(batch()).square().sum()
        with offload._engine.swapper(torch.device("cpu"))._lock:
            assert not any(one.expired() for one in found)
            if end == "is dropped":
                del loss
                assert all(one.expired() for one in found)
        if end == "is used":
            loss.backward()
        if end == "outlives the offload":
            offload.close()
            del loss
        assert all(one.expired() for one in found)
    assert len(found) == LAYERS - 1


def test_a_tensor_that_was_refused_is_not_in_the_plan(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved after it in the same pass is planned by its own times."""

    def refuse(self: swapper.Swapper, saved: Any) -> None:
        raise OffloadError("an activation could not be written")

    offload = make(schedule=0, min_bytes=1)
    step = hooks.StepHooks(offload._engine)
    with monkeypatch.context() as patched:
        patched.setattr(swapper.Swapper, "admit", refuse)
        with pytest.raises(OffloadError, match="could not be written"):
            step.pack(torch.ones(3000))
    assert step.unpack(step.pack(torch.ones(5000))).sum() == 5000
    offload._engine.planner.plan_ended()
    (planned,) = offload.plan().tensors
    assert planned.shape == (5000,)
    assert math.isfinite(planned.idle_seconds)


def test_nothing_more_stays_once_memory_gets_short(make: Any, free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a pass, too: another process has taken it."""
    monkeypatch.setattr(swapper, "_LEAST_USE", 1)
    monkeypatch.setattr(swapper, "bytes_until_short", lambda reserve: 0)
    monkeypatch.setattr(limits, "_LOOK_AGAIN_SECONDS", math.inf)
    offload, net = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=EACH), Net()
    expected = train(net, None)
    train(net, offload)  # which is not examined
    offload._engine.planner.look_again()
    free(free_for(SAVED, 3 * EACH))
    net.layers[3].register_forward_hook(lambda *_: free(0))
    assert same(train(net, offload), expected)
    found = offload.statistics()
    assert found.kept["fits"] == 4 * EACH, "the batch, and what the first three layers give"
    assert found.offloaded_bytes == (SAVED - 4) * EACH


def test_holes_have_room_as_long_as_the_pass_may_take_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is in use beside saved tensors takes nothing of their room; gradients have a room of their own."""
    monkeypatch.setattr(limits, "_USUAL_HOLES", EACH)
    in_use, holes = [100 * EACH], 0
    monkeypatch.setattr(limits, "bytes_in_use", lambda: in_use[0])
    monkeypatch.setattr(limits, "free_heap_bytes", lambda: holes)
    config = OffloadConfig(schedule=10 * EACH, staging_bytes=3 * EACH, prefetch_bytes=2 * EACH)
    deciding = planner.Planner(config, lambda: None, lambda: 20 * EACH, lambda: EACH)
    assert deciding.room_for_holes() > 1 << 60, "no pass has begun"
    kept = deciding.keep(1, 4 * EACH, torch.device("cpu"))  # of an earlier graph, as is what is in transit
    deciding.begin_pass()
    operation = limits.OPERATION_TENSORS * 4 * EACH
    assert deciding.room_for_holes() == (10 + 3 + 2 + 20 - 4 - 1) * EACH + operation
    in_use[0] += 6 * EACH  # saved tensors, or gradients
    assert deciding.room_for_holes() == (30 - 6) * EACH + operation
    in_use[0] += 100 * EACH  # which nobody knows of
    assert deciding.room_for_holes() == operation
    holes = operation + EACH
    assert deciding.room_for_holes() == -EACH
    monkeypatch.setattr(limits, "_USUAL_HOLES", holes + EACH)
    assert deciding.room_for_holes() == EACH
    assert kept is not None


@pytest.mark.parametrize("in_transit", [0, 2 * EACH])
def test_what_transfers_take_of_their_budgets_is_not_kept_free_twice(free: Any, in_transit: int) -> None:
    free(100 * EACH - in_transit)
    config = OffloadConfig(staging_bytes=EACH, prefetch_bytes=EACH)
    deciding = planner.Planner(config, lambda: None, lambda: 0, lambda: in_transit)
    assert deciding.memory.limit(torch.device("cpu")) == int(97 * EACH * limits._SHARE_OF_FREE_MEMORY)


def test_what_stays_within_dram_bytes_is_not_kept_free_twice(make: Any, free: Any) -> None:
    offload = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=EACH, dram_bytes=100 * EACH)
    net, memory, cpu = Net(), offload._engine.planner.memory, torch.device("cpu")
    free(200 * EACH)
    before = memory.limit(cpu)
    assert before == int(97 * EACH * limits._SHARE_OF_FREE_MEMORY)
    memory.look_again()
    free(0)
    with offload.step():
        loss = net(batch()).square().sum()
    in_dram = offload.memory_usage()["in_dram"]
    assert in_dram >= EACH
    free(200 * EACH - in_dram)
    memory.look_again()
    assert memory.limit(cpu) == before - limits.OPERATION_TENSORS * EACH
    loss.backward()


@pytest.mark.parametrize("schedule", [2 * EACH, 0, 0.5, 0.0, 1.0, "auto", "all"])
def test_gradients_are_the_same_by_every_schedule(make: Any, free: Any, schedule: Any) -> None:
    net = Net()
    offload = make(schedule=schedule, staging_bytes=EACH, prefetch_bytes=EACH)
    offload.attach(net)
    expected = train(net, None)
    free(free_for(2, 3 * EACH))
    for _ in range(5):
        assert same(train(net, offload), expected)


def test_the_tensors_that_are_saved_first_leave(make: Any) -> None:
    """Where no selection is faster than another one: on a disk that takes no time."""
    offload = make(schedule=2 * EACH)
    offload._engine.planner._rates = lambda: TransferRates(math.inf, math.inf, 1 << 30, 1 << 30)
    net = Net()
    train(net, offload)
    assert offload.plan() is None  # a pass is planned when the next one begins
    for _ in range(4):
        train(net, offload)
    found = offload.plan()
    assert [one.leaves for one in found.tensors] == [True] * (SAVED - 2) + [False, False]
    assert (found.kept_bytes, found.offloaded_bytes) == (2 * EACH, (SAVED - 2) * EACH)
    assert found.limit_bytes == 2 * EACH
    idle = [one.idle_seconds for one in found.tensors]
    assert sorted(idle, reverse=True) == idle
    assert [one.made_by for one in found.tensors] == ["", *["SigmoidBackward0"] * LAYERS]
    assert all(one.shape == (BATCH, WIDTH) for one in found.tensors)
    text = str(found)
    assert re.search(r"320 KiB leave memory, which is predicted to make a step .* % longer", text)
    assert "256 × 64" in text


def test_what_stays_never_exceeds_the_limit(make: Any) -> None:
    """Also if several graphs are alive at once, and some never see a backward pass."""
    offload = make(schedule=3 * EACH)
    net = Net()
    expected = train(net, None)
    graphs = []
    for _ in range(3):
        with offload.step():
            graphs.append(net(batch()).square().sum())
    del graphs[1]
    gc.collect()
    for graph in graphs:
        net.zero_grad()
        graph.backward()
        assert same([p.grad for p in net.parameters() if p.grad is not None], expected)
    for _ in range(3):
        assert same(train(net, offload), expected)
    assert 0 < offload._engine.planner.memory.peak_bytes <= 3 * EACH
    graphs.clear()
    del graph
    assert offload._engine.planner.kept_bytes() == 0


def test_a_share_of_what_is_saved(make: Any) -> None:
    offload = make(schedule=0.5)
    net = Net()
    for _ in range(4):
        train(net, offload)
    found = offload.plan()
    assert (found.kept_bytes, found.offloaded_bytes) == (SAVED // 2 * EACH, (SAVED - SAVED // 2) * EACH)


def test_a_share_that_is_not_free(make: Any, free: Any) -> None:
    """What is free counts, too: then the plan says which tensors leave because of that."""
    free(free_for(3, 1))
    offload = make(schedule=0.9, staging_bytes=1, prefetch_bytes=0)
    net = Net()
    for _ in range(4):
        train(net, offload)
    found = offload.plan()
    assert found.kept_bytes == 3 * EACH
    assert found.limit_bytes < 4 * EACH


def record_of(planner: planner.Planner, device: str, *, others_keep_first: bool = False) -> None:
    """Have a pass on a device recorded: three tensors of 100 bytes, one of which others may keep in memory."""
    record = planner.begin_pass()
    for mark in range(3):
        noted = SavedTensor(mark, 100, torch.device(device), torch.float32, torch.Size((25,)), "", float(mark))
        record.tensors.append(record.nothing(0.0) if others_keep_first and not mark else noted)
        record.tensors[-1].needed_at = 10.0 - mark


def test_tensors_that_others_keep_ask_for_no_memory_of_the_host() -> None:
    """Others begin to keep a GPU's tensor at some later pass, between two plans: what is recorded of it is on no
    device."""
    deciding = planner.Planner(OffloadConfig(schedule=250), lambda: None, lambda: 0)
    for number in range(8):
        record_of(deciding, "cuda:0", others_keep_first=number > 4)
    found = deciding.latest()
    assert found is not None
    assert found.limits == {torch.device("cuda:0"): 250}


def test_the_same_sizes_on_another_device_are_another_form(make: Any) -> None:
    forward = ForwardPass(make()._engine.swapper(torch.device("cpu")), PrefetchSchedules(), PassRecord())
    other = ForwardPass(make()._engine.swapper(torch.device("cpu")), PrefetchSchedules(), PassRecord())
    assert forward.mark(100, torch.float32, torch.device("cpu")) != other.mark(100, torch.float32, torch.device("cuda"))


def test_other_shapes_are_planned_anew(make: Any) -> None:
    offload = make(schedule=4 * EACH)
    net = Net()
    for rows in (BATCH, 2 * BATCH, BATCH // 2, BATCH, 2 * BATCH):
        expected = train(net, None, rows)
        for _ in range(2):
            assert same(train(net, offload, rows), expected)
        train(net, offload, rows)
        each = rows * WIDTH * 4
        assert offload.plan().kept_bytes == min(4 * EACH // each, SAVED) * each


def test_graphs_that_change_in_every_step(make: Any) -> None:
    offload = make(schedule=2 * EACH)
    random = torch.Generator().manual_seed(2)
    for _ in range(40):
        net = Net(int(torch.randint(1, 9, (), generator=random)))
        rows = int(torch.randint(1, BATCH, (), generator=random))
        assert same(train(net, offload, rows), train(net, None, rows))
    assert len(offload._engine.planner._forms) <= planner._MOST_FORMS
    assert offload._engine.planner.memory.peak_bytes <= 2 * EACH


def test_less_memory_than_before(make: Any, free: Any) -> None:
    """Another process takes memory: what stays is planned anew, and again when the memory is there again."""
    offload = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=0)
    net = Net()
    kept = []
    for room in (100, 100, 3, 3, 3, 100, 100, 100):
        free(free_for(room, EACH))
        train(net, offload)
        kept.append(offload.plan().kept_bytes // EACH if offload.plan() else None)
    assert kept == [None, None, 3, 3, 3, SAVED, SAVED, SAVED], "the first pass is not examined"


class Shallow(Net):
    """Passes end after the first layers if that is wanted."""

    depth = LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.depth]:  # type: ignore[union-attr]  # a ModuleList
            x = layer(x).sigmoid()
        return x


def test_passes_that_begin_alike_keep_no_more_than_their_shares(make: Any, free: Any) -> None:
    free(1 << 40)
    offload, net = make(schedule=0.5), Shallow()
    kept: dict[int, list[int]] = {3: [], LAYERS: []}
    for number in range(12):
        net.depth = 3 if number % 2 else LAYERS
        before = offload.statistics().kept.get("fits", 0)
        train(net, offload, settle=True)
        kept[net.depth].append((offload.statistics().kept.get("fits", 0) - before) // EACH)
    for depth, found in kept.items():
        assert max(found[1:]) <= (depth + 1) // 2
    assert max(kept[LAYERS][1:]) > 0


def test_a_plan_for_less_memory_does_not_count_for_passes_that_begin_alike(make: Any, free: Any) -> None:
    offload, net = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=0), Shallow()
    free(free_for(2, EACH))
    for depth in (LAYERS, LAYERS, 3):
        net.depth = depth
        train(net, offload, settle=True)
    before = offload.statistics().offloaded
    assert before > 0
    free(1 << 40)
    for _ in range(2):
        train(net, offload, settle=True)
    assert offload.statistics().offloaded == before


def test_what_has_no_bytes_of_its_own_is_not_planned() -> None:
    record = PassRecord()
    for mark in (1, 2):
        record.form = mark
        record.tensors.append(
            SavedTensor(mark, 100, torch.device("cpu"), torch.uint8, torch.Size([100]), "", mark, needed_at=9 - mark)
        )
        record.tensors.append(record.nothing(mark + 0.5))
    found = planner.Planner(OffloadConfig(schedule=100), lambda: None, lambda: 0).planned(record)
    assert len(found.plan.out) == 1
    assert found.leaving() < {1, 2}
    assert len(planner.Planner(OffloadConfig(schedule="all"), lambda: None, lambda: 0).planned(record).plan.out) == 2


def test_what_stays_in_host_memory_for_the_disk_takes_room_there(make: Any, free: Any) -> None:
    free(100 * EACH)
    options = {"schedule": "auto", "staging_bytes": EACH, "prefetch_bytes": EACH}
    found = [make(**options, dram_bytes=n)._engine.planner.memory.limit(torch.device("cpu")) for n in (None, 5 * EACH)]
    assert found[0] - found[1] == 5 * EACH * limits._SHARE_OF_FREE_MEMORY


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 30 + 20 - 5), (0.4, 40 - 5)])
def test_the_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, fraction: float, free: int) -> None:
    """A GPU of 100 bytes: torch has reserved 20, and uses 5 of these; other processes have 50."""
    told = {"mem_get_info": (30, 100), "memory_reserved": 20, "memory_allocated": 5}
    for name, value in (told | {"get_per_process_memory_fraction": fraction}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert limits._free_memory(torch.device("cuda")) == free


def test_a_sample_for_which_there_is_no_memory(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hooks, "sampled_ratio", full)
    net = Net()
    assert same(train(net, make(schedule=2 * EACH, codecs=("csr",))), train(net, None))


def test_gradients_that_do_not_exist_yet_are_counted(make: Any, free: Any) -> None:
    offload = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=EACH)
    net = Net()
    offload.attach(net)
    nbytes = sum(parameter.nbytes for parameter in net.parameters())
    assert offload._engine._unallocated_gradients() == nbytes
    net.layers[0].weight.grad = torch.zeros(WIDTH, WIDTH)
    net.layers[1].weight.requires_grad_(False)
    assert offload._engine._unallocated_gradients() == nbytes - 2 * WIDTH * WIDTH * 4


def test_tensors_that_are_saved_twice_count_once(make: Any) -> None:
    """A tensor and a view of it share memory, and what leaves and what stays is the same in each pass."""
    offload = make(schedule=3 * EACH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def run() -> torch.Tensor:
        weight.grad = None
        with offload.step():
            x = batch().requires_grad_()
            for _ in range(LAYERS):
                x = (x.mm(weight).sin() * 0.1).exp()
                x = x.t().exp().t() * x
            loss = x.sum()
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    expected = run().clone()
    for _ in range(4):
        assert torch.equal(run(), expected)
    assert offload._engine.planner.memory.peak_bytes <= 3 * EACH
    assert offload.plan().kept_bytes <= 3 * EACH


def test_in_place_changes_of_what_stays_are_found(make: Any) -> None:
    offload = make(schedule=1 << 40)
    x = torch.rand(1000, requires_grad=True)
    for _ in range(2):
        with offload.step():
            y = x.exp()
            loss = y.sin().sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert not offload.statistics().offloaded


def test_passes_that_fit_as_before_are_not_examined(make: Any) -> None:
    """Nor does that hide in-place changes, or keep a pass from being examined now and then."""
    net = Net()
    offload = make(schedule=1 << 30)
    for _ in range(EXAMINED):
        train(net, offload)
    assert "unexamined" not in offload.statistics().kept
    packed = offload.statistics().packed
    assert same(train(net, offload), train(net, None))
    assert offload.statistics().kept["unexamined"] >= SAVED * EACH
    assert offload.statistics().packed == packed + packed // EXAMINED

    with offload.step():
        changed = batch().requires_grad_().sigmoid()
        loss = changed.square().sum()
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    examined = []
    for _ in range(3 * planner._EXAMINED_EVERY):
        before = offload.statistics().kept["fits"]
        train(net, offload)
        examined.append(offload.statistics().kept["fits"] > before)
    assert examined.count(True) == 3


def test_the_first_pass_is_not_examined_while_memory_is_ample(make: Any, free: Any) -> None:
    """The second one is, so that there is a plan to show. Then one in 16."""
    free(1 << 40)
    net, offload = Net(), make(schedule="auto")
    examined, saved = [], 0
    for _ in range(2 * planner._EXAMINED_EVERY):
        before = offload.statistics().kept
        assert same(train(net, offload), train(net, None))
        found = offload.statistics().kept
        examined.append(found.get("fits", 0) > before.get("fits", 0))
        saved = max(saved, found.get("unexamined", 0) - before.get("unexamined", 0))
    assert [number for number, was in enumerate(examined) if was] == [1, 1 + planner._EXAMINED_EVERY]
    assert offload.plan() is not None
    assert SAVED * EACH <= offload.statistics().peak_saved_bytes <= saved, "not all that may be saved"


def test_the_first_pass_is_examined_where_it_takes_half_of_the_memory(make: Any, free: Any) -> None:
    """What does not fit leaves. The next pass is planned as a whole."""
    fits = 4
    free(free_for(fits, 2 * EACH))
    net, offload = Net(), make(schedule="auto", staging_bytes=EACH, prefetch_bytes=EACH)
    kept = offload._engine.planner.kept_bytes
    with offload.step():
        loss = net(batch()).square().sum()
    assert offload.statistics().offloaded >= SAVED - fits
    assert kept() <= fits * EACH
    loss.backward()
    del loss
    assert kept() == 0
    for _ in range(2):
        assert same(train(net, offload), train(net, None))
    assert offload.plan() is not None
    assert offload.plan().kept_bytes <= fits * EACH


@pytest.mark.parametrize(("tensors", "blind"), [(17, 2), (15, 0)])
def test_a_tensor_that_operations_may_need_several_of_is_examined_in_the_first_pass(
    make: Any, free: Any, tensors: int, blind: int
) -> None:
    """One takes an eighth of what fits at most."""
    free(int(tensors * EACH / 2 / limits._SHARE_OF_FREE_MEMORY) + 3 * EACH)
    offload = make(schedule="auto", staging_bytes=EACH, prefetch_bytes=EACH)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with offload.step():
        loss = x.exp().exp().sum()
    assert offload.statistics().kept.get("unexamined", 0) == blind * EACH
    loss.backward()


def test_the_first_pass_is_examined_from_the_first_tensor_on_another_device_on(free: Any) -> None:
    free(1 << 40)
    deciding = planner.Planner(OffloadConfig(), lambda: None, lambda: 0)
    found = deciding.begin_unexamined(torch.device("cpu"))
    assert found is not None
    assert found.takes(1 << 20, torch.device("cpu"))
    assert found.takes(8, torch.device("cuda:0"))
    assert not found.takes(1 << 20, torch.device("cuda:0"))


def test_the_first_pass_is_examined_where_stacks_of_threads_take_of_the_memory(
    make: Any, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(1 << 40)
    monkeypatch.setattr(planner, "is_address_space_limited", lambda: True)
    offload = make(schedule="auto")
    train(Net(), offload)
    assert "unexamined" not in offload.statistics().kept


@pytest.mark.parametrize("weights", [0, 512], ids=["", "weights that outweigh activations"])
def test_a_pass_that_saves_more_than_before_is_examined_from_there_on(make: Any, weights: int) -> None:
    """A larger batch has no room in what passes of the smaller one have left, whatever else they have saved."""
    net, limit = Net(), int(3 * SAVED * EACH)
    offload = make(schedule=limit)
    heavy = nn.Linear(WIDTH, weights, bias=False) if weights else None

    def run(rows: int) -> int:
        with offload.step():
            out = net(batch(rows)) if heavy is None else heavy(net(batch(rows))[:1])
            loss = out.square().sum()
        resident = offload._engine.planner.kept_bytes()
        loss.backward()
        return resident

    for _ in range(EXAMINED + 1):
        assert run(BATCH) <= limit
    before = offload.statistics()
    assert before.kept["unexamined"] > 0
    assert not before.offloaded
    assert run(4 * BATCH) <= limit
    found = offload.statistics()
    assert found.offloaded_bytes >= 4 * SAVED * EACH - limit
    assert same(train(net, offload, 4 * BATCH), train(net, None, 4 * BATCH))


def test_passes_of_several_forms_stay_within_the_limit(make: Any) -> None:
    """What a form with much weight may save is not what a form without any may leave in memory."""
    heavy = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])

    def light(rows: int) -> torch.Tensor:
        x = torch.randn(rows, 256, requires_grad=True)
        for _ in range(6):
            x = x.sigmoid()
        return x

    limit = 40 << 10
    offload = make(schedule=limit)
    for number in range(30):
        with offload.step():
            loss = (heavy(torch.randn(4, 256)) if number < 5 else light(4)).square().sum()
        loss.backward()
    with offload.step():
        loss = light(64).square().sum()
    assert offload._engine.planner.kept_bytes() <= limit
    assert offload.statistics().offloaded_bytes >= 6 * 64 * 256 * 4 - limit
    loss.backward()


def test_graphs_of_passes_that_are_not_examined_count(make: Any) -> None:
    """There is room for three graphs. While they live, the next pass finds none."""
    net = Net()
    offload = make(schedule=int(3.9 * SAVED * EACH))
    for _ in range(EXAMINED):
        train(net, offload)
    losses = []
    for _ in range(5):
        with offload.step():
            losses.append(net(batch()).square().sum())
    assert "unexamined" in offload.statistics().kept
    assert offload.statistics().offloaded_bytes >= (5 - 3.9) * SAVED * EACH
    assert offload.statistics().peak_saved_bytes >= 5 * SAVED * EACH
    net.zero_grad()
    for loss in losses:
        loss.backward()
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    for _ in losses:
        net(batch()).square().sum().backward()
    assert same(found, [parameter.grad for parameter in net.parameters() if parameter.grad is not None])


def test_passes_that_are_dropped_do_not_lengthen_the_next_one(make: Any) -> None:
    """Many graphs of a step go before the one that is trained: what they have saved is not what that one saves."""
    offload = make(schedule=1 << 30)
    net = Net()
    for _ in range(EXAMINED):
        with offload.step():
            for _ in range(100):
                net(batch())
            loss = net(batch()).square().sum()
        loss.backward()
    offload._engine.planner.plan_ended()
    form = offload._engine.planner.latest()
    assert form is not None
    assert form.record.saved_nbytes <= 100 * SAVED * EACH


def test_an_interrupt_while_a_pass_begins_holds_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    offload = make(schedule=1 << 30)
    for _ in range(EXAMINED):
        train(net, offload)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(limits, "KeptBytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(net, offload)
    assert offload._engine.planner.kept_bytes() == 0
    assert same(train(net, offload), train(net, None))


def test_steps_in_several_threads(make: Any) -> None:
    offload = make(schedule=3 * EACH)
    expected = train(Net(), None)
    found: list[bool] = []

    def run(net: Net) -> None:
        found.extend([same(train(net, offload), expected) for _ in range(5)])

    threads = [threading.Thread(target=run, args=(Net(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15
    assert offload._engine.planner.memory.peak_bytes <= 3 * EACH


def test_ratios_of_codecs_are_planned_with(make: Any) -> None:
    """Sampled before the first plan, and then as they were written; also of what stays."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    expected = train(net, None)
    offload = make(schedule=2 * EACH, codecs=("csr",))
    for _ in range(4):
        assert same(train(net, offload, settle=True), expected)
    planned = offload._engine.planner.latest()
    ratios = [one.ratio for one in planned.profile.tensors if one.nbytes]
    assert ratios[0] == 1.0  # the batch, of which no element is zero
    assert all(1.3 < ratio < 4 for ratio in ratios[1:]), ratios
    encoded = offload.statistics().encoded["csr"]
    assert encoded.encoded_nbytes < encoded.nbytes


@pytest.mark.parametrize("codecs", [(), ("csr",)])
def test_steps_are_planned_as_they_would_be_without_the_transfers_in_them(make: Any, codecs: tuple[str, ...]) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    offload = make(schedule="all", codecs=codecs)
    for _ in range(4):
        train(net, offload, settle=True)
    engine, planned = offload._engine, offload._engine.planner.latest()
    written = offload.statistics().written_bytes / 4
    assert planned.record.moved_nbytes == written
    measured, alone = planned.record.profile(), planned.profile
    assert alone.forward_seconds < measured.forward_seconds
    assert alone.backward_seconds < measured.backward_seconds
    assert 0 < engine._counters.seconds["cpu"] < time.process_time()


# --- dry runs


def test_a_dry_run_says_what_training_will_take(make: Any) -> None:
    net = Net()
    offload = make(schedule=2 * EACH, drive_tbw=600.0)
    offload.attach(net)
    before = set(threading.enumerate())
    found = offload.dry_run(lambda: train(net, None))
    assert found.plan.kept_bytes == 2 * EACH
    assert found.plan.offloaded_bytes == (SAVED - 2) * EACH
    assert found.write_bandwidth > 0 < found.read_bandwidth
    assert 0 < found.drive_days < 1e9
    assert found.plan.slowdown > 1
    assert "are written in a day of training: the drives last" in str(found)
    assert not set(threading.enumerate()) - before
    assert offload.plan() is None  # nothing of it stays
    assert not offload.statistics().packed
    assert same(train(net, offload), train(net, None))


def test_a_dry_run_knows_what_codecs_save(make: Any) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    found = make(schedule=0, codecs=("csr",)).dry_run(lambda: train(net, None)).plan
    assert found.prediction.moved_bytes < 0.8 * found.offloaded_bytes


def test_a_dry_run_of_what_fits(make: Any) -> None:
    net = Net()
    found = make(schedule=1 << 40).dry_run(lambda: train(net, None))
    assert not found.plan.offloaded_bytes
    assert found.plan.slowdown == 1
    assert "a day" not in str(found)


def test_an_estimate_says_what_it_assumes(make: Any) -> None:
    offload, net = make(schedule=1 << 40), Net()
    with pytest.raises(OffloadError, match="nothing was measured"):
        offload.estimate()
    train(net, offload)
    assert "nothing has moved so far: 954 MiB/s are assumed" in str(offload.estimate(OffloadConfig(schedule=0)))
    for _ in range(20):
        offload.estimate()
    assert not offload._engine.planner._passes


def test_a_dry_run_that_measures_nothing(make: Any) -> None:
    with pytest.raises(OffloadError, match="nothing was measured"):
        make().dry_run(lambda: None)
    with torch.no_grad(), pytest.raises(OffloadError, match="and its backward pass"):
        make().dry_run(lambda: Net()(batch()))
    offload = make()
    with pytest.raises(OffloadError, match=r"in a dry run, without a step\(\) of their own"):
        offload.dry_run(lambda: train(Net(), offload))


# --- interrupts


@pytest.mark.parametrize("number", range(3))
def test_bytes_that_an_interrupt_has_counted_are_forgotten(
    make: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Ctrl-C between the count of bytes that stay, and the handle that gives them back."""
    offload, net = make(schedule=3 * EACH), Net()
    expected = train(net, None)
    made: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        made.append(1)
        if len(made) > number:
            raise KeyboardInterrupt
        return handle(*arguments)

    handle = limits.KeptBytes
    with monkeypatch.context() as patched:
        patched.setattr(limits, "KeptBytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(net, offload)
    before = offload.statistics().kept["fits"] if number else 0
    for _ in range(3):
        assert same(train(net, offload), expected)
    assert offload.statistics().kept["fits"] - before == 3 * 3 * EACH


# --- memory that is given in all


@pytest.mark.parametrize("by_host", [False, True], ids=["", "staged"])
@pytest.mark.parametrize("share", SHARES_OF_TRANSFERS)
def test_memory_is_divided_by_plan(
    make: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, share: int, by_host: bool
) -> None:
    """Once the second pass is known, for good; transfers go by it."""
    if by_host:
        request.getfixturevalue("staged")
    memory, tried = 64 * EACH, []

    def predict(profile: Any, out: Any, rates: TransferRates) -> scheduler.Prediction:
        moving = 2 * rates.staging_bytes
        assert rates.prefetch_bytes == moving // 4
        tried.append(moving)
        found = scheduler.predict(profile, out, rates)
        return dataclasses.replace(found, step_seconds=1.0 if moving == memory // share else 2.0)

    monkeypatch.setattr(planner, "predict", predict)
    offload, net = make(schedule="auto", memory_bytes=memory), Net(80)
    expected, budgets = train(net, None), []
    for _ in range(6):
        assert same(train(net, offload), expected)
        found = offload._engine.swapper(torch.device("cpu"))
        budgets.append(
            (found._pending.limit, found._tiers.staging_nbytes, found._loaded.limit, found._loaded.host.budget)
        )
    parts = {one: memory // one for one in SHARES_OF_TRANSFERS}
    assert tried == [parts[4], *parts.values(), parts[share]], "the forms of passes 1, 2 and 4"
    at_first, then = ((part // 2, part // 2, part // 4, part // 4) for part in (parts[4], parts[share]))
    assert budgets == [at_first] * 2 + [then] * 4
    plan_of_it = offload.plan()
    assert plan_of_it is not None
    assert (plan_of_it.limit_bytes, plan_of_it.transfer_bytes) == (memory - parts[share], parts[share])
    assert f"may stay, beside {human_size(parts[share])} for transfers" in str(plan_of_it)


@pytest.mark.parametrize("recompute", [False, "auto"])
def test_memory_in_all_is_not_exceeded(make: Any, recompute: Any) -> None:
    offload, net = make(schedule="auto", memory_bytes=64 * EACH, recompute=recompute), Net(100)
    offload.attach(net)
    expected = train(net, None)
    for _ in range(6):
        assert same(train(net, offload), expected)
    found = offload.statistics()
    assert found.peak_saved_bytes == 101 * EACH
    assert found.peak_memory_bytes <= 64 * EACH


def test_a_division_in_which_large_tensors_take_no_more_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much longer a step takes."""
    record, cpu = PassRecord(form=1), torch.device("cpu")
    for mark in range(12):
        tensor = SavedTensor(
            mark, 10_000, cpu, torch.uint8, torch.Size([10_000]), "", float(mark), needed_at=20.0 - mark
        )
        record.tensors.append(tensor)
    seen: dict[int, float] = {}

    def predict(profile: Any, out: Any, rates: TransferRates) -> scheduler.Prediction:
        found = scheduler.predict(profile, out, rates)
        seconds = seen[rates.staging_bytes] = 1.0 if rates.staging_bytes == 80_000 // 16 // 2 else 3.0
        return dataclasses.replace(found, step_seconds=seconds)

    monkeypatch.setattr(planner, "predict", predict)
    rates = TransferRates(100.0, 100.0, 0, 0)
    found = planner.Planner(OffloadConfig(memory_bytes=80_000), lambda: rates, lambda: 0).planned(record)
    assert seen == {10_000: 3.0, 2_500: 1.0, 20_000: 3.0}
    assert found.limits == {cpu: 40_000}, "10,000 may be read ahead"


def test_the_first_form_of_which_something_leaves_decides(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that fits anyway; after one pass, if others before it have begun alike."""

    def predict(profile: Any, out: Any, rates: TransferRates) -> scheduler.Prediction:
        found = scheduler.predict(profile, out, rates)
        seconds = 1.0 if not out or rates.staging_bytes == 2 * EACH else 2.0
        return dataclasses.replace(found, step_seconds=seconds)

    monkeypatch.setattr(planner, "predict", predict)
    offload, small, large = make(schedule="auto", memory_bytes=64 * EACH), Net(), Net(80)
    budgets = []
    for net in (small, small, small, large, large, large):
        assert same(train(net, offload), train(net, None))
        budgets.append(offload._engine.planner.divided_budgets())
    assert budgets == [(8 * EACH, 4 * EACH)] * 4 + [(2 * EACH, EACH)] * 2


def test_transfers_get_more_when_earlier_passes_keep_less() -> None:
    cpu, config = torch.device("cpu"), OffloadConfig(memory_bytes=1600)
    deciding = planner.Planner(config, lambda: None, lambda: 0)
    kept = deciding.keep(1, 1100, cpu)
    assert kept is not None
    assert deciding.divided_budgets() == (200, 100)
    deciding.memory.config = config.divided(2)
    assert deciding.divided_budgets() is None
    del kept
    assert deciding.divided_budgets() == (400, 200)


@pytest.mark.usefixtures("staged")
def test_staging_blocks_for_tensors_that_fit_into_the_new_part_only(make: Any) -> None:
    """12 MiB each: an eighth of the memory has no room for one of them, a quarter has."""
    weights = [torch.full((1024,), 1.1, requires_grad=True) for _ in range(12)]

    def train(offload: ActivationOffload | None) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 3 << 20).view(-1, 1024)
        with nullcontext() if offload is None else offload.step():
            for weight in weights:
                x = (x * weight).tanh()
            loss = x.square().mean()
        return list(torch.autograd.grad(loss, weights))

    offload, expected = make(schedule="auto", memory_bytes="64MiB", when_full="raise"), train(None)
    for _ in range(5):
        assert same(train(offload), expected)
    assert offload._engine.planner.divided_budgets() == (16 << 20, 8 << 20)
    assert offload.memory_usage()["staged"] >= 16 << 20
    assert not offload.statistics().failed_writes


def test_an_estimate_is_made_within_the_budgets_of_its_configuration(make: Any) -> None:
    offload, net = make(schedule=2 * EACH, staging_bytes=EACH, prefetch_bytes=EACH), Net()
    train(net, offload, settle=True)
    config = OffloadConfig(schedule=2 * EACH, staging_bytes=5 * EACH, prefetch_bytes=4 * EACH, min_bytes=1)
    assert offload.estimate(config).plan.transfer_bytes == 13 * EACH
    assert offload.plan().transfer_bytes == 3 * EACH


def test_what_is_advised_where_memory_in_all_is_enough(make: Any) -> None:
    """Not a schedule, which is refused beside it."""
    offload, net = make(schedule="auto", memory_bytes=1 << 30), Net()
    for _ in range(3):
        train(net, offload)
    said = offload.statistics().in_words(offload.config)
    assert said.endswith("which fit into memory; less memory_bytes offloads some")


def test_a_dry_run_divides_memory(make: Any) -> None:
    net = Net()
    found = make(schedule="auto", memory_bytes=5 * EACH).dry_run(lambda: train(net, None)).plan
    assert found.limit_bytes + found.transfer_bytes == pytest.approx(5 * EACH, abs=4)
    assert 0 < found.offloaded_bytes < SAVED * EACH


@pytest.mark.parametrize(
    "given",
    [{"schedule": "all"}, {"schedule": 0}, {"schedule": 0.5}, {"staging_bytes": 5}, {"prefetch_bytes": 0}],
    ids=str,
)
def test_memory_in_all_is_divided_by_nobody_else(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(TypeError, match=f"^memory_bytes is divided by the plan: .*, found {name}={value!r}"):
        OffloadConfig(memory_bytes="1GiB", **given)


# --- what users give


@pytest.mark.parametrize("schedule", ["none", -1, 1, 1.5, -0.1, True, None, "1", "0.5"])
def test_schedules_that_mean_nothing(schedule: Any) -> None:
    with pytest.raises(ValueError, match="schedule is"):
        OffloadConfig(schedule=schedule)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"min_bytes": "1 lot"}, "min_bytes: expected a size such as 5GB or 2GiB, found '1 lot'"),
        ({"min_bytes": None}, "min_bytes is a whole number of bytes, or a text such as '2GiB', found None"),
        ({"prefetch_bytes": 1e8}, "prefetch_bytes is a whole number of bytes, or a text such as '2GiB', found 1"),
        ({"staging_bytes": True}, "staging_bytes is a whole number of bytes, or a text such as '2GiB', found True"),
        ({"staging_bytes": 0}, "staging_bytes is at least 1, found 0"),
        ({"memory_bytes": 63}, "memory_bytes is at least 64, found 63"),
        ({"dram_bytes": -1}, "dram_bytes is at least 0, found -1"),
        ({"drive_tbw": float("nan")}, "drive_tbw is at least 0, found nan"),
        ({"drive_days": None}, "drive_days is a number, found None"),
        ({"verify": "no"}, "verify is True or False, found 'no'"),
        ({"directories": None}, "directories is a tuple of strings, found None"),
        ({"codecs": None}, "codecs is a tuple of strings, found None"),
        ({"trace": 5}, "trace is the name of a file, found 5"),
        ({"trace": b"t.json"}, "trace is the name of a file, found b't.json'"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind(option: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        OffloadConfig(**option)


def test_options_of_kinds_that_will_do() -> None:
    config = OffloadConfig(min_bytes=np.int64(5), drive_tbw=600, dram_bytes=None, codecs=["csr"], trace=Path("t.json"))
    assert (config.min_bytes, config.codecs, config.trace) == (5, ("csr",), "t.json")


@pytest.mark.parametrize(("limits", "steps"), [({}, 3), ({"max_steps": 2}, 2), ({"min_steps": 5}, 6)], ids=str)
def test_a_dry_run_of_a_trainer(capsys: pytest.CaptureFixture[str], limits: dict[str, int], steps: int) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from offload.lightning_callbacks import WrittenFirst

    from fastensor_lightning import SSDActivationOffload

    callback = SSDActivationOffload(OffloadConfig(min_bytes=1, schedule=1 << 30), dry_run=True)
    trainer = Trainer(
        callbacks=[callback, WrittenFirst(callback)], max_epochs=5, logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        limit_train_batches=6, **limits,
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert callback.statistics is not None
    assert callback.statistics.steps == steps
    assert trainer.global_step == 0
    assert callback.estimate is not None
    assert not callback.estimate.plan.offloaded_bytes
    assert callback.estimate.write_bandwidth > 0
    assert capsys.readouterr().out.count("dry run of activation offload on rank 0") == 1


def test_a_trainer_is_told_that_everything_fits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line that says what was gained where something was: on a terminal, with nothing configured."""
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from fastensor_lightning import SSDActivationOffload

    callback = SSDActivationOffload(OffloadConfig(min_bytes=1, schedule=1 << 30))
    trainer = Trainer(
        callbacks=[callback], max_steps=2, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        trainer.fit(BoringModel())
    (line,) = (one for one in caplog.messages if "activation offload" in one)
    assert line.startswith("fastensor: activation offload: nothing has left memory: at most ")
    assert line.endswith(" of saved tensors at a time, which fit into memory; schedule='all' offloads them all")


def test_a_dry_run_says_its_estimate_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from fastensor_lightning import SSDActivationOffload

    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    for dry_run in (True, False):
        caplog.clear()
        callback = SSDActivationOffload(OffloadConfig(min_bytes=1, schedule=1 << 30), dry_run=dry_run)
        with caplog.at_level(logging.INFO):
            Trainer(
                callbacks=[callback], logger=False, accelerator="cpu", enable_progress_bar=False, max_epochs=1,
                enable_model_summary=False, limit_val_batches=0, enable_checkpointing=False,
            ).fit(BoringModel())  # fmt: skip
        assert any("activation offload:" in one for one in caplog.messages) != dry_run


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        (
            {"offloaded": 3, "peak_saved_bytes": 72 << 20, "peak_memory_bytes": 72 << 20},
            {"schedule": "all"},
            ". Up to 256 MiB of them may be on their way, which is all: staging_bytes='9MiB' and "
            "prefetch_bytes='9MiB' free more",
        ),
        (
            {"offloaded": 3, "peak_saved_bytes": 72 << 20, "peak_memory_bytes": 20 << 20},
            {"schedule": "all", "staging_bytes": 8 << 20, "prefetch_bytes": 8 << 20},
            "at 0 s a step; 0 B written",
        ),
        (
            {"offloaded": 3, "peak_saved_bytes": 72 << 20, "peak_memory_bytes": 72 << 20},
            {},
            "at 0 s a step; 0 B written",
        ),
        ({}, {}, "nothing has left memory: autograd has saved nothing in training steps. Do they run under no_grad?"),
        (
            {"packed": 7, "kept": {"small": 3000, "parameter": 5 << 20, "subclass": 8}},
            {"min_bytes": "1MiB"},
            "nothing has left memory of 7 saved tensors: 2.93 KiB are smaller than min_bytes (1 MiB), 5 MiB are "
            "parameters, 8 B are of subclasses of Tensor",
        ),
    ],
    ids=["budgets hide the gain", "gain", "some stay", "nothing saved", "others"],
)
def test_a_sentence_says_what_has_happened(counts: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    found = dataclasses.replace(ActivationOffload().statistics(), **counts)
    assert found.in_words(OffloadConfig(**options)).endswith(expected)
