"""Activation offload of a GPU's tensors: the same gradients, less memory, whatever streams do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fastensor.backends import registry
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor.offload.codecs import Codec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
CONFIGS = [
    OffloadConfig(schedule="all"),
    OffloadConfig(schedule="all", staging_bytes=8 << 20, prefetch_bytes=8 << 20),
    OffloadConfig(schedule="all", prefetch_bytes=0),
    OffloadConfig(schedule="all", dram_bytes=64 << 20),
    OffloadConfig(schedule="all", target="dram"),
    OffloadConfig(schedule="all", ssd_bytes=16 << 20),
    OffloadConfig(schedule="all", backend="numpy"),
    OffloadConfig(schedule="all", backend="gds"),
    OffloadConfig(schedule="all", backend="gds", verify=False),
    OffloadConfig(schedule="all", codecs=("csr",)),
    OffloadConfig(schedule="all", codecs=("csr",), dram_bytes=32 << 20),
    OffloadConfig(schedule="all", codecs=("csr",), backend="gds"),
]


def what_is_configured(config: OffloadConfig) -> str:
    default = OffloadConfig()
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != getattr(default, name))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()


def gradients(net: nn.Module, x: torch.Tensor, offload: ActivationOffload | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net.zero_grad()
    if offload is None:
        loss = net(x).square().mean()
    else:
        with offload.step():
            loss = net(x).square().mean()
    loss.backward()
    return [one.grad.clone() for one in net.parameters() if one.grad is not None]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("config", CONFIGS, ids=what_is_configured)
def test_gradients_are_the_same(tmp_path: Path, config: OffloadConfig) -> None:
    if config.backend != registry.AUTO and (reason := registry.get(config.backend).why_unavailable()):
        pytest.skip(f"{config.backend}: {reason}")
    net, x = encoder(), torch.randn(16, 128, 256, device="cuda")
    expected = gradients(net, x, None)
    with ActivationOffload(replace(config, directories=(str(tmp_path),))) as offload:
        for _ in range(3):
            found = gradients(net, x, offload)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert offload.statistics().offloaded > 0


def test_memory_of_the_device_is_freed(tmp_path: Path) -> None:
    net = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(512, 512), nn.GELU())]).cuda()
    x = torch.randn(32768, 512, device="cuda")

    def peak(offload: ActivationOffload | None) -> int:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            gradients(net, x, offload)
        return torch.cuda.max_memory_allocated()

    usual = peak(None)
    config = OffloadConfig(  # by default, all of this is little on a large GPU
        schedule="all", directories=(str(tmp_path),), staging_bytes="256MiB", prefetch_bytes="256MiB"
    )
    with ActivationOffload(config) as offload:
        assert peak(offload) < usual / 2


def test_streams_race_with_the_copies(tmp_path: Path, occupy: Callable[[int], None]) -> None:
    """Activations are made late on one stream, are freed while they are copied, and are wanted on another one."""
    side = torch.cuda.Stream()
    x = torch.randn(8 << 20, device="cuda", requires_grad=True)
    with ActivationOffload(
        OffloadConfig(schedule="all", directories=(str(tmp_path),), staging_bytes=64 << 20)
    ) as offload:
        for attempt in range(6):
            with torch.cuda.stream(side if attempt % 2 else torch.cuda.current_stream()):
                occupy(50_000_000)
                with offload.step():
                    loss = (x * 2).exp().sin().square().tanh().sum()
                noise = [torch.full_like(x, attempt) for _ in range(3)]  # takes what has been freed
                (found,) = torch.autograd.grad(loss, x)
                (expected,) = torch.autograd.grad((x * 2).exp().sin().square().tanh().sum(), x)
                assert torch.equal(found, expected)
                del noise
            torch.cuda.synchronize()


def test_copies_to_host_memory_are_not_waited_for(occupy: Callable[[int], None]) -> None:
    x = torch.randn(8 << 20, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad((x * 2).exp().sin().square().tanh().sum(), x)
    with ActivationOffload(OffloadConfig(schedule="all", target="dram", dram_bytes=4 << 30)) as offload:
        for attempt in range(4):
            occupy(2_000_000_000 if attempt else 1)
            before = torch.cuda.current_stream().record_event()
            with offload.step():
                loss = (x * 2).exp().sin().square().tanh().sum()
            assert not (attempt and before.query()), "the forward pass has only been queued"
            (found,) = torch.autograd.grad(loss, x)
            assert torch.equal(found, expected)
            del loss
        assert offload.statistics().offloaded_bytes > 0


@pytest.mark.parametrize("codecs", [("csr",), ("fp16",), ("csr", "fp16")], ids=str)
def test_codecs_make_outputs_of_relu_smaller(tmp_path: Path, codecs: tuple[Codec, ...]) -> None:
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    expected = gradients(net, x, None)
    with ActivationOffload(OffloadConfig(schedule="all", directories=(str(tmp_path),), codecs=codecs)) as offload:
        for one, other in zip(gradients(net, x, offload), expected, strict=True):
            if "fp16" in codecs:
                assert nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.99
            else:
                assert torch.equal(one, other)
        (by_codec,) = offload.statistics().encoded.values()
        assert by_codec.ratio > (1.7 if codecs == ("csr",) else 1.99)
