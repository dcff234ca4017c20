"""What is left of a planned file, put to its places in a file that has the rest, makes the whole file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastensor.backends import registry
from fastensor.stitch import safetensors, shards, torch_zip
from fastensor.stitch.extents import Extent
from fastensor.stitch.image import Payload
from fastensor.stitch.remainder import remainder
from fastensor.stitch.source import Plan

SIZES = (0, 3, 64, 999, 5000)


def tensors_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.arange(size).to(torch.uint8).add_(n) for n, size in enumerate(sizes)}


def plan_of(kind: str, sizes: list[int]) -> Plan:
    tensors: Any = tensors_of(sizes)
    if kind == "torch":
        return torch_zip.plan({**tensors, "step": 3}, pickle_module=pickle, pickle_protocol=2)
    if kind == "shards":
        return shards.plan([b"object", *tensors.values()])
    parts = torch.cat([torch.zeros(7, dtype=torch.uint8), *tensors.values()]).split([7, *sizes])[1:]
    return safetensors.plan(dict(zip(tensors, parts, strict=True)), metadata=None, checksums=kind == "checksums")


def written(plan: Plan, path: Path) -> tuple[bytearray, list[int]]:
    with path.open("w+b") as file:
        checksums = registry.get("numpy").write(plan, file.fileno())
    data = bytearray(path.read_bytes())
    head = plan.head(checksums) if plan.checksums_first else b""
    data[: len(head)] = head
    return data, list(checksums)


@given(data=st.data(), kind=st.sampled_from(["torch", "safetensors", "checksums", "shards"]))
def test_the_remainder_and_what_is_shared_make_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    path = tmp_path_factory.mktemp("remainder") / "x"
    plan = plan_of(kind, data.draw(st.lists(st.sampled_from(SIZES), max_size=6)))
    whole, checksums = written(plan, path)
    shared: list[Extent] = []
    known: dict[int, int] = {}
    for payload in plan.image.segments:
        if isinstance(payload, Payload) and payload.nbytes > 1 and data.draw(st.booleans()):
            begin = data.draw(st.integers(payload.offset, payload.offset + payload.nbytes - 1))
            shared.append((begin, data.draw(st.integers(begin + 1, payload.offset + payload.nbytes))))
            known[payload.storage] = checksums[payload.storage]
    rest = remainder(plan, shared, known)
    assert rest.nbytes == plan.nbytes - sum(end - begin for begin, end in shared)
    found, own = written(rest, path)
    for begin, offset, nbytes in rest.places:
        assert found[begin : begin + nbytes] == whole[offset : offset + nbytes]
    assert rest.all_checksums(own) == checksums


def test_the_remainder_lets_go_of_the_storages() -> None:
    plan = plan_of("torch", [5000, 999])
    (first, _) = (one for one in plan.image.segments if isinstance(one, Payload) and one.nbytes > 100)
    rest = remainder(plan, [(first.offset, first.offset + 4096)], {first.storage: 1})
    released = rest.released()
    assert released.storages == released.tensors == released.whole.storages == released.whole.tensors == ()
    assert released.head([]) == b""


def test_progress_begins_with_what_is_shared(tmp_path: Path) -> None:
    told: list[int] = []
    plan = plan_of("torch", [5000, 999])
    object.__setattr__(plan, "progress", told.append)
    first = next(one for one in plan.image.segments if isinstance(one, Payload) and one.nbytes == 5000)
    written(remainder(plan, [(first.offset, first.offset + 4096)], {first.storage: 1}), tmp_path / "x")
    assert told == [plan.nbytes]


def test_a_backend_without_checksums_gives_none() -> None:
    plan = plan_of("torch", [5000, 999])
    first = next(one for one in plan.image.segments if isinstance(one, Payload) and one.nbytes == 5000)
    assert remainder(plan, [(first.offset, first.offset + 4096)], {first.storage: 1}).all_checksums(()) == ()
