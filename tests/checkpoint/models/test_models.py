"""``fastensor.load_model`` and ``fastensor.save_model``, beside those of safetensors and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from states import assert_equal
from torch import nn

import fastensor
from fastensor import StateMismatchError, UnsupportedContentError
from fastensor.testing.calls import Call, intercepted

SUFFIXES = ["x.safetensors", "x.ckpt"]
files = pytest.mark.parametrize("name", SUFFIXES)


class Tied(nn.Module):
    """A language model's ties: its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 40)
        self.norm = nn.BatchNorm1d(40)
        self.body = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40))
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(4), persistent=False)


def trained() -> Tied:
    torch.manual_seed(1)
    model = Tied()
    model.norm.num_batches_tracked.fill_(7)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    return {**model.state_dict()}


@files
def test_round_trip_into_the_same_memory(tmp_path: Path, name: str) -> None:
    fastensor.save_model(trained(), tmp_path / name)
    torch.manual_seed(2)
    model = Tied()
    parameters = {key: (one, one.data_ptr()) for key, one in model.named_parameters()}
    found = fastensor.load_model(model, tmp_path / name)
    assert found == ([], [])
    assert_equal(state_of(model), state_of(trained()))
    for key, one in model.named_parameters():
        assert one is parameters[key][0]
        assert one.data_ptr() == parameters[key][1]
    assert model.head.weight is model.embedding.weight


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    fastensor.save_model(trained(), tmp_path / "ours.safetensors", checksums=False)
    safetensors.torch.save_model(trained(), str(tmp_path / "theirs.safetensors"))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    fastensor.save_model(trained(), tmp_path / "checked.safetensors")
    model = Tied()
    safetensors.torch.load_model(model, tmp_path / "checked.safetensors")
    assert_equal(state_of(model), state_of(trained()))


def test_metadata_of_the_user_and_names_that_were_left_out(tmp_path: Path) -> None:
    fastensor.save_model(trained(), tmp_path / "x.safetensors", metadata={"by": "us"})
    expected = {"format": "pt", "by": "us", "head.weight": "embedding.weight"}
    assert fastensor.inspect(tmp_path / "x.safetensors").metadata == expected


def test_views_of_one_storage(tmp_path: Path) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 4)
            self.whole, self.part = nn.Parameter(whole), nn.Parameter(whole[2:4])
            self.turned = nn.Parameter(whole.t())

    torch.manual_seed(3)
    model = Fused()
    fastensor.save_model(model, tmp_path / "x.safetensors")
    other = Fused()
    fastensor.load_model(other, tmp_path / "x.safetensors")
    assert_equal({**other.state_dict()}, {**model.state_dict()})
    model.whole = None
    model.turned = None
    model.part = nn.Parameter(model.part[:1])
    model.other = nn.Parameter(torch.as_strided(model.part.data, (2,), (1,), 11))
    with pytest.raises(UnsupportedContentError, match="overlap"):
        fastensor.save_model(model, tmp_path / "y.safetensors")


@files
def test_memory_is_that_of_the_model(tmp_path: Path, name: str) -> None:
    """Nothing of the size of a large tensor is allocated beside it."""
    model = nn.Linear(2000, 2000)
    fastensor.save_model(model, tmp_path / name)
    other = nn.Linear(2000, 2000)
    sizes: list[int] = []

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result.is_meta:
                sizes.append(result.untyped_storage().nbytes() if "empty" in str(func) else 0)
            return result

    with Allocations():
        fastensor.load_model(other, tmp_path / name)
    assert max(sizes, default=0) < 1 << 20
    assert_equal(state_of(other), state_of(model))


@files
def test_other_dtypes_and_strides_of_the_model(tmp_path: Path, name: str) -> None:
    model = nn.Conv2d(3, 8, 3)
    fastensor.save_model(model, tmp_path / name)
    other = nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)
    fastensor.load_model(other, tmp_path / name)
    assert torch.equal(other.weight, model.weight.double())
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def altered() -> dict[str, tuple[Callable[[dict[str, Any]], object], str]]:
    return {
        "missing": (lambda state: state.pop("body.0.bias"), "1 names are missing in the file: 'body.0.bias'"),
        "unexpected": (lambda state: state.update(more=torch.ones(1)), "1 names are not in the model: 'more'"),
        "size": (lambda state: state.update(mask=torch.ones(3, dtype=torch.bool)), r"size mismatch for mask"),
        "both": (lambda state: state.update(b=state.pop("mask")), "'mask'; 1 names are not in the model: 'b'"),
    }


@files
@pytest.mark.parametrize("what", altered())
def test_strict(tmp_path: Path, name: str, what: str) -> None:
    alter, message = altered()[what]
    state = {key: one.clone() for key, one in trained().state_dict().items()}
    alter(state)
    fastensor.save(state, tmp_path / name)
    model = Tied()
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=f"{message}.*nothing was overwritten"):
        fastensor.load_model(model, tmp_path / name)
    assert_equal(state_of(model), before)
    with pytest.raises(RuntimeError):
        Tied().load_state_dict(state)


@files
def test_not_strict_is_as_load_state_dict(tmp_path: Path, name: str) -> None:
    state = {key: one.clone() for key, one in trained().state_dict().items()}
    state["more"] = state.pop("mask")
    fastensor.save(state, tmp_path / name)
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    found, theirs = fastensor.load_model(model, tmp_path / name, strict=False), other.load_state_dict(state, False)
    assert [*found] == [*theirs]
    assert found.missing_keys == ["mask"]
    assert_equal(state_of(model), state_of(other))


def test_a_batch_norm_of_before_its_counter(tmp_path: Path) -> None:
    state = {key: one for key, one in trained().state_dict().items() if "num_batches" not in key}
    state.pop("head.weight")
    fastensor.save(state, tmp_path / "x.safetensors")
    assert fastensor.load_model(Tied(), tmp_path / "x.safetensors") == ([], [])
    versioned = trained().state_dict()
    versioned.pop("norm.num_batches_tracked")
    fastensor.save(versioned, tmp_path / "x.ckpt")
    with pytest.raises(StateMismatchError, match=r"missing in the file: 'norm.num_batches_tracked'"):
        fastensor.load_model(Tied(), tmp_path / "x.ckpt")


def test_a_checkpoint_of_lightning_by_its_root(tmp_path: Path) -> None:
    fastensor.save({"state_dict": trained().state_dict(), "epoch": 3}, tmp_path / "x.ckpt")
    model = Tied()
    with pytest.raises(StateMismatchError, match="choose one of its dicts of tensors with root: 'state_dict'"):
        fastensor.load_model(model, tmp_path / "x.ckpt")
    fastensor.load_model(model, tmp_path / "x.ckpt", root="state_dict")
    assert_equal(state_of(model), state_of(trained()))
    with pytest.raises(UnsupportedContentError, match=r"called 'model', found none; choose.*'state_dict'"):
        fastensor.load_model(model, tmp_path / "x.ckpt", root="model")


def test_parameters_without_memory(tmp_path: Path) -> None:
    fastensor.save_model(trained(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(StateMismatchError, match=r"on the meta device.*to_empty"):
        fastensor.load_model(model, tmp_path / "x.safetensors")
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    fastensor.load_model(model, tmp_path / "x.safetensors")
    assert_equal(state_of(model), state_of(trained()))


class Renaming(nn.Module):
    """Loads files in which a layer had another name, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self._register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(state: dict[str, Any], prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state:
                state[f"{prefix}new.{name}"] = state.pop(f"{prefix}old.{name}")


class Blending(nn.Module):
    """Does something with the values that it has before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.weight.data = (self.weight.data + state[f"{prefix}weight"]) / 2


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


@files
def test_modules_that_do_more_get_their_tensors_by_load_state_dict(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fastensor.save({"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2)}, tmp_path / name)
    renaming = Renaming()
    assert fastensor.load_model(renaming, tmp_path / name) == ([], [])
    assert torch.equal(renaming.new.weight, torch.ones(2, 2))
    assert "loading straight into the model" in caplog.text
    assert "hooks for load_state_dict" in caplog.text
    fastensor.save({"weight": torch.ones(2)}, tmp_path / name)
    blending = Blending()
    fastensor.load_model(blending, tmp_path / name)
    assert blending.weight.tolist() == [0.5, 0.5]


def test_extra_state_and_old_files(tmp_path: Path) -> None:
    fastensor.save_model(Extra(5), tmp_path / "x.ckpt")
    model = Extra()
    fastensor.load_model(model, tmp_path / "x.ckpt")
    assert model.extra == 5
    with pytest.raises(UnsupportedContentError, match="_extra_state"):
        fastensor.save_model(Extra(5), tmp_path / "x.safetensors")
    torch.save(trained().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    tied = Tied()
    with pytest.warns(fastensor.UnverifiedCheckpointWarning):
        fastensor.load_model(tied, tmp_path / "old.pt")
    assert_equal(state_of(tied), state_of(trained()))


@files
def test_damage(tmp_path: Path, name: str) -> None:
    model = trained()
    fastensor.save_model(model, tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    data[data.index(model.body[1].weight.detach().numpy().tobytes()) + 3] ^= 1
    (tmp_path / name).write_bytes(data)
    other = Tied()
    with pytest.raises(fastensor.CorruptCheckpointError) as caught:
        fastensor.load_model(other, tmp_path / name)
    assert caught.value.overwritten
    assert "body.1.weight" not in caught.value.overwritten  # small ones are compared before
    before = {key: one.clone() for key, one in other.state_dict().items()}
    with pytest.raises(fastensor.CorruptCheckpointError) as caught:
        fastensor.load_model(other, tmp_path / name, verify="first")
    assert caught.value.overwritten == ()
    assert_equal(state_of(other), before)


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    """A model in a file of torch is read by as many bytes as the file has, about."""
    fastensor.save_model(nn.Linear(1000, 1000), tmp_path / "x.ckpt")
    read = [0]

    def count(call: Call) -> Any:
        result = call.perform()
        if call.name in ("pread", "preadv"):
            read[0] += len(result) if isinstance(result, bytes) else int(result)
        return result

    with intercepted(count):
        fastensor.load_model(nn.Linear(1000, 1000), tmp_path / "x.ckpt", backend="numpy")
    assert read[0] < 1.05 * (tmp_path / "x.ckpt").stat().st_size + 10_000


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a torch.nn.Module, found one of type dict; fastensor.save"):
        fastensor.save_model({}, tmp_path / "x.ckpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is a torch.nn.Module"):
        fastensor.load_model({}, tmp_path / "x.ckpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="verify is True, False, 'first' or None, found 'yes'"):
        fastensor.load_model(Tied(), tmp_path / "x.ckpt", verify="yes")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        fastensor.load_model(Tied(), tmp_path / "x.ckpt")
    with pytest.raises(FileNotFoundError, match="no weights"):
        fastensor.load_model(Tied(), tmp_path)
