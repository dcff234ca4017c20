"""Activations through codecs: the same gradients by CSR, near ones by FP16, fewer bytes; damage is found."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from models import CASES, equal, gradients, slot_files
from torch import nn

from fastensor.backends import direct
from fastensor.offload import CorruptActivationError, OffloadConfig, jobs, moving

Case = tuple[torch.Tensor, list[torch.Tensor]]


def relu_net() -> Case:
    """Convolutions, whose outputs have many zeros, and more than a piece of them."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for width in (3, 16, 16):
        layers += [nn.Conv2d(width, 16, 3), nn.ReLU(inplace=True)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return net(torch.randn(4, 3, 75, 75)).square().sum(), list(net.parameters())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "PIECE_NBYTES", 64 << 10)


@pytest.mark.parametrize("name", [name for name in CASES if "checkpointed" not in name])
def test_gradients_are_the_same_by_csr(make: Any, name: str) -> None:
    expected = gradients(CASES[name], None)
    offload = make(codecs=("csr",), prefetch_bytes=100_000)
    for _ in range(2):
        assert equal(gradients(CASES[name], offload), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 0}, {"verify": False}, {"backend": "numpy"}], ids=str)
def test_a_net_with_relu_gets_smaller(make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "THREADS", 1)  # slots are large until their pieces are encoded: those of one range here
    expected = gradients(relu_net, None)
    plain, offload = make(), make(codecs=("csr",), **options)
    assert equal(gradients(relu_net, plain), expected)
    assert equal(gradients(relu_net, offload), expected)
    before, found = plain.statistics(), offload.statistics()
    by_csr = found.encoded["csr"]
    assert by_csr.ratio > 1.4, "more than two in five elements are zero, and each has a bit"
    assert found.offloaded_bytes == before.offloaded_bytes
    assert before.written_bytes - found.written_bytes == by_csr.nbytes - by_csr.encoded_nbytes
    assert found.written_bytes < 0.75 * before.written_bytes
    assert found.read_bytes == found.written_bytes, "each range is read once, as it was written"
    assert sum(found.written_by.values()) == found.written_bytes
    assert found.peak_ssd_bytes < 0.8 * before.peak_ssd_bytes, "slots are smaller, too"
    assert "made smaller: csr" in str(found)
    assert "made smaller" not in str(before)
    assert before.encoded == {}


def test_ranges_on_a_device(make: Any, staged: None) -> None:
    """A device's tensors are encoded in staging blocks."""
    expected = gradients(relu_net, None)
    offload = make(codecs=("csr",), dram_bytes=8 << 20)
    for _ in range(2):
        assert equal(gradients(relu_net, offload), expected)
    assert offload.statistics().encoded["csr"].nbytes > 0
    assert offload.statistics().peak_dram_bytes > 0


@pytest.mark.parametrize("staging", [4 << 20, 16 << 20])
def test_what_is_too_large_to_be_staged_is_not_encoded(make: Any, staged: None, staging: int) -> None:
    expected = torch.randn(2 << 20).relu()
    offload = make(codecs=("csr",), staging_bytes=staging)
    weight = torch.ones_like(expected, requires_grad=True)
    with offload.step():
        loss = (weight * expected.clone()).sum()
    offload.settle()
    assert offload.statistics().written_bytes > 0
    assert bool(offload.statistics().encoded) == (staging > expected.nbytes)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_that_get_no_smaller_are_written_as_they_are(make: Any) -> None:
    expected = torch.cat([torch.zeros(1 << 18), torch.randn(1 << 18)])
    offload = make(codecs=("csr",))
    weight = torch.ones_like(expected, requires_grad=True)
    with offload.step():
        loss = (weight * expected.clone()).sum()
    offload.settle()
    assert offload.statistics().encoded["csr"].nbytes == pytest.approx(expected.nbytes / 2, rel=0.1)
    assert offload.memory_usage()["on_ssd"] < 0.6 * expected.nbytes
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


@pytest.mark.parametrize("codecs", [("fp16",), ("bf16",), ("csr", "fp16")])
def test_gradients_by_rounding_are_near(make: Any, codecs: tuple[str, ...]) -> None:
    expected = gradients(CASES["perceptron"], None)
    offload = make(codecs=codecs)
    found_gradients = gradients(CASES["perceptron"], offload)
    assert not equal(found_gradients, expected)
    for one, other in zip(found_gradients, expected, strict=True):
        assert nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.99
    found = offload.statistics()
    assert found.encoded["+".join(reversed(codecs))].ratio >= 2
    assert found.written_bytes < 0.6 * found.offloaded_bytes


def test_rounding_is_what_torch_does(make: Any) -> None:
    x = torch.randn(5000, requires_grad=True)
    offload = make(codecs=("fp16",))
    with offload.step():
        loss = x.exp().sum()
    offload.settle()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, x.detach().exp().half().float())


def test_what_would_overflow_stays_as_it_is(make: Any) -> None:
    x = torch.tensor([2.0, 12.0] * 3000, requires_grad=True)
    offload = make(codecs=("fp16",))
    with offload.step():
        loss = x.exp().sum()  # exp(12) is no FP16
    offload.settle()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, x.detach().exp())
    assert offload.statistics().encoded == {}
    assert offload.statistics().written_bytes == x.nbytes


@pytest.mark.parametrize("rounded_first", [True, False])
def test_other_dtypes_on_the_same_memory_keep_their_bits(make: Any, rounded_first: bool) -> None:
    """A graph saves a storage as float32, and again as int32: rounding must not change the integers."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            numbers, bits = memory.view(torch.float32), memory.view(torch.int32)
            ctx.save_for_backward(*((numbers, bits) if rounded_first else (bits, numbers)))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            saved.extend(one.clone() for one in ctx.saved_tensors)
            return torch.zeros(()), None

    saved: list[torch.Tensor] = []
    bits = torch.arange(0x3F800000, 0x3F800000 + 5000, dtype=torch.int32)
    offload, memory = make(codecs=("fp16",)), bits.clone()
    with offload.step():
        loss = Save.apply(torch.zeros((), requires_grad=True), memory)
    del memory
    offload.settle()
    loss.backward()
    by_dtype = {one.dtype: one for one in saved}
    assert torch.equal(by_dtype[torch.int32], bits)
    assert torch.equal(by_dtype[torch.float32], bits.view(torch.float32).half().float())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.usefixtures("small_pieces")
def test_damage_is_found_before_anything_is_decoded(make: Any, verify: bool) -> None:
    offload = make(codecs=("csr",), verify=verify)
    x = torch.randn(40_000, requires_grad=True)
    with offload.step():
        loss = x.relu().square().sum()
    offload.settle()
    (file,) = slot_files(offload)
    data = bytearray(os.pread(file.fd, 4096, 0))
    data[10] ^= 4  # in the bitmap of the first piece
    os.pwrite(file.fd, data, 0)
    message = "have CRC32" if verify else "cannot be decoded .*names another number of values"
    with pytest.raises(CorruptActivationError, match=rf"has changed on the disk of .*{message}"):
        loss.backward()


def test_the_ratio_of_a_tensor_is_known_in_the_next_pass(make: Any) -> None:
    offload = make(codecs=("csr",))
    gradients(relu_net, offload)
    swapper = offload._engine.swapper(torch.device("cpu"))
    marks = []
    admit = swapper.admit
    with mock.patch.object(swapper, "admit", lambda saved: (marks.append(saved.mark), admit(saved))[-1]):
        gradients(relu_net, offload)
    ratios = [swapper.ratio_of(mark) for mark in marks]
    assert any(ratio > 1.4 for ratio in ratios)
    assert 1.0 in ratios, "the input has no zeros"
    assert swapper.ratio_of(12345) is None


def test_a_graph_that_goes_while_its_tensors_are_encoded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    write = direct.DirectSlots.write

    def when_let_go(self: direct.DirectSlots, data: memoryview, offset: int) -> None:
        begun.set()
        assert go.wait(60)
        write(self, data, offset)

    monkeypatch.setattr(direct.DirectSlots, "write", when_let_go)
    monkeypatch.setattr(moving, "PIECE_NBYTES", 8192)
    offload = make(codecs=("csr",), backend="direct")
    with offload.step():
        loss = torch.randn(20_000, requires_grad=True).relu().square().sum()
    assert begun.wait(60)
    del loss
    go.set()
    offload.settle()
    usage = offload.memory_usage()
    assert (usage["on_ssd"], usage["pending"]) == (0, 0)
    assert offload.statistics().failed_writes == 0


@pytest.mark.parametrize(
    ("codecs", "error"), [("csr", TypeError), (("zip",), ValueError), (("fp16", "bf16"), ValueError)], ids=str
)
def test_codecs_that_mean_nothing(codecs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="codecs"):
        OffloadConfig(codecs=codecs)
