"""Saves, loads and batches of a device with streams: what was queued before is there, and no buffer is used too
early."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_model import ORDERS, modelled
from devices import filled_at_once

import fastensor
from fastensor.backends.registry import available_names
from fastensor.backends.streams import CudaStreams, wait_for
from fastensor.provision.loader import DeviceCopies

SIZES = (5 << 20, 3, 0, 1 << 20)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["direct", "numpy"])  # torch copies by itself
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_save_waits_for_what_is_queued(tmp_path: Path, order: Any, backend: str, name: str) -> None:
    state = {str(number): torch.zeros(size) for number, size in enumerate(SIZES)}
    with modelled(order) as model, model.queuing():
        for value in (1, 2):
            for one in state.values():
                model.kernel(lambda one=one, value=value: one.fill_(value))
            report = fastensor.save(state, tmp_path / name, backend=backend)
            assert report.backend == backend
            for one in state.values():
                model.kernel(lambda one=one: one.zero_())
    assert all((one == 2).all() for one in fastensor.load(tmp_path / name).values())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", available_names())
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_what_is_queued_after_a_load_finds_the_bytes(tmp_path: Path, order: Any, backend: str, name: str) -> None:
    state = {str(number): torch.full((size,), float(number)) for number, size in enumerate(SIZES)}
    fastensor.save(state, tmp_path / name)
    right: list[bool] = []
    with filled_at_once(), modelled(order) as model, model.queuing():
        for key, one in fastensor.load(tmp_path / name, "cpu", backend=backend).items():
            model.kernel(lambda one=one, key=key: right.append(torch.equal(one, state[key])))
    assert right == [True] * len(SIZES)


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_whole_although_their_memory_is_used_again(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    source, right = {"a": torch.zeros(1 << 16), "b": (torch.zeros(3), "text")}, []
    with modelled(order) as model, model.queuing():
        copies = DeviceCopies(torch.device("cpu"))
        for number in range(1, 7):
            source["a"].fill_(number)  # type: ignore[attr-defined]
            batch = copies(source)
            model.kernel(lambda one=batch["a"], number=number: right.append(bool((one == number).all())))
            assert batch["b"][1] == "text"
            del batch
    assert right == [True] * 6


def test_batches_are_copied_while_another_device_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):  # torch notes once which functions make tensors: before one is replaced here
        empty = torch.empty
        assert empty(0).is_meta
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    with modelled() as model:
        with torch.device("meta"):
            copies = DeviceCopies(torch.device("cpu"))
            for _ in range(2):  # both pieces of pinned memory are made
                copies([torch.ones(3, device="cpu")])
        for value in range(4):
            (found,) = copies([torch.full((3,), float(value))])
            model.run(list(model.queued))
            assert found.tolist() == [value] * 3


def test_what_cannot_be_waited_for_is_an_error_and_no_loop() -> None:
    event = mock.Mock(**{"synchronize.side_effect": RuntimeError("Cannot re-initialize CUDA in forked subprocess")})
    wait_for([event], even_if_failed=True)
    with pytest.raises(RuntimeError, match="re-initialize"):
        wait_for([event])
    assert event.synchronize.call_count == 2


def test_only_devices_of_cuda_have_streams() -> None:
    assert CudaStreams().are_on(torch.device("cuda", 1))
    assert not any(CudaStreams().are_on(torch.device(kind)) for kind in ("cpu", "meta", "mps", "xpu"))
