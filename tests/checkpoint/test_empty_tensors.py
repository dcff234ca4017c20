"""Empty tensors: they share a storage with their views, and it has no bytes by which they could be told apart."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

EMPTY = torch.empty(0, 4)
STATE = {
    "before": torch.arange(3),
    "whole": EMPTY,
    "as_int16": EMPTY.view(torch.int16),
    "again": EMPTY.view(torch.float32),
    "parameter": torch.nn.Parameter(torch.empty(2, 0, dtype=torch.bfloat16)),
    "behind": torch.ones(2, dtype=torch.int16),
}


def by_fastensor(path: Path) -> None:
    fastensor.save(STATE, path)


def by_torch(path: Path) -> None:
    torch.save(STATE, path)


def by_a_writer(path: Path) -> None:
    with closing(fastensor.AsyncWriter()) as writer:
        writer.save(STATE, path).result()


def by_convert(path: Path) -> None:
    by_torch(path.with_suffix(".other"))
    fastensor.convert(path.with_suffix(".other"), path)


def as_safetensors(path: Path) -> None:
    fastensor.save(STATE, path, container="safetensors")


def load_on_host(storage: Any, location: str) -> Any:
    return storage


def lazily(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with fastensor.open(path, **options) as opened:
        return dict(opened.items())


def into(path: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    fastensor.load(path, into=found)
    return found


def from_open_file(path: Path) -> Any:
    return fastensor.load(io.BytesIO(path.read_bytes()))


SAVES = (by_fastensor, by_torch, by_a_writer, by_convert, as_safetensors)
LOADS: dict[str, Callable[[Path], Any]] = {
    "load": fastensor.load,
    "any class": lambda path: fastensor.load(path, weights_only=False),
    "to a place": lambda path: fastensor.load(path, "cpu"),
    "by a function": lambda path: fastensor.load(path, load_on_host),
    "mmap": lambda path: fastensor.load(path, mmap=True),
    "keys": lambda path: fastensor.load(path, keys=list(STATE)),
    "into": into,
    "open": lazily,
    "open, mmap": lambda path: lazily(path, mmap=True),
    "open file": from_open_file,
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_each_keeps_its_dtype(save: Callable[[Path], None], load: str, tmp_path: Path) -> None:
    save(tmp_path / "x")
    found = LOADS[load](tmp_path / "x")
    assert described(found) == described(STATE)
    if load != "mmap":  # torch.load(mmap=True) gives empty storages addresses
        check(found)


@pytest.mark.parametrize("load", ["load", "to a place", "by a function", "open file"])
@pytest.mark.parametrize("save", [by_fastensor, by_torch])
def test_tensors_that_shared_an_empty_storage_share_one_again(
    save: Callable[[Path], None], load: str, tmp_path: Path
) -> None:
    save(tmp_path / "x")
    found = LOADS[load](tmp_path / "x")
    shared, other = found["whole"].untyped_storage(), found["parameter"].untyped_storage()
    assert {found[name].untyped_storage()._cdata for name in ("as_int16", "again")} == {shared._cdata}
    assert other._cdata != shared._cdata


def test_mapped_safetensors_can_be_saved(tmp_path: Path) -> None:
    as_safetensors(tmp_path / "x")
    check(fastensor.load(tmp_path / "x", mmap=True))


def test_a_file_that_torch_maps_wrongly_is_read(tmp_path: Path) -> None:
    by_torch(tmp_path / "x")
    _, report = fastensor.load_with_report(tmp_path / "x", mmap=True)
    unmapped = [] if torch.__version__ >= "2.15" else ["mapping"]  # since then torch keeps the dtypes
    assert [fallback.backend for fallback in report.fallbacks] == unmapped
    torch.save({**STATE, "as_int16": torch.ones(2)}, tmp_path / "y")
    _, report = fastensor.load_with_report(tmp_path / "y", mmap=True)
    assert not report.fallbacks


def test_distributed_checkpoints(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=FastensorStorageWriter(tmp_path / "x"))
    found = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    dcp.load(found, storage_reader=FastensorStorageReader(tmp_path / "x"))
    check(found)


def test_stores(tmp_path: Path) -> None:
    store = fastensor.TensorStore(tmp_path)
    check({name: store.get(store.put(tensor)) for name, tensor in STATE.items()})


def check(found: dict[str, torch.Tensor]) -> None:
    """Each has its dtype, and can be saved as another one."""
    assert described(found) == described(STATE)
    # torch.save refuses storages at one address with two dtypes, so empty ones must have none
    found["viewed"] = found["whole"].view(torch.float16)
    for save in (torch.save, fastensor.save):
        file = io.BytesIO()
        save(found, file)
        file.seek(0)
        assert described(torch.load(file)) == described(found)


def described(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
