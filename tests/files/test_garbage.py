"""The garbage collector pauses while many objects are made, and only then."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import fastensor
from fastensor.files.garbage import without_collection


def collects() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] > 0


def test_it_pauses_for_many_objects_and_goes_on() -> None:
    before = gc.get_threshold()
    with without_collection():
        assert not collects()
        with without_collection():
            assert not collects()
        assert not collects()
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), without_collection():
        raise ZeroDivisionError
    assert gc.get_threshold() == before
    with without_collection(10):
        assert collects()


def test_what_somebody_sets_meanwhile_stays() -> None:
    before = gc.get_threshold()
    try:
        with without_collection():
            gc.set_threshold(5000, 20, 20)
        assert gc.get_threshold() == (5000, 20, 20)
    finally:
        gc.set_threshold(*before)
    with without_collection():
        assert not collects()
    assert gc.get_threshold() == before


def test_a_block_that_begins_while_that_of_another_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other block begins and ends between the two calls by which this one pauses the collector."""
    before, pause = gc.get_threshold(), gc.set_threshold

    def other_comes_first(*thresholds: int) -> None:
        monkeypatch.setattr(gc, "set_threshold", pause)
        with without_collection():
            pass
        pause(*thresholds)

    monkeypatch.setattr(gc, "set_threshold", other_comes_first)
    try:
        with without_collection():
            assert not collects()
            pid = os.fork()
            if pid == 0:
                os._exit(not collects())
        assert os.waitpid(pid, 0)[1] == 0
        assert gc.get_threshold() == before
    finally:
        pause(*before)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_has_switched_it_off_keeps_it_off(when: str) -> None:
    try:
        if when == "before":
            gc.disable()
        with without_collection():
            gc.disable()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collects()


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_forked_child_collects_as_its_parent_does_outside_of_blocks(is_paused: bool) -> None:
    with without_collection(1000 if is_paused else 1):
        pid = os.fork()
        if pid == 0:
            os._exit(not collects())
    assert os.waitpid(pid, 0)[1] == 0
    gc.disable()
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(gc.isenabled())
    finally:
        gc.enable()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_a_load_of_a_few_tensors_does_not_pause_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save({"x": torch.ones(3)}, tmp_path / name)
    fastensor.load(tmp_path / name)  # imports what the next one uses
    monkeypatch.setattr(gc, "set_threshold", lambda *_: pytest.fail("the collector is paused"))
    fastensor.load(tmp_path / name)


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_loads_and_lists_of_many_tensors_leave_it_on(tmp_path: Path, name: str) -> None:
    state = {str(number): torch.full((3,), number) for number in range(1500)}
    fastensor.save(state, tmp_path / name)
    found = fastensor.load(tmp_path / name)
    assert collects()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert len(fastensor.inspect(tmp_path / name).tensors) == 1500
    assert collects()
    damaged = (tmp_path / name).read_bytes().replace(state["1499"].numpy().tobytes(), bytes(24))
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(fastensor.CorruptCheckpointError):
        fastensor.load(tmp_path / name)
    assert collects()
