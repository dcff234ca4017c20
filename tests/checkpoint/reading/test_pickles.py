"""Sound archives with right checksums whose pickle is hostile: no code is run, in bounded memory and time."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile import crafted
from hostile.attacks import STATE, withstand
from hostile.crafted import (
    NO_HOOKS,
    REBUILD,
    call,
    checkpoint,
    list_of,
    named,
    number,
    program,
    storage,
    tensor,
    text,
    tuple_of,
)
from hostile.isolated import Laboratory, Limits, Outcome
from hostile.pickles import (
    BOMBS,
    BUILDING,
    CODE,
    ELSEWHERE,
    FROM_TYPE,
    GEOMETRIES,
    LAUGHING,
    LOADING,
    LONG,
    ON_META,
    OPCODES,
    PARAMETER,
    PARTS,
    QUANTIZED,
    READERS,
    SPARSE,
    STORAGES,
    WRAPPER,
    Hostile,
    holding,
    running_code,
)

import fastensor
from fastensor import CorruptCheckpointError, FastensorError, UnsafeCheckpointError

pytestmark = pytest.mark.hostile

MOST_GROWTH = 256
"""Bytes of memory per byte of the file: what an empty set, one byte in a pickle, takes in Python."""
SLACK = 32 << 20
"""What reading any file may take."""
HANGS_SECONDS = 60
"""What takes longer never ends. A million values take a few seconds, and more on a machine that is busy."""
LONGEST_MESSAGE = 1_500
"""In characters. It is for a user to read, whatever the file holds."""


Attack = Callable[..., dict[str, Outcome]]


def each(pickles: list[Hostile]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("hostile", [pytest.param(hostile, id=hostile.name) for hostile in pickles])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.ckpt"
    state = {"plain": OrderedDict(w=torch.arange(4.0)), "counts": Counter("abca"), "set": {1}, "name": "x"}
    fastensor.save(state, path)
    return path


@pytest.fixture
def attack(isolated: Laboratory, sound: Path, path: Path) -> Attack:
    """Attacks all entry points that a hostile pickle is for, and fails unless they withstand it."""

    def attack(hostile: Hostile) -> dict[str, Outcome]:
        path.write_bytes(checkpoint(hostile.pickled))
        outcomes = isolated.attack(hostile.entries, path, sound, Limits(HANGS_SECONDS))
        flaws = {entry: flaw for entry, outcome in outcomes.items() if (flaw := flaw_of(outcome, hostile, entry, path))}
        assert not flaws, hostile.name
        return outcomes

    return attack


def flaw_of(outcome: Outcome, hostile: Hostile, entry: str, path: Path) -> str:
    """What is wrong with how an entry point withstood; empty if nothing is."""
    if outcome.broken:
        return outcome.broken
    if outcome.poisoned:
        return f"afterwards, a sound file gives {outcome.poisoned[:300]}"
    if imported := [name for name in outcome.imported if entry not in LOADING or not name.startswith("torch.")]:
        return f"imported {imported[:3]}"
    if outcome.refused and str(path) not in outcome.refused:
        return f"does not name the file: {outcome.refused}"
    if entry in hostile.refused_by and not outcome.refused:
        return "not refused"
    message = hostile.message if entry in hostile.refused_by else f"{hostile.message}|{ELSEWHERE}"
    if outcome.refused and not re.search(message, outcome.refused, re.DOTALL):
        return f"refused with {outcome.refused!r}, not {message!r}"
    if len(outcome.refused) > LONGEST_MESSAGE:
        return f"refused with {len(outcome.refused)} characters: {outcome.refused[:300]}"
    most_nbytes = hostile.most_nbytes or SLACK + MOST_GROWTH * path.stat().st_size
    if entry != "load" and outcome.grown_nbytes > most_nbytes:  # with load, torch reads
        return f"takes {outcome.grown_nbytes >> 20} MiB for {path.stat().st_size >> 10} KiB"
    return ""


@each([*GEOMETRIES, *STORAGES, *PARTS])
def test_tensors(hostile: Hostile, attack: Attack) -> None:
    attack(hostile)


@each([*CODE, *BUILDING])
def test_nothing_is_imported_or_changed(hostile: Hostile, attack: Attack) -> None:
    attack(hostile)


@pytest.mark.parametrize("number", range(len(running_code(""))))
def test_no_code_is_run(number: int, attack: Attack, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    hostile = running_code(str(marker))[number]
    attack(hostile)
    assert not marker.exists()
    with contextlib.suppress(AttributeError):  # what it gives is no tensor
        result = pickle.loads(hostile.pickled)
        getattr(result, "close", int)()
    assert marker.exists(), "it would not run anyway"


@each(OPCODES)
def test_opcodes(hostile: Hostile, attack: Attack) -> None:
    attack(hostile)


@each(LAUGHING)
def test_what_is_only_large_when_looked_at(hostile: Hostile, attack: Attack) -> None:
    attack(hostile)


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.torture)], ids=["one entry", "every entry"]
)
@each(BOMBS)
def test_bombs(hostile: Hostile, every: bool, attack: Attack) -> None:
    """By one of the entry points that each is for, which take turns, or by every one."""
    number = BOMBS.index(hostile)
    attack(hostile if every else replace(hostile, entries=(hostile.entries[number % len(hostile.entries)],)))


@pytest.mark.parametrize(
    ("pickled", "expected", "cause"),
    [
        (program(call(named("os", "system"), text("true"))), UnsafeCheckpointError, pickle.UnpicklingError),
        (program(b"\x93"), UnsafeCheckpointError, pickle.UnpicklingError),
        (program(b"}")[:-1], CorruptCheckpointError, EOFError),
        (holding(tensor(storage(numel=400))), CorruptCheckpointError, RuntimeError),
        (holding(tensor(storage("7"))), CorruptCheckpointError, RuntimeError),
        (holding(tensor(stride=(-1,))), CorruptCheckpointError, RuntimeError),
        (program(b"h\7"), CorruptCheckpointError, KeyError),
        (b"", CorruptCheckpointError, EOFError),
    ],
)
def test_errors_of_torch_are_kept_as_causes(
    pickled: bytes, expected: type[FastensorError], cause: type[Exception], path: Path
) -> None:
    path.write_bytes(checkpoint(pickled))
    with pytest.raises(expected, match=f"^{path}: ") as caught:
        fastensor.load(path)
    assert expected in (type(caught.value), type(caught.value).__bases__[0])
    assert type(caught.value).__name__ == expected.__name__
    assert isinstance(caught.value, cause)
    assert isinstance(caught.value.__cause__, cause)


def test_memory_that_a_pickle_asks_torch_for_is_not_our_error(path: Path) -> None:
    """Whether there is that much depends on the machine; ``open`` and ``inspect`` ask for none."""
    path.write_bytes(checkpoint(program(call(named("builtins", "bytearray"), number(LONG)))))
    with pytest.raises(MemoryError):
        fastensor.load(path)
    with fastensor.open(path) as opened:
        assert list(opened.others_in_words.values()) == ["<builtins.bytearray>"]


def test_a_slice_of_a_tensor_of_2_to_the_50_elements(path: Path) -> None:
    path.write_bytes(checkpoint(holding(tensor(size=(1 << 50,), stride=(0,)))))
    with fastensor.open(path) as opened:
        for found in (opened["plain.w"], opened["plain.w", :]):
            assert found.shape == (1 << 50,)
            assert found.untyped_storage().nbytes() == 4


def pickle_of(state: object) -> bytes:
    with zipfile.ZipFile(io.BytesIO(crafted.saved_by_torch(state))) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
def test_a_pickle_that_ends_anywhere(step: int, path: Path, tally: Counter[str]) -> None:
    whole = pickle_of(STATE)
    for length in range(0, len(whole), step):
        path.write_bytes(checkpoint(whole[:length]))
        for entry in READERS:
            assert withstand(entry, path, {}) is not None, (entry, length)
        tally["pickles cut off"] += 1


PLACE = tuple_of(number(4)), tuple_of(number(1))
FUNCTIONS = {
    REBUILD: (storage(), number(0), *PLACE, b"\x89", NO_HOOKS),
    PARAMETER: (tensor(), b"\x88", NO_HOOKS),
    ON_META: (named("torch", "float32"), *PLACE, b"\x89"),
    WRAPPER: (named("a", "b"), named("torch", "float32"), *PLACE, number(0), b"N", text("cpu"), b"\x89"),
    QUANTIZED: (storage(), number(0), *PLACE, b"N", b"\x89", NO_HOOKS),
    SPARSE: (b"N", tuple_of(tensor(), tensor(), call(named("torch", "Size"), tuple_of(number(4))), b"\x89")),
    FROM_TYPE: (REBUILD, named("a", "b"), tuple_of(storage(), number(0), *PLACE, b"\x89", NO_HOOKS), b"}"),
    named("collections", "OrderedDict"): (list_of(tuple_of(text("w"), b"N")),),
    named("collections", "Counter"): (b"}",),
    named("builtins", "set"): (b"]",),
    named("torch", "Size"): (tuple_of(number(4)),),
    named("os", "system"): (text("true"),),
    named("a", "b"): (number(1), number(2)),
}
"""Functions, and arguments that they take."""
VALUES = [
    *(b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"h\0", b"G?" + bytes(7), text("w"), text("0"), NO_HOOKS, tensor()),
    *(number(4), number(-1), number(1 << 62), number(1 << 100), storage(), named("torch", "float32"), *FUNCTIONS),
]
AROUND = [
    *((b"", b"\x86"), (b"", b"0"), (b"", b"0q\0"), (b"", b"02\x86"), (b"(", b"t"), (b"(", b"l"), (b"(", b"\x91")),
    *((b"](", b"e"), (b"}(", b"u"), (b"\x8f(", b"\x90")),
]
"""Opcodes before and behind two values that make one of them."""


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_random_opcodes(count: int, attack: Attack, tally: Counter[str]) -> None:
    rng = random.Random(0)
    accepted = 0
    for _ in range(count):
        body = b"Nq\0" + anything(rng, rng.randrange(1, 5))
        outcomes = attack(Hostile(f"{body!r}", program(body), ""))
        accepted += not outcomes["inspect"].refused
        tally["pickles of random opcodes"] += 1
    assert count / 3 < accepted < count


def anything(rng: random.Random, depth: int) -> bytes:
    """A value made of others: whatever an opcode takes is there, of whatever type it is."""
    if not depth:
        return rng.choice(VALUES)
    one, other = anything(rng, depth - 1), anything(rng, rng.randrange(depth))
    match rng.randrange(12):
        case 0:
            return one + other + rng.choice([b"a", b"b", b"R", b"\x81"])
        case 1:
            return one + text("w") + other + b"s"
        case 2 | 3 | 4 | 5 | 6:
            return called(rng, one)
        case _:
            start, end = rng.choice(AROUND)
            return start + one + other + end


def called(rng: random.Random, argument: bytes) -> bytes:
    """A call of a function, in which one argument may be another one than it takes."""
    function = rng.choice(list(FUNCTIONS))
    arguments = list(FUNCTIONS[function])
    if rng.random() < 0.3:
        arguments[rng.randrange(len(arguments))] = argument
    start, end = rng.choice([(function + b"(", b"tR"), (function + b"(", b"t\x81"), (b"(" + function, b"o")])
    return start + b"".join(arguments) + end
