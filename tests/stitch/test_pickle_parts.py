"""Cutting out of a pickle what was not asked for."""

from __future__ import annotations

import cProfile
import enum
import io
import pickle
import pstats
import types
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import UnsafeCheckpointError
from fastensor.checkpoint.models import names
from fastensor.stitch.pickle_parts import cut
from fastensor.stitch.pickle_records import all_in
from fastensor.stitch.torch_pickle import read_program


class Pair:
    """Records what it was rebuilt from."""

    built: ClassVar[list[Any]] = []

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.built.append(state["one"])


def load(state: Any, keys: list[str]) -> Any:
    """A part of what torch makes of a state, read from the part's bytes alone."""
    file = io.BytesIO()
    torch.save(state, file)
    whole = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    file.seek(0)
    found, report = fastensor.load_with_report(file, keys=keys, weights_only=False)  # type: ignore[arg-type]
    assert not report.fallbacks
    states.assert_equal(found, names.choose(whole, set(keys).__contains__))
    return found


@given(tree=states.trees(), data=st.data())
def test_any_part_of_any_tree(tree: Any, data: st.DataObject) -> None:
    tied = {"root": tree, "again": tree, "first": torch.ones(3)}
    there = sorted({node.name for node in names.nodes(tied)})
    load(tied, data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=3, unique=True)))


W = torch.arange(6.0)
TIED: dict[str, Any] = {
    "one tensor under two names": {"a": W, "b": W, "c": torch.ones(2)},
    "views of one": {"a": W[:2], "b": W[2:], "c": torch.ones(2)},
    "a dict in two places": {"a": {"w": W, "v": torch.ones(1)}, "b": [torch.zeros(1)]},
    "attributes": {"a": OrderedDict(w=W, v=torch.ones(1)), "b": torch.ones(2), "c": W},
    "in tuples": (torch.ones(1), (W, torch.zeros(3)), {"x": W}),
    "parameters": {"a": torch.nn.Parameter(W), "b": torch.nn.Parameter(torch.ones(2)), "c": W},
    "texts that are used again": {"cpu": W, "storage": torch.ones(1), "0": "cpu", "x": ["storage", "cpu", "0"]},
    "more than 256": {str(i): torch.tensor([i]) for i in range(300)},
}
TIED["a dict in two places"]["b"].append(TIED["a dict in two places"]["a"])


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *((kind, 11 if kind == "more than 256" else 1) for kind in TIED),
        pytest.param("more than 256", 1, marks=pytest.mark.torture),
    ],
)
def test_what_several_refer_to(kind: str, step: int) -> None:
    for node in [*names.nodes(TIED[kind])][::step]:
        load(TIED[kind], [node.name])


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


class Wrapped:
    """Comes back as a parameter."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_parameter, (self.data, True, OrderedDict())  # type: ignore[attr-defined]


ODD_KEYS: dict[str, tuple[Any, str]] = {
    "a key of a dict of another class": ({"mode": Mode.TRAIN, "x": defaultdict(int, {Mode.TRAIN: 3})}, "x"),
    "keys that would be the same": ({"mode": Mode.TRAIN, "table": {None: W, Mode.TRAIN: 5}}, "table.None"),
    "a plain value beside a tensor": ({"ema": [torch.ones(3), 0.99], "w": W}, "ema.1"),
    "a layout": ({"layout": torch.sparse_coo, "s": torch.eye(3).to_sparse()}, "s"),
}


@pytest.mark.parametrize("kind", ODD_KEYS)
def test_what_is_left_out_is_nothing_that_is_needed(kind: str) -> None:
    state, key = ODD_KEYS[kind]
    load(state, [key])


def test_a_parameter_of_a_tensor_that_is_not_asked_for() -> None:
    file = io.BytesIO()
    torch.save({"w": W, "p": Wrapped(W)}, file)
    file.seek(0)
    assert torch.equal(fastensor.load(file, keys=["p"], weights_only=False)["p"], W)  # type: ignore[arg-type]


def test_identities_are_not_used_again() -> None:
    """A pickler without a memo leaves nothing that keeps the inner tensor's record."""
    state = {f"{i}": [torch.nn.Parameter(torch.full((2,), float(i))), f"{i:045}", (i, str(i))] for i in range(30)}

    class Fast(pickle.Pickler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.fast = True

    module = types.SimpleNamespace(**{**vars(pickle), "Pickler": Fast})
    file = io.BytesIO()
    torch.save(state, file, pickle_module=module)
    for i in range(30):
        file.seek(0)
        found = fastensor.load(file, keys=[f"{i}.0"])  # type: ignore[arg-type]
        assert torch.equal(found[str(i)][0], torch.full((2,), float(i)))


def test_what_an_unknown_object_shares_with_the_rest() -> None:
    shared = torch.arange(4.0)
    state = {"first": Pair(shared, {"inner": torch.ones(2)}), "shared": shared, "last": Pair(1, shared)}
    state["inner"] = state["first"].other  # type: ignore[attr-defined]
    for key in ("shared", "inner", "inner.inner", "last"):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        found = fastensor.load(file, keys=[key], weights_only=False)  # type: ignore[arg-type]
        part = found[key.partition(".")[0]]
        assert torch.equal(part.other if key == "last" else part if key == "shared" else part["inner"], {
            "shared": shared, "last": shared}.get(key, torch.ones(2)))  # fmt: skip


def test_only_what_is_asked_for_is_rebuilt(tmp_path: Path) -> None:
    """The calls are counted, not timed."""
    Pair.built.clear()
    state = {f"layer.{i}": torch.tensor([i]) for i in range(200)} | {"pair": Pair(1, torch.ones(2))}
    fastensor.save(state, tmp_path / "x")
    with cProfile.Profile() as profile:
        found = fastensor.load(tmp_path / "x", keys=["layer.117"], weights_only=False)
    assert found["layer.117"].item() == 117
    calls = {name: count for (_, _, name), (count, *_) in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    assert calls["load_tensor"] == calls["_rebuild_tensor_v2"] == 1
    assert not Pair.built


def test_globals_of_what_is_cut_out_are_cut_out_unless_they_are_used(tmp_path: Path) -> None:
    fastensor.save({"a": torch.ones(1), "pair": Pair(1, 2), "again": Pair(3, 4)}, tmp_path / "x")
    assert fastensor.load(tmp_path / "x", keys=["a"])["a"].tolist() == [1]
    for key in ("pair", "again"):
        with pytest.raises(UnsafeCheckpointError, match="Pair"):
            fastensor.load(tmp_path / "x", keys=["a", key])
        assert fastensor.load(tmp_path / "x", keys=[key], weights_only=False)[key].one in (1, 3)


def test_what_is_named_only_by_values_that_are_cut_out() -> None:
    data = pickle.dumps({"a": Pair(1, 2), "b": Pair, "c": Mode, "d": {Mode.EVAL: 3}, "e": [Mode, "x"]}, protocol=2)
    program = read_program(data, where="x")
    structure = program.structure
    wanted = {id(one) for one in all_in([structure["c"], structure["e"]])}
    short = cut(program, (one for one in all_in(structure) if id(one) not in wanted))
    assert short is not None
    assert b"Pair" not in short
    assert pickle.loads(short) == {"a": (), "b": (), "c": Mode, "d": {(): 3}, "e": [Mode, "x"]}
    short = cut(program, all_in(structure))
    assert short is not None
    assert b"Mode" not in short
    assert pickle.loads(short) == {"a": (), "b": (), "c": (), "d": {(): 3}, "e": [(), "x"]}


def test_what_cannot_be_cut_is_left_as_it_is(tmp_path: Path) -> None:
    state = {"a": W, "b": torch.ones(2)}
    for protocol in (1, 3, 4, 5):
        fastensor.save(state, tmp_path / "x", pickle_protocol=protocol)
        found = fastensor.load(tmp_path / "x", keys=["b"], weights_only=False)
        states.assert_equal(found, {"b": torch.ones(2)})
    twice = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x01K\x02u."
    assert pickle.loads(twice) == {"a": 1, "b": 2}
    assert cut(read_program(twice, where="x"), []) is None


def test_it_takes_no_more_bytes() -> None:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=2)
    pickler.dump({"a": Pair("x" * 300, "y"), "b": ["y", "x" * 300], "c": Pair("y", 3)})
    program = read_program(file.getvalue(), where="x")
    short = cut(program, [program.structure["a"], program.structure["c"]])
    assert short is not None
    assert len(short) <= len(program.data)
    assert pickle.loads(short) == {"a": (), "b": ["y", "x" * 300], "c": ()}
