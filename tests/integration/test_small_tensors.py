"""Checkpoints of many small tensors: records are read together, and come out as ``torch.load`` brings them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import states
import torch

import fastensor
from fastensor import CorruptCheckpointError, UnsafeCheckpointError
from fastensor.backends.fallback import available_names
from fastensor.checkpoint import storages, torch_file

SIZES = [0, 1, 3, 64, 1000, 16 << 10, (16 << 10) + 1, 300_000]
"""In elements; some records are read with their neighbours, some by themselves."""


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(SIZES[i % len(SIZES)], generator=generator) for i in range(200)}
    shared = torch.randn(40, generator=generator)
    return {
        **tensors,
        "tied": [shared, shared, shared[3:9]],
        "parameter": torch.nn.Parameter(torch.ones(3, 4).t()),
        "others": [torch.ones(5, dtype=dtype) for dtype in states.DTYPES],
        "sparse": torch.eye(4).to_sparse(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.fixture
def not_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is not to fall back to ``torch.load``."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("torch.load was called")

    if not storages.is_known():
        pytest.skip("this torch is not known")
    monkeypatch.setattr(torch_file, "_load_through_torch", refuse)


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize("backend", available_names())
def test_what_comes_back_is_what_torch_brings(path: Path, backend: str) -> None:
    found, expected = fastensor.load(path, backend=backend), torch.load(path)
    states.assert_equal(found, expected)
    assert states.pattern(states.storages_of(found)) == states.pattern(states.storages_of(expected))


@pytest.mark.usefixtures("not_with_torch")
def test_storages_are_not_resizable_as_those_of_torch(path: Path) -> None:
    loaded = fastensor.load(path)
    assert not loaded["t3"].untyped_storage().resizable()
    assert not loaded["t7"].untyped_storage().resizable()


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize(
    "map_location", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cpu": "meta"}, lambda storage, location: storage]
)
def test_forms_of_map_location(path: Path, map_location: Any) -> None:
    found = fastensor.load(path, map_location)
    expected = torch.load(path, map_location)
    assert found["t3"].device == expected["t3"].device
    assert found["t3"].shape == expected["t3"].shape


def test_every_damaged_storage_is_noticed(path: Path) -> None:
    sound, loaded = path.read_bytes(), state()
    for name in ("t1", "t2", "t4", "t5", "t6", "t7", "t197"):
        at = sound.index(loaded[name].numpy().tobytes())
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match="has CRC32"):
            fastensor.load(path)
        assert fastensor.load(path, verify=False)["t3"].numel() == loaded["t3"].numel()


def test_records_in_another_order_than_that_of_the_pickle(tmp_path: Path) -> None:
    """Before torch 2.1 they were sorted as text."""
    torch.save(state(), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as other:
        for name in sorted(archive.namelist()):
            other.writestr(name, archive.read(name))
    states.assert_equal(fastensor.load(tmp_path / "y.pt"), torch.load(tmp_path / "x.pt"))


class NotAllowed:
    """A class that nobody has allow-listed."""


def test_what_torch_refuses_is_refused(tmp_path: Path) -> None:
    torch.save({**state(), "last": NotAllowed()}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match="NotAllowed"):
        fastensor.load(tmp_path / "x.pt")


def test_an_unknown_torch_reads_the_records_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_KNOWN_TORCH", "1.0.")
    assert not storages.is_known()
    states.assert_equal(fastensor.load(path), torch.load(path))


def test_a_wrapped_load_of_torch_is_called(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], torch.load

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(torch, "load", wrapped)
    fastensor.load(path)
    assert calls
