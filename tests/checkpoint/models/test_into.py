"""``fastensor.load(into=...)``: into tensors that are there already, and what is said when that fails midway."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import assert_equal, dense
from torch import Tensor

import fastensor
from fastensor import CorruptCheckpointError, StateMismatchError, UnverifiedCheckpointWarning
from fastensor.backends.registry import available_names
from fastensor.testing.faults import failing_call

STATE = {
    "large": torch.arange(300_000, dtype=torch.int32),
    "small": torch.arange(12.0).reshape(3, 4),
    "half": torch.arange(40_000).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
}
NAMES = ["x.ckpt", "x.safetensors"]
files = pytest.mark.parametrize("name", NAMES)


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def damage(path: Path, tensor: Tensor) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) + 3] ^= 1
    path.write_bytes(data)


@files
@pytest.mark.parametrize("backend", available_names())
def test_tensors_are_filled_where_they_are(tmp_path: Path, name: str, backend: str) -> None:
    fastensor.save(STATE, tmp_path / name)
    into = blank(STATE)
    addresses = {key: tensor.data_ptr() for key, tensor in into.items()}
    result, report = fastensor.load_with_report(tmp_path / name, into=into, backend=backend)
    assert result is into
    assert_equal(into, STATE)
    assert addresses == {key: tensor.data_ptr() for key, tensor in into.items()}
    assert report.verified
    assert report.backend == backend


@given(st.dictionaries(st.sampled_from("abcdef"), dense(), min_size=1), st.sampled_from(NAMES))
def test_whatever_was_saved(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor], name: str) -> None:
    state = {key: one for key, one in state.items() if one.dtype != torch.complex128}
    if not state:
        return
    path = tmp_path_factory.mktemp("into") / name
    fastensor.save(state, path)
    into = blank(state)
    fastensor.load(path, into=into)
    assert_equal(into, state)


def test_views_strides_parameters_and_other_dtypes(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    fastensor.save({"rows": base[2:4], "transposed": base.t(), "whole": base, "tie": base}, tmp_path / "x.ckpt")
    buffer = torch.zeros(8, 10)
    into: dict[str, Tensor] = {
        "rows": buffer[3:5],
        "transposed": torch.nn.Parameter(torch.zeros(10, 6)),
        "whole": torch.zeros(6, 10, dtype=torch.float64),
        "tie": torch.zeros(10, 6).t(),
    }
    fastensor.load(tmp_path / "x.ckpt", into=into)
    assert torch.equal(buffer, torch.cat([torch.zeros(3, 10), base[2:4], torch.zeros(3, 10)]))
    assert torch.equal(into["transposed"], base.t())
    assert torch.equal(into["whole"], base.double())
    assert torch.equal(into["tie"], base)


def test_nested_as_the_file_is_and_nothing_else_is_read(tmp_path: Path) -> None:
    state = {"model": OrderedDict(w=torch.ones(3), b=torch.ones(200_000)), "epochs": [torch.ones(2)], "step": 3}
    fastensor.save(state, tmp_path / "x.ckpt")
    damage(tmp_path / "x.ckpt", state["model"]["b"])  # type: ignore[index]
    into = {"model": {"w": torch.zeros(3)}, "epochs": [torch.zeros(2)]}
    assert fastensor.load(tmp_path / "x.ckpt", into=into) is into
    assert_equal(into, {"model": {"w": torch.ones(3)}, "epochs": [torch.ones(2)]})


def test_ties_of_the_target_need_one_name_in_the_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fastensor.save_model(model, tmp_path / "x.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    fastensor.load(tmp_path / "x.safetensors", into=other.state_dict())
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_sparse_tensors_and_files_of_old_torch_are_copied(tmp_path: Path) -> None:
    state = {"sparse": torch.eye(3).to_sparse(), "dense": torch.ones(2)}
    fastensor.save(state, tmp_path / "x.ckpt")
    torch.save({"dense": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    into: dict[str, Tensor] = {"sparse": torch.zeros(3, 3).to_sparse(), "dense": torch.zeros(2)}
    fastensor.load(tmp_path / "x.ckpt", into=into)
    assert torch.equal(into["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(into["dense"], torch.ones(2))
    into["dense"].zero_()
    with pytest.warns(UnverifiedCheckpointWarning):
        fastensor.load(tmp_path / "old.pt", into={"dense": into["dense"]})
    assert torch.equal(into["dense"], torch.ones(2))


def test_verified_first_holds_for_copied_tensors_too(tmp_path: Path) -> None:
    state = {"sparse": torch.eye(3).to_sparse(), "dense": torch.arange(100_000)}
    fastensor.save(state, tmp_path / "x.ckpt")
    damage(tmp_path / "x.ckpt", state["dense"])
    into = {"sparse": torch.zeros(3, 3).to_sparse(), "dense": torch.zeros(100_000, dtype=torch.int64)}
    with pytest.raises(CorruptCheckpointError) as caught:
        fastensor.load(tmp_path / "x.ckpt", into=into, verify="first")
    assert caught.value.overwritten == ()
    assert not into["sparse"].to_dense().any()


def test_a_graph_that_needs_the_old_values_is_not_wrong(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    fastensor.save({"w": torch.full((3,), 2.0)}, tmp_path / "x.ckpt")
    loss = weight.square().sum()
    fastensor.load(tmp_path / "x.ckpt", into={"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x.ckpt")
    with torch.inference_mode():
        into = blank(STATE)
    fastensor.load(tmp_path / "x.ckpt", into=into)
    assert_equal({name: one.clone() for name, one in into.items()}, STATE)


MISFITS: dict[str, tuple[Any, str]] = {
    "a name": ({"w": torch.zeros(1)}, r"'w' not in it; nothing was overwritten\. It holds '"),
    "a shape": ({"small": torch.zeros(4, 3)}, r"'small': the file has the shape \[3, 4\], it has \[4, 3\]"),
    "a dtype": ({"small": torch.zeros(3, 4, dtype=torch.int8)}, "torch.float32, of which torch.int8 keeps too little"),
    "the meta device": ({"small": torch.zeros(3, 4, device="meta")}, "to_empty"),
    "a sparse one": ({"small": torch.zeros(3, 4).to_sparse()}, "the layout torch.strided, it has torch.sparse_coo"),
    "an expanded one": ({"small": torch.zeros(1, 4).expand(3, 4)}, "expanded"),
}


@files
@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_said_before_anything_is_overwritten(tmp_path: Path, name: str, what: str) -> None:
    fastensor.save(STATE, tmp_path / name)
    odd, message = MISFITS[what]
    into = {"large": torch.zeros(300_000, dtype=torch.int32), **odd}
    with pytest.raises(StateMismatchError, match=message) as caught:
        fastensor.load(tmp_path / name, into=into)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.overwritten == ()
    assert not into["large"].any()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_no_tensor_in_the_file(tmp_path: Path, zipped: bool) -> None:
    torch.save({"step": 3, "w": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    into = {"step": torch.zeros(1), "w": torch.zeros(3)}
    with pytest.raises(StateMismatchError, match=r"'step' not in it; nothing was overwritten. It holds 'w'"):
        fastensor.load(tmp_path / "x.pt", into=into)
    assert not into["w"].any()


def test_a_sparse_tensor_of_the_file_does_not_fit_into_a_dense_one(tmp_path: Path) -> None:
    fastensor.save({"dense": torch.ones(3), "odd": torch.eye(3).to_sparse()}, tmp_path / "x.ckpt")
    into = {"dense": torch.zeros(3), "odd": torch.zeros(3, 3)}
    with pytest.raises(StateMismatchError, match=r"'odd': the file has the layout torch.sparse_coo") as caught:
        fastensor.load(tmp_path / "x.ckpt", into=into)
    assert caught.value.overwritten == ()
    assert not into["dense"].any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"into": torch.zeros(3)}, TypeError, "into is a dict"),
        ({"into": {"step": 3}}, TypeError, "'step' in it is of type int; leave it out"),
        ({"into": {}}, TypeError, "is of type dict|holds no tensors"),
        ({"into": {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}}, ValueError, "two tensors.*'a.b'"),
        ({"into": {"small": torch.zeros(3, 4)}, "keys": ["small"]}, ValueError, "into says what is loaded"),
        ({"into": {"small": torch.zeros(3, 4)}, "map_location": "cpu"}, ValueError, "into says what is loaded"),
        ({"verify": "first"}, ValueError, "verify='first' is for into"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: Any, error: type[Exception], message: str) -> None:
    fastensor.save(STATE, tmp_path / "x.ckpt")
    with pytest.raises(error, match=message):
        fastensor.load(tmp_path / "x.ckpt", **arguments)


@files
def test_damage_names_every_tensor_that_is_overwritten(tmp_path: Path, name: str) -> None:
    state = {f"t{number}": torch.full((50_000,), number + 1.0) for number in range(8)}
    fastensor.save(state, tmp_path / name)
    damage(tmp_path / name, state["t6"])
    into = blank(state)
    with pytest.raises(CorruptCheckpointError, match=r"7 tensors had been overwritten.*'t0', .* and 2 more") as caught:
        fastensor.load(tmp_path / name, into=into)
    assert caught.value.overwritten == tuple(f"t{number}" for number in range(7))
    assert not into["t7"].any()
    assert torch.equal(into["t5"], state["t5"])


@files
def test_small_tensors_are_compared_before_they_are_overwritten(tmp_path: Path, name: str) -> None:
    state = {f"t{number}": torch.full((50,), number + 1.0) for number in range(3)}
    fastensor.save(state, tmp_path / name)
    damage(tmp_path / name, state["t1"])
    into = blank(state)
    with pytest.raises(CorruptCheckpointError, match="1 tensor had been overwritten") as caught:
        fastensor.load(tmp_path / name, into=into)
    assert caught.value.overwritten == ("t0",)
    assert not into["t1"].any()


@files
def test_verified_first_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    fastensor.save(STATE, tmp_path / name)
    into = blank(STATE)
    fastensor.load(tmp_path / name, into=into, verify="first")
    assert_equal(into, STATE)
    damage(tmp_path / name, STATE["half"])
    into = blank(STATE)
    with pytest.raises(CorruptCheckpointError) as caught:
        fastensor.load(tmp_path / name, into=into, verify="first")
    assert caught.value.overwritten == ()
    assert "overwritten" not in str(caught.value)
    assert not any(tensor.any() for tensor in into.values())
    fastensor.load(tmp_path / name, into=into, verify=False)
    assert torch.equal(into["large"], STATE["large"])


def test_reads_that_fail_name_them_too(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x.ckpt")
    number, seen = 1, set()
    while True:
        into = blank(STATE)
        with failing_call(number) as fault:
            try:
                fastensor.load(tmp_path / "x.ckpt", into=into, backend="numpy")
            except fastensor.CheckpointReadError as error:
                seen.add(error.overwritten)
                assert {key for key, one in into.items() if one.any()} <= {*error.overwritten}
                assert bool(error.overwritten) == ("overwritten" in str(error))
            else:
                assert_equal(into, STATE)
        if not fault.fired:
            break
        number += 1
    assert len(seen) > 1


def test_an_interrupt_carries_the_names(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x.ckpt")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fastensor.load(tmp_path / "x.ckpt", into=blank(STATE), progress=stop)
    assert caught.value.__notes__ == ["1 tensor had been overwritten: large"]
