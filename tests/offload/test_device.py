"""Activation offload from a device with streams: copies are queued, and neither bytes nor memory are used too early."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from device_model import ORDERS, DeviceModel, modelled
from device_programs import Graph, ModelComputer, graphs, offload_config, run_pass
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, equal, gradients, large
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends import buffers, memory
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.errors import OffloadError
from fastensor.offload import ActivationOffload, OffloadConfig, config, moving
from fastensor.offload.hooks import StepHooks
from fastensor.offload.swapper import Swapper

WAYS: dict[str, dict[str, Any]] = {
    "host memory": {"target": "dram", "dram_bytes": 256 << 20},
    "little on its way": {"target": "dram", "dram_bytes": 256 << 20, "staging_bytes": 1, "prefetch_bytes": 4096},
    "nothing read ahead": {"target": "dram", "dram_bytes": 256 << 20, "prefetch_bytes": 0},
    "the SSD": {"staging_bytes": 8 << 20},
    "both": {"dram_bytes": 16 << 20, "staging_bytes": 8 << 20},
    "encoded": {"codecs": ("csr",), "staging_bytes": 8 << 20},
}
pytestmark = pytest.mark.usefixtures("staged")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["transformer", "convolutions", "attention_by_hand"])
def test_gradients_are_the_same(make: Any, way: str, name: str, order: Any) -> None:
    expected = gradients(CASES[name], None)
    with modelled(order) as model:
        offload = make(**WAYS[way])
        for _ in range(3):
            assert equal(gradients(CASES[name], offload), expected)
        usage = offload.memory_usage()
        offload.close()
        assert model.copied_nbytes > 0
    assert not any(usage[what] for what in ("in_dram", "loaded", "on_ssd")), usage


def test_the_host_waits_for_no_copy_to_host_memory(make: Any) -> None:
    """Nothing has run when the forward pass is over: the host has only queued. Memory of the device is held so long."""
    with modelled() as model:
        offload = make(target="dram", dram_bytes=1 << 30, staging_bytes=1 << 30, prefetch_bytes=1 << 30)
        with offload.step():
            loss, _ = large()
        assert model.copied_nbytes == 0
        assert offload.memory_usage()["pending"] == offload.memory_usage()["in_dram"] > 0
        offload.settle()
        assert offload.memory_usage()["pending"] == 0
        loss.backward()
        assert offload.statistics().wait_to_read_seconds == 0
        offload.close()


def test_beyond_the_budget_the_host_waits_for_the_oldest_copy(make: Any) -> None:
    with modelled() as model:
        offload = make(target="dram", dram_bytes=1 << 30, staging_bytes=20 << 20, prefetch_bytes=1 << 30)
        with offload.step():
            loss, _ = large()
        assert 0 < model.copied_nbytes < offload.statistics().offloaded_bytes
        assert offload.statistics().wait_to_write_seconds > 0
        assert offload.statistics().peak_pending_bytes <= 20 << 20
        loss.backward()
        offload.close()


@pytest.mark.parametrize("what", ["tiers.StorageTiers.take", "tiers.BufferPool.reserve"])
def test_without_pinned_memory_left_tensors_stay_on_the_device(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise MemoryError("no memory for staging")

    expected = gradients(CASES["transformer"], None)
    with modelled():
        offload = make(target="dram", dram_bytes=1 << 30)
        monkeypatch.setattr(f"fastensor.offload.{what}", refuse)
        assert equal(gradients(CASES["transformer"], offload), expected)
        assert offload.statistics().offloaded_bytes == 0
        offload.close()
    assert caplog.text.count("stays in memory, because it could not be written: no memory for staging") == 1


@given(
    graph=graphs(),
    passes=st.integers(1, 3),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 1 << 16),
    blocks=st.sampled_from([1, 3, 8]),
    ahead=st.sampled_from([0, 1, 4]),
    target=st.sampled_from(["dram", "ssd"]),
)
def test_any_graph_gets_what_it_has_saved(
    tmp_path_factory: pytest.TempPathFactory,
    graph: Graph,
    passes: int,
    order: Any,
    seed: int,
    blocks: int,
    ahead: int,
    target: Any,
) -> None:
    """Tensors are needed in any order, once or twice or never, and graphs go while copies are under way."""
    generator = random.Random(seed)
    config = offload_config(tmp_path_factory.getbasetemp(), target, blocks=blocks, ahead=ahead)
    with modelled(order, seed) as model, model.queuing(), nothing_else_keeps_memory(), used_memory(model):
        offload = ActivationOffload(config)
        for number in range(passes):
            run_pass(ModelComputer(model), offload, graph, generator, number)
        offload.close()


@contextmanager
def nothing_else_keeps_memory() -> Iterator[None]:
    """What was saved is not found again because what is queued holds it, as it does in the model only."""
    with mock.patch.object(Swapper, "_original", return_value=None):
        yield


@contextmanager
def used_memory(model: DeviceModel) -> Iterator[None]:
    """What the device has computed before may still be changing memory that is new."""

    def storage_on(device: torch.device, nbytes: int) -> torch.UntypedStorage:
        storage = memory.storage_on(device, nbytes)
        values = torch.empty(0, dtype=torch.uint8).set_(storage)
        model.kernel(lambda: void(values.numpy().fill(255)))
        return storage

    with mock.patch.object(moving, "storage_on", storage_on):
        yield


def void(value: object) -> None:
    """Kernels have no results."""


def test_what_was_read_ahead_for_nothing_is_not_freed_before_it_has_arrived(make: Any) -> None:
    with modelled() as model, nothing_else_keeps_memory():
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.full((BUFFER_NBYTES,), float(value))) for value in range(3)]
        offload.settle()
        with model.queuing():
            copied = model.copied_nbytes
            assert hooks.unpack(packed[2]).numel() == BUFFER_NBYTES
            assert offload.memory_usage()["loaded"] == 3 * 4 * BUFFER_NBYTES
            packed.clear()
            assert offload.memory_usage()["loaded"] == 0
            assert model.copied_nbytes == copied, "nothing has waited"


@pytest.mark.parametrize("end", ["settle", "settle when nothing is needed", "close"])
def test_what_ends_or_settles_waits_for_what_comes_back(make: Any, end: str) -> None:
    with modelled() as model, nothing_else_keeps_memory(), model.queuing():
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.full((BUFFER_NBYTES,), float(value))) for value in range(3)]
        offload.settle()
        copied = model.copied_nbytes
        found = hooks.unpack(packed[2])
        assert model.copied_nbytes == copied
        if end == "settle when nothing is needed":
            del found
            packed.clear()
        offload.close() if end == "close" else offload.settle()
        assert model.copied_nbytes == 2 * copied


def test_staging_memory_grows_by_more_than_a_tensor(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, map_buffers = list[int](), buffers.map_buffers
    monkeypatch.setattr(buffers, "map_buffers", lambda count: sizes.append(count) or map_buffers(count))
    with modelled():
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.ones(BUFFER_NBYTES // 4)) for _ in range(20)]
        assert offload.memory_usage()["in_dram"] == len(packed) * BUFFER_NBYTES
        offload.close()
    assert sizes == [16, 16]


def test_a_device_that_has_no_room_for_what_comes_back_says_so(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, nbytes: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("the device is full")

    with modelled():
        offload = make(target="dram", dram_bytes=1 << 30, prefetch_bytes=0)
        with offload.step():
            loss, _ = large()
        offload.settle()
        with monkeypatch.context() as patched:
            patched.setattr("fastensor.offload.moving.storage_on", refuse)
            with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
                loss.backward(retain_graph=True)
        loss.backward()
        offload.close()


@pytest.mark.parametrize("target", ["dram", "ssd"])
def test_what_is_needed_takes_the_room_of_what_was_read_ahead(
    make: Any, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The device has room for two tensors. Others are needed than were expected."""
    living = list[StorageWeakRef]()

    def storage_on(device: torch.device, nbytes: int) -> torch.UntypedStorage:
        living[:] = [one for one in living if not one.expired()]
        if len(living) == 2:
            raise torch.OutOfMemoryError("the device is full")
        storage = memory.storage_on(device, nbytes)
        living.append(StorageWeakRef(storage))
        return storage

    monkeypatch.setattr(moving, "storage_on", storage_on)
    with modelled("early"), nothing_else_keeps_memory():
        offload = make(target=target, dram_bytes=1 << 30 if target == "dram" else 0)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.full((BUFFER_NBYTES,), float(value))) for value in range(6)]
        offload.settle()
        for value in (5, 0, 3, 1, 4, 2):
            assert (hooks.unpack(packed[value]) == value).all()
            offload.settle()
        packed.clear()
        offload.close()


def test_what_came_back_and_was_used_is_not_kept_by_the_copies(make: Any) -> None:
    """Or else a host that runs ahead would need memory for all that comes back."""
    with modelled() as model, model.queuing(), nothing_else_keeps_memory():
        offload = make(target="dram", dram_bytes=1 << 30, prefetch_bytes=1)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.full((BUFFER_NBYTES,), float(value))) for value in range(4)]
        offload.settle()
        while packed:
            assert hooks.unpack(packed.pop()).numel() == BUFFER_NBYTES
        assert model.kept_nbytes == 0


def test_a_device_that_has_failed_hangs_nothing(make: Any) -> None:
    with modelled() as model:
        offload = make(target="dram", dram_bytes=1 << 30)
        with offload.step():
            loss, _ = large()
        model.has_failed = True
        with pytest.raises(torch.AcceleratorError):
            loss.backward()
        offload.close()
        model.has_failed = False


def test_a_storage_that_is_resized_while_it_is_copied_is_lost(make: Any) -> None:
    with modelled() as model, model.queuing(), nothing_else_keeps_memory():
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        tensor = torch.full((BUFFER_NBYTES,), 7.0)
        packed = hooks.pack(tensor)
        tensor.untyped_storage().resize_(0)
        model.wrong.clear()
        offload.settle()
        model.wrong.clear()  # the memory was freed too early, by the program
        with pytest.raises(OffloadError, match="it was resized"):
            hooks.unpack(packed)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_what_cannot_be_queued_stays_on_the_device(make: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    copy, calls = DeviceModel.copy, []

    def refuse_second(self: DeviceModel, target: torch.Tensor, source: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error("none is left")
        copy(self, target, source)

    monkeypatch.setattr(DeviceModel, "copy", refuse_second)
    expected = gradients(CASES["transformer"], None)
    with modelled():
        offload = make(target="dram", dram_bytes=1 << 30)
        for _ in range(2):
            assert equal(gradients(CASES["transformer"], offload), expected)
        usage = offload.memory_usage()
        assert (usage["pending"], usage["in_dram"]) == (0, 0)
        assert offload.statistics().failed_writes == 1
        offload.close()


@pytest.mark.parametrize("order", ["late", "early"])
def test_what_is_away_is_counted_as_away(make: Any, order: Any) -> None:
    with modelled(order):
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.ones(BUFFER_NBYTES)) for _ in range(3)]
        offload.settle()
        assert offload._engine.swapper(torch.device("cpu")).saved_bytes() == (3 * 4 * BUFFER_NBYTES, 0)
        assert packed.pop()
        packed.clear()
        assert offload._engine.swapper(torch.device("cpu")).saved_bytes() == (0, 0)
        offload.close()


def test_what_is_being_copied_takes_host_memory_once(make: Any) -> None:
    """It counts against both budgets, so that it may stay when it has been copied."""
    with modelled():
        offload = make(target="dram", dram_bytes=1 << 30, staging_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = [hooks.pack(torch.ones(BUFFER_NBYTES)) for _ in range(3)]
        usage = offload.memory_usage()
        assert usage["pending"] == usage["in_dram"] == 12 * BUFFER_NBYTES
        assert offload._engine._transit_bytes() == 12 * BUFFER_NBYTES
        offload.settle()
        assert offload._engine._transit_bytes() == 12 * BUFFER_NBYTES
        packed.clear()
        offload.settle()
        assert offload._engine._transit_bytes() == 0
        offload.close()


def test_what_is_being_copied_is_not_lost_by_a_close(make: Any) -> None:
    with modelled() as model, model.queuing():
        offload = make(target="dram", dram_bytes=1 << 30)
        hooks = StepHooks(offload._engine)
        packed = hooks.pack(torch.full((BUFFER_NBYTES,), 3.0))
        offload.close()
        model.run(list(model.queued))
        assert (hooks.unpack(packed) == 3).all()


def test_budgets_are_shares_of_the_gpu() -> None:
    properties = mock.Mock(total_memory=140 << 30)
    device = torch.device("cuda", 0)
    config._share_of_gpu.cache_clear()
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch.object(config, "available_memory", return_value=128 << 30),
    ):
        found = OffloadConfig(prefetch_bytes="1GiB").for_device(device)
        assert (found.staging_nbytes, found.prefetch_nbytes) == ((140 << 30) // 32, 1 << 30)
        properties.total_memory = 2 << 30
        config._share_of_gpu.cache_clear()
        assert OffloadConfig().for_device(device).staging_nbytes == 128 << 20
    config._share_of_gpu.cache_clear()
    assert OffloadConfig().for_device(torch.device("cpu")) == OffloadConfig()
    assert OffloadConfig().staging_nbytes == 128 << 20
