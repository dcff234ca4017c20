"""Blocks of models: which are found, and what replaces their ``forward`` while a model is attached."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_copies import WAYS
from programs import run
from recomputing import MEASURED, plans_that_recompute
from torch import Tensor, nn

from fastensor.offload import OffloadConfig, OffloadError
from fastensor.offload.blocks import BlockForward, find_blocks

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


class Stage(nn.Sequential):
    """A class of its own is a block, whatever is in it."""


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


class Pairs(nn.Module):
    """Lists of lists, whose modules the model calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Layer(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2)])


def sequence(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], list[str]]] = {
    "layers": (sequence, (), ["0", "1"]),
    "one alone": (lambda: sequence(1), (), []),
    "leaves": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (), []),
    "several classes": (lambda: nn.Sequential(Layer(), WithExperts(), Layer()), (),
                        ["0", "1.experts.0", "1.experts.1", "2"]),
    "experts in layers": (lambda: nn.ModuleList([WithExperts(), WithExperts()]), (), ["0", "1"]),
    "stages": (lambda: nn.Sequential(sequence(3), sequence(1), sequence(2)), (), ["0.0", "0.1", "0.2", "2.0", "2.1"]),
    "stages of stages": (lambda: nn.Sequential(nn.Sequential(sequence()), nn.Sequential(sequence())), (),
                         ["0.0.0", "0.0.1", "1.0.0", "1.0.1"]),
    "stages of a class": (lambda: nn.Sequential(Stage(Layer(), Layer()), Stage(Layer(), Layer())), (), ["0", "1"]),
    "lists of lists": (Pairs, (), []),
    "one several times": (lambda: nn.ModuleList([Layer()] * 3), (), ["0"]),
    "scripted": (lambda: nn.Sequential(*(torch.jit.trace(Layer(), torch.ones(1, WIDTH)) for _ in range(2))), (), []),
    "by name": (sequence, ("0",), ["0"]),
    "by patterns": (sequence, ("0.*", "1"), ["0.linear", "1"]),
    "outer ones": (sequence, ("1*",), ["1"]),
    "all": (sequence, ("*",), ["0", "1"]),
    "lists are called by nobody": (Pairs, ("layers*",), ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found(name: str) -> None:
    make_model, patterns, expected = MODELS[name]
    found = find_blocks(model := make_model(), patterns)
    assert list(found) == expected
    assert all(model.get_submodule(name) is module for name, module in found.items())


def test_blocks_of_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    for kind, layers in (("bert", "encoder.layer"), ("llama", "layers"), ("vit", ""), ("mixtral", "layers")):
        config = transformers.AutoConfig.for_model(kind, **size)
        found = list(find_blocks(transformers.AutoModel.from_config(config)))
        assert len(found) == 2, (kind, found)
        assert all(name.startswith(layers) for name in found)


# --- configurations


@pytest.mark.parametrize("value", ["auto", False, ("0", "1*"), ["0"], ()])
def test_values_of_the_option(value: Any) -> None:
    found = OffloadConfig(recompute=value).recompute
    assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("value", [True, "0", "none", 3, (1,), None])
def test_values_that_mean_nothing(value: Any) -> None:
    with pytest.raises(TypeError, match=r"recompute is .*found"):
        OffloadConfig(recompute=value)


def test_a_model_is_needed(make: Any) -> None:
    with pytest.raises(OffloadError, match=r"recompute needs the blocks of a model: call attach"):  # noqa: SIM117
        with make(recompute="auto").step():
            pass


def test_patterns_that_fit_nothing(make: Any) -> None:
    model = sequence()
    with pytest.raises(ValueError, match=r"no module of Sequential is called 'layers\.\*'"):
        make(recompute=("0", "layers.*")).attach(model)
    assert not any("forward" in vars(one) for one in model.modules())


def test_modules_of_torch_script_are_refused(make: Any) -> None:
    model = nn.Sequential(torch.jit.trace(Layer(), torch.ones(1, WIDTH)), Layer())  # type: ignore[no-untyped-call]
    with pytest.raises(OffloadError, match=r"recompute fits '0', a module of TorchScript"):
        make(recompute=("0", "1"), exclude=("1",)).attach(model)
    assert not any("forward" in vars(one) for one in model.modules())
    assert not model[1]._forward_hooks, "nothing is left of what was refused"


def test_a_model_without_blocks_is_named(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    make(recompute="auto").attach(sequence(1))
    assert "no blocks of Sequential can be computed again" in caplog.text
    caplog.clear()
    make(recompute=("0",)).attach(sequence(1))
    make(recompute=False).attach(sequence(1))
    assert not caplog.records


# --- what is attached


def trained(offload: Any, model: nn.Module, passes: int = MEASURED + 1) -> int:
    """Blocks that were computed again."""
    before = offload.statistics().recomputed
    for _ in range(passes):
        with offload.step():
            loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
    return int(offload.statistics().recomputed - before)


@pytest.fixture
def offload(make: Any) -> Any:
    with plans_that_recompute():
        yield make(schedule=1 << 30, recompute="auto")


@pytest.mark.parametrize("copied", WAYS)
def test_copies_are_not_attached(make: Any, offload: Any, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = sequence()
    offload.attach(model)
    assert trained(offload, model) == 2
    again = copied(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert torch.equal(again(torch.ones(1, WIDTH)), torch.full((1, WIDTH), 0.5)), "it has weights of its own"
    assert not torch.equal(model(torch.ones(1, WIDTH)), again(torch.ones(1, WIDTH)))
    assert trained(offload, again) == 0
    other = make(schedule=1 << 30, recompute="auto")
    other.attach(again)
    assert trained(other, again) == 2, "another offload may be attached to the copy"
    assert trained(offload, model, 1) == 2


def test_a_copy_is_loaded_where_fastensor_is_not_installed(offload: Any, tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    offload.attach(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(model(torch.ones(1, 2, WIDTH)), tmp_path / "output.pt")
    program = tmp_path / "load.py"
    program.write_text(
        "import sys\n"
        "sys.modules['fastensor'] = None  # imports of it raise\n"
        "import torch\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        f"assert torch.equal(model(torch.ones(1, 2, {WIDTH})), torch.load('output.pt'))\n"
    )
    run(program, cold=True, folder=tmp_path)


def forwards(model: nn.Module) -> list[Any]:
    return [vars(one).get("forward") for one in model.modules()]


def test_detaching_leaves_what_was_there(make: Any, offload: Any) -> None:
    """Whatever else has replaced ``forward``, before or since, and in whatever order offloads go."""
    model = sequence(3)

    def own(x: Tensor) -> Tensor:
        return Layer.forward(model[1], x) * 2  # type: ignore[arg-type]

    model[1].forward = own
    before = forwards(model)
    offload.attach(model)
    assert trained(offload, model) == 3
    offload.attach(model)
    assert trained(offload, model, 2) == 3, "what blocks change is found out anew"
    offload.detach()
    assert forwards(model) == before
    other = make(schedule=1 << 30, recompute="auto")
    offload.attach(model)
    other.attach(model)
    offload.detach()
    assert trained(other, model) == 3
    other.close()
    assert forwards(model) == before
    offload.attach(model)
    found = vars(model[2])["forward"]
    model[2].forward = theirs = lambda x: found(x) * 3
    offload.close()
    assert forwards(model) == [*before[:-2], theirs, None]
    assert isinstance(found, BlockForward)
    assert torch.equal(model[2](torch.ones(2, WIDTH)), 3 * Layer.forward(model[2], torch.ones(2, WIDTH)))  # type: ignore[arg-type]


def test_hooks_of_accelerate_before_and_after(offload: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[str] = []

    class Hook(hooks.ModelHook):  # type: ignore[misc,name-defined]  # Accelerate has no types
        def __init__(self, name: str) -> None:
            self.name = name

        def pre_forward(self, module: nn.Module, *args: Any, **options: Any) -> Any:
            seen.append(self.name)
            return args, options

    model = sequence()
    hooks.add_hook_to_module(model[0], Hook("before"))
    replaced = model[0].forward
    offload.attach(model)
    assert inspect.signature(model[0].forward) == inspect.signature(replaced)
    hooks.add_hook_to_module(model[1], Hook("after"))
    assert trained(offload, model) == 2
    assert seen.count("after") == MEASURED + 1
    assert seen.count("before") == MEASURED + 2, "a block is computed again with what has replaced its forward before"
    offload.detach()
    assert vars(model[0])["forward"] is replaced
    seen.clear()
    model(torch.ones(2, WIDTH))
    assert seen == ["before", "after"], "what has come since is still there"
    for one in model:
        hooks.remove_hook_from_module(one)
    seen.clear()
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), Layer.forward(model[1], Layer.forward(model[0], x)))  # type: ignore[arg-type]
    assert not seen


def test_outside_of_steps_and_without_gradients_blocks_are_as_they_are(offload: Any) -> None:
    model = sequence()
    offload.attach(model)
    assert trained(offload, model) == 2
    model(torch.ones(4, WIDTH)).sum().backward()
    with torch.no_grad(), offload.step():
        model(torch.ones(4, WIDTH))
    with torch.inference_mode(), offload.step():
        model(torch.ones(4, WIDTH))
    assert offload.statistics().recomputed == 2
    offload.detach()
    assert not any(forwards(model))


def test_the_signature_of_a_block_is_still_that_of_its_forward(offload: Any) -> None:
    """Libraries look which arguments a module takes."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH), 2, enable_nested_tensor=False)
    expected = inspect.signature(model.layers[0].forward)
    offload.attach(model)
    assert inspect.signature(model.layers[0].forward) == expected
