"""What an error of a load says: ``CorruptCheckpointError`` means damage and nothing else."""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

import fastensor
from fastensor import PlacementError, UnsafeCheckpointError
from fastensor.errors import FastensorError, UnsupportedContentError

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, so the device is not wrong")


class Outdated:
    """Does not take what was saved of it."""

    error: Exception = NotImplementedError("version 1 is not supported any more, use tools/migrate.py")

    def __getstate__(self) -> dict[str, int]:
        return {"version": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        raise self.error


class Scale:
    """Looks at its values when it is rebuilt, as quantizers do."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        assert state["values"].tolist()[0] > 0


SPECIAL: dict[str, Callable[[], Any]] = {
    "quantized per channel": lambda: torch.quantize_per_channel(
        torch.ones(3, 3), torch.ones(3), torch.zeros(3), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(9).to_sparse(),
    "compressed rows": lambda: torch.eye(9).to_sparse_csr(),
    "dense": lambda: torch.ones(3),
    "a class that looks at its values": lambda: Scale(torch.ones(3)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize_per_channel.*", "ignore:.*[Nn]ested.*", "ignore:.*[Ss]parse.*")
]
of_every_kind = pytest.mark.parametrize("kind", SPECIAL)


@pytest.fixture
def allowed() -> Any:
    """Nested tensors are among what ``weights_only=True`` allows by itself until torch 2.14."""
    with torch.serialization.safe_globals([Outdated, Scale, torch._utils._rebuild_nested_tensor]):
        yield


def saved(path: Path, kind: str) -> Path:
    fastensor.save({"a": torch.ones(3), "x": SPECIAL[kind](), "z": torch.zeros(2)}, path)
    return path


@of_every_kind
@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("invariants", [False, True])
@pytest.mark.usefixtures("allowed")
def test_a_part_of_a_file_with_anything_else_in_it(
    tmp_path: Path, kind: str, weights_only: bool | None, invariants: bool
) -> None:
    path = saved(tmp_path / "x.pt", kind)
    with torch.sparse.check_sparse_tensor_invariants(invariants):
        for name, values in (("a", [1, 1, 1]), ("z", [0, 0])):
            found = fastensor.load(path, keys=[name], weights_only=weights_only)
            assert list(found) == [name]
            assert found[name].tolist() == values
        assert list(fastensor.load(path, keys=["x"], weights_only=weights_only)) == ["x"]


@of_every_kind
@pytest.mark.parametrize("options", [{}, {"keys": ["x"]}, {"weights_only": False}, {"mmap": True}], ids=str)
@pytest.mark.parametrize("invariants", [False, True])
@without_cuda
@pytest.mark.usefixtures("allowed")
def test_a_device_that_is_not_there(tmp_path: Path, kind: str, options: dict[str, Any], invariants: bool) -> None:
    path = saved(tmp_path / "x.pt", kind)
    with torch.sparse.check_sparse_tensor_invariants(invariants):
        for place in ("cuda", torch.device("cuda:1"), {"cpu": "cuda:0"}):
            with pytest.raises(PlacementError, match=rf"^{re.escape(str(path))}: .*(?s:.)*[^.]\. map_location='cpu'"):
                fastensor.load(path, place, **options)


@of_every_kind
@without_cuda
@pytest.mark.usefixtures("allowed")
def test_a_device_that_is_not_there_is_said_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "x.pt", kind)
    for load in (fastensor.load, fastensor.open):
        with pytest.raises(PlacementError) as caught:
            load(path, "cuda")
        shown = "".join(traceback.format_exception(caught.value))
        assert shown.count("Traceback") == 1
        assert shown.count("map_location=") == 1, "torch's advice is about torch.load"
        assert shown.endswith(
            f"{path}: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. "
            f"map_location='cpu' loads it to the host\n"
        )
    assert (caplog.text, capfd.readouterr().err) == ("", "")


@without_cuda
@pytest.mark.parametrize("legacy", [False, True])
def test_a_device_that_the_file_names(tmp_path: Path, legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(PlacementError, match="map_location='cpu'"):
        fastensor.load(tmp_path / "x.pt", verify=False)
    assert fastensor.load(tmp_path / "x.pt", "cpu", verify=False)["a"].tolist() == [1, 1, 1]


ERRORS = [
    NotImplementedError("use tools/migrate.py"),
    RuntimeError("PytorchStreamReader is what the user's own tool is called"),
    ConnectionRefusedError(111, "the database is down"),
    FileNotFoundError(2, "no such file", "vocabulary.txt"),
    KeyError("layer"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}, {"keys": ["v"]}], ids=str)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.usefixtures("allowed")
def test_what_a_class_raises_when_it_is_rebuilt_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, options: dict[str, Any], legacy: bool
) -> None:
    if legacy and "mmap" in options:
        pytest.skip("torch does not map files of before 1.6")
    monkeypatch.setattr(Outdated, "error", error)
    torch.save({"a": torch.ones(3), "v": Outdated()}, tmp_path / "x", _use_new_zipfile_serialization=not legacy)
    for load in (torch.load, fastensor.load):
        more = {"verify": False} if load is fastensor.load else {}
        given = {**options, **more} if load is fastensor.load else {k: v for k, v in options.items() if k != "keys"}
        with pytest.raises(type(error)) as caught:
            load(tmp_path / "x", **given)
        assert caught.value is error


@pytest.mark.usefixtures("allowed")
def test_what_is_not_asked_for_is_not_rebuilt(tmp_path: Path) -> None:
    fastensor.save({"a": torch.ones(3), "v": Outdated()}, tmp_path / "x")
    assert fastensor.load(tmp_path / "x", keys=["a"])["a"].tolist() == [1, 1, 1]


def test_a_tensor_that_was_saved_without_its_memory(tmp_path: Path) -> None:
    """Sharded training frees the memory of tensors. torch saves such a tensor and cannot load it; the file is sound."""
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    torch.save({"freed": freed, "a": torch.ones(3)}, tmp_path / "x")
    assert fastensor.verify(tmp_path / "x").complete
    assert fastensor.load(tmp_path / "x", keys=["a"])["a"].tolist() == [1, 1, 1]
    for read in (fastensor.load, fastensor.open, fastensor.inspect, lambda path: fastensor.load(path, keys=["freed"])):
        with pytest.raises(UnsupportedContentError, match=r"'freed' was saved without its values: .*20 bytes.* has 0"):
            read(tmp_path / "x")
    with pytest.raises(RuntimeError, match="not resizable"):
        fastensor.load(tmp_path / "x", weights_only=False)


@pytest.mark.parametrize("kind", ["nested", "quantized per channel"])
@pytest.mark.usefixtures("allowed")
def test_what_torch_cannot_rebuild_on_a_device_is_not_called_damaged(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path / "x.pt", kind)
    with pytest.raises(UnsupportedContentError, match=r"cannot rebuild .* is sound: NotImplemented") as caught:
        fastensor.load(path, "meta")
    with pytest.raises(type(caught.value.__cause__)):
        fastensor.load(path, "meta", weights_only=False)


@without_cuda
def test_a_device_that_is_not_there_for_safetensors(tmp_path: Path) -> None:
    fastensor.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    for read in (fastensor.load, fastensor.open):
        with pytest.raises(PlacementError, match="map_location='cpu'"):
            read(tmp_path / "x.safetensors", "cuda")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchscript_is_not_called_damaged(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "x"))
    with pytest.raises(UnsafeCheckpointError, match=r"TorchScript.*weights_only=False"):
        fastensor.load(tmp_path / "x")


# The environment.


@pytest.fixture
def unsafe(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(3), "c": PurePosixPath("x")}, tmp_path / "unsafe.pt")
    return tmp_path / "unsafe.pt"


FORCED, NOT_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.mark.parametrize("options", [{}, {"keys": ["c"]}, {"mmap": True}], ids=str)
def test_weights_only_by_force(unsafe: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setenv(FORCED, "1")
    with pytest.raises(UnsafeCheckpointError, match=rf"PurePosixPath.*{FORCED}"):
        fastensor.load(unsafe, weights_only=False, **options)
    assert fastensor.load(unsafe, weights_only=False, keys=["w"])["w"].tolist() == [1, 1, 1]


def test_weights_only_by_force_in_a_file_of_before_1_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(PurePosixPath("x"), tmp_path / "x", _use_new_zipfile_serialization=False)
    monkeypatch.setenv(FORCED, "1")
    with pytest.raises(UnsafeCheckpointError, match=FORCED):
        fastensor.load(tmp_path / "x", weights_only=False, verify=False)


@pytest.mark.parametrize("value", ["1", "y", "YES", "True", "0", "off", ""])
def test_the_default_is_torchs(unsafe: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(NOT_FORCED, value)
    for load in (torch.load, fastensor.load):
        for options in ({}, {"weights_only": None}):
            if (value.lower() if torch.__version__ >= "2.13" else value) in ("1", "y", "yes", "true"):
                with pytest.warns(UserWarning, match=NOT_FORCED):
                    assert load(unsafe, **options)["c"] == PurePosixPath("x")
            else:
                with pytest.raises(Exception, match="PurePosixPath"):
                    load(unsafe, **options)
        with pytest.raises(Exception, match="PurePosixPath"):
            load(unsafe, weights_only=True)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_both_forces_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    fastensor.save({"w": torch.ones(3)}, path)
    monkeypatch.setenv(FORCED, "1")
    monkeypatch.setenv(NOT_FORCED, "1")
    for load in (torch.load, fastensor.load):
        with pytest.raises(RuntimeError, match="but both were set") as caught:
            load(path)
        assert not isinstance(caught.value, FastensorError)


def test_what_the_user_raises_is_recognized_by_its_frames(tmp_path: Path) -> None:
    """A callable map_location is the user's, whatever module it is in."""
    fastensor.save({"w": torch.ones(3)}, tmp_path / "x")

    def place(storage: Any, location: str) -> Any:
        raise OSError(5, "the device is gone")

    with pytest.raises(OSError, match="the device is gone") as caught:
        fastensor.load(tmp_path / "x", place)
    assert not isinstance(caught.value, FastensorError)


def test_wrappers_of_torch_load_get_the_same_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper is code of the user's in every traceback, and none that torch has called."""
    module = types.ModuleType("other_tooling")
    exec("def load(*args, **options): return original(*args, **options)", vars(module))  # a module of its own
    vars(module)["original"] = torch.load
    monkeypatch.setattr(torch, "load", vars(module)["load"])
    torch.save({"w": torch.ones(3), "path": Path("x")}, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError, match="PosixPath"):
        fastensor.load(tmp_path / "x")
    torch.save({"w": torch.ones(3)}, tmp_path / "y")
    if not torch.cuda.is_available():
        with pytest.raises(PlacementError):
            fastensor.load(tmp_path / "y", "cuda")


def test_what_the_environment_cannot_mean_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x")
    monkeypatch.setenv("FASTENSOR_EXPLORE", "maybe")
    for options in ({}, {"keys": ["w"]}):
        with pytest.raises(ValueError, match="FASTENSOR_EXPLORE is 'maybe'"):
            fastensor.load(tmp_path / "x", **options)  # type: ignore[arg-type]
