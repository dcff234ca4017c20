"""CUDA storages: staged on a stream of their own, behind the work that is queued, and loaded to the device."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import fastensor
from fastensor.backends import registry
from fastensor_lightning import FastensorCheckpointIO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize("backend", registry.names())
def test_device_tensors_come_back_equal(tmp_path: Path, backend: str) -> None:
    state = {
        "large": torch.randn(20 << 20, device="cuda"),
        "small": torch.randn(7, device="cuda", dtype=torch.bfloat16),
        "host": torch.arange(1000),
    }
    state["tied"] = state["large"][5:50]
    report = fastensor.save(state, tmp_path / "x", backend=backend)
    assert report.fallbacks == ()
    for location in (None, "cuda", "cpu"):
        loaded = fastensor.load(tmp_path / "x", location)
        assert all(torch.equal(loaded[key].cpu(), state[key].cpu()) for key in state)
        assert loaded["tied"].data_ptr() == loaded["large"][5:].data_ptr()


@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_a_save_waits_for_work_that_is_queued(tmp_path: Path, backend: str) -> None:
    """The tensor gets its value only after a second of other work on the stream; nothing synchronizes before."""
    tensor = torch.zeros(32 << 20, device="cuda")
    fastensor.save(tensor, tmp_path / "warm", backend=backend)
    for attempt in range(5):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(attempt + 1)
        fastensor.save(tensor, tmp_path / "x", backend=backend)
        tensor.zero_()
        assert (torch.load(tmp_path / "x", "cpu") == attempt + 1).all()


def test_work_on_another_current_stream_is_waited_for(tmp_path: Path) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(3)
        fastensor.save(tensor, tmp_path / "x", backend="direct")
    assert (torch.load(tmp_path / "x", "cpu") == 3).all()


def test_saving_takes_no_device_memory(tmp_path: Path) -> None:
    tensor = torch.randn(64 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fastensor.save(tensor, tmp_path / "x")
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_an_asynchronous_save_waits_for_queued_work_and_for_nothing_that_comes_later(tmp_path: Path) -> None:
    tensor = torch.zeros(32 << 20, device="cuda")
    with fastensor.AsyncWriter() as writer:
        for attempt in range(5):
            torch.cuda._sleep(200_000_000)
            tensor.fill_(attempt + 1)
            handle = writer.save({"w": tensor, "host": torch.full((5,), attempt)}, tmp_path / "x")
            tensor.zero_()
            assert handle.result().backend == "direct"
            found = torch.load(tmp_path / "x", "cpu")
            assert (found["w"] == attempt + 1).all()
            assert found["host"][0] == attempt


def test_an_asynchronous_save_takes_no_device_memory_and_pins_its_own(tmp_path: Path) -> None:
    """What others do instead: clone the state on the device."""
    tensor = torch.randn(64 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    with fastensor.AsyncWriter() as writer:
        writer.save({"w": tensor}, tmp_path / "x").result()
        assert all(block._pinned for block in writer._arena._idle if block._touched)
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(torch.load(tmp_path / "x", "cpu")["w"], tensor.cpu())


def test_an_asynchronous_save_of_more_than_its_staging_memory(tmp_path: Path) -> None:
    state = {"a": torch.randn(8 << 20, device="cuda"), "b": torch.arange(100)}
    expected = {name: one.cpu().clone() for name, one in state.items()}
    with fastensor.AsyncWriter(staging_bytes=8 << 20) as writer:
        writer.save(state, tmp_path / "x")
        for one in state.values():
            one.zero_()
    found = fastensor.load(tmp_path / "x", "cpu")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_safetensors_of_device_tensors(tmp_path: Path, backend: str) -> None:
    base = torch.randn(20 << 20, device="cuda")
    state = {"a": base[: 5 << 20], "b": base[5 << 20 :], "half": torch.randn(7, device="cuda").half()}
    report = fastensor.save(state, tmp_path / "x.safetensors", backend=backend)
    assert report.fallbacks == ()
    for location in (None, "cuda"):
        loaded = fastensor.load(tmp_path / "x.safetensors", location)
        assert all(torch.equal(loaded[key].cpu(), state[key].cpu()) for key in state)
        assert loaded["a"].is_cuda == (location == "cuda")
    with fastensor.open(tmp_path / "x.safetensors", "cuda") as found:
        assert torch.equal(found["a", 10:20], state["a"][10:20])


def test_device_tensors_to_an_open_file(tmp_path: Path) -> None:
    state = {"w": torch.randn(9 << 20, device="cuda")}
    for container in ("torch", "safetensors"):
        buffer = io.BytesIO()
        fastensor.save(state, buffer, container=container)
        buffer.seek(0)
        assert torch.equal(fastensor.load(buffer, "cuda")["w"], state["w"])


def test_a_part_of_a_checkpoint_straight_to_the_device(tmp_path: Path) -> None:
    fastensor.save({"a": torch.randn(1000, device="cuda"), "b": torch.randn(1000)}, tmp_path / "x")
    found = fastensor.load(tmp_path / "x", "cuda", keys=["a"])
    assert list(found) == ["a"]
    assert found["a"].is_cuda


def test_the_plugin_loads_straight_to_the_device(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(map_location="cuda")
    plugin.save_checkpoint({"w": torch.arange(5)}, tmp_path / "x")
    assert plugin.load_checkpoint(tmp_path / "x")["w"].is_cuda


@pytest.mark.parametrize("backend", ["auto", *registry.names()])
def test_stored_tensors_come_back_to_the_device(tmp_path: Path, backend: str) -> None:
    store = fastensor.TensorStore(tmp_path, backend=backend, mode="write_read")
    large = torch.randn(8, 16, 256, 256, device="cuda")
    tensors = [large, large[3], large.bfloat16(), large[:, ::2], large[0, 0].t(), torch.tensor(3, device="cuda"),
               large.contiguous(memory_format=torch.channels_last), large[0, 0].to_sparse()]  # fmt: skip
    for tensor in tensors * 2:
        ref = store.put(tensor)
        assert ref.device == "cuda"
        for device in (None, "cuda", "cpu"):
            found = store.get(ref, device)
            assert found.device.type == (device or "cuda")
            assert found.dtype == tensor.dtype
            assert torch.equal(found.to_dense().cpu(), tensor.to_dense().cpu())
        store.delete(ref)
    assert store.get(store.put(large.contiguous(memory_format=torch.channels_last))).stride(1) == 1


def test_a_store_waits_for_work_that_is_queued(tmp_path: Path) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    store = fastensor.TensorStore(tmp_path)
    for attempt in range(12):
        torch.cuda._sleep(50_000_000)
        tensor.fill_(attempt + 1)
        ref = store.put(tensor)
        tensor.zero_()
        assert (store.get(ref, "cpu") == attempt + 1).all()
        store.delete(ref)
