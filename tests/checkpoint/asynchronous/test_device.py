"""Asynchronous saves from a device with streams: the host waits for no copy, and the file holds what was there."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device_model import ORDERS, DeviceModel, modelled
from device_programs import ModelComputer, Steps, programs, run_saves
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import AsyncWriter, SaveDroppedError
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer, BufferPool
from fastensor.backends.snapshot import Snapshot
from fastensor.stitch import torch_zip

MIB = 1 << 20


def big(mib: float, value: float = 0.0) -> torch.Tensor:
    return torch.full((int(mib * MIB) // 4,), value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("staging", ["8MiB", None])
def test_what_was_queued_before_is_saved_and_what_was_queued_later_is_not(
    tmp_path: Path, order: Any, staging: str | None
) -> None:
    tensor, small = big(18), torch.zeros(5)
    with AsyncWriter(staging_bytes=staging) as writer, modelled(order) as model, model.queuing():
        for attempt in range(1, 4):
            model.kernel(lambda value=attempt: tensor.fill_(value))
            model.kernel(lambda value=attempt: small.fill_(value))
            handle = writer.save({"w": tensor, "s": small, "step": attempt}, tmp_path / "x")
            model.kernel(lambda: tensor.zero_())
            model.kernel(lambda: small.zero_())
            handle.result()
            found = torch.load(tmp_path / "x")
            assert (found["w"] == attempt).all()
            assert (found["s"] == attempt).all()
            assert found["step"] == attempt


def test_the_host_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_move, wait_to_move = threading.Event(), Snapshot.wait_to_move

    def wait(snapshot: Snapshot) -> None:
        assert may_move.wait(60)
        wait_to_move(snapshot)

    monkeypatch.setattr(Snapshot, "wait_to_move", wait)
    with AsyncWriter() as writer, modelled() as model, model.queuing():
        handle = writer.save({"w": big(10, 1.0)}, tmp_path / "x")
        assert model.copied_nbytes == 0, "nothing has waited for a copy"
        may_move.set()
        handle.result()
        assert model.copied_nbytes == 10 * MIB
    assert (fastensor.load(tmp_path / "x")["w"] == 1).all()


def test_each_storage_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, sizes = DeviceModel.copy, []

    def note(model: DeviceModel, target: torch.Tensor, source: torch.Tensor) -> None:
        sizes.append(source.nbytes)
        copy(model, target, source)

    monkeypatch.setattr(DeviceModel, "copy", note)
    state = {str(number): big(mib, float(number)) for number, mib in enumerate((1, 11, 3, 17, 9))}
    with AsyncWriter(staging_bytes="64MiB") as writer, modelled() as model, model.queuing():
        for _ in range(2):
            sizes.clear()
            writer.save(state, tmp_path / "x").result()
            assert sizes == [one.nbytes for one in state.values()]
    found = fastensor.load(tmp_path / "x")
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_is_dropped_after_a_save_stays_until_it_is_copied(tmp_path: Path, order: Any) -> None:
    with AsyncWriter() as writer, modelled(order) as model, model.queuing():
        handle = writer.save({"w": big(9, 2.0)}, tmp_path / "x")
        handle.result()
    assert (fastensor.load(tmp_path / "x")["w"] == 2).all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_save_that_is_dropped_gives_no_buffer_back_that_is_copied_to(tmp_path: Path, gate: Any, order: Any) -> None:
    with AsyncWriter(staging_bytes="32MiB") as writer, modelled(order) as model, model.queuing():
        gate.close()
        first = writer.save({"w": big(10, 1.0)}, tmp_path / "x")
        gate.wait_until_reached()
        second = writer.save({"w": big(10, 2.0)}, tmp_path / "y")
        assert second.cancel()
        third = writer.save({"w": big(10, 3.0)}, tmp_path / "z")
        gate.open()
        first.result()
        third.result()
        with pytest.raises(SaveDroppedError):
            second.result()
    assert (fastensor.load(tmp_path / "x")["w"] == 1).all()
    assert (fastensor.load(tmp_path / "z")["w"] == 3).all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_save_that_fails_in_the_middle_gives_no_buffer_back_that_is_copied_to(tmp_path: Path, order: Any) -> None:
    """The storage is resized while it is staged, by what waits for room."""
    state = {"a": big(12), "b": big(12)}
    with AsyncWriter(staging_bytes="8MiB") as writer, modelled(order) as model, model.queuing():
        resized = False

        def resize(nbytes: int) -> None:
            nonlocal resized
            if not resized:
                resized = True
                state["b"].untyped_storage().resize_(4)

        writer._pace.wait = lambda nbytes, stopped: resize(nbytes)  # type: ignore[method-assign]
        with pytest.raises(fastensor.StateChangedError):
            writer.save(state, tmp_path / "x")
        writer.wait()  # its thread gives the buffers back
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("order", ORDERS)
def test_an_interrupt_gives_no_buffer_back_twice(order: Any) -> None:
    class Interrupted(list[Buffer]):
        def remove(self, buffer: Buffer) -> None:
            if len(self) == 3:
                raise KeyboardInterrupt
            super().remove(buffer)

    pool, holder = BufferPool(lambda: 8 * BUFFER_NBYTES), list[Buffer]()
    planned = torch_zip.plan({"w": big(15)}, pickle_module=pickle, pickle_protocol=2)
    pool.reserve(planned.nbytes)
    with modelled(order) as model, model.queuing():
        snapshot = Snapshot(planned, pool)
        snapshot._filling = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            snapshot.stage()
        snapshot.discard()
    lent = pool.take_idle(holder, 100)
    assert len(lent) == len(set(lent)) == 4
    pool.close()


@given(
    program=programs(),
    sizes=st.lists(st.integers(0, 3 * BUFFER_NBYTES // 4), min_size=1, max_size=4),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 1 << 16),
    staging=st.sampled_from([1, 2, 5]),
)
def test_any_program_saves_what_it_has_computed_by_then(
    tmp_path_factory: pytest.TempPathFactory,
    program: Steps,
    sizes: list[int],
    order: Any,
    seed: int,
    staging: int,
) -> None:
    folder = tmp_path_factory.mktemp("saves")
    with AsyncWriter(staging_bytes=staging * BUFFER_NBYTES) as writer, modelled(order, seed) as model, model.queuing():
        check = run_saves(ModelComputer(model), writer, program, sizes, folder)
    check()


def test_a_device_that_has_failed_hangs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"before")
    with modelled() as model, model.queuing(), AsyncWriter() as writer:
        may_move = threading.Event()
        wait_to_move = Snapshot.wait_to_move

        def wait(snapshot: Snapshot) -> None:
            assert may_move.wait(60)
            wait_to_move(snapshot)

        monkeypatch.setattr(Snapshot, "wait_to_move", wait)
        handle = writer.save({"w": big(10)}, tmp_path / "x")
        model.has_failed = True
        may_move.set()
        with pytest.raises(torch.AcceleratorError, match="the device has failed"):
            handle.result()
        model.has_failed = False
        model.wrong.clear()  # it copies nothing any more
    assert (tmp_path / "x").read_bytes() == b"before"


def test_the_model_notices_what_is_wrong() -> None:
    model = DeviceModel()
    stream = model.new(torch.device("cpu"))
    source = torch.ones(10)
    with model.entered(stream):
        model.copy(torch.empty(10), source)
    model.record(stream).synchronize()
    assert model.wrong == ["memory was freed before a copy from or to it had run"]
