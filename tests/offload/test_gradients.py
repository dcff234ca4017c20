"""Gradients with offloading are those without, to the last bit, whatever is saved and wherever it has been."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, equal, gradients, large
from torch import nn

from fastensor.offload import ActivationOffload, mover, slots

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
        assert found.written_nbytes > 0
        assert found.misses + found.prefetch_hits + found.prefetch_late > 0
    gauge = offload.gauge()
    assert not any(gauge[what] for what in ("pending", "resting", "resident", "on_ssd")), gauge


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory in the place of a device's: it is copied to other host memory first."""
    monkeypatch.setattr(mover, "STAGED_FIRST", {"cpu"})
    monkeypatch.setattr(mover, "READ_IN_PLACE", set())


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", RICH)
@pytest.mark.parametrize("options", [{}, {"dram_bytes": 16 << 20}, {"target": "dram", "dram_bytes": 16 << 20},
                                     {"staging_bytes": 1 << 20}])  # fmt: skip
def test_by_way_of_the_host(make: Any, name: str, options: dict[str, Any]) -> None:
    expected = gradients(CASES[name], None)
    offload = make(**{"staging_bytes": 8 << 20} | options)
    for _ in range(3):
        assert equal(gradients(CASES[name], offload), expected)
    gauge = offload.gauge()
    assert not any(gauge[what] for what in ("pending", "resting", "resident", "on_ssd")), gauge


@pytest.mark.parametrize("options", [{}, {"staging_bytes": 1}, {"prefetch_bytes": 0}, {"verify": False}])
def test_several_folders_share_large_tensors(make: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    offload = make(directories=tuple(map(str, folders)), **options)
    expected = gradients(large, None)
    for _ in range(2):
        assert equal(gradients(large, offload), expected)
    files = offload._mover._slots.files
    assert all(file.reserved_nbytes for file in files)
    assert len(files) == 3


@pytest.mark.usefixtures("staged")
def test_large_ones_by_way_of_the_host(make: Any) -> None:
    expected = gradients(large, None)
    for options in ({}, {"staging_bytes": 16 << 20}, {"staging_bytes": 4 << 20}, {"dram_bytes": 12 << 20}):
        assert equal(gradients(large, make(**options)), expected)


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


def test_a_part_of_a_graph(make: Any) -> None:
    x = torch.randn(100, 100, requires_grad=True)
    y = torch.randn(100, 100, requires_grad=True)
    offload = make()
    with offload.step():
        first, second = x.exp().sin().sum(), y.exp().sin().sum()
    offload.settle()
    (found,) = torch.autograd.grad(first, x)
    assert torch.equal(found, (x.exp().cos() * x.exp()).detach())
    assert offload.gauge()["on_ssd"] > 0, "the other part is still wanted"
    del first, second
    assert offload.gauge()["on_ssd"] == 0


def test_tensors_that_share_memory_are_written_once(make: Any) -> None:
    x = torch.randn(64, 128)
    layers = [nn.Linear(128, 128) for _ in range(3)]
    offload = make(min_bytes=16 << 10)
    with offload.step():
        loss = torch.stack([layer(x).sum() for layer in layers]).sum()
    offload.settle()
    found = offload.statistics()
    assert (found.offloaded, found.written_nbytes, found.shared_nbytes) == (1, x.nbytes, 2 * x.nbytes)
    loss.backward()
    assert torch.equal(layers[0].weight.grad, layers[2].weight.grad)  # type: ignore[arg-type]


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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "PIECE_NBYTES", 8192)
    monkeypatch.setattr(slots, "_STRIPE_NBYTES", 16384)


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
