"""Loading into tensors that share memory, from files that have values for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fastensor
from fastensor import CorruptCheckpointError, StateMismatchError
from fastensor.checkpoint.reading.opened import LocalFile

pytestmark = pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")


def _zip(state: dict[str, Tensor], path: Path) -> Path:
    torch.save(state, path / "x.pt")
    return path / "x.pt"


def _legacy(state: dict[str, Tensor], path: Path) -> Path:
    torch.save(state, path / "old.pt", _use_new_zipfile_serialization=False)
    return path / "old.pt"


def _safetensors(state: dict[str, Tensor], path: Path) -> Path:
    """In the order of the dict: safetensors' own writer sorts by name."""
    fastensor.save(state, path / "x.safetensors")
    return path / "x.safetensors"


def _of_safetensors(state: dict[str, Tensor], path: Path) -> Path:
    safetensors.torch.save_file(state, path / "theirs.safetensors")
    return path / "theirs.safetensors"


def _sharded(state: dict[str, Tensor], path: Path) -> Path:
    fastensor.save_sharded(state, path / "folder", shard_nbytes="1B")
    return path / "folder"


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], Path]] = {
    "zip": _zip,
    "legacy": _legacy,
    "safetensors": _safetensors,
    "of safetensors": _of_safetensors,
    "sharded": _sharded,
}
files = pytest.mark.parametrize("kind", WRITERS)
orders = pytest.mark.parametrize("names", [("wte.weight", "head.weight"), ("head.weight", "wte.weight")])


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.wte.weight


class Overlapping(nn.Module):
    """Its own buffer, which torch loads first, is a part of the parameter of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 4, bias=False)
        self.register_buffer("rows", self.child.weight.detach()[1:3])


def untied(names: tuple[str, ...] = ("wte.weight", "head.weight"), head: float = 2.0) -> dict[str, Tensor]:
    values = {"wte.weight": torch.full((4, 2), 1.0), "head.weight": torch.full((4, 2), head)}
    return {name: values[name] for name in names}


def of_model(model: nn.Module) -> dict[str, Any]:
    return {name: one.tolist() for name, one in model.state_dict().items()}


@files
@orders
def test_two_values_for_one_memory_are_refused(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    path = WRITERS[kind](untied(names), tmp_path)
    model = Tied()
    before = of_model(model)
    with pytest.raises(
        StateMismatchError, match=r"'wte.weight' and 'head.weight' share memory.*strict=False"
    ) as caught:
        fastensor.load_model(model, path)
    assert "nothing was overwritten" in str(caught.value)
    assert caught.value.overwritten == ()
    assert of_model(model) == before


@files
@orders
def test_not_strict_is_in_the_order_of_the_model(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    path = WRITERS[kind](untied(names), tmp_path)
    ours, theirs = Tied(), Tied()
    theirs.load_state_dict(untied(names))
    assert fastensor.load_model(ours, path, strict=False) == ([], [])
    assert of_model(ours) == of_model(theirs)
    assert ours.head.weight is ours.wte.weight


@files
@orders
def test_equal_values_are_no_contradiction(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    path = WRITERS[kind](untied(names, head=1.0), tmp_path)
    model = Tied()
    assert fastensor.load_model(model, path) == ([], [])
    assert model.wte.weight.tolist() == [[1.0, 1.0]] * 4
    into = Tied().state_dict()
    loaded = (fastensor.load_sharded if kind == "sharded" else fastensor.load)(path, into=into)
    assert loaded["head.weight"].tolist() == [[1.0, 1.0]] * 4


@files
@orders
def test_into_refuses_them(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    path = WRITERS[kind](untied(names), tmp_path)
    model = Tied()
    before = of_model(model)
    load = fastensor.load_sharded if kind == "sharded" else fastensor.load
    with pytest.raises(StateMismatchError, match=r"' and '.*' share memory.*leave the others out"):
        load(path, into=model.state_dict())
    assert of_model(model) == before


@files
@pytest.mark.parametrize("names", [("rows", "child.weight"), ("child.weight", "rows")])
def test_a_part_of_the_memory(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    values = {"child.weight": torch.arange(8.0).reshape(4, 2), "rows": torch.full((2, 2), -1.0)}
    path = WRITERS[kind]({name: values[name] for name in names}, tmp_path)
    with pytest.raises(StateMismatchError, match=r"'rows' and 'child.weight' share memory"):
        fastensor.load_model(Overlapping(), path)
    ours, theirs = Overlapping(), Overlapping()
    theirs.load_state_dict(values)
    fastensor.load_model(ours, path, strict=False)
    assert of_model(ours) == of_model(theirs)
    assert ours.rows.tolist() == values["child.weight"][1:3].tolist()


@files
def test_parts_that_agree(tmp_path: Path, kind: str) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    path = WRITERS[kind]({"child.weight": whole, "rows": whole[1:3].clone()}, tmp_path)
    model = Overlapping()
    assert fastensor.load_model(model, path) == ([], [])
    assert model.rows.tolist() == whole[1:3].tolist()


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_memory_that_is_only_interleaved(tmp_path: Path, name: str) -> None:
    fastensor.save({"even": torch.ones(4), "odd": torch.zeros(4)}, tmp_path / name)
    memory = torch.full((8,), 9.0)
    fastensor.load(tmp_path / name, into={"even": memory[::2], "odd": memory[1::2]})
    assert memory.tolist() == [1, 0] * 4


def test_not_a_number_is_equal_to_itself(tmp_path: Path) -> None:
    fastensor.save({"a": torch.full((3,), torch.nan), "b": torch.full((3,), torch.nan)}, tmp_path / "x.safetensors")
    memory = torch.zeros(3)
    fastensor.load(tmp_path / "x.safetensors", into={"a": memory, "b": memory})
    assert memory.isnan().all()


NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (NAN, NAN.flip(0)),
        (torch.tensor([0.0, torch.inf]).half(), torch.tensor([-0.0, torch.inf]).half()),
        (torch.tensor([0.0, 1.0]).to(torch.float8_e4m3fn), torch.tensor([-0.0, 1.0]).to(torch.float8_e4m3fn)),
        (torch.tensor([0.0, 1.0j]), torch.tensor([-0.0, 1.0j])),
    ],
    ids=["zero", "NaN", "half", "float8", "complex"],
)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_equal_values_of_other_bits(tmp_path: Path, name: str, a: Tensor, b: Tensor) -> None:
    """The last one stays, as in ``load_state_dict``."""
    fastensor.save({"a": a, "b": b}, tmp_path / name)
    memory = torch.empty_like(a)
    fastensor.load(tmp_path / name, into={"a": memory, "b": memory})
    assert memory.view(torch.uint8).tolist() == b.view(torch.uint8).tolist()


def test_one_value_of_a_million_differs(tmp_path: Path) -> None:
    """Some are equal numbers of other bits, in another piece of those that are compared at a time."""
    values = torch.zeros(1_200_000)
    other = -values
    other[-1] = 1
    fastensor.save({"a": values, "b": other}, tmp_path / "x.safetensors")
    with pytest.raises(StateMismatchError, match="share memory"):
        fastensor.load(tmp_path / "x.safetensors", into=dict.fromkeys("ab", torch.zeros(1_200_000)))


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "coo, not coalesced": lambda dense: torch.sparse_coo_tensor(
        dense.nonzero().T.repeat(1, 2), dense[dense != 0].repeat(2) / 2, dense.shape
    ),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_more_than_their_bytes(tmp_path: Path, kind: str) -> None:
    make = SPARSE[kind]
    fastensor.save({"a": make(torch.eye(4)), "b": make(torch.eye(4)), "c": make(2 * torch.eye(4))}, tmp_path / "x.pt")
    target = make(torch.eye(4) * 3)
    fastensor.load(tmp_path / "x.pt", into={"a": target, "b": target})
    dense = target.dequantize() if kind == "quantized" else target.to_dense()
    assert torch.equal(dense, torch.eye(4))
    with pytest.raises(StateMismatchError, match="'a' and 'c' share memory"):
        fastensor.load(tmp_path / "x.pt", into={"a": target, "c": target})


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_each_value_is_read_once_by_one_reader_that_teaches_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(number): torch.ones(40_000) for number in range(8)}
    fastensor.save(state, tmp_path / name)
    opened: list[tuple[int, bool]] = []
    open_reader = LocalFile.open_reader

    def noting(self: LocalFile, order: Any, options: Any, fallbacks: Any) -> Any:
        opened.append((len(order), options.learn))
        return open_reader(self, order, options, fallbacks)

    monkeypatch.setattr(LocalFile, "open_reader", noting)
    memory = [torch.zeros(40_000) for _ in range(4)]
    fastensor.load(tmp_path / name, into={number: memory[int(number) // 2] for number in state})
    assert all(torch.equal(one, torch.ones(40_000)) for one in memory)
    assert opened == [(0, False), (8, True)]
    opened.clear()
    fastensor.load(tmp_path / name, into={number: torch.zeros(40_000) for number in state})
    assert opened == [(8, True)]  # nothing is compared


def test_values_count_as_the_target_holds_them(tmp_path: Path) -> None:
    """1 + 2^-20 is 1 in bfloat16."""
    fastensor.save({"a": torch.ones(3), "b": torch.full((3,), 1 + 2**-20)}, tmp_path / "x.safetensors")
    memory = torch.zeros(3, dtype=torch.bfloat16)
    fastensor.load(tmp_path / "x.safetensors", into={"a": memory, "b": memory})
    assert memory.tolist() == [1, 1, 1]
    with pytest.raises(StateMismatchError, match="share memory"):
        fastensor.load(tmp_path / "x.safetensors", into=dict.fromkeys("ab", torch.zeros(3)))


def test_damage_is_noticed_before_anything_is_overwritten(tmp_path: Path) -> None:
    fastensor.save(untied(head=1.0), tmp_path / "x.safetensors")
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x.safetensors").write_bytes(data)
    model = Tied()
    before = of_model(model)
    with pytest.raises(CorruptCheckpointError) as caught:
        fastensor.load_model(model, tmp_path / "x.safetensors")
    assert caught.value.overwritten == ()
    assert of_model(model) == before


class Unties(Tied):
    """Its own code decides which of two values counts."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}head.weight"] = state[f"{prefix}wte.weight"]
        super()._load_from_state_dict(state, prefix, *args)


class Strict(Tied):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**state_dict, "head.weight": state_dict["wte.weight"]}, strict, assign)


@pytest.mark.parametrize("kind", [Unties, Strict])
def test_models_whose_own_code_decides(tmp_path: Path, kind: type[Tied]) -> None:
    fastensor.save(untied(), tmp_path / "x.safetensors")
    model = kind()
    fastensor.load_model(model, tmp_path / "x.safetensors")
    assert model.wte.weight.tolist() == [[1.0, 1.0]] * 4


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, int, int]:
    begin = draw(st.integers(0, 10))
    return begin, draw(st.integers(begin + 1, 12)), draw(st.integers(1, 3))


@given(
    st.lists(slices(), min_size=1, max_size=4),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12),
    st.lists(st.integers(0, 11), max_size=1),
    st.sampled_from(["x.safetensors", "x.pt"]),
)
def test_any_slices_of_one_memory(
    tmp_path_factory: pytest.TempPathFactory,
    chosen: list[tuple[int, int, int]],
    values: list[float],
    changed: list[int],
    name: str,
) -> None:
    """Loaded if the result has the values of all names, refused if not."""
    meant = torch.tensor(values)
    state = {str(number): meant[slice(*one)].clone() for number, one in enumerate(chosen)}
    for index in changed:
        first = next(iter(state.values()))
        first[index % len(first)] = 7.0
    memory = torch.full((12,), 9.0)
    into = {str(number): memory[slice(*one)] for number, one in enumerate(chosen)}
    reference = memory.clone()
    for number, one in enumerate(chosen):
        reference[slice(*one)] = state[str(number)]
    fits = all(torch.equal(reference[slice(*one)], state[str(number)]) for number, one in enumerate(chosen))
    path = tmp_path_factory.mktemp("slices") / name
    fastensor.save(state, path)
    if fits:
        fastensor.load(path, into=into)
        assert torch.equal(memory, reference)
    else:
        with pytest.raises(StateMismatchError):
            fastensor.load(path, into=into)
        assert (memory == 9).all()
