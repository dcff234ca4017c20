"""Saves where ``torch.save`` is unusual: wrapped by other tooling, or set to leave out values; and the memory that
saves take for arrays that are no tensors."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from programs import run
from torch._subclasses.fake_tensor import FakeTensorMode

import fastensor
from fastensor import CheckpointWriteError, SaveReport, UnsupportedContentError
from fastensor.checkpoint.dcp import FastensorStorageWriter

STATE = {"w": torch.arange(300_000), "b": torch.ones(3)}
SMALL = {"w": torch.arange(10)}


class Counting:
    """Wraps ``torch.save`` as tools do that add something to each checkpoint."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.calls = 0

        @wraps(original)
        def save(obj: Any, *arguments: Any, **options: Any) -> None:
            self.calls += 1
            original({**obj, "added": self.calls}, *arguments, **options)

        self.save = save


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting(torch.save)
    monkeypatch.setattr(torch, "save", found.save)
    return found


def test_a_wrapped_save_is_called_once_and_writes_the_file(counting: Counting, tmp_path: Path) -> None:
    for number, state in enumerate([STATE, SMALL, SMALL, STATE], 1):
        report = fastensor.save(state, tmp_path / "x")
        assert counting.calls == number
        found = fastensor.load(tmp_path / "x")
        assert found["added"] == number
        assert torch.equal(found["w"], state["w"])
    assert report.backend == "torch"
    assert "torch.save is <function" in report.fallbacks[0].reason


@pytest.mark.parametrize("backend", ["direct", "numpy", "torch"])
def test_a_wrapped_save_is_called_once_whatever_backend_is_named(
    counting: Counting, tmp_path: Path, backend: str
) -> None:
    fastensor.save(STATE, tmp_path / "x", backend=backend)
    assert counting.calls == 1


def test_a_wrapped_save_is_called_once_for_open_files_and_later(counting: Counting, tmp_path: Path) -> None:
    fastensor.save(STATE, file := io.BytesIO())
    assert counting.calls == 1
    assert torch.load(io.BytesIO(file.getvalue()))["added"] == 1
    with fastensor.AsyncWriter() as writer:
        writer.save(STATE, tmp_path / "x")
    assert counting.calls == 2
    assert torch.load(tmp_path / "x")["added"] == 2


def test_what_is_no_checkpoint_of_the_users_calls_no_wrapped_save(counting: Counting, tmp_path: Path) -> None:
    store = fastensor.TensorStore(tmp_path / "store")
    assert torch.equal(store.get(store.put(torch.eye(3).to_sparse())).to_dense(), torch.eye(3))
    fastensor.save(SMALL, tmp_path / "x.safetensors")
    fastensor.convert(tmp_path / "x.safetensors", tmp_path / "x.pt")
    assert counting.calls == 0
    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], SMALL["w"])


def test_a_save_that_writes_nothing_replaces_nothing(tmp_path: Path) -> None:
    fastensor.save(SMALL, tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    with mock.patch.object(torch, "save") as save, pytest.raises(CheckpointWriteError, match="written nothing"):
        fastensor.save(STATE, tmp_path / "x")
    save.assert_called_once()
    assert (tmp_path / "x").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# --- files without values


def save_now(state: Any, path: Path) -> SaveReport:
    return fastensor.save(state, path)


def save_to_an_open_file(state: Any, path: Path) -> SaveReport:
    with path.open("wb") as file:
        return fastensor.save(state, file)


def save_in_place(state: Any, path: Path) -> SaveReport:
    path.touch()
    return fastensor.save(state, path)


def save_to_a_url(state: Any, path: Path) -> SaveReport:
    report = fastensor.save(state, f"memory:/{path}")
    path.write_bytes(fsspec.filesystem("memory").cat_file(f"{path}"))
    return report


def save_later(state: Any, path: Path) -> SaveReport:
    with fastensor.AsyncWriter() as writer:
        return writer.save(state, path).result()


SAVES = [save_now, save_to_an_open_file, save_in_place, save_to_a_url, save_later]


def fake_state() -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        return {"w": torch.empty(500_000), "b": torch.empty(3)}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("is_fake", [False, True])
def test_torch_writes_files_without_values(
    tmp_path: Path, save: Callable[[Any, Path], SaveReport], is_fake: bool
) -> None:
    state = fake_state() if is_fake else STATE
    expected = io.BytesIO()
    with torch.serialization.skip_data(materialize_fake_tensors=is_fake):
        torch.save(state, expected)
        report = save(state, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").read_bytes() == expected.getvalue()
    assert report.backend == "torch"
    assert report.nbytes == len(expected.getvalue())
    assert ["skip_data is active" in fallback.reason for fallback in report.fallbacks] == [True]


def test_skip_data_says_nothing_about_safetensors(tmp_path: Path) -> None:
    """``safetensors`` writes values there, too."""
    with torch.serialization.skip_data():
        safetensors.torch.save_file(STATE, tmp_path / "x.safetensors")
        fastensor.save(STATE, tmp_path / "y.safetensors", checksums=False)
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    with torch.serialization.skip_data(True), pytest.raises(UnsupportedContentError, match="memory of its own"):
        fastensor.save(fake_state(), tmp_path / "z.safetensors")


def test_distributed_checkpoints_without_values(tmp_path: Path) -> None:
    with torch.serialization.skip_data():
        dcp.save(STATE, storage_writer=FastensorStorageWriter(tmp_path / "x"))
    found = {name: torch.ones_like(tensor) for name, tensor in STATE.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "x"))
    assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("save", [save_now, save_to_an_open_file, save_later])
def test_fake_tensors_are_refused_as_by_torch(tmp_path: Path, save: Callable[[Any, Path], object], name: str) -> None:
    mode, refusal = FakeTensorMode(), r"pickle|FakeTensor|memory|local object"
    with mode:
        fake = {"w": torch.empty(5)}
        with pytest.raises(Exception, match=refusal):
            save(fake, tmp_path / name)
    with pytest.raises(Exception, match=refusal):
        save(fake, tmp_path / name)
    found = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert found == ({name: 0} if save is save_to_an_open_file else {})


# --- arrays that are no tensors


_PROGRAM = """
import json, sys
import numpy as np, torch, fastensor

def peak_nbytes(function):
    '''Of the process, beyond what it has before.'''
    open("/proc/self/clear_refs", "w").write("5")  # the peak is from now on
    before = memory("VmRSS")
    function()
    return memory("VmHWM") - before

def memory(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) << 10

def save_later():
    with fastensor.AsyncWriter() as writer:
        writer.save(state, path)

path = sys.argv[1]
state = {"replay": np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8), "w": torch.ones(1000)}
for save in (torch.save, fastensor.save):
    save({"w": torch.ones(100)}, path)  # what is imported then is not counted
found = {"torch": peak_nbytes(lambda: torch.save(state, path))}
found["first"], found["again"] = [peak_nbytes(lambda: fastensor.save(state, path)) for _ in range(2)]
found["later"] = peak_nbytes(save_later)
del state
found["torch loads"] = peak_nbytes(lambda: torch.load(path, weights_only=False))
found["loads"] = peak_nbytes(lambda: fastensor.load(path, weights_only=False))
print(json.dumps(found))
"""
_ARRAY_NBYTES = 32 << 20


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What saving and loading a state takes that is one large array, in times its size."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel does not let a process begin to look for its peak")
    program = _PROGRAM.replace("NBYTES", str(_ARRAY_NBYTES))
    path = tmp_path_factory.mktemp("peaks") / "x"
    found = json.loads(run("-c", program, path).stdout)
    return {name: nbytes / _ARRAY_NBYTES for name, nbytes in found.items()}


@pytest.mark.parametrize("save", ["first", "again", "later"])
def test_saving_a_large_array_takes_no_more_memory_than_with_torch(peaks: dict[str, float], save: str) -> None:
    assert peaks[save] < peaks["torch"] + 0.1


def test_loading_a_large_array_takes_no_more_memory_than_with_torch(peaks: dict[str, float]) -> None:
    assert peaks["loads"] < peaks["torch loads"] + 0.1


@pytest.fixture(scope="module")
def with_array() -> dict[str, Any]:
    array = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
    return {"replay": array, "w": torch.ones(1000)}


def test_a_large_pickle_stands_where_torch_puts_it(tmp_path: Path, with_array: dict[str, Any]) -> None:
    state = {**with_array, "large": torch.arange(300_000)}  # at another alignment: torch runs again
    for one in (with_array, state):
        fastensor.save(one, tmp_path / "x")
        with zipfile.ZipFile(tmp_path / "x") as archive:
            assert archive.testzip() is None
        found = torch.load(tmp_path / "x", weights_only=False)
        assert np.array_equal(found["replay"], with_array["replay"])
        assert torch.equal(found["w"], with_array["w"])
