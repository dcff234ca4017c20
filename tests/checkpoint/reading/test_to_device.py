"""Loads straight to a device: what goes there is never whole on the host. Here the host stands for the device."""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import filled_at_once

import fastensor
from fastensor import TensorStore
from fastensor.backends import memory, registry
from fastensor.backends.base import Extent
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.registry import available_names
from fastensor.backends.streams import Copies
from fastensor.backends.to_device import DeviceTarget, read_through_host
from fastensor.checkpoint.containers import torch_file
from fastensor.checkpoint.reading import placement

LARGE = torch.randn(5 << 20)
STATE: dict[str, Any] = OrderedDict(
    large=LARGE, view=LARGE[7:99].view(2, -1), small=torch.arange(7), empty=torch.empty(0, 3), odd=torch.randn(70_001),
    nested={"list": [torch.ones(300_000, dtype=torch.bfloat16), "text"]}, parameter=torch.nn.Parameter(torch.randn(9)),
)  # fmt: skip


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected) and type(found) is type(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("backend", available_names())
@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu")])
def test_objects(tmp_path: Path, backend: str, map_location: Any) -> None:
    fastensor.save(STATE, tmp_path / "x")
    with filled_at_once() as filled:
        found, report = fastensor.load_with_report(tmp_path / "x", map_location, backend=backend)
        part = fastensor.load(tmp_path / "x", map_location, keys=["odd"], backend=backend)
    assert equal(found, STATE)
    assert found["view"].data_ptr() == found["large"][7:].data_ptr(), "ties are kept"
    assert (report.verified, report.fallbacks) == (True, ())
    assert sorted(filled, reverse=True)[:3] == [LARGE.nbytes, 600_000, 70_001 * 4]
    assert equal(part, {"odd": STATE["odd"]})


@pytest.mark.parametrize("backend", available_names())
def test_safetensors(tmp_path: Path, backend: str) -> None:
    state = {"a": LARGE, "b": torch.arange(5), "c": torch.empty(0)}
    fastensor.save(state, tmp_path / "x.safetensors")
    on_the_host = mock.patch.object(placement, "place", side_effect=AssertionError("it was on the host first"))
    destination = mock.patch.object(placement, "destination", return_value=torch.device("cpu"))
    with filled_at_once() as filled, on_the_host, destination:
        found, report = fastensor.load_with_report(tmp_path / "x.safetensors", "cpu", backend=backend)
    assert equal(dict(sorted(found.items())), state)
    assert report.verified
    assert max(filled) == LARGE.nbytes


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
@pytest.mark.parametrize("backend", ["auto", *available_names()])
def test_tensors_and_slices_of_an_open_checkpoint(tmp_path: Path, backend: str, name: str) -> None:
    fastensor.save({"a": LARGE, "b": torch.arange(5), "c": torch.empty(0)}, tmp_path / name)
    on_the_host = mock.patch.object(placement, "place", side_effect=AssertionError("it was on the host first"))
    destination = mock.patch.object(placement, "destination", return_value=torch.device("cpu"))
    with (
        filled_at_once() as filled,
        on_the_host,
        destination,
        fastensor.open(tmp_path / name, "cpu", backend=backend) as found,
    ):
        assert torch.equal(found["a"], LARGE)
        assert torch.equal(found["a", 1000:-1000], LARGE[1000:-1000])
        assert found["b", 2] == 2
        assert found["c"].numel() == 0
    assert filled == [LARGE.nbytes, LARGE.nbytes - 8000, 8]


@pytest.mark.parametrize("backend", available_names())
def test_single_tensors(tmp_path: Path, backend: str) -> None:
    store = TensorStore(tmp_path, backend=backend)
    with filled_at_once():
        for tensor in (LARGE, LARGE.view(5, -1).t(), torch.tensor(3), torch.empty(0, 2)):
            assert torch.equal(store.get(store.put(tensor)), tensor)


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
@pytest.mark.parametrize("backend", available_names())
def test_a_flipped_bit_is_found(tmp_path: Path, backend: str, name: str) -> None:
    fastensor.save({"a": LARGE}, tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with filled_at_once(), pytest.raises(fastensor.CorruptCheckpointError, match=r"a|data/0"):
        fastensor.load(tmp_path / name, "cpu", backend=backend)


def test_a_callable_gets_storages_that_are_filled(tmp_path: Path) -> None:
    fastensor.save({"a": LARGE}, tmp_path / "x")
    seen = []

    def look(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append(zlib.crc32(memory.memory_of(storage)))
        return storage

    with filled_at_once() as filled:
        assert equal(fastensor.load(tmp_path / "x", look), {"a": LARGE})
    assert seen == [zlib.crc32(LARGE.numpy().data)]
    assert filled == []


@pytest.mark.parametrize("map_location", [None, {"cpu": "cpu"}])
def test_where_they_were_or_where_a_dict_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, map_location: Any
) -> None:
    fastensor.save(STATE, tmp_path / "x")
    assert equal(fastensor.load(tmp_path / "x", map_location), STATE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with filled_at_once() as filled:
        assert equal(fastensor.load(tmp_path / "x", map_location), STATE)
    assert LARGE.nbytes in filled


@pytest.mark.parametrize("backend", available_names())
def test_what_torch_does_not_ask_for_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Some modes of torch's place storages without asking."""
    fastensor.save(STATE, tmp_path / "x")
    load = torch.load

    def forgetful(file: Any, map_location: Any, **options: Any) -> Any:
        return load(file, "cpu" if callable(map_location) else map_location, **options)

    monkeypatch.setattr(torch_file.torch, "load", forgetful)
    with filled_at_once():
        found, report = fastensor.load_with_report(tmp_path / "x", "cpu", backend=backend)
    assert equal(found, STATE)
    assert [fallback.backend for fallback in report.fallbacks] == ["filling devices at once"]


class Pair(torch.Tensor):
    """A tensor around another one: torch rebuilds it only without a callable for its place."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Pair(arguments[0].inner)
        raise NotImplementedError(function)


@pytest.mark.parametrize("weights_only", [True, False])
def test_subclasses_that_take_no_callable(tmp_path: Path, weights_only: bool) -> None:
    fastensor.save({"pair": Pair(torch.arange(100_000)), "plain": LARGE}, tmp_path / "x")
    with filled_at_once(), torch.serialization.safe_globals([Pair]):
        found = fastensor.load(tmp_path / "x", "cpu", weights_only=weights_only)
    assert torch.equal(found["pair"].inner, torch.arange(100_000))
    assert torch.equal(found["plain"], LARGE)


@pytest.mark.parametrize("backend", available_names())
def test_storages_that_are_longer_than_their_elements(tmp_path: Path, backend: str) -> None:
    odd = torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)
    large = torch.arange((1 << 20) + 3, dtype=torch.uint8)[: 1 << 20].view(torch.float32)
    fastensor.save({"odd": odd, "large": large}, tmp_path / "x")
    try:
        torch.load(tmp_path / "x")
    except RuntimeError as error:
        pytest.skip(f"this torch refuses such files itself: {error}")
    with filled_at_once():
        found, report = fastensor.load_with_report(tmp_path / "x", "cpu", backend=backend)
    assert report.verified
    assert found["odd"].view(torch.uint8).tolist() == list(range(8))
    assert torch.equal(found["large"].view(torch.uint8), large.view(torch.uint8))


@pytest.mark.parametrize("backend", available_names())
def test_in_inference_mode(tmp_path: Path, backend: str) -> None:
    fastensor.save({"a": LARGE}, tmp_path / "x")
    store = TensorStore(tmp_path, backend=backend)
    ref = store.put(LARGE)
    with filled_at_once(), torch.inference_mode():
        assert equal(fastensor.load(tmp_path / "x", "cpu", backend=backend), {"a": LARGE})
        assert torch.equal(store.get(ref), LARGE)


@pytest.mark.parametrize("backend", available_names())
def test_ranges_of_a_file(tmp_path: Path, backend: str) -> None:
    content = random.Random(0).randbytes(3 * BUFFER_NBYTES + 12_345)
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file, filled_at_once():
        extents = [Extent(5, 300_000), Extent(300_000, len(content) - 9)]
        reader = registry.get(backend).open_reader(file.fileno(), len(content), extents)
        for begin, end in [(5, 300_000), (300_000, len(content) - 9), (0, len(content)), (8, 8), (1, 300_001)]:
            storage = memory.storage_on(torch.device("cpu"), end - begin)
            for checksum in (True, False):
                expected = zlib.crc32(content[begin:end]) if checksum else 0
                assert memory.fill(reader, storage, begin, checksum=checksum) == expected
                assert bytes(memory.memory_of(storage)) == content[begin:end]
        target = DeviceTarget(torch.empty(len(content), dtype=torch.uint8), Copies([], "load"))
        assert read_through_host(reader, 0, target, checksum=True) == zlib.crc32(content)
        assert target.values.numpy().tobytes() == content
        with pytest.raises(OSError, match="ends before"):
            memory.fill(reader, memory.storage_on(torch.device("cpu"), 1 << 20), len(content) - 10, checksum=True)
        reader.close()
