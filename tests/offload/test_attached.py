"""Models that an offload is attached to: what copies of them have, and what compilers make of its hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_copies import WAYS
from torch import nn

from fastensor.offload import OffloadError


def three() -> nn.Sequential:
    return nn.Sequential(nn.Sigmoid(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sigmoid())


@pytest.mark.parametrize("copied", WAYS)
@pytest.mark.parametrize("options", [{}, {"exclude": ("1*",)}, {"include": ("1", "2")}])
def test_copies_of_a_model_are_not_attached(
    make: Any, copied: Callable[[nn.Module], nn.Module], options: dict[str, Any]
) -> None:
    model, x = three(), torch.randn(4, 8)
    offload = make(**options)
    offload.attach(model)
    again = copied(model)
    assert torch.equal(again(x), model(x))
    with offload.step():
        loss = again(x).sum()
    loss.backward()
    found = offload.statistics()
    if offload.config.include:
        assert found.offloaded == 0, "the copy's modules do not say that they are offloaded"
    else:
        assert "module" not in found.kept, "nor that they are not"
    other = make(exclude=("1",))
    other.attach(again)
    with other.step():
        loss = again(x).sum()
    loss.backward()
    assert other.statistics().kept["module"] > 0, "another offload may be attached to the copy"
    other.detach()
    offload.detach()
    assert torch.equal(again(x), model(x))


def test_a_model_is_copied_while_it_runs(make: Any) -> None:
    model, copies = three(), []
    offload = make(exclude=("1",))
    offload.attach(model)
    model[1].register_forward_hook(lambda module, *_: copies.append(copy.deepcopy(module)))
    with offload.step():
        loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    assert copies[0](torch.ones(8)).shape == (8,)


def test_modules_of_torch_script_are_refused(make: Any) -> None:
    inside = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))  # type: ignore[no-untyped-call]
    model = nn.Sequential(inside, nn.Sigmoid())
    with pytest.raises(OffloadError, match=r"fits '0\.1', a module of TorchScript.*Let the pattern fit"):
        make(exclude=("1", "0.1")).attach(model)
    assert not model[1]._forward_hooks, "nothing is left of what was refused"
    make(exclude=("1",)).attach(model)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x)))
        return found


def whole(model: Blocks) -> Callable[[torch.Tensor], torch.Tensor]:
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model, backend="aot_eager")
    return compiled


def in_regions(model: Blocks) -> Callable[[torch.Tensor], torch.Tensor]:
    for block in (model.first, model.second, model.third):
        block.compile(backend="aot_eager")
    return model


def only_what_is_excluded(model: Blocks) -> Callable[[torch.Tensor], torch.Tensor]:
    model.second.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("compiled", [whole, in_regions, only_what_is_excluded])
@pytest.mark.parametrize("options", [{"exclude": ("second",)}, {"include": ("first", "third")}])
def test_modules_in_compiled_regions(make: Any, compiled: Any, options: dict[str, Any]) -> None:
    """What is kept of the module is what is kept of it without compiling; gradients are those without offloading."""
    torch.compiler.reset()
    model, x = Blocks(), torch.randn(16, 8)
    model(x).square().sum().backward()
    expected = [one.grad for one in model.parameters()]
    offload = make(**options)
    offload.attach(model)
    run, kept = compiled(model), []
    for _ in range(2):
        model.zero_grad()
        with offload.step():
            loss = run(x).square().sum()
        loss.backward()
        kept.append(offload.statistics().kept["module"])
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted)
    assert kept[0] == kept[1] / 2 > 0
    assert offload.statistics().offloaded >= 4, "what the others save"


def test_a_region_that_may_not_be_broken(make: Any) -> None:
    torch.compiler.reset()
    model, x = Blocks(), torch.randn(16, 8)
    offload = make(exclude=("second",))
    offload.attach(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        run(x)
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match="exclude in fastensor's OffloadConfig"),
        offload.step(),
    ):
        run(x)
    offload.detach()
    run(x).sum().backward()
