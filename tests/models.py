"""Forward passes that save all kinds of tensors, each with what gradients are wanted of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fastensor.offload import ActivationOffload
from fastensor.offload.slots import SlotFile

Case = Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]
"""Makes a loss, and says what it depends on. The same each time for the same seed."""
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def of_module(module: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    wanted = [one for one in (*module.parameters(), *inputs) if one.requires_grad]
    return output.square().sum(), wanted


@case
def perceptron() -> tuple[torch.Tensor, list[torch.Tensor]]:
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)]
    return of_module(nn.Sequential(*layers), torch.randn(32, 64))


@case
def convolutions() -> tuple[torch.Tensor, list[torch.Tensor]]:
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3)]
    return of_module(nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5)), torch.randn(4, 3, 32, 32))


@case
def channels_last() -> tuple[torch.Tensor, list[torch.Tensor]]:
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.SiLU(), nn.Conv2d(16, 8, 1)).to(memory_format=torch.channels_last)
    return of_module(net, torch.randn(2, 8, 20, 20).to(memory_format=torch.channels_last).requires_grad_())


@case
def transformer() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return of_module(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.2), torch.randn(4, 20, 32))


@case
def attention_by_hand() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Three projections save one tensor, and chunks are views of one storage."""
    inputs = torch.randn(6, 24, 32, requires_grad=True)
    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(3)]
    q, k, v = (inputs @ weight for weight in weights)
    a, b, c = torch.cat([q, k, v], -1).chunk(3, -1)
    mixed = functional.softmax(a @ b.transpose(1, 2), -1) @ c
    return (mixed * torch.sin(mixed)).sum(), [inputs, *weights]


@case
def tied_weights() -> tuple[torch.Tensor, list[torch.Tensor]]:
    embedding, head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
    head.weight = embedding.weight
    logits = head(torch.tanh(embedding(torch.randint(0, 50, (4, 10)))))
    return functional.cross_entropy(logits.view(-1, 50), torch.randint(0, 50, (40,))), [embedding.weight]


@case
def recurrent() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return of_module(nn.LSTM(16, 32, 2, batch_first=True), torch.randn(4, 12, 16, requires_grad=True))


@case
def complex_numbers() -> tuple[torch.Tensor, list[torch.Tensor]]:
    signal = torch.randn(16, 128, requires_grad=True)
    spectrum = torch.fft.fft(signal)
    return (spectrum.conj() * spectrum * torch.exp(spectrum / 100)).abs().sum(), [signal]


@case
def forward_derivative() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The derivative along a direction, which weights have none of: torch saves zeros in its place, without memory."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with forward_ad.dual_level():
        value = model(forward_ad.make_dual(torch.randn(64, 64), torch.randn(64, 64)))
        primal, tangent = forward_ad.unpack_dual(value)
        assert tangent is not None
        return primal.mean() + tangent.square().mean(), [*model.parameters()]


@case
def strides() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(20, 30, 4, requires_grad=True)
    y = x.exp()
    parts = [y.t() if y.dim() == 2 else y.transpose(0, 2), y[::2], y[:, 3:4].expand(20, 30, 4), y[1, 2], y[..., 1]]
    return torch.stack([(part * part).sum() for part in parts]).prod().log(), [x]


@case
def tiny_and_empty() -> tuple[torch.Tensor, list[torch.Tensor]]:
    scalar, nothing = torch.tensor(3.0, requires_grad=True), torch.empty(0, 4, requires_grad=True)
    return scalar.exp() * scalar.sin() + nothing.exp().sum(), [scalar, nothing]


@case
def autocast() -> tuple[torch.Tensor, list[torch.Tensor]]:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return of_module(net, torch.randn(32, 64))


@case
def integers_and_masks() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(40, 50, requires_grad=True)
    top, _ = x.exp().topk(7, dim=1)
    masked = torch.where(x > 0, x.sinh(), x.cosh()).masked_fill(x > 1.5, 2.0)
    return top.sum() + masked.gather(1, torch.randint(0, 50, (40, 9))).prod(1).sum(), [x]


class Cube(torch.autograd.Function):
    """Reads what it has saved twice, as functions of users may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (first, _), (second, _) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(first, second)
        return gradient * 3 * first * second


@case
def own_function() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(30, 30, requires_grad=True)
    return Cube.apply(Cube.apply(x.tanh())).sum(), [x]  # type: ignore[no-untyped-call]


def _block(module: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    found: torch.Tensor = checkpoint(module, x, use_reentrant=reentrant)
    return found


def _checkpointed(reentrant: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    x = inputs = torch.randn(16, 32, requires_grad=True)
    for block in blocks:
        x = _block(block, x, reentrant)
    return x.square().sum(), [inputs, *(one for block in blocks for one in block.parameters())]


@case
def checkpointed() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return _checkpointed(reentrant=False)


@case
def checkpointed_reentrantly() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return _checkpointed(reentrant=True)


@case
def sparse() -> tuple[torch.Tensor, list[torch.Tensor]]:
    weight = torch.randn(30, 20, requires_grad=True)
    matrix = (torch.rand(40, 30) > 0.8).float().to_sparse()
    return torch.sparse.mm(matrix, weight.exp()).square().sum(), [weight]


def gradients(case: Case, offload: ActivationOffload | None, *, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with nullcontext() if offload is None else offload.step():
        loss, wanted = case()
    if offload is not None:
        offload.settle()
    loss.backward()
    return [loss.detach(), *(one.grad for one in wanted if one.grad is not None)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(found, expected, strict=True)
    )


def large() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Several pieces each, the last of odd sizes."""
    x = torch.randn(2_500_003, requires_grad=True)
    return (x.exp().sin() * x.cos()).sum(), [x]


def slot_files(offload: ActivationOffload) -> list[SlotFile]:
    """The nameless files that hold activations now."""
    return offload._engine.swapper(torch.device("cpu"))._tiers.slots.files


def in_threads(work: Callable[[torch.Tensor], None], inputs: Iterable[torch.Tensor]) -> None:
    """Each input in a thread of its own, all at once; what one of them raises is raised."""
    given = list(inputs)
    with ThreadPoolExecutor(len(given)) as pool:
        for done in [pool.submit(work, one) for one in given]:
            done.result()
