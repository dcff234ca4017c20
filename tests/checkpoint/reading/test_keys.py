"""Loading a part of a checkpoint: the same object with nothing else in it, and nothing else read."""

from __future__ import annotations

import argparse
import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import UnknownKeyError, UnsafeCheckpointError, UnsupportedContentError
from fastensor.backends.registry import available_names
from fastensor.checkpoint.models import names
from fastensor.files import posix


class Unknown:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Subclass(torch.Tensor):
    pass


def with_attribute(state: Any, value: Any) -> Any:
    state.attribute = value
    return state


WEIGHTS = OrderedDict({"layer.weight": torch.randn(50, 100), "layer.bias": torch.randn(50), "head": torch.randn(9)})
CHECKPOINT = {
    "epoch": 3,
    "state_dict": WEIGHTS,
    "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(50, 100), "step": torch.tensor(5.0)}}, "lr": 0.1}],
    "tied": WEIGHTS["layer.weight"][3:5],
    "order": list(range(5)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fastensor.save(CHECKPOINT, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["epoch"], {"epoch": 3}),
        (["state_dict.layer.bias"], {"state_dict": OrderedDict({"layer.bias": WEIGHTS["layer.bias"]})}),
        (["state_dict"], {"state_dict": WEIGHTS}),
        (["*.lr", "order"], {"optimizer_states": [{"lr": 0.1}], "order": list(range(5))}),
        (["*step"], {"optimizer_states": [{"state": {0: {"step": torch.tensor(5.0)}}}]}),
        (["state_dict.[!l]*"], {"state_dict": OrderedDict({"head": WEIGHTS["head"]})}),
        (["tied"], {"tied": CHECKPOINT["tied"]}),
        (["*"], CHECKPOINT),
    ],
)
@pytest.mark.parametrize("backend", available_names())
def test_the_same_object_with_nothing_else_in_it(path: Path, keys: list[str], expected: Any, backend: str) -> None:
    states.assert_equal(fastensor.load(path, keys=keys, backend=backend), expected)


def test_ties_within_the_choice_are_kept(path: Path) -> None:
    found = fastensor.load(path, keys=["tied", "state_dict.layer.weight"])
    found["state_dict"]["layer.weight"][3] = 7
    assert (found["tied"][0] == 7).all()


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    state = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(8)}
    fastensor.save(state, path)
    read: list[int] = []
    original = posix.read_fully

    def count(fd: int, buffer: memoryview, offset: int, **options: Any) -> int:
        read.append(buffer.nbytes)
        return original(fd, buffer, offset, **options)

    monkeypatch.setattr(posix, "read_fully", count)
    found = fastensor.load(path, keys=["t3"], backend="numpy")
    assert list(found) == ["t3"]
    assert (found["t3"] == 3).all()
    assert 4 << 20 <= sum(read) < 5 << 20


def test_damage_elsewhere_does_not_matter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(WEIGHTS["layer.weight"].numpy().tobytes())
    data[at + 99] ^= 1
    path.write_bytes(data)
    states.assert_equal(fastensor.load(path, keys=["*.head"])["state_dict"]["head"], WEIGHTS["head"])
    with pytest.raises(fastensor.CorruptCheckpointError):
        fastensor.load(path, keys=["*.weight"])


def test_what_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(
        UnknownKeyError, match=r"matches 'state_dict.tail', 'x\*'; there are epoch, state_dict, state_dict.layer"
    ):
        fastensor.load(path, keys=["epoch", "state_dict.tail", "x*"])
    with pytest.raises(KeyError):
        fastensor.load(path, keys=[""])


def test_one_name_is_not_a_list_of_names(path: Path) -> None:
    with pytest.raises(TypeError, match="list of names"):
        fastensor.load(path, keys="epoch")


@pytest.mark.parametrize("kind", states.SPECIAL)
def test_any_kind_of_tensor_chosen_or_not(tmp_path: Path, kind: str) -> None:
    state = {"special": states.special_of(kind, 1), "plain": torch.arange(5)}
    fastensor.save(state, tmp_path / "x")
    expected = torch.load(tmp_path / "x", weights_only=False)
    for key in state:
        found = fastensor.load(tmp_path / "x", keys=[key], weights_only=False)
        assert list(found) == [key]
        states.assert_equal(found[key], expected[key])


class Named(enum.Enum):
    ONE = 1


def unknown() -> None:
    """A function that a file may name."""


NOT_ALLOWED: dict[str, Any] = {
    "an object": Unknown(torch.arange(4)),
    "a path": Path("data"),
    "a class": Unknown,
    "a function": unknown,
    "in a dict": {"hyper_parameters": {"root": Path("data"), "act": torch.nn.ReLU, "lr": 0.1}},
    "a namespace": argparse.Namespace(root=Path("data"), sizes=[1, 2]),
    "a list": [Path("a"), "b", Path("a")],
    "a set": {Path("a"), Path("b")},
    "keys": {Named.ONE: 1, Unknown: 2, (Path("a"), 3): torch.ones(2)},
    "an attribute": with_attribute(OrderedDict(a=torch.ones(1)), Unknown),
    "a subclass of tensors": torch.ones(2).as_subclass(Subclass),
    "a range": range(3),
}


@pytest.mark.parametrize("kind", NOT_ALLOWED)
@pytest.mark.parametrize("first", [True, False])
def test_what_was_not_chosen_may_be_of_any_class(tmp_path: Path, kind: str, first: bool) -> None:
    """Nothing else is read: neither does ``weights_only=True`` refuse it."""
    odd, plain = {"odd": NOT_ALLOWED[kind]}, {"state_dict": OrderedDict(w=torch.ones(2), tied=torch.arange(3)), "n": 3}
    fastensor.save({**odd, **plain} if first else {**plain, **odd}, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError):
        fastensor.load(tmp_path / "x")
    for keys in (["state_dict", "n"], ["state_dict.w"], ["n"]):
        found, report = fastensor.load_with_report(tmp_path / "x", keys=keys)
        states.assert_equal(found, names.choose(plain, set(keys).__contains__))
        assert report.verified
        assert not report.fallbacks
    with pytest.raises(UnsafeCheckpointError, match=r"fastensor\.open reads its tensors"):
        fastensor.load(tmp_path / "x", keys=["odd"])


def test_what_both_need_is_refused_with_it(tmp_path: Path) -> None:
    """A key of a dict that was chosen from stays, and so does what it is made of."""
    state = {"modes": {Named.ONE: 1, "w": torch.ones(2)}, "mode": Named.ONE, "kind": Named}
    fastensor.save(state, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError, match="Named"):
        fastensor.load(tmp_path / "x", keys=["modes.w"])
    with torch.serialization.safe_globals([Named]):
        assert fastensor.load(tmp_path / "x", keys=["mode", "kind"]) == {"mode": Named.ONE, "kind": Named}
        states.assert_equal(fastensor.load(tmp_path / "x", keys=["modes.w"]), {"modes": {"w": torch.ones(2)}})
    with torch.serialization.safe_globals([Subclass]):
        fastensor.save({"kind": Subclass, "t": torch.ones(2).as_subclass(Subclass)}, tmp_path / "x")
        assert type(fastensor.load(tmp_path / "x", keys=["t"])["t"]) is Subclass


def test_a_refusal_of_a_part_names_the_ways_that_work(tmp_path: Path) -> None:
    """A pickle of another protocol is not cut."""
    fastensor.save({"root": Path("data"), "w": torch.ones(2)}, tmp_path / "x", pickle_protocol=4)
    with pytest.raises(UnsafeCheckpointError, match=r"fastensor\.open reads its tensors.*into=.*without any of that"):
        fastensor.load(tmp_path / "x", keys=["w"])
    with fastensor.open(tmp_path / "x") as opened:
        assert opened["w"].tolist() == [1, 1]
    assert fastensor.load(tmp_path / "x", into={"w": torch.zeros(2)})["w"].tolist() == [1, 1]


def test_objects_of_classes_that_are_not_allowed(tmp_path: Path) -> None:
    fastensor.save({"object": Unknown(torch.arange(4)), "w": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError, match="Unknown"):
        fastensor.load(tmp_path / "x", keys=["object"])
    found = fastensor.load(tmp_path / "x", keys=["object"], weights_only=False)
    assert list(found) == ["object"]
    assert torch.equal(found["object"].tensor, torch.arange(4))


def test_files_that_torch_reads_by_itself(tmp_path: Path) -> None:
    torch.save(CHECKPOINT, tmp_path / "x", _use_new_zipfile_serialization=False)
    with pytest.warns(fastensor.UnverifiedCheckpointWarning):
        found = fastensor.load(tmp_path / "x", keys=["state_dict.head"])
    states.assert_equal(found, {"state_dict": OrderedDict({"head": WEIGHTS["head"]})})


def test_mapped(path: Path) -> None:
    found = fastensor.load(path, keys=["state_dict.head"], mmap=True)
    assert torch.equal(found["state_dict"]["head"], WEIGHTS["head"])


def test_a_tree_of_too_many_values_and_one_that_holds_itself() -> None:
    bomb: Any = [torch.ones(1)]
    for _ in range(40):
        bomb = [bomb, bomb]
    with pytest.raises(UnsupportedContentError, match="more than 1000000"):
        list(names.walk(bomb))
    with pytest.raises(UnsupportedContentError, match="characters"):
        list(names.walk({"x" * 100_000: dict.fromkeys(range(2000), 1)}))
    loop: dict[str, Any] = {"a": 1}
    loop["self"] = loop
    assert [name for name, _ in names.walk(loop)] == ["a", "self"]
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert len(list(names.walk(deep))) == 1
    assert names.choose(deep, lambda name: False) is None


@given(tree=states.trees(), data=st.data())
def test_choosing_any_leaf_gives_that_leaf(tree: Any, data: st.DataObject) -> None:
    leaves = list(names.walk({"root": tree}))
    name, value = data.draw(st.sampled_from(leaves))
    assert holds(names.choose({"root": tree}, lambda other: other == name), value)


def holds(tree: Any, value: Any) -> bool:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return tree is value or any(holds(child, value) for child in inner)


def test_a_pickle_that_only_python_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbolic reading gives up; then everything is read, and the rest dropped."""
    from fastensor.checkpoint.containers import selecting

    def give_up(data: bytes, *, where: str) -> Any:
        raise fastensor.CorruptCheckpointError(f"{where}: not understood")

    fastensor.save(CHECKPOINT, tmp_path / "x")
    monkeypatch.setattr(selecting, "read_program", give_up)
    found, report = fastensor.load_with_report(tmp_path / "x", keys=["state_dict.head"])
    states.assert_equal(found, {"state_dict": OrderedDict({"head": WEIGHTS["head"]})})
    assert "not understood" in report.fallbacks[0].reason
    with pytest.raises(UnknownKeyError, match="nope"):
        fastensor.load(tmp_path / "x", keys=["nope"])


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_what_keys_may_be(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    fastensor.save({"w[0]": torch.zeros(1), "w0": torch.ones(1)}, path)
    assert list(fastensor.load(path, keys=(key for key in ["w0"]))) == ["w0"]
    assert list(fastensor.load(path, keys=["w[0]"])) == ["w[0]"], "a name is no pattern"
    assert sorted(fastensor.load(path, keys=["*", "w0"])) == ["w0", "w[0]"], "one key may be within another"
    with pytest.raises(ValueError, match="keys is empty"):
        fastensor.load(path, keys=[])


def test_attributes_of_a_branch_come_with_it(tmp_path: Path) -> None:
    branch: Any = OrderedDict({"w": torch.ones(2), "v": torch.zeros(2)})
    branch.extra = torch.full((3,), 7.0)
    fastensor.save({"branch": branch, "rest": torch.ones(4)}, tmp_path / "x")
    for keys in (["branch"], ["branch.w"]):
        found = fastensor.load(tmp_path / "x", keys=keys)["branch"]
        assert torch.equal(found.extra, branch.extra)
    assert list(OrderedDict.keys(found)) == ["w"]


def test_many_exact_names_are_found_at_once() -> None:
    known = [f"layer.{i}.weight" for i in range(20_000)]
    assert len(names.resolve(known, known, "x")) == 20_000
