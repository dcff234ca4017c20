"""What was true when ``save`` returned is what is in the file, in bounded memory."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_equal, trees

import fastensor
from fastensor import AsyncWriter
from fastensor.backends import snapshot as snapshots
from fastensor.backends.buffers import BUFFER_NBYTES, BufferPool
from fastensor.backends.registry import available_names
from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint.asynchronous import work
from fastensor.errors import LayoutError
from fastensor.stitch import torch_zip

MIB = 1 << 20
PATIENCE_SECONDS = 60


def test_nothing_that_happens_later_is_in_the_file(tmp_path: Path, gate: Any) -> None:
    shared = torch.arange(6.0)
    state = {
        "tensor": torch.zeros(1000),
        "tied": [shared, shared],
        "view": shared[2:4],
        "array": np.zeros(5),
        "list": [1, [2]],
        "generator": random.Random(1).getstate(),
    }
    gate.close()
    with AsyncWriter() as writer:
        handle = writer.save(state, tmp_path / "x")
        state["tensor"].add_(1)
        shared.add_(1)
        state["array"] += 1
        state["list"][1].append(3)
        state["more"] = True
        gate.wait_until_reached()
        assert not handle.done()
        gate.open()
    found = fastensor.load(tmp_path / "x", weights_only=False)
    assert "more" not in found
    assert found["list"] == [1, [2]]
    assert torch.equal(found["tensor"], torch.zeros(1000))
    assert torch.equal(found["tied"][0], torch.arange(6.0))
    assert found["tied"][0] is found["tied"][1]
    assert found["view"].data_ptr() == found["tied"][0].data_ptr() + 8
    assert not found["array"].any()


@given(state=trees())
def test_the_file_is_the_one_of_a_synchronous_save(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("x")
    fastensor.save(state, folder / "now")
    with AsyncWriter() as writer:
        writer.save(state, folder / "later")
    assert (folder / "later").read_bytes() == (folder / "now").read_bytes()


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("backend", ["auto", *available_names()])
@pytest.mark.parametrize("staging_bytes", [None, BUFFER_NBYTES, 3 * BUFFER_NBYTES + 17], ids=["all", "one", "three"])
def test_a_file_larger_than_the_staging_memory(
    tmp_path: Path, backend: str, name: str, staging_bytes: int | None
) -> None:
    """Windows end anywhere in the last block, and a last block of little more than nothing."""
    for nbytes in (10, BUFFER_NBYTES - 2000, 4 * BUFFER_NBYTES, 5 * BUFFER_NBYTES + 1):
        state = {"a": torch.randint(0, 255, (nbytes,), dtype=torch.uint8), "b": torch.arange(7)}
        expected = {key: tensor.clone() for key, tensor in state.items()}
        with AsyncWriter(staging_bytes=staging_bytes) as writer:
            handle = writer.save(state, tmp_path / name, backend=backend)
            for tensor in state.values():
                tensor.zero_()
            report = handle.result()
            statistics = writer.statistics()
        found = fastensor.load(tmp_path / name)
        assert_equal({key: found[key] for key in expected}, expected)
        assert fastensor.verify(tmp_path / name).complete
        assert report.nbytes == (tmp_path / name).stat().st_size
        if staging_bytes is not None:
            assert BUFFER_NBYTES <= statistics.peak_staging_bytes <= staging_bytes
        used = "numpy" if backend == "torch" else backend
        assert backend == "auto" or report.backend == used
        assert [fallback.backend for fallback in report.fallbacks] == (["torch"] if backend == "torch" else [])


@pytest.mark.parametrize(("moving", "most_lent"), [(True, 2), (False, 4)])
def test_a_file_larger_than_the_pool(monkeypatch: pytest.MonkeyPatch, moving: bool, most_lent: int) -> None:
    """A file is staged little by little while it is moved. While another file is moved, it fills the pool."""
    monkeypatch.setattr(snapshots, "_AHEAD", 2)
    lent: list[int] = []
    waiting = threading.Event()

    @contextmanager
    def note() -> Iterator[None]:
        lent.append((pool.nbytes - pool.free_nbytes) // BUFFER_NBYTES)
        waiting.set()
        yield

    state = {"w": torch.zeros(8 * BUFFER_NBYTES, dtype=torch.uint8)}
    planned = torch_zip.plan(state, pickle_module=pickle, pickle_protocol=2)
    with closing(BufferPool(lambda: 4 * BUFFER_NBYTES)) as pool:
        pool.reserve(planned.nbytes)
        snapshot = Snapshot(planned, pool, while_waiting=note)
        if moving:
            snapshot.begin_moving()
        staging = threading.Thread(target=snapshot.stage)
        staging.start()
        assert waiting.wait(PATIENCE_SECONDS)
        assert lent == [most_lent]
        for offset in range(0, planned.nbytes, BUFFER_NBYTES):
            snapshot.give_back(snapshot.window(offset, min(BUFFER_NBYTES, planned.nbytes - offset)))
        staging.join()
        assert pool.free_nbytes == pool.nbytes


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("staging_bytes", [None, BUFFER_NBYTES])
def test_a_url(name: str, staging_bytes: int | None) -> None:
    url = f"memory://asynchronous/{name}"
    state = {"w": torch.randint(0, 255, (2 * BUFFER_NBYTES + 5,), dtype=torch.uint8)}
    expected = state["w"].clone()
    with AsyncWriter(staging_bytes=staging_bytes) as writer:
        handle = writer.save(state, url)
        state["w"].zero_()
        assert torch.equal(fastensor.load(url)["w"], expected)
        assert handle.result().backend == "stream"
    assert fastensor.verify(url).complete


def test_a_url_of_nothing() -> None:
    with AsyncWriter() as writer:
        writer.save({}, "memory://asynchronous/empty.safetensors")
    assert fastensor.load("memory://asynchronous/empty.safetensors") == {}


def test_memory_is_reused(tmp_path: Path) -> None:
    state = {"w": torch.zeros(8 * MIB)}
    with AsyncWriter() as writer:
        for number in range(5):
            state["w"].fill_(number)
            writer.save(state, tmp_path / "x")
        writer.wait()
        assert writer.statistics().staging_bytes == 9 * BUFFER_NBYTES
    assert writer.statistics().staging_bytes == 0
    assert fastensor.load(tmp_path / "x")["w"][0] == 4


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 3 * BUFFER_NBYTES), max_size=4), blocks=st.integers(1, 3))
def test_the_budget_holds_for_any_sizes(
    sizes: list[int], blocks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("x")
    with AsyncWriter(staging_bytes=blocks * BUFFER_NBYTES) as writer:
        for number, nbytes in enumerate(sizes):
            writer.save({"w": torch.full((nbytes,), number, dtype=torch.uint8)}, folder / str(number))
        writer.wait()
        assert writer.statistics().peak_staging_bytes <= blocks * BUFFER_NBYTES
    for number, nbytes in enumerate(sizes):
        assert torch.equal(fastensor.load(folder / str(number))["w"], torch.full((nbytes,), number, dtype=torch.uint8))


def test_a_storage_that_is_resized_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(10), "v": torch.ones(10)}
    fastensor.save({"old": True}, tmp_path / "x")
    open_save = work.Save.open

    def resize_meanwhile(self: work.Save, snapshot: Snapshot) -> None:
        state["v"].untyped_storage().resize_(0)
        open_save(self, snapshot)

    monkeypatch.setattr(work.Save, "open", resize_meanwhile)
    with AsyncWriter() as writer:
        with pytest.raises(fastensor.StateChangedError, match="40 bytes was resized to 0"):
            writer.save(state, tmp_path / "x")
        writer.wait()
    assert fastensor.load(tmp_path / "x") == {"old": True}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_torch_has_to_write_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise LayoutError("an unknown torch")

    monkeypatch.setattr(torch_zip, "plan", refuse)
    with AsyncWriter() as writer:
        handle = writer.save({"a": 1}, tmp_path / "x")
        assert handle.done()
    assert (handle.result().backend, handle.result().fallbacks[0].reason) == ("torch", "an unknown torch")
    assert handle.result().stall_seconds == handle.result().seconds
    assert fastensor.load(tmp_path / "x") == {"a": 1}


def test_unpicklable_objects_are_refused_at_once(tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        with pytest.raises((pickle.PicklingError, AttributeError)):
            writer.save({"f": lambda: None}, tmp_path / "x")
        writer.wait()
    assert not list(tmp_path.iterdir())


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    refusal = pytest.raises(TypeError, match=r"fastensor\.save takes open files")
    with AsyncWriter() as writer, (tmp_path / "x").open("wb") as file, refusal:
        writer.save({}, file)  # type: ignore[arg-type]


def test_a_missing_directory_raises_at_once(tmp_path: Path) -> None:
    with AsyncWriter() as writer, pytest.raises(fastensor.CheckpointWriteError, match="directory is missing"):
        writer.save({}, tmp_path / "no" / "x")
