"""Archives of very many tensors, whose storages are read before torch rebuilds the object: as ``torch.load`` has it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from hypothesis import given

import fastensor
from fastensor.checkpoint import at_once, torch_file
from fastensor.errors import CorruptCheckpointError, UnsafeCheckpointError

MANY = {f"layer.{number}": torch.full((number % 7,), float(number)) for number in range(1200)}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few storages there are."""
    monkeypatch.setattr(at_once, "_FEW", -1)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each load that was tried at once, whether it was; or why not."""
    found: list[str] = []

    def observed(*arguments: Any) -> Any:
        try:
            loaded = at_once.load_at_once(*arguments)
        except at_once.UnusualError as error:
            found.append(str(error))
            raise
        found.append("at once")
        return loaded

    monkeypatch.setattr(torch_file, "load_at_once", observed)
    return found


@given(states.trees())
def test_what_comes_back_is_what_torch_brings(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, torch.serialization.safe_globals([states.Scaled]):
        path = Path(folder, "x.pt")
        torch.save(tree, path)
        try:
            expected = torch.load(path)
        except Exception as error:  # noqa: BLE001  # whatever it is, ours fails, too
            with pytest.raises(Exception):  # noqa: B017, PT011
                fastensor.load(path)
            assert error
            return
        for backend in ("numpy", "direct"):
            states.assert_equal(fastensor.load(path, backend=backend), expected)


@pytest.mark.parametrize("map_location", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("backend", ["numpy", "direct", "auto"])
def test_many(tmp_path: Path, outcomes: list[str], map_location: Any, backend: str) -> None:
    large = {"large": torch.randn(300_000), "view": torch.randn(200_000)[3:9]}
    tied = {"tied": MANY["layer.6"], "large": large["large"][:5]}
    state = {"many": MANY, "large": large, "tied": tied}
    fastensor.save(state, tmp_path / "x")
    found, report = fastensor.load_with_report(tmp_path / "x", map_location, backend=backend)
    states.assert_equal(found, state)
    assert report.verified
    assert found["tied"]["tied"].data_ptr() == found["many"]["layer.6"].data_ptr()
    assert found["tied"]["large"].data_ptr() == found["large"]["large"].data_ptr()
    assert found["many"]["layer.1"].untyped_storage().resizable()
    assert outcomes == ["at once"]


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    state = {f"{number}": torch.arange(50.0) for number in range(30)} | {"large": torch.arange(100_000.0)}
    fastensor.save(state, path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 997):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        try:
            states.assert_equal(fastensor.load(path), state)  # what lies between the records
        except fastensor.FastensorError:
            continue


def test_damage_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x"
    fastensor.save({"a": torch.full((100,), 1.5), "b": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.full((100,), 1.5).numpy().tobytes())
    data[at + 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"record 'archive/data/0' \(400 bytes at offset"):
        fastensor.load(path)
    assert fastensor.load(path, verify=False)["a"][2] != 1.5


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x"
    fastensor.save(MANY, path)
    data = path.read_bytes()
    for nbytes in (10, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:nbytes])
        with pytest.raises(CorruptCheckpointError):
            fastensor.load(path)


class Foreign:
    """Not allow-listed."""


class Demanding(torch.Tensor):
    """Looks at its values when it is rebuilt."""

    def __setstate__(self, state: Any) -> None:
        assert self.sum() == 3.0, "they are there"
        self.__dict__.update(state)


def test_what_torch_refuses_is_refused(tmp_path: Path, outcomes: list[str]) -> None:
    torch.save({"a": Foreign()}, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError, match="Foreign"):
        fastensor.load(tmp_path / "x")
    assert "Foreign" in outcomes[0]


def test_values_are_there_when_objects_are_rebuilt(tmp_path: Path, outcomes: list[str]) -> None:
    tensor = torch.ones(3).as_subclass(Demanding)
    tensor.mark = 1  # type: ignore[attr-defined]
    torch.save({"a": tensor}, tmp_path / "x")
    with torch.serialization.safe_globals([Demanding]):
        found = fastensor.load(tmp_path / "x")["a"]
    assert found.mark == 1
    assert outcomes == ["at once"]


@pytest.mark.parametrize(
    "options", [{"weights_only": False}, {"map_location": lambda storage, location: storage}, {"keys": ["layer.3"]}]
)
def test_what_is_done_by_torch_load(tmp_path: Path, outcomes: list[str], options: Any) -> None:
    fastensor.save(MANY, tmp_path / "x")
    found = fastensor.load(tmp_path / "x", **options)
    assert torch.equal(found["layer.3"], MANY["layer.3"])
    assert outcomes == []


def test_other_versions_of_torch(tmp_path: Path, outcomes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "_KNOWN_TORCH", ((99, 0),))
    fastensor.save(MANY, tmp_path / "x")
    states.assert_equal(fastensor.load(tmp_path / "x"), MANY)
    assert outcomes == []


def test_inside_modes_and_skip_data(tmp_path: Path, outcomes: list[str]) -> None:
    fastensor.save(MANY, tmp_path / "x")
    with torch.device("meta"):
        expected = torch.load(tmp_path / "x")["layer.3"]
        assert fastensor.load(tmp_path / "x")["layer.3"].device.type == expected.device.type
    with torch.serialization.skip_data():
        assert fastensor.load(tmp_path / "x")["layer.3"].shape == (3,)
    assert outcomes == []
