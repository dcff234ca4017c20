"""Training with blocks that are computed again is training without, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import join
from models import in_threads
from programs import run_ranks
from recomputing import MEASURED, a_slow_disk, plans_that_recompute
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from fastensor.offload import ActivationOffload, OffloadConfig, OffloadError, blocks, planner
from fastensor.offload.engine import OffloadEngine
from fastensor.offload.recomputing import predict_with_blocks
from fastensor.offload.scheduler import OffloadPlan

STEPS = MEASURED + 4
ROWS, WIDTH, BLOCKS = 24, 32, 12
Run: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.other(self.second(self.norm(self.first(x)).relu_()))).relu_()


class Spectral(nn.Module):
    """Each forward pass reads vectors in buffers, and changes them in place."""

    def __init__(self, normed: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear, self.other = normed(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(torch.tanh(self.linear(x)))


class Modulated(nn.Module):
    """Gets tensors by keywords and in a tuple, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor, both: tuple[Tensor, Tensor], *, scale: Tensor, unused: None = None) -> Any:
        shift, total = both
        x = self.inner(x * scale.sigmoid() + shift.sin())
        return x, total + x.square().mean(-1)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for one in (self.base, self.wide):
            one.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.wide(functional.gelu(self.base(x) + self.up(self.down(self.dropout(x))))))


class Mixture(nn.Module):
    """Each expert gets other numbers of rows in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = shares.argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            y = y.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return x + y


def in_turn(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)


def frozen_first() -> nn.Module:
    model = nn.Sequential(*(Mlp() for _ in range(2 * BLOCKS)))
    for one in list(model)[:BLOCKS]:
        one.requires_grad_(False)
    return model


def tied() -> nn.Module:
    block = Spectral(nn.utils.parametrizations.spectral_norm)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*[block] * BLOCKS))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *(Residual() for _ in range(BLOCKS)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Modulated() for _ in range(BLOCKS)])
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total, scale = x.new_zeros(len(x)), self.scale(x)
        for layer in self.layers:
            x, total = layer(x, (scale * 2, total), scale=scale)
        return x + total[:, None]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found.square().mean()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, x)


def masked(model: nn.Module, x: Tensor) -> Tensor:
    x = x.view(4, -1, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    padding = torch.zeros(x.shape[:2])
    padding[1, -2:] = -torch.inf
    found: Tensor = model(x, mask=mask, src_key_padding_mask=padding, is_causal=False)
    return found.square().mean()


def of_images(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model, x.view(-1, 2, 8, 16))


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    """Two forward passes, and then one backward pass."""
    return plain(model, x) + plain(model, x[: ROWS // 2])


MODELS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "perceptrons": (lambda: in_turn(*(Mlp() for _ in range(BLOCKS))), plain),
    "transformer": (encoder, masked),
    "batch norms": (convolutions, of_images),
    "spectral norms": (
        lambda: in_turn(*(Spectral(nn.utils.parametrizations.spectral_norm) for _ in range(BLOCKS))), plain,
    ),
    "spectral norms by hooks": (lambda: in_turn(*(Spectral(nn.utils.spectral_norm) for _ in range(BLOCKS))), plain),
    "one block several times": (tied, plain),
    "keywords and tuples": (Keywords, plain),
    "autocast": (lambda: in_turn(*(Mlp() for _ in range(BLOCKS))), autocast),
    "frozen first blocks": (frozen_first, plain),
    "adapters": (lambda: in_turn(*(Lora() for _ in range(BLOCKS))), plain),
    "mixture": (lambda: in_turn(*(Mixture() for _ in range(BLOCKS))), plain),
    "two forward passes": (lambda: in_turn(*(Mlp() for _ in range(BLOCKS))), accumulated),
}  # fmt: skip
HOW: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "all blocks": ({"schedule": 1 << 30}, plans_that_recompute),
    "inputs leave": ({"schedule": 1 << 30}, lambda: plans_that_recompute(inputs_leave=True)),
    "every other block": ({"schedule": 1 << 30}, lambda: plans_that_recompute(lambda number: number % 2 == 1)),
    "half": ({"schedule": 0.5}, a_slow_disk),
    "a third": ({"schedule": 0.3}, a_slow_disk),
    "a tenth": ({"schedule": 0.1}, a_slow_disk),
    "memory in all": ({"schedule": "auto", "memory_bytes": 100_000}, plans_that_recompute),
}


def batches(count: int = STEPS, rows: Callable[[int], int] = lambda step: ROWS) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(rows(step), WIDTH, generator=chance) for step in range(count)]


def train(
    make_model: Callable[[], nn.Module],
    offload: ActivationOffload | None,
    run: Run = plain,
    data: Sequence[Tensor] = (),
    *,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> list[Tensor]:
    """The losses of a training, the gradients of the last step, and the parameters and buffers after it."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    if offload is not None:
        offload.attach(model)
    losses = []
    for step, x in enumerate(data or batches()):
        between(model, step)
        optimizer.zero_grad()
        with nullcontext() if offload is None else offload.step():
            loss = run(model, x)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    if offload is not None:
        offload.detach()
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    return [*losses, *grads, *(one.detach() for one in model.state_dict().values())]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) > STEPS and all(map(torch.equal, found, expected))


@pytest.fixture
def forced(make: Any) -> Iterator[Callable[..., ActivationOffload]]:
    """Makes offloads that compute all blocks again from the third pass on."""
    with plans_that_recompute():
        yield lambda **options: make(**{"schedule": 1 << 30, "recompute": "auto"} | options)


# --- what is trained


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same(make: Any, name: str, how: str) -> None:
    make_model, run = MODELS[name]
    options, patch = HOW[how]
    expected = train(make_model, None, run)
    with patch():
        offload = make(recompute="auto", **options)
        assert same(train(make_model, offload, run), expected)
    found = offload.statistics()
    assert found.recomputed > 0
    assert found.recompute_seconds > 0
    if how in ("all blocks", "inputs leave"):
        a_step = 2 * BLOCKS if run is accumulated else BLOCKS
        assert found.recomputed == (STEPS - MEASURED) * a_step
    offload.settle()  # what is still being written was let go of
    assert not any(offload.memory_usage()[what] for what in ("pending", "in_dram", "on_ssd"))


@pytest.mark.parametrize(
    "options",
    [{"codecs": ("csr",)}, {"target": "dram", "dram_bytes": 64 << 20, "staging_bytes": 8 << 20}, {"prefetch_bytes": 0}],
    ids=["codec", "host memory", "nothing read ahead"],
)
@pytest.mark.parametrize("by_host", [False, True])
def test_inputs_that_leave_by_other_ways(
    make: Any, request: pytest.FixtureRequest, options: dict[str, Any], by_host: bool
) -> None:
    if by_host:
        request.getfixturevalue("staged")
    for name in ("keywords and tuples", "batch norms", "transformer"):
        make_model, run = MODELS[name]
        with plans_that_recompute(inputs_leave=True):
            offload = make(schedule=1 << 30, recompute="auto", **options)
            assert same(train(make_model, offload, run), train(make_model, None, run))
        found = offload.statistics()
        assert found.recomputed == BLOCKS * (STEPS - MEASURED)
        assert (found.peak_dram_bytes if options.get("target") == "dram" and by_host else found.peak_saved_bytes) > 0


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_batches_of_ever_new_lengths(make: Any, share: float) -> None:
    """Nothing is computed again, because nobody knows what such a pass saves."""
    data = batches(planner._MOST_FORMS + 6, lambda step: 8 + step)
    make_model, run = MODELS["perceptrons"]
    expected = train(make_model, None, run, data)
    with a_slow_disk():
        offload = make(schedule=share, recompute="auto")
        assert same(train(make_model, offload, run, data), expected)
    assert offload.statistics().recomputed == 0


def test_batches_of_a_few_lengths(make: Any) -> None:
    """Each is measured twice, and has a plan of its own."""
    data = batches(12, lambda step: 8 + step % 3)
    make_model, run = MODELS["perceptrons"]
    expected = train(make_model, None, run, data)
    with plans_that_recompute():
        offload = make(schedule=1 << 30, recompute="auto")
        assert same(train(make_model, offload, run, data), expected)
    assert offload.statistics().recomputed == BLOCKS * (12 - 3 * MEASURED)


def test_passes_that_open_alike_and_end_otherwise(make: Any) -> None:
    """What the plan of one form computes again, but not that of the other, is not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(8)))
    with a_slow_disk():
        offload = make(schedule=120_000, recompute="auto")
        offload.attach(model)
        for step, x in enumerate(batches(10)):
            with offload.step():
                loss = plain(model[: 8 if step % 2 else 2], x)
            loss.backward()
    assert offload.statistics().recomputed == 0


class Odd(nn.Module):
    """A block that is not computed again, because torch's checkpoint would not bring back what it needs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.own: Any = {
            "own generator": lambda: torch.Generator().manual_seed(0),
            "own random": lambda: random.Random(0),
            "own numpy": lambda: np.random.default_rng(0),
        }.get(kind, lambda: None)()
        self.total = torch.zeros(1)
        if kind == "sparse":
            self.register_buffer("graph", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.kind == "clamped":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
        if self.kind == "sparse":
            x = torch.sparse.mm(self.graph, x.T).T
        if self.kind == "attribute":
            self.total += 1
        scale = {
            "random": random.random,
            "numpy": np.random.random_sample,
            "own generator": lambda: torch.rand(1, generator=self.own),
            "own random": lambda: self.own.random(),
            "own numpy": lambda: float(self.own.random()),
            "attribute": lambda: self.total,
        }.get(self.kind, lambda: 1.0)()
        return x + torch.sigmoid(self.linear(x) * scale)


@pytest.mark.parametrize(
    "kind",
    ["clamped", "sparse", "random", "numpy", "own generator", "own random", "own numpy", "attribute", "inference"],
)
def test_what_checkpoint_would_not_bring_back(forced: Any, kind: str) -> None:
    def train_with(offload: Any) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(*(Odd(kind) for _ in range(3)))
        if offload is not None:
            offload.attach(model)
        found = []
        for x in batches(MEASURED + 3):
            if kind == "inference":
                with torch.inference_mode():
                    x = x.clone()
            with nullcontext() if offload is None else offload.step():
                loss = plain(model, x) if kind != "inference" else _masked(model, x)
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]  # type: ignore[union-attr]
            model.zero_grad()
        return found

    offload = forced()
    assert all(map(torch.equal, train_with(offload), train_with(None)))
    assert (offload.statistics().recomputed > 0) == (kind == "sparse")


def _masked(model: nn.Module, x: Tensor) -> Tensor:
    """The blocks get an inference tensor, which they do not save."""
    found = torch.zeros(x.shape, requires_grad=True).sin()
    for block in model.children():
        found = block(found, x)
    return found.square().mean()


def test_parameters_that_are_replaced_in_a_forward_pass(forced: Any) -> None:
    """The block cannot be computed again with them, which is an error and no wrong gradient."""
    torch.manual_seed(0)
    model, offload = nn.Sequential(*(Mlp() for _ in range(3))), forced()
    offload.attach(model)
    for x in batches(MEASURED):
        with offload.step():
            loss = plain(model, x)
        loss.backward()
    others = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    with offload.step():
        loss = torch.func.functional_call(model, others, (batches()[0],)).square().mean()
    with pytest.raises(RuntimeError, match="functional_call"):
        loss.backward()


def test_blocks_by_name(forced: Any) -> None:
    make_model, run = MODELS["perceptrons"]
    offload = forced(recompute=("1", "3"))
    assert same(train(make_model, offload, run), train(make_model, None, run))
    assert offload.statistics().recomputed == 2 * (STEPS - MEASURED)


# --- ways of training


def in_order(model: nn.Module, step: Callable[[], Any]) -> None:
    """Several forward passes, and then their backward passes in the same order."""
    losses = []
    for x in batches(3):
        with step():
            losses.append(plain(model, x))
    for loss in losses:
        loss.backward()


def twice(model: nn.Module, step: Callable[[], Any]) -> None:
    with step():
        loss = plain(model, batches()[0])
    loss.backward(retain_graph=True)
    loss.backward()


def never(model: nn.Module, step: Callable[[], Any]) -> None:
    """Forward passes whose losses nobody needs, in their own steps and beside others."""
    with step():
        plain(model, batches()[0])
    with step():
        plain(model, batches()[1])
        loss = plain(model, batches()[2])
    loss.backward()


def backward_inside(model: nn.Module, step: Callable[[], Any]) -> None:
    with step():
        for x in batches(2):
            plain(model, x).backward()


def evaluated(model: nn.Module, step: Callable[[], Any]) -> None:
    with step():
        with torch.no_grad():
            guess = model(batches()[0])
        model.eval()
        with torch.no_grad():
            guess = guess + model(batches()[1])
        with torch.inference_mode():
            model(batches()[1])
        plain(model, guess).backward()
        model.train()
        loss = plain(model, guess)
    loss.backward()


def nested(model: nn.Module, step: Callable[[], Any]) -> None:
    with step():
        first = plain(model, batches()[0])
        with step():
            second = plain(model, batches()[1])
        third = plain(model, batches()[2])
    (first + second * third).backward()


def in_evaluation_mode_backwards(model: nn.Module, step: Callable[[], Any]) -> None:
    """The modes of the modules change before the backward pass, and dropout with them."""
    with step():
        loss = plain(model, batches()[0])
    model.eval()
    loss.backward()
    assert not any(one.training for one in model.modules())
    model.train()


def second_derivatives(model: nn.Module, step: Callable[[], Any]) -> None:
    with step():
        x = batches()[0].requires_grad_()
        loss = plain(model, x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        total = first.square().sum()
    total.backward()


def parts(model: nn.Module, step: Callable[[], Any]) -> None:
    """A backward pass that goes through some blocks only, and then one through all."""
    inside: list[Tensor] = []
    handle = model[5].register_forward_hook(lambda module, args, output: inside.append(output))  # type: ignore[index]
    with step():
        loss = plain(model, batches()[0])
    handle.remove()
    torch.autograd.grad(loss, inside, retain_graph=True)
    loss.backward()


WAYS = [
    in_order, twice, never, backward_inside, evaluated, nested, in_evaluation_mode_backwards, second_derivatives, parts,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inputs_leave", [False, True])
@pytest.mark.parametrize("name", ["perceptrons", "spectral norms"])
def test_ways_of_training(make: Any, name: str, way: Callable[..., None], inputs_leave: bool) -> None:
    make_model, _ = MODELS[name]

    def gradients(offload: ActivationOffload | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = make_model(), list[Tensor]()
        if offload is not None:
            offload.attach(model)
        for _ in range(4):
            model.zero_grad()
            torch.manual_seed(7)
            way(model, nullcontext if offload is None else offload.step)
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        return [*found, *(one.clone() for one in model.buffers())]

    expected = gradients(None)
    with plans_that_recompute(inputs_leave=inputs_leave):
        offload = make(schedule=1 << 30, recompute="auto")
        assert same(gradients(offload), expected)
    assert offload.statistics().recomputed > 0


class Failing(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.calls = [0]  # a number would be as it was when the block is computed again

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.error is not None and self.calls[0] % 2 == 0:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("inside", [False, True])
def test_exceptions_in_blocks(forced: Any, kind: type[BaseException], where: str, inside: bool) -> None:
    """In a forward pass, or while a block is computed again; caught in the step or outside of it. All goes on."""

    def make_model() -> nn.Module:
        return in_turn(Mlp(), Mlp(), Failing(), Failing(), Mlp())

    offload = forced()
    model = make_model()
    offload.attach(model)
    failing: Failing = model[3]  # type: ignore[index,assignment]
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = plain(model, x)
        loss.backward()
    before = offload.statistics().recomputed
    assert before == 5
    failing.error, failing.calls = kind("in a block"), [1 if where == "forward" else 0]
    caught = pytest.raises(kind, match="in a block")
    with ExitStack() as outside:
        outside.enter_context(caught if not inside else nullcontext())
        with offload.step(), caught if inside else nullcontext():
            plain(model, batches()[0]).backward()
    failing.error = None
    expected = train(lambda: clone(model), None)
    assert same(train(lambda: model, offload), expected)
    assert offload.statistics().recomputed > before


def clone(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    made = in_turn(Mlp(), Mlp(), Failing(), Failing(), Mlp())
    made.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    return made


class Undetermined(nn.Module):
    """Saves what a list says."""

    def __init__(self, saves_more: list[bool]) -> None:
        super().__init__()
        self.linear, self.saves_more = nn.Linear(WIDTH, WIDTH), saves_more

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x).sigmoid()
        return found.sin().exp() if self.saves_more[0] else found


def test_a_block_that_saves_something_else_is_found(forced: Any) -> None:
    """By torch's checkpoint."""
    saves_more = [True]
    model, offload = nn.Sequential(Undetermined(saves_more), Undetermined(saves_more)), forced()
    offload.attach(model)
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = plain(model, x)
        loss.backward(retain_graph=True)
    saves_more[0] = False
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        loss.backward()


# --- what blocks read beside their inputs


def test_parameters_that_change_before_the_backward_pass_are_found(forced: Any) -> None:
    """As without offloading."""
    make_model, run = MODELS["perceptrons"]
    offload, model = forced(), make_model()
    offload.attach(model)
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = run(model, x)
        loss.backward(retain_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bias_that_changes_before_the_backward_pass_is_found(forced: Any) -> None:
    """Autograd saves none, but the block is computed again with it."""
    make_model, run = MODELS["perceptrons"]
    offload, model = forced(), make_model()
    offload.attach(model)
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = run(model, x)
        loss.backward(retain_graph=True)
    with torch.no_grad():
        model[2].down.bias.add_(1)  # type: ignore[index,union-attr,operator]
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation, .*: a parameter of '2'"):
        loss.backward()


@pytest.mark.parametrize("name", ["batch norms", "spectral norms"])
def test_modes_that_change_while_it_trains(forced: Any, name: str) -> None:
    """Buffers change only from some step on, in which their blocks are not computed again."""
    make_model, run = MODELS[name]

    def between(model: nn.Module, step: int) -> None:
        model.train(step >= MEASURED + 1)

    offload = forced()
    expected = train(make_model, None, run, batches(6), between=between)
    assert same(train(make_model, offload, run, batches(6), between=between), expected)
    assert offload.statistics().recomputed == 3 * BLOCKS


class Counting(nn.Module):
    """Has a buffer that it reads, and that it changes from some step on: in place, or by another one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place, self.calls = Mlp(), in_place, 0
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        if self.calls == MEASURED + 1 and self.in_place:
            scale = scale.clone()
            self.scale.mul_(2)
        elif self.calls == MEASURED + 1:
            self.scale = self.scale * 2
        return self.inner(x * scale)


def test_a_buffer_that_is_replaced_late(forced: Any) -> None:
    def between(model: nn.Module, step: int) -> None:
        for one in model:  # type: ignore[attr-defined]
            one.calls = step

    def make_model() -> nn.Module:
        return nn.Sequential(Counting(False), Counting(False))

    offload = forced()
    expected = train(make_model, None, between=between)
    assert same(train(make_model, offload, between=between), expected)
    assert offload.statistics().recomputed == 2 * (STEPS - MEASURED)


def test_a_small_buffer_that_is_changed_in_place_late(forced: Any) -> None:
    def train_with(offload: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Counting(True), Counting(True))
        if offload is not None:
            offload.attach(model)
        found = []
        for step in range(MEASURED + 2):
            for one in model:
                one.calls = step
            with nullcontext() if offload is None else offload.step():
                loss = plain(model, batches()[step])
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]  # type: ignore[union-attr]
            model.zero_grad()
        return [*found, *model.buffers()]

    offload = forced()
    assert all(map(torch.equal, train_with(offload), train_with(None)))
    assert offload.statistics().recomputed > 0


def test_a_large_buffer_that_is_changed_in_place_late(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values from before are gone, so the step raises; the next one is right again."""
    monkeypatch.setattr(blocks, "_SMALL_NBYTES", 0)
    torch.manual_seed(0)
    model = nn.Sequential(Counting(True), Counting(True))
    offload = forced()
    offload.attach(model)
    for step in range(MEASURED + 1):
        with offload.step():
            loss = plain(model, batches()[step])
        loss.backward()
    for one in model:
        one.calls = MEASURED + 1
    with pytest.raises(OffloadError, match=r"block '0' has changed 'scale' of Counting .* first time"):  # noqa: SIM117
        with offload.step():
            plain(model, batches()[3])
    for one in model:
        one.calls = MEASURED + 2
    before = offload.statistics().recomputed
    model.zero_grad()
    torch.manual_seed(1)
    with offload.step():
        loss = plain(model, batches()[4])
    loss.backward()
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    offload.detach()
    model.zero_grad()
    torch.manual_seed(1)
    plain(model, batches()[4]).backward()
    assert all(map(torch.equal, found, [one.grad for one in model.parameters()]))  # type: ignore[arg-type]
    assert offload.statistics().recomputed == before + 2


def test_buffers_that_nobody_changes_are_not_copied(forced: Any) -> None:
    """They may be large, as weights that are quantized."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8))
            self.weight: Tensor
            self.up = nn.Linear(WIDTH, WIDTH)
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(self.weight.data_ptr())
            return torch.sigmoid(self.up(x @ self.weight.float()))

    offload = forced()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Quantized(), Quantized())
    train(lambda: model, offload)
    assert offload.statistics().recomputed == 2 * (STEPS - MEASURED)
    for one in model[1:]:
        assert len(one.seen) == 2 * STEPS - MEASURED
        assert len(set(one.seen)) == 1


class Scaled(nn.Module):
    """Reads a number, or a tensor that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number, self.tensor = nn.Linear(WIDTH, WIDTH), 1.0, torch.ones(WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.buffer: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.linear(x) * self.number + self.tensor + self.buffer)

    def set(self, what: str, value: float) -> None:
        if what == "number":
            self.number = value
        elif what.endswith(" in place"):
            getattr(self, what.removesuffix(" in place")).fill_(value)
        else:
            setattr(self, what, torch.full((WIDTH,), value))


@pytest.mark.parametrize("what", ["number", "tensor", "tensor in place", "buffer", "buffer in place"])
@pytest.mark.parametrize("inputs_leave", [False, True])
def test_what_changes_between_forward_passes(make: Any, what: str, inputs_leave: bool) -> None:
    """Each pass is computed again with what it has read, and afterwards everything is as it was."""

    def run(model: Any, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for value in (1.0, 2.0, 3.0):
            for one in model:
                one.set(what, value)
            loss = loss + plain(model, x)
        return loss

    def make_model() -> nn.Module:
        return nn.Sequential(*(Scaled() for _ in range(3)))

    with plans_that_recompute(inputs_leave=inputs_leave):
        offload = make(schedule=1 << 30, recompute="auto")
        assert same(train(make_model, offload, run), train(make_model, None, run))
    assert offload.statistics().recomputed > 0


@pytest.mark.parametrize("what", ["buffer", "tensor"])
def test_a_large_tensor_that_others_change_in_place_is_found(
    forced: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """There is no copy of it."""
    monkeypatch.setattr(blocks, "_SMALL_NBYTES", 0)
    model, offload = nn.Sequential(Scaled(), Scaled()), forced()
    offload.attach(model)
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = plain(model, x)
        loss.backward(retain_graph=True)
    model[1].set(f"{what} in place", 2.0)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=rf"modified by an inplace operation: '{what}' of Scaled in '1'"):
        loss.backward()


class Remembering(nn.Module):
    """Reads what its last pass has kept: a number, and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.last: Tensor | None = None
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = torch.sigmoid(self.linear(x) * self.calls + (0 if self.last is None else self.last))
        self.last, self.shown = found.detach().mean(0), found
        return x + found


def test_what_a_pass_keeps_for_the_next_one(forced: Any) -> None:
    """Counters and last results are as the forward passes have left them."""

    def make_model() -> nn.Module:
        return nn.Sequential(*(Remembering() for _ in range(3)))

    offload, made = forced(), list[Any]()

    def made_model() -> nn.Module:
        made.append(make_model())
        return made[-1]  # type: ignore[no-any-return]

    assert same(train(made_model, offload), train(make_model, None))
    assert offload.statistics().recomputed == 3 * (STEPS - MEASURED)
    assert [one.calls for one in made[0]] == [STEPS] * 3


class Used(nn.Module):
    """Uses up what somebody has given it: an attribute, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: Any
        self.shift: Any

    def forward(self, x: Tensor) -> Tensor:
        found = x + torch.sigmoid(self.linear(x) * self.scale + self.shift)
        del self.scale, self.shift
        return found


def test_what_a_pass_deletes_is_gone_when_it_has_been_computed_again(forced: Any) -> None:
    made = list[Any]()

    def make_model() -> nn.Module:
        made[:] = [Used() for _ in range(3)]
        return nn.Sequential(*made)

    def run(model: Any, x: Tensor) -> Tensor:
        for number, one in enumerate(model):
            one.scale = 0.5 + number
            one.register_buffer("shift", torch.full((WIDTH,), float(number)))
        return plain(model, x)

    offload = forced()
    assert same(train(make_model, offload, run), train(make_model, None, run))
    assert offload.statistics().recomputed == 3 * (STEPS - MEASURED)
    for one in made:
        assert not hasattr(one, "scale")
        assert not hasattr(one, "shift")
        one.register_buffer("shift", None)


class Normed(nn.Module):
    """Has the statistics of a batch norm in attributes, whose changes autograd does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean, self.var = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(functional.batch_norm(self.linear(x), self.mean, self.var, training=True))


def test_attributes_whose_changes_nobody_counts(forced: Any) -> None:
    """Such blocks are left alone."""
    made = list[Any]()

    def make_model() -> nn.Module:
        made.append(nn.Sequential(Normed(), Normed()))
        return made[-1]  # type: ignore[no-any-return]

    offload = forced()
    assert same(train(make_model, offload), train(make_model, None))
    assert offload.statistics().recomputed == 0
    for ours, other in zip(*made, strict=True):
        assert torch.equal(ours.mean, other.mean)
        assert torch.equal(ours.var, other.var)


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "Python": random.Random,
    "NumPy": np.random.default_rng,
    "NumPy, MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "NumPy, as before": np.random.RandomState,
}


@pytest.mark.parametrize("kind", [*GENERATORS, "the system"])
def test_a_generator_that_a_block_has_and_does_not_use(forced: Any, kind: str) -> None:
    """It forbids nothing, unless it has no state that could be compared."""

    def make_model() -> nn.Module:
        model = nn.Sequential(Scaled(), Scaled())
        for one in model:
            one.own = GENERATORS.get(kind, random.SystemRandom)()  # type: ignore[assignment]
        return model

    offload = forced()
    assert same(train(make_model, offload), train(make_model, None))
    assert offload.statistics().recomputed == (0 if kind == "the system" else 2 * (STEPS - MEASURED))


# --- inputs that are changed in place


class Changing(nn.Module):
    """Changes its input in place, as it may: nothing has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.relu_())
        return found


class Squashing(nn.Module):
    """Does not save its input, but what it makes of it."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.linear, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, x: Tensor, *, more: Tensor | None = None, both: tuple[Tensor, ...] = ()) -> Tensor:
        if self.view:
            return x.view(x.shape)
        x = x if more is None else x * more.sigmoid()
        for one in both:
            x = x * one.sigmoid()
        found: Tensor = self.linear(torch.sigmoid(x))
        return found


class Loop(nn.Module):
    def __init__(self, step: Callable[[nn.Module, Tensor], Tensor], *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.step = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), step

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.step(block, x)
        return x


def add_to_output(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = block(x)
    return found.add_(1)


def add_to_input(block: nn.Module, x: Tensor) -> Tensor:
    return x.add_(block(x))


def add_to_view_of_input(block: nn.Module, x: Tensor) -> Tensor:
    """The block's input is a view that goes at once."""
    flat = block(x.view(1, *x.shape))
    return x.add_(flat[0])


def add_to_keyword(block: nn.Module, x: Tensor) -> Tensor:
    more = x * 2
    found: Tensor = block(x, more=more)
    more.add_(1)
    return found


def add_to_one_of_a_tuple(block: nn.Module, x: Tensor) -> Tensor:
    both = x * 2, x * 3
    found: Tensor = block(x, both=both)
    both[1].add_(1)
    return found


def call(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = block(x)
    return found


IN_PLACE: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "x = block(x), which changes x": (lambda: Loop(call, *(Changing() for _ in range(4))), False),
    "block(x).add_(1)": (lambda: Loop(add_to_output, *(Squashing() for _ in range(4))), True),
    "x.add_(block(x))": (lambda: Loop(add_to_input, *(Squashing() for _ in range(4))), False),
    "x.add_(block(x.view(...)))": (lambda: Loop(add_to_view_of_input, *(Squashing() for _ in range(4))), False),
    "block(x, more=y); y.add_(1)": (lambda: Loop(add_to_keyword, *(Squashing() for _ in range(4))), False),
    "block(x, both=(y, z)); z.add_(1)": (lambda: Loop(add_to_one_of_a_tuple, *(Squashing() for _ in range(4))), False),
    "a view of x, which is changed": (lambda: Loop(add_to_output, *(Squashing(view=True) for _ in range(4))), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("how", ["all blocks", "a tenth"])
def test_inputs_that_are_changed_in_place(make: Any, name: str, how: str) -> None:
    make_model, is_recomputed = IN_PLACE[name]
    options, patch = HOW[how]
    with patch():
        offload = make(recompute="auto", **options)
        assert same(train(make_model, offload), train(make_model, None))
    if how == "all blocks":
        assert bool(offload.statistics().recomputed) == is_recomputed


def test_an_input_that_is_changed_in_place_late_is_found(forced: Any) -> None:
    """The block is computed again when the change comes: the backward pass raises, as autograd does. Later steps leave
    the block alone."""
    late = [False]

    def sometimes(block: nn.Module, x: Tensor) -> Tensor:
        return add_to_input(block, x) if late[0] else x + block(x)

    torch.manual_seed(0)
    model = Loop(sometimes, Squashing(), Squashing())
    offload = forced()
    offload.attach(model)
    for x in batches(MEASURED + 1):
        with offload.step():
            loss = plain(model, x)
        loss.backward()
    late[0] = True
    with offload.step():
        loss = plain(model, batches()[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    before = offload.statistics().recomputed
    model.zero_grad()
    with offload.step():
        loss = plain(model, batches()[1])
    loss.backward()
    assert offload.statistics().recomputed == before
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    offload.detach()
    model.zero_grad()
    plain(model, batches()[1]).backward()
    assert all(map(torch.equal, found, [one.grad for one in model.parameters()]))  # type: ignore[arg-type]


# --- other arguments


class Cache:
    """As that of keys and values: each block appends to it."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        found = cache.found if isinstance(cache, Cache) else cache
        found.append(torch.sigmoid(self.linear(x)))
        return x + torch.stack(found).sum(0)


@pytest.mark.parametrize(("kind", "is_recomputed"), [(Cache, False), (list, True)])
def test_arguments_that_blocks_change(forced: Any, kind: Callable[[], Any], is_recomputed: bool) -> None:
    """What an object holds cannot be brought back, and a list can."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attending() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            cache = kind()
            for layer in self.layers:
                x = layer(x, cache)
            assert len(cache.found if kind is Cache else cache) == 3
            return x

    offload = forced()
    assert same(train(Model, offload), train(Model, None))
    assert bool(offload.statistics().recomputed) == is_recomputed


# --- memory


@pytest.mark.parametrize("name", ["perceptrons", "keywords and tuples", "transformer"])
def test_inputs_that_leave_take_no_memory(make: Any, name: str) -> None:
    """Nor does anything else of a block that is computed again."""
    make_model, run = MODELS[name]
    torch.manual_seed(0)
    model = make_model()
    held: list[StorageWeakRef] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        held.extend(StorageWeakRef(one.untyped_storage()) for one in args if one.grad_fn is not None)
        held.append(StorageWeakRef((output[0] if isinstance(output, tuple) else output).untyped_storage()))

    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.Linear):
            module.register_forward_hook(watch)
    with plans_that_recompute(inputs_leave=True):
        offload = make(schedule=1 << 30, recompute="auto")
        offload.attach(model)
        for x in batches(MEASURED):
            with offload.step():
                loss = run(model, x)
            loss.backward()
        held.clear()
        del loss
        with offload.step():
            loss = run(model, batches()[0])
        offload.settle()
        alive = sum(not one.expired() for one in held)
        assert len(held) > 2 * BLOCKS
        assert alive <= 3, "of what is outside of blocks"
        loss.backward()
    assert offload.statistics().recomputed == BLOCKS
    assert offload.statistics().read_bytes > 0


def test_what_was_planned_stays_and_leaves(make: Any) -> None:
    """Also of blocks that are not computed again, which save what the block before has made."""

    class Ends(nn.Module):
        """Saves its output, and the next one its input."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Ends() for _ in range(6)))
    leaving = frozenset({3, 4})

    def plan(profile: Any, limit: int, rates: Any, among: Any = None) -> Any:
        return OffloadPlan(leaving, predict_with_blocks(profile, leaving, {1}, rates), frozenset({1}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "plan_with_blocks", plan)
        offload = make(schedule=1 << 30, recompute="auto")
        offload.attach(model)
        offloaded = []
        for x in batches(MEASURED + 1):
            before = offload.statistics().offloaded
            with offload.step():
                loss = plain(model, x)
            loss.backward()
            offloaded.append(offload.statistics().offloaded - before)
    assert offloaded == [0, 0, 2]


def test_a_mask_that_all_blocks_get_counts_once(make: Any) -> None:
    make_model, run = MODELS["transformer"]
    with plans_that_recompute():
        offload = make(schedule=1 << 30, recompute="auto")
        train(make_model, offload, run)
        found = offload.plan()
    assert found is not None
    first, *others = found.blocks
    assert first.inputs_nbytes > others[0].inputs_nbytes == ROWS * WIDTH * 4
    assert len({one.inputs_nbytes for one in others}) == 1


@pytest.fixture
def stayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The names of blocks when they have been computed again, and the bytes that stay then."""
    found: list[tuple[str, int]] = []
    note = OffloadEngine.note_recomputed

    def noted(engine: OffloadEngine, name: str, started: float) -> None:
        found.append((name, engine.planner.kept_bytes()))
        note(engine, name, started)

    monkeypatch.setattr(OffloadEngine, "note_recomputed", noted)
    return found


@pytest.mark.parametrize("limit", [0.15, 0.3, 0.6])
def test_a_limit_holds(make: Any, limit: float, stayed: list[tuple[str, int]]) -> None:
    """What is on its way out or in may come on top. A block that was computed again has room beside what still stays,
    not beside all that has stayed."""
    make_model, run = MODELS["perceptrons"]
    everything = make(schedule=1 << 30)
    train(make_model, everything, run)
    saved = everything.plan()
    assert saved is not None
    budget, room = ROWS * WIDTH * 4 * 4, int(limit * saved.kept_bytes)
    with a_slow_disk():
        offload = make(schedule=room, recompute="auto", staging_bytes=budget, prefetch_bytes=budget)
        assert same(train(make_model, offload, run), train(make_model, None, run))
    found = offload.statistics()
    assert found.recomputed > 0
    assert 0 < found.peak_memory_bytes <= room + 3 * budget
    plan = offload.plan()
    assert plan is not None
    assert plan.kept_bytes <= room
    nbytes = {one.name: one.nbytes for one in plan.blocks}
    assert len(stayed) == found.recomputed
    assert max(kept + nbytes[name] for name, kept in stayed) <= room
    if limit > 0.2:
        assert plan.kept_bytes + max(nbytes.values()) > room


class Given(nn.Module):
    """A block that gets a tensor which all blocks get."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        if given is not None:
            x = (x.unsqueeze(1) * given).mean(1)
        return x + self.down(functional.gelu(self.up(x)))


class WithMore(nn.Module):
    """Blocks, and a large tensor that all of them get (``given``); that is made before them and used behind them
    (``skipped``); or from which an output is made that no backward pass comes to (``probed``)."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.more = more
        inner = (8, 30 * WIDTH, *[8] * 6) if more == "given" else (4 * WIDTH,) * 6
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(map(Given, inner))
        self.wide, self.last = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, 1)
        self.probes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        given = torch.ones(ROWS, 8, WIDTH) if self.more == "given" else None
        x = self.first(x)
        wide = self.wide(x).tanh() if self.more == "skipped" else None
        for layer in self.layers:
            x = layer(x, given)
        if self.more == "given":
            return x
        if wide is None:
            wide = self.wide(x).tanh()
            self.probes = [self.last(wide)]
        return self.last(wide) * x


@pytest.mark.parametrize("more", ["given", "skipped", "probed"])
def test_what_stays_until_later_counts(more: str, forced: Any, stayed: list[tuple[str, int]]) -> None:
    """Predicted is what is in memory when a block has been computed again."""
    offload = forced()
    train(lambda: WithMore(more), offload)
    plan, form = offload.plan(), offload._engine.planner.latest()
    assert plan is not None
    assert form is not None
    nbytes = {one.name: one.nbytes for one in plan.blocks}
    assert form.plan.recomputed == set(range(len(nbytes)))
    assert form.peak_nbytes > form.peak_nbytes - form.again_nbytes == plan.kept_bytes
    most = max(kept + nbytes[name] for name, kept in stayed)
    assert 0 <= form.peak_nbytes - most <= ROWS * WIDTH * 4, "one tensor may be counted for longer than it is held"


@pytest.mark.parametrize("order", ["one after the other", "two at a time", "one behind"])
def test_a_limit_holds_while_several_graphs_are_alive(make: Any, order: str, stayed: list[tuple[str, int]]) -> None:
    """Then tensors of one pass take the memory of those that the backward pass of another has done with."""
    everything = make(schedule=1 << 30)
    train(MODELS["perceptrons"][0], everything)
    saved = everything.plan()
    assert saved is not None
    room = saved.kept_bytes // 2
    model = MODELS["perceptrons"][0]()
    with a_slow_disk():
        offload = make(schedule=room, recompute="auto", staging_bytes=1 << 16, prefetch_bytes=1 << 16)
        offload.attach(model)
        alive: list[Tensor] = []
        for x in batches(12):
            with offload.step():
                alive.append(model(x).square().mean())
            if order == "one after the other":
                alive.pop().backward()
            elif order == "two at a time" and len(alive) == 2:
                for loss in reversed(alive):
                    loss.backward()
                alive.clear()
            elif order == "one behind" and len(alive) == 2:
                alive.pop(0).backward()
            loss = None
    plan = offload.plan()
    assert plan is not None
    nbytes = {one.name: one.nbytes for one in plan.blocks}
    assert len(stayed) > 0
    assert max(kept + nbytes[name] for name, kept in stayed) <= room
    offload.detach()


def test_a_block_that_takes_more_than_has_stayed_has_room_in_the_forward_pass(forced: Any) -> None:
    """What no plan knows does not take it."""
    offload = forced()
    train(MODELS["perceptrons"][0], offload)
    planner, form = offload._engine.planner, offload._engine.planner.latest()
    assert form is not None
    assert planner.memory.again_nbytes == form.again_nbytes > 0
    assert planner.kept_bytes() == 0
    assert planner.memory.room(torch.device("cpu")) == (1 << 30) - form.again_nbytes


# --- passes that need nothing


def test_nothing_is_recomputed_where_everything_fits(make: Any) -> None:
    """And most passes are not examined, as without the option."""
    make_model, run = MODELS["perceptrons"]
    counts = []
    for options in ({}, {"recompute": "auto"}):
        offload = make(schedule=1 << 30, **options)
        expected = train(make_model, None, run, batches(12))
        assert same(train(make_model, offload, run, batches(12)), expected)
        found = offload.statistics()
        assert (found.recomputed, found.offloaded) == (0, 0)
        counts.append((found.packed, found.kept["unexamined"], found.everything_fits))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_nothing_is_recomputed_if_all_is_to_move(make: Any) -> None:
    make_model, run = MODELS["perceptrons"]
    with a_slow_disk():
        offload = make(schedule="all", recompute="auto")
        assert same(train(make_model, offload, run), train(make_model, None, run))
    assert offload.statistics().recomputed == 0
    assert offload.statistics().offloaded > 0


# --- what is shown


def test_the_plan_and_the_trace_show_it(make: Any, tmp_path: Path) -> None:
    make_model, run = MODELS["perceptrons"]
    trace = tmp_path / "trace.json"
    with plans_that_recompute(inputs_leave=True):
        offload = make(schedule=1 << 30, recompute="auto", trace=str(trace))
        train(make_model, offload, run)
        plan = offload.plan()
        offload.close()
    assert plan is not None
    assert [one.name for one in plan.blocks] == [str(number) for number in range(1, BLOCKS + 1)]
    assert all(one.is_recomputed and one.inputs_leave for one in plan.blocks)
    assert f"{BLOCKS} of {BLOCKS} blocks (1 to {BLOCKS}) can be computed again, and {BLOCKS} of them are" in str(plan)
    for way in ("keep", "move", "recompute", "recompute, move inputs", "this plan", "twice the batch, planned alike"):
        assert re.search(rf"\n{way}: .* a step, at most .*B in memory", str(plan)), way
    assert f"{BLOCKS * (STEPS - MEASURED)} blocks computed again" in str(offload.statistics())
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one["name"] == "recompute"]
    assert [one["args"]["block"] for one in events[:BLOCKS]] == [str(number) for number in range(BLOCKS, 0, -1)]
    assert len(events) == BLOCKS * (STEPS - MEASURED)


def test_the_plan_says_why_nothing_can_be_recomputed(forced: Any) -> None:
    make_model, _ = IN_PLACE["x.add_(block(x))"]
    offload = forced()
    train(make_model, offload)
    found = str(offload.plan())
    assert "none of 4 blocks (blocks.0 to blocks.3) can be computed again, and none of them are" in found
    assert "change their inputs in place" in found


def test_an_estimate_for_a_configuration_without_recomputing(make: Any) -> None:
    make_model, run = MODELS["perceptrons"]
    with a_slow_disk():
        offload = make(schedule=0.3, recompute="auto")
        train(make_model, offload, run)
        again = offload.estimate()
        alone = offload.estimate(dataclasses.replace(offload.config, recompute=False))
    assert again.plan.recomputed_bytes > 0
    assert alone.plan.recomputed_bytes == 0
    assert again.plan.ways.keys() - alone.plan.ways.keys() == {"recompute", "recompute, move inputs"}
    assert alone.plan.twice is not None
    assert alone.plan.twice.recompute_seconds == 0


def test_a_dry_run_shows_what_would_be_recomputed(make: Any) -> None:
    make_model, run = MODELS["batch norms"]
    torch.manual_seed(0)
    model = make_model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with a_slow_disk():
        offload = make(schedule=0.3, recompute="auto")
        offload.attach(model)
        found = offload.dry_run(lambda: run(model, batches()[0]).backward())
    assert found.plan.recomputed_bytes > 0
    assert offload.statistics().steps == 0
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


# --- models that are checkpointed already


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Mlp() for _ in range(BLOCKS)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, "auto"])
@pytest.mark.parametrize("schedule", ["all", 0.3])
def test_models_that_are_checkpointed_already(make: Any, reentrant: bool, recompute: Any, schedule: Any) -> None:
    """What leaves are the inputs of blocks, and nothing is left to gain."""
    expected = train(lambda: Checkpointed(None), None)
    with a_slow_disk():
        offload = make(schedule=schedule, recompute=recompute)
        assert same(train(lambda: Checkpointed(reentrant), offload), expected)
    found = offload.statistics()
    assert found.recomputed == 0
    if schedule == "all":
        inputs = BLOCKS + 2  # of the first layer, of the loss
        assert BLOCKS <= found.offloaded / STEPS <= inputs
        assert found.offloaded_bytes <= STEPS * inputs * ROWS * WIDTH * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_checkpointed_inside(forced: Any, reentrant: bool) -> None:
    """A block that is computed again computes a part again."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.other(checkpoint(self.inner, x, use_reentrant=reentrant))
            return found

    def make_model() -> nn.Module:
        return in_turn(*(Inside() for _ in range(3)))

    offload = forced()
    assert same(train(make_model, offload), train(make_model, None))
    assert offload.statistics().recomputed == 3 * (STEPS - MEASURED)


# --- compiled models


def compiled_whole(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    for number in range(1, len(model)):  # type: ignore[arg-type]
        model[number] = torch.compile(model[number], backend="aot_eager")  # type: ignore[operator,index]
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    for block in list(model.children())[1:]:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("compiled", "is_recomputed"), [(compiled_whole, False), (compiled_blocks, True), (compiled_in_place, False)]
)
def test_compiled_models(forced: Any, compiled: Callable[[nn.Module], nn.Module], is_recomputed: bool) -> None:
    torch.compiler.reset()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x)).sigmoid()

    def make_model() -> nn.Module:
        return compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), Plain(), Plain()))

    expected = train(make_model, None)
    offload = forced()
    assert same(train(make_model, offload), expected)
    assert bool(offload.statistics().recomputed) == is_recomputed


def test_several_threads_at_once(forced: Any) -> None:
    make_model, run = MODELS["adapters"]
    torch.manual_seed(0)
    model = make_model().eval()
    wanted = [one for one in model.parameters() if one.requires_grad]
    expected = [torch.autograd.grad(run(model, x), wanted) for x in batches(4)]
    offload = forced()
    offload.attach(model)
    found: dict[int, Any] = {}

    def work(x: Tensor) -> None:
        for _ in range(4):
            with offload.step():
                loss = run(model, x)
            found[id(x)] = torch.autograd.grad(loss, wanted)

    data = batches(4)
    in_threads(work, data)
    for x, gradients in zip(data, expected, strict=True):
        assert all(map(torch.equal, found[id(x)], gradients))
    assert offload.statistics().recomputed > 0


# --- several processes


class Together(Mlp):
    """A block in which ranks wait for each other, as in a batch norm over all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + all_reduce(x.mean()) / 2


@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_plan_differently(tmp_path: Path, together: bool) -> None:
    """Where ranks wait for each other in a block, it is not computed again: others may not do so."""
    run_ranks(_train_ddp, 2, tmp_path, together)


def _train_ddp(rank: int, folder: Path, together: bool) -> None:
    join(folder, rank, 2)
    torch.set_num_threads(1)

    def make_model() -> nn.Module:
        return DistributedDataParallel(in_turn(*((Together if together else Mlp)() for _ in range(4))))

    data = [x + rank for x in batches()]
    expected = train(make_model, None, plain, data)
    config = OffloadConfig(schedule=1 << 30, min_bytes=1, directories=(str(folder),), recompute="auto")
    with plans_that_recompute(lambda number: number % 2 == rank), ActivationOffload(config) as offload:
        assert same(train(make_model, offload, plain, data), expected)
        assert offload.statistics().recomputed == (0 if together else 2 * (STEPS - MEASURED))
    dist.destroy_process_group()
