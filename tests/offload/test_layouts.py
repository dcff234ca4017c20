"""Saved tensors without sizes, strides, bytes or storage of the usual kind: they stay in memory, and are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from fastensor.backends.buffers import map_buffers
from fastensor.errors import OffloadError
from fastensor.offload import ActivationOffload, copying

Made = tuple[torch.Tensor, list[torch.Tensor]]
"""A loss, and what it depends on."""
LAYOUTS: dict[str, tuple[Callable[[], Made], str]] = {}
"""What saves a tensor of the kind, and why that stays in memory."""


def saving(reason: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def note(function: Callable[[], Made]) -> Callable[[], Made]:
        LAYOUTS[function.__name__] = function, reason
        return function

    return note


class Product(torch.autograd.Function):
    """Saves one tensor of whatever kind, and looks at it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor, dense: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(other)
        ctx.dense = dense
        return x * dense(other)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (other,) = ctx.saved_tensors
        return gradient * ctx.dense(other), None, None


def product(other: torch.Tensor, dense: Callable[[Any], torch.Tensor]) -> Made:
    x = torch.randn(8, 8, requires_grad=True)
    return Product.apply(x, other, dense).square().sum(), [x]  # type: ignore[no-untyped-call]


def values() -> torch.Tensor:
    return torch.randn(8, 8).relu()


@saving("layout")
def strided_nested() -> Made:
    net = nn.Linear(8, 8)
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    return torch.nested.to_padded_tensor(functional.gelu(net(parts)), 0.0).square().sum(), [*net.parameters()]


@saving("layout")
def strided_nested_leaf() -> Made:
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], requires_grad=True)
    return torch.nested.to_padded_tensor(functional.gelu(parts * 2), 0.0).square().sum(), [parts]


@saving("subclass")
def jagged_nested() -> Made:
    net = nn.Linear(8, 8)
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    return functional.gelu(net(parts)).values().square().sum(), [*net.parameters()]


@saving("layout")
def coordinates() -> Made:
    weight = torch.randn(8, 8, requires_grad=True)
    return torch.sparse.mm(values().to_sparse(), weight.exp()).square().sum(), [weight]


@saving("parameter")
def coordinates_leaf() -> Made:
    matrix = values().to_sparse().requires_grad_()
    weight = torch.randn(8, 8, requires_grad=True)
    return torch.sparse.mm(matrix, weight).square().sum(), [matrix, weight]


@saving("parameter")
def sparse_parameter() -> Made:
    matrix = nn.Parameter(values().to_sparse())
    return torch.sparse.mm(matrix, torch.randn(8, 3)).square().sum(), [matrix]


@saving("layout")
def compressed_rows() -> Made:
    weight = torch.randn(8, 8, requires_grad=True)
    return (values().to_sparse_csr() @ weight.exp()).square().sum(), [weight]


@saving("parameter")
def compressed_rows_leaf() -> Made:
    matrix = values().to_sparse_csr().requires_grad_()
    weight = torch.randn(8, 8, requires_grad=True)
    return (matrix @ weight.exp()).square().sum(), [weight]


@saving("layout")
def compressed_columns() -> Made:
    return product(values().to_sparse_csc(), torch.Tensor.to_dense)


@saving("layout")
def blocks_of_rows() -> Made:
    return product(values().to_sparse_bsr((2, 2)), torch.Tensor.to_dense)


@saving("layout")
def blocks_of_columns() -> Made:
    return product(values().to_sparse_bsc((2, 2)), torch.Tensor.to_dense)


@saving("layout")
def mkldnn() -> Made:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without MKL-DNN")
    x = torch.randn(8, 8, requires_grad=True)
    return functional.relu(x.to_mkldnn()).to_dense().square().sum(), [x]


@saving("layout")
def quantized() -> Made:
    return product(torch.quantize_per_tensor(values(), 0.1, 3, torch.qint8), torch.Tensor.dequantize)


@saving("layout")
def quantized_per_channel() -> Made:
    scales, zeros = torch.rand(8) + 0.1, torch.zeros(8, dtype=torch.int64)
    return product(torch.quantize_per_channel(values(), scales, zeros, 0, torch.qint8), torch.Tensor.dequantize)


@saving("layout")
def negated() -> Made:
    return product(torch.view_as_complex(torch.randn(8, 8, 2)).conj().imag, torch.Tensor.clone)


@saving("device")
def meta() -> Made:
    x = torch.empty(8, 8, device="meta", requires_grad=True)
    return x.exp().sin().sum(), [x]


@saving("layout")
def zeros_without_memory() -> Made:
    """What forward-mode differentiation takes for the tangents of tensors that have none."""
    return product(torch._efficientzerotensor((8, 8)), lambda zeros: zeros + torch.ones(8, 8))


@saving("layout")
def to_be_functionalized() -> Made:
    return product(torch._to_functional_tensor(values()), torch._from_functional_tensor)


@saving("subclass")
def fake() -> Made:
    with FakeTensorMode():
        x = torch.empty(8, 8, requires_grad=True)
        return x.exp().sin().sum(), [x]


class Named(torch.Tensor):
    """A subclass that adds nothing."""


@saving("subclass")
def subclass() -> Made:
    x = torch.randn(8, 8, requires_grad=True)
    return x.as_subclass(Named).exp().sin().sum().as_subclass(torch.Tensor), [x]


@saving("subclass")
def wrapper_subclass() -> Made:
    x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
    return x.exp().sin().sum(), [x]


class Secretive(torch.Tensor):
    """Says nothing about itself."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (torch.Tensor.numel, torch.Tensor.nbytes.__get__, torch.Tensor.dtype.__get__):  # type: ignore[attr-defined]
            raise RuntimeError("it has none")
        return super().__torch_function__(function, types, arguments, options)


@saving("subclass")
def secretive_subclass() -> Made:
    x = torch.randn(8, 8, requires_grad=True)
    return x.as_subclass(Secretive).exp().sin().sum().as_subclass(torch.Tensor), [x]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes of torch warn of themselves
        yield


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Plain tensors that are equal if such ones are; none if it has no values."""
    if isinstance(tensor, TwoTensor):
        return [tensor.a, tensor.b]
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return []
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def gradients(make: Callable[[], Made], offload: ActivationOffload | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with offload.step() if offload else nullcontext():
        loss, wanted = make()
    if offload:
        offload.settle()
    loss.backward()
    found = [one.grad for one in wanted]
    assert all(one is not None for one in found)
    return [part for one in (loss.detach(), *found) if one is not None for part in parts(one)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_kept_and_counted(make: Any, name: str) -> None:
    saves, reason = LAYOUTS[name]
    expected = gradients(saves, None)
    offload = make()
    for times in (1, 2):
        found = gradients(saves, offload)
        assert [*map(torch.equal, found, expected)] == [True] * len(expected)
        kept = offload.statistics().kept
        assert kept.get(reason, 0) > 0, kept
        assert kept[reason] % times == 0
    assert offload.statistics().failed_writes == 0


def test_a_subclass_that_refuses_every_function(make: Any) -> None:
    """A parameter of a lazy module does."""
    with make().step():
        loss, (x,) = product(nn.UninitializedParameter(), lambda _: torch.ones(()))
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)


def test_memory_that_cannot_be_reached_is_no_fault_of_a_backend() -> None:
    zeros = torch._efficientzerotensor((8, 8)).untyped_storage()
    with pytest.raises(OffloadError, match="the memory of a saved tensor cannot be reached"):
        copying.copy_out(zeros, 0, zeros.nbytes(), map_buffers(1)[0], None)
    with pytest.raises(OffloadError, match="the memory of a saved tensor cannot be reached"):
        copying.pages_of(zeros, 0, zeros.nbytes())


@pytest.mark.parametrize("attached", [True, False])
def test_buffers_of_such_layouts(make: Any, attached: bool) -> None:
    class Holds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.nested = nn.Buffer(torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)]))
            self.sparse = nn.Buffer(values().to_sparse())
            self.rows = nn.Buffer(values().to_sparse_csr())
            self.quantized = nn.Buffer(torch.quantize_per_tensor(values(), 0.1, 3, torch.qint8))
            self.nowhere = nn.Buffer(torch.empty(3, device="meta"))

    model, offload = Holds(), make()
    if attached:
        offload.attach(model)
    with offload.step():
        loss = torch.sparse.mm(model.sparse, model(values())).sum()
    loss.backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_in_place_changes_of_nested_tensors_are_found(make: Any, layout: torch.layout) -> None:
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout, requires_grad=True)
    with make().step():
        saved = parts * 2
        result = functional.gelu(saved)
    saved.detach().mul_(3)
    gradient = torch.ones_like(result)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        result.backward(gradient)
