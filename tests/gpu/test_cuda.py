"""CUDA storages: staged on a stream of their own, behind the work that is queued, and loaded to the device."""

from __future__ import annotations

import gc
import io
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastensor
from fastensor.backends import gds, registry
from fastensor.backends.buffers import BUFFER_NBYTES, BufferPool, map_buffers
from fastensor.backends.device_crc32 import PendingCrc32s

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@pytest.fixture(autouse=True, scope="module")
def cuda() -> None:
    torch.cuda.init()  # gds is available only then


def skip_unless_available(backend: str) -> None:
    if backend != registry.AUTO and (reason := registry.get(backend).why_unavailable()):
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize("backend", registry.names())
def test_device_tensors_come_back_equal(tmp_path: Path, backend: str) -> None:
    state = {
        "large": torch.randn(20 << 20, device="cuda"),
        "small": torch.randn(7, device="cuda", dtype=torch.bfloat16),
        "host": torch.arange(1000),
    }
    state["tied"] = state["large"][5:50]
    skip_unless_available(backend)
    report = fastensor.save(state, tmp_path / "x", backend=backend)
    assert report.fallbacks == ()
    for location in (None, "cuda", "cpu"):
        loaded = fastensor.load(tmp_path / "x", location)
        assert all(torch.equal(loaded[key].cpu(), state[key].cpu()) for key in state)
        assert loaded["tied"].data_ptr() == loaded["large"][5:].data_ptr()


@pytest.mark.parametrize("backend", ["direct", "gds", "numpy"])
def test_a_save_waits_for_work_that_is_queued(tmp_path: Path, backend: str, occupy: Callable[[int], None]) -> None:
    """The tensor gets its value only after a second of other work on the stream; nothing synchronizes before."""
    skip_unless_available(backend)
    tensor = torch.zeros(32 << 20, device="cuda")
    fastensor.save(tensor, tmp_path / "warm", backend=backend)
    for attempt in range(5):
        occupy(200_000_000)
        tensor.fill_(attempt + 1)
        fastensor.save(tensor, tmp_path / "x", backend=backend)
        tensor.zero_()
        assert (torch.load(tmp_path / "x", "cpu") == attempt + 1).all()


def test_work_on_another_current_stream_is_waited_for(tmp_path: Path, occupy: Callable[[int], None]) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        occupy(200_000_000)
        tensor.fill_(3)
        fastensor.save(tensor, tmp_path / "x", backend="direct")
    assert (torch.load(tmp_path / "x", "cpu") == 3).all()


def test_saving_takes_no_device_memory(tmp_path: Path) -> None:
    tensor = torch.randn(64 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fastensor.save(tensor, tmp_path / "x", backend="direct")
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_an_asynchronous_save_waits_for_queued_work_and_for_nothing_that_comes_later(
    tmp_path: Path, occupy: Callable[[int], None]
) -> None:
    tensor = torch.zeros(32 << 20, device="cuda")
    with fastensor.AsyncWriter() as writer:
        for attempt in range(5):
            occupy(200_000_000)
            tensor.fill_(attempt + 1)
            handle = writer.save({"w": tensor, "host": torch.full((5,), attempt)}, tmp_path / "x")
            tensor.zero_()
            assert handle.result().backend == "direct"
            found = torch.load(tmp_path / "x", "cpu")
            assert (found["w"] == attempt + 1).all()
            assert found["host"][0] == attempt


def test_an_asynchronous_save_returns_before_the_device_has_copied(
    tmp_path: Path, occupy: Callable[[int], None]
) -> None:
    state = {"w": torch.ones(32 << 20, device="cuda")}
    with fastensor.AsyncWriter() as writer:
        writer.save(state, tmp_path / "x").result()  # maps and pins the staging memory
        occupy(2_000_000_000)
        before = torch.cuda.current_stream().record_event()
        handle = writer.save(state, tmp_path / "x")
        assert not before.query(), "the copies are behind work that is not done"
        state["w"].zero_()
        handle.result()
    assert (torch.load(tmp_path / "x", "cpu")["w"] == 1).all()


def test_memory_that_is_dropped_after_an_asynchronous_save_is_not_used_before_it_is_copied(
    tmp_path: Path, occupy: Callable[[int], None]
) -> None:
    with fastensor.AsyncWriter() as writer:
        for attempt in range(5):
            state = {"w": torch.full((32 << 20,), float(attempt), device="cuda")}
            occupy(200_000_000)
            handle = writer.save(state, tmp_path / "x")
            del state
            noise = [torch.full((32 << 20,), -1.0, device="cuda") for _ in range(3)]
            handle.result()
            assert (torch.load(tmp_path / "x", "cpu")["w"] == attempt).all()
            del noise


def test_an_asynchronous_save_takes_no_device_memory(tmp_path: Path) -> None:
    """What others do instead: clone the state on the device."""
    tensor = torch.randn(64 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    with fastensor.AsyncWriter() as writer:
        writer.save({"w": tensor}, tmp_path / "x").result()
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


@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_parameters_on_the_device_are_filled_where_they_are(tmp_path: Path, backend: str, name: str) -> None:
    skip_unless_available(backend)
    model = torch.nn.Sequential(torch.nn.Linear(3000, 2000), torch.nn.Linear(2000, 7)).cuda()
    fastensor.save_model(model, tmp_path / name, backend=backend)
    other = torch.nn.Sequential(torch.nn.Linear(3000, 2000), torch.nn.Linear(2000, 7)).cuda()
    addresses = [one.data_ptr() for one in other.parameters()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fastensor.load_model(other, tmp_path / name, backend=backend)
    if backend != "gds":  # the device computes checksums, which takes memory
        assert torch.cuda.max_memory_allocated() - before < 4 << 20
    assert addresses == [one.data_ptr() for one in other.parameters()]
    for one, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("backend", ["auto", *registry.names()])
def test_stored_tensors_come_back_to_the_device(tmp_path: Path, backend: str) -> None:
    skip_unless_available(backend)
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


def test_a_store_waits_for_work_that_is_queued(tmp_path: Path, occupy: Callable[[int], None]) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    store = fastensor.TensorStore(tmp_path)
    for attempt in range(12):
        occupy(50_000_000)
        tensor.fill_(attempt + 1)
        ref = store.put(tensor)
        tensor.zero_()
        assert (store.get(ref, "cpu") == attempt + 1).all()
        store.delete(ref)


@pytest.mark.parametrize("backend", registry.names())
def test_a_load_takes_no_memory_of_a_tensors_size_on_the_host(tmp_path: Path, backend: str) -> None:
    skip_unless_available(backend)
    skip_unless_peaks_are_known()
    tensor = torch.randn(128 << 20, device="cuda")
    for name in ("x", "x.safetensors"):
        fastensor.save({"w": tensor}, tmp_path / name)
        fastensor.load(tmp_path / name, "cuda", backend=backend)  # what is loaded and pinned once
        CLEAR_REFS.write_text("5")
        before = resident_nbytes("VmRSS")
        found = fastensor.load(tmp_path / name, "cuda", backend=backend)
        assert resident_nbytes("VmHWM") - before < 128 << 20
        assert torch.equal(found["w"], tensor)


def skip_unless_peaks_are_known() -> None:
    if not CLEAR_REFS.exists() or "VmHWM:" not in STATUS.read_text():
        pytest.skip("this kernel does not report the peak of a process's memory, or cannot begin a new one")


def resident_nbytes(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.parametrize("backend", registry.names())
def test_loads_and_saves_race_with_the_training(tmp_path: Path, backend: str, occupy: Callable[[int], None]) -> None:
    """Memory is freed and given out again all the time, on two streams, while kernels are still queued on it: a load
    must not write to what they still use, and what is queued behind it must find its values."""
    skip_unless_available(backend)
    expected = {str(number): torch.full((2 << 20,), float(number), device="cuda") for number in range(12)}
    fastensor.save(expected, tmp_path / "x", backend=backend)
    side = torch.cuda.Stream()
    for attempt in range(6):
        busy = [torch.ones(2 << 20, device="cuda") for _ in range(12)]
        occupy(50_000_000)
        sums = [one.mul_(2.0).sum() for one in busy]  # still to be done when its memory is free
        del busy
        with torch.cuda.stream(side if attempt % 2 else torch.cuda.current_stream()):
            found = fastensor.load(tmp_path / "x", "cuda", backend=backend)
            means = {name: one.mean() for name, one in found.items()}
            for one in found.values():
                one.add_(attempt)
            fastensor.save(found, tmp_path / "y", backend=backend)
            for one in found.values():
                one.zero_()
        torch.cuda.synchronize()
        assert all(total.item() == 2.0 * (2 << 20) for total in sums)
        assert {name: mean.item() for name, mean in means.items()} == {name: float(name) for name in expected}
        again = fastensor.load(tmp_path / "y", "cpu", backend="numpy")
        assert all(torch.equal(again[name], expected[name].cpu() + attempt) for name in expected)


def test_several_devices_in_one_state(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    state = {str(number): torch.randn(3 << 20, device=f"cuda:{number}") for number in range(2)}
    for backend in registry.names():
        if registry.get(backend).why_unavailable():
            continue
        fastensor.save(state, tmp_path / "x", backend=backend)
        found = fastensor.load(tmp_path / "x", backend=backend)
        assert all(torch.equal(found[name], state[name]) and found[name].device == state[name].device for name in state)


@pytest.mark.parametrize("nbytes", [1, 4096, 70_001, (9 << 20) + 5])
def test_checksums_are_computed_on_the_device(nbytes: int) -> None:
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    pending = PendingCrc32s([values, values[: nbytes // 2 + 1]])
    torch.cuda.synchronize()
    host = values.cpu().numpy()
    assert pending.values() == [zlib.crc32(host.data), zlib.crc32(host[: nbytes // 2 + 1].data)]


def test_compat_mode_is_told_apart_from_gpudirect_storage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skip_unless_available("gds")
    gds.announce_mode.cache_clear()
    fastensor.save({"w": torch.ones(1 << 20, device="cuda")}, tmp_path / "x", backend="gds")
    assert ("compat mode" in caplog.text) == bool(gds.compat_reason())


def test_buffers_for_a_device_are_pinned_until_they_are_dropped() -> None:
    pool = BufferPool(lambda: 2 * BUFFER_NBYTES)
    pool.reserve(2 * BUFFER_NBYTES)
    with pool.lending() as lent:
        memory = pool.take(lent).as_tensor()
        lent[0].prepare(torch.device("cuda"))
        assert memory.is_pinned()
    pool.close()
    gc.collect()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_pinned_leaves_no_error_to_later_calls() -> None:
    (buffer,) = map_buffers(1)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(buffer.address, buffer.nbytes, 0)) == 0
    try:
        buffer.prepare(torch.device("cuda"))  # it is pinned already
        assert torch.ones(10, device="cuda").sum().item() == 10
    finally:
        assert int(cudart.cudaHostUnregister(buffer.address)) == 0


def test_gds_reserves_no_more_device_memory_each_time(tmp_path: Path) -> None:
    skip_unless_available("gds")
    state = {"w": torch.randn(16 << 20, device="cuda")}
    reserved = []
    for _ in range(40):
        fastensor.save(state, tmp_path / "x", backend="gds")
        found = fastensor.load(tmp_path / "x", "cuda", backend="gds")
        reserved.append(torch.cuda.memory_reserved())
    assert torch.equal(found["w"], state["w"])
    assert reserved[39] == reserved[2]
