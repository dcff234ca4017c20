"""Ranks that hold the same state write one file together: the bytes that one of them would have written alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import join, state_of_all_kinds
from programs import run_ranks

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.testing.calls import Call, intercepted

MIB = 1 << 20


def large(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some MiB, so that every rank has a part, in tensors that begin and end anywhere."""
    torch.manual_seed(seed)
    sizes = (3, 400_000, 700_001, 1, 0, 900_000, 5000, 17)
    return {f"layers.{number}": torch.randn(size) for number, size in enumerate(sizes)}


def aligned() -> dict[str, torch.Tensor]:
    """Pages of their own for every tensor, one of which spans several parts."""
    torch.manual_seed(1)
    return {"first": torch.randn(MIB), "second": torch.randn(3 * MIB // 2), "third": torch.randn(MIB // 2)}


def tied() -> dict[str, Any]:
    whole = large()
    return {**whole, "again": whole["layers.1"], "view": whole["layers.2"][5:10], "step": 3}


def objects() -> Any:
    torch.manual_seed(2)
    return [{"nothing": {}}, state_of_all_kinds(), {"text", "other", "third"}]


TORCH: list[Callable[[], Any]] = [large, aligned, tied, objects, dict, lambda: {"x": torch.zeros(0)}, lambda: 7]
SAFETENSORS: list[Callable[[], Any]] = [large, aligned, dict, lambda: {"x": torch.zeros(0)}]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_file_is_that_of_one_rank(tmp_path: Path, world: int) -> None:
    run_ranks(_save_all, world, world, tmp_path)


def _save_all(rank: int, world: int, folder: Path) -> None:
    join(folder, rank, world)
    cases = [(make, "torch", {}) for make in TORCH] + [(make, "safetensors", {}) for make in SAFETENSORS]
    cases += [(large, "torch", {"backend": backend}) for backend in ("numpy", "direct")]
    # it writes whole files only, and then with another serialization id
    cases += [(large, "torch", {"backend": "torch"})] if world > 1 else []
    cases += [(large, "torch", {"durable": False, "check_replicas": "all"}), (objects, "torch", {"pickle_protocol": 4})]
    cases += [(large, "safetensors", {"checksums": False, "metadata": {"a": "b"}})]
    for number, (make, container, options) in enumerate(cases):
        path, expected = folder / f"{number}", folder / f"{number}-alone"
        report = cooperative.save(make(), path, container=container, **options)
        assert report.nbytes == path.stat().st_size
        assert report.atomic
        assert (f"{world} ranks" in report.reason) == (world > 1)
        if rank == 0:
            options = {key: value for key, value in options.items() if key not in ("check_replicas", "backend")}
            fastensor.save(make(), expected, container=container, **options)
            assert path.read_bytes() == expected.read_bytes(), (number, make, options)
            fastensor.verify(path)
        dist.barrier()
    if rank == 0:
        assert len(os.listdir(folder)) == 2 * len(cases) + 1
    dist.destroy_process_group()


def test_every_part_is_durable_before_the_file_is_published(tmp_path: Path) -> None:
    run_ranks(_note_order, 3, tmp_path)


def _note_order(rank: int, folder: Path) -> None:
    join(folder, rank, 3)
    calls: list[tuple[float, str]] = []

    def note(call: Call) -> Any:
        is_of_file = call.name != "fsync" or not os.path.isdir(f"/proc/self/fd/{call.arguments[0]}")
        result = call.perform()
        if call.name in ("pwrite", "rename", "fsync"):
            calls.append((time.monotonic(), call.name if is_of_file else "fsync of the directory"))
        return result

    with intercepted(note):
        cooperative.save(large(), folder / "x")
    everyones: list[Any] = [None] * 3
    dist.all_gather_object(everyones, calls)
    ((renamed, _),) = [one for one in everyones[0] if one[1] == "rename"]
    for one in everyones:
        written = max(at for at, name in one if name == "pwrite")
        assert any(written < at < renamed for at, name in one if name == "fsync")
    assert everyones[0][-1][1] == "fsync of the directory"
    assert not [name for one in everyones[1:] for _, name in one if name == "rename"]
    dist.destroy_process_group()
