"""Gradients with offloading are those without, to the last bit, whatever is saved and wherever it has been."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import CASES, equal, gradients, large, slot_files
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends import memory
from fastensor.offload import ActivationOffload, copying, moving

WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "nothing read ahead": {"prefetch_bytes": 0},
    "little on its way": {"staging_bytes": 1, "prefetch_bytes": 4096},
    "numpy": {"backend": "numpy"},
    "dram": {"dram_bytes": 8_000},
    "only dram": {"target": "dram"},
    "unverified": {"verify": False},
    "no room": {"ssd_bytes": 40_960},
}


RICH = ("convolutions", "transformer", "attention_by_hand", "autocast", "complex_numbers")


@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in WAYS for name in (CASES if way in ("usual", "little on its way") else RICH)],
)
def test_gradients_are_the_same(make: Any, name: str, way: str) -> None:
    expected = gradients(CASES[name], None)
    offload = make(**WAYS[way])
    for _ in range(3):
        assert equal(gradients(CASES[name], offload), expected)
    found = offload.statistics()
    if way != "only dram" and name not in ("tiny_and_empty", "sparse"):
        assert found.written_bytes > 0
        assert found.misses + found.prefetch_hits + found.prefetch_late > 0
    usage = offload.memory_usage()
    assert not any(usage[what] for what in ("pending", "in_dram", "loaded", "on_ssd")), usage


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", RICH)
@pytest.mark.parametrize("options", [{}, {"dram_bytes": 16 << 20}, {"target": "dram", "dram_bytes": 16 << 20},
                                     {"staging_bytes": 1 << 20}])  # fmt: skip
def test_by_way_of_the_host(make: Any, name: str, options: dict[str, Any]) -> None:
    expected = gradients(CASES[name], None)
    offload = make(**{"staging_bytes": 8 << 20} | options)
    for _ in range(3):
        assert equal(gradients(CASES[name], offload), expected)
    usage = offload.memory_usage()
    assert not any(usage[what] for what in ("pending", "in_dram", "loaded", "on_ssd")), usage


@pytest.mark.parametrize("options", [{}, {"staging_bytes": 1}, {"prefetch_bytes": 0}, {"verify": False}])
def test_several_folders_take_turns(make: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    offload = make(directories=tuple(map(str, folders)), **options)
    expected = gradients(large, None)
    for _ in range(2):
        assert equal(gradients(large, offload), expected)
    files = slot_files(offload)
    assert all(file.reserved_nbytes for file in files)
    assert len(files) == 3


@pytest.mark.usefixtures("staged")
def test_large_ones_by_way_of_the_host(make: Any) -> None:
    expected = gradients(large, None)
    for options in ({}, {"staging_bytes": 16 << 20}, {"staging_bytes": 4 << 20}, {"dram_bytes": 12 << 20}):
        offload = make(**options)
        assert equal(gradients(large, offload), expected)
        found = offload.statistics()
        assert (found.failed_writes, found.written_bytes > 0) == (0, True)


@pytest.mark.usefixtures("staged")
def test_blocks_are_touched_before_they_are_filled(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels that touch no memory by themselves, that is done by writing to it."""
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", -1)
    offload = make()
    for _ in range(2):
        assert equal(gradients(large, offload), gradients(large, None))
    assert offload.statistics().read_bytes > 0


def test_what_is_wanted_again_at_once_is_read_once(make: Any) -> None:
    """Each product saves a tensor twice. Room for the next ones is not made of what is wanted now, or before them."""
    offload = make(prefetch_bytes=3 * 40_000)
    x = torch.rand(10_000, requires_grad=True)
    for _ in range(3):
        before = offload.statistics()
        with offload.step():
            y = x * 1
            for _ in range(12):
                y = y * y
            loss = y.sum()
        del y
        offload.settle()
        torch.autograd.grad(loss, x)
        found = offload.statistics()
        moved = found.read_bytes - before.read_bytes
        assert found.misses - before.misses == 1, "the first, which nothing has announced"
        assert moved == found.written_bytes - before.written_bytes > 0


@pytest.mark.usefixtures("staged")
def test_host_memory_is_read_ahead_from_as_well(make: Any) -> None:
    """Tensors are larger than what may be on its way, and smaller than what may rest."""
    offload = make(target="dram", dram_bytes=1 << 30, staging_bytes=1 << 20, prefetch_bytes=64 << 20)
    expected = gradients(large, None)
    for _ in range(3):
        misses = offload.statistics().misses
        assert equal(gradients(large, offload), expected)
    found = offload.statistics()
    assert (found.written_bytes, found.read_bytes) == (0, 0)
    assert found.misses - misses == 1, "nothing is read before the first one is wanted"
    assert found.prefetch_hits + found.prefetch_late > 0
    assert found.peak_dram_bytes > 30 << 20
    assert found.wait_to_read_seconds == 0, "a device waits for its copies, and the host for nothing"


@pytest.mark.parametrize("name", CASES)
def test_the_graph_may_be_used_again(make: Any, name: str) -> None:
    offload = make(prefetch_bytes=1 << 16)

    def twice(offload: ActivationOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with nullcontext() if offload is None else offload.step():
            loss, wanted = CASES[name]()
        if offload is not None:
            offload.settle()
        if name == "checkpointed_reentrantly":
            loss.backward()
        else:
            loss.backward(retain_graph=True)
            loss.backward()
        return [one.grad for one in wanted if one.grad is not None]

    assert equal(twice(offload), twice(None))


@pytest.mark.parametrize("name", sorted({*CASES} - {"checkpointed_reentrantly", "recurrent", "sparse"}))
def test_second_derivatives(make: Any, name: str) -> None:
    def second(offload: ActivationOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with nullcontext() if offload is None else offload.step():
            loss, wanted = CASES[name]()
            first = torch.autograd.grad(loss, wanted, create_graph=True)
        total = torch.stack([one.square().sum() for one in first]).sum()
        total.backward()
        return [*first, *(one.grad for one in wanted if one.grad is not None)]

    assert equal(second(make()), second(None))


def test_graphs_that_are_used_in_the_order_in_which_they_were_made(make: Any) -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    offload = make()
    inputs = torch.randn(3, 128, 64)

    def losses(offload: ActivationOffload | None) -> list[torch.Tensor]:
        net.zero_grad()
        made = []
        for one in inputs:
            with nullcontext() if offload is None else offload.step():
                made.append(net(one).square().sum())
        for loss in made:
            loss.backward()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    expected = losses(None)
    for _ in range(3):
        assert equal(losses(offload), expected)


def test_with_a_gradient_scaler(make: Any) -> None:
    net, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(32, 64)
    start = [one.detach().clone() for one in net.parameters()]

    def train(offload: ActivationOffload | None) -> list[torch.Tensor]:
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(4):
            optimizer.zero_grad()
            with nullcontext() if offload is None else offload.step(), torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return [one.detach().clone() for one in net.parameters()]

    offload = make()
    assert equal(train(offload), train(None))
    assert offload.statistics().offloaded > 0
    assert not equal(train(None), start)


def test_several_backward_passes_in_one_step_are_foreseen(make: Any) -> None:
    """Once the order is known, little is read only when it is asked for."""
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(256, 64)
    offload = make()
    for _ in range(3):
        before = offload.statistics()
        with offload.step():
            losses = [net(x).square().mean(), net(x + 1).abs().mean()]
        offload.settle()
        for loss in losses:
            loss.backward()
    after = offload.statistics()
    read = sum(getattr(after, what) - getattr(before, what) for what in ("prefetch_hits", "prefetch_late", "misses"))
    assert read > 20
    assert after.misses - before.misses <= 2, "the first one of each backward pass"


def test_a_part_of_a_graph(make: Any) -> None:
    x = torch.randn(100, 100, requires_grad=True)
    y = torch.randn(100, 100, requires_grad=True)
    offload = make()
    with offload.step():
        first, second = x.exp().sin().sum(), y.exp().sin().sum()
    offload.settle()
    (found,) = torch.autograd.grad(first, x)
    assert torch.equal(found, (x.exp().cos() * x.exp()).detach())
    assert offload.memory_usage()["on_ssd"] > 0, "the other part is still wanted"
    del first, second
    offload.settle()
    assert offload.memory_usage()["on_ssd"] == 0


def test_tensors_that_share_memory_are_written_once(make: Any) -> None:
    x = torch.randn(64, 128)
    layers = [nn.Linear(128, 128) for _ in range(3)]
    offload = make(min_bytes=16 << 10)
    with offload.step():
        loss = torch.stack([layer(x).sum() for layer in layers]).sum()
    offload.settle()
    found = offload.statistics()
    assert (found.offloaded, found.written_bytes, found.shared_bytes) == (1, x.nbytes, 2 * x.nbytes)
    loss.backward()
    assert torch.equal(layers[0].weight.grad, layers[2].weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["all", 1 << 30])
def test_a_part_of_what_was_saved_is_not_saved_again(make: Any, schedule: Any) -> None:
    """Also if it is too small to leave by itself: in memory, it would keep all of it there."""
    storage = torch.randn(30_000)
    large = storage[:10_000].requires_grad_()
    offload = make(schedule=schedule, min_bytes=1 << 10)
    with offload.step():
        loss = large.exp().sum() + large.square().sum() + large[5:9_000].square().sum() + large[:10].square().sum()
    found = offload.statistics()
    assert found.kept.get("small", 0) == 0
    in_memory = found.kept.get("fits", 0)
    assert found.offloaded_bytes + in_memory == 2 * 40_000, "the result of exp, and the part of the storage"
    loss.backward()
    part = torch.zeros(10_000)
    part[5:9_000] += 2 * storage[5:9_000]
    part[:10] += 2 * storage[:10]
    assert torch.allclose(large.grad, storage[:10_000].exp() + 2 * storage[:10_000] + part)  # type: ignore[arg-type]


def test_a_small_part_of_what_has_left_does_not_keep_it_in_memory(make: Any) -> None:
    offload, x = make(min_bytes=1 << 10), torch.randn(30_000, requires_grad=True)
    with offload.step():
        storage = x * 2
        held, part = StorageWeakRef(storage.untyped_storage()), storage[:10_000]
        loss = part.square().sum() + part[:10].square().sum()
    del storage, part
    offload.settle()
    assert held.expired()
    loss.backward()


def test_the_same_memory_with_other_values_is_not_the_same(make: Any) -> None:
    """``data`` has a version counter of its own, which may show the same number."""
    x = torch.randn(100, 100)
    w = torch.randn(100, 100, requires_grad=True)
    offload = make()
    x.add_(1)
    with offload.step():
        first = (w * x).sum()
        other = x.data
        before = x.clone()
        other.mul_(2)
        assert other._version == x._version
        second = (w * other).sum()
        offload.settle()
        (found,) = torch.autograd.grad(second, w, retain_graph=True)
        assert torch.equal(found, other)
        del first, before


@pytest.mark.parametrize("name", [name for name in CASES if name != "convolutions"])
def test_straight_from_where_it_is_saved(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is large is not copied before it is written. (Batch normalization changes small tensors after autograd has
    saved them: those are.)"""
    monkeypatch.setattr(copying, "ZERO_COPY_NBYTES", 1)
    expected = gradients(CASES[name], None)
    offload = make()
    for _ in range(3):
        assert equal(gradients(CASES[name], offload), expected)
    found = offload.statistics()
    assert (found.failed_writes, found.written_bytes > 0) == (0, True)


@pytest.mark.parametrize(("begin", "lead"), [(0, 0), (3, None), (64, 64), (4096 - 64, 4096 - 64), (4096, 0)])
def test_large_tensors_wherever_they_begin(make: Any, begin: int, lead: int | None) -> None:
    """At any place of a page, and at one where nothing is written straight from."""
    nbytes = 5_000_000
    pages = np.frombuffer(mmap.mmap(-1, nbytes + 8192), dtype=np.uint8)
    part = pages[begin : begin + nbytes]
    part[:] = np.random.default_rng(0).integers(0, 2, nbytes)
    mask = torch.from_numpy(part).view(torch.bool)
    expected = (~mask).float()
    assert copying.page_offset_of(mask, range(nbytes)) == lead
    weight = torch.randn(nbytes, requires_grad=True)
    offload = make()
    with offload.step():
        loss = weight.masked_fill(mask, 0.0).sum()
    del mask
    offload.settle()
    assert offload.statistics().written_bytes == nbytes
    pages[:] = 1  # it is not read any more
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert offload.statistics().read_bytes == nbytes


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "PIECE_NBYTES", 8192)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["transformer", "convolutions", "complex_numbers"])
def test_in_many_pieces(make: Any, tmp_path: Path, name: str) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    expected = gradients(CASES[name], None)
    offload = make(directories=tuple(map(str, folders)), prefetch_bytes=100_000)
    for _ in range(3):
        assert equal(gradients(CASES[name], offload), expected)


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (256, {}),
        (256, {"dram_bytes": 0, "staging_bytes": 1 << 20}),
        pytest.param(1024, {}, marks=pytest.mark.torture),
        pytest.param(1024, {"dram_bytes": 0, "staging_bytes": 4 << 20}, marks=pytest.mark.torture),
    ],
)
def test_parts_that_are_changed_behind_those_that_are_saved(make: Any, width: int, options: dict[str, Any]) -> None:
    """The cells of recurrent networks save parts of one large tensor, and go on with the next part in place."""

    def run(offload: ActivationOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        cell = nn.LSTMCell(64, width)
        x = torch.randn(8, 512, 64)
        with offload.step() if offload else nullcontext():
            state = None
            for part in x:
                state = cell(part, state)
            loss = state[0].square().sum()  # type: ignore[index]
        return list(torch.autograd.grad(loss, tuple(cell.parameters())))

    offload = make(**options)
    for _ in range(2):
        assert equal(run(offload), run(None))
    assert offload.statistics().failed_writes == 0


def test_a_part_of_which_the_rest_is_changed_meanwhile(make: Any, held_writes: Any) -> None:
    """Such parts may have version counters of their own, so the change is not noticed, and need not be."""
    offload = make()
    x = torch.randn(700_000, requires_grad=True)
    part, rest = torch.randn(1 << 20).unsafe_split_with_sizes([700_000, (1 << 20) - 700_000])
    expected = part.clone()
    with offload.step():
        loss = (x * part).sum()
    assert held_writes.begun.wait(60)
    rest.zero_()
    held_writes.go.set()
    offload.settle()
    assert offload.statistics().written_bytes == 4 << 20
    del part, rest
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert offload.statistics().read_bytes == 4 << 20
