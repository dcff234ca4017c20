"""Our reading of safetensors headers against that of the reference implementation."""

from __future__ import annotations

import io
import math
import random
import tempfile
import warnings
from collections import Counter
from typing import Any

import pytest
import safetensors
import safetensors.torch
from hostile.attacks import PLAIN, picture
from hostile.crafted import safetensors_file
from hostile.headers import EMPTY, IN_AN_ENTRY, IN_THE_JSON, IN_THE_LENGTH, IN_THE_PLACES, SOUND, A, made, single, two
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import FastensorError

pytestmark = pytest.mark.hostile

BY_NAME = {
    f"{table}: {defect.name}": defect
    for table, defects in (
        ("length", IN_THE_LENGTH),
        ("JSON", IN_THE_JSON),
        ("entry", IN_AN_ENTRY),
        ("places", IN_THE_PLACES),
    )
    for defect in defects
}
STRICTER = {
    "JSON: a leading space": "such a file could not be told from others; the format says that headers begin with {",
    "JSON: duplicate names": "which of the two was meant is anyone's guess; the format forbids it",
    "JSON: duplicate metadata": "the same",
    "JSON: metadata that is null": "the format says that it maps texts to texts",
    "entry: a list": "a leniency of the reference's parser that the format does not have",
    "entry: with something else": "what we do not know might say how the tensor is to be read",
}
"""What the reference accepts and we refuse, and why."""
LOOSER = "a minus before a zero: for Python's parser that is the int 0, for the reference's a float"


def by_reference(data: bytes) -> Any:
    """The tensors that the reference finds; None if it refuses the file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            with safetensors.safe_open(file.name, "pt") as opened:
                return picture({name: opened.get_tensor(name).clone() for name in sorted(opened.keys())})
        except (safetensors.SafetensorError, TypeError):  # the latter for sizes beyond those of Python
            return None


def by_us(data: bytes) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fastensor.UnverifiedCheckpointWarning)
            return picture(dict(sorted(fastensor.load(io.BytesIO(data)).items())))
    except FastensorError:
        return None


def test_where_we_are_stricter_than_the_reference() -> None:
    accepted = {name for name, defect in BY_NAME.items() if by_reference(defect.damage(SOUND)) is not None}
    assert accepted == STRICTER.keys()


LEGAL = {
    "no tensors": made({}, b""),
    "no tensors, but metadata": made({"__metadata__": {"x": "y"}}, b""),
    "empty metadata": made({"__metadata__": {}, "a": A}),
    "not in the order of the header": two([1, 3], [0, 1], b"xyz"),
    "empty tensors at both ends": made({"a": A, "b": EMPTY, "c": {**EMPTY, "data_offsets": [1, 1]}}),
    "a scalar": single(shape=[]),
    "of 1000 dimensions": single(shape=[1] * 1000),
    "empty, of 2^62 columns": single(shape=[1 << 62, 0], data_offsets=[0, 0], body=b""),
    "halves of bytes": single(dtype="F4", shape=[3, 4], data_offsets=[0, 6], body=b"abcdef"),
    "a name that is empty": made({"": A}),
    "a name with NUL": made({"\0": A}),
    "a name beyond the basic plane": made({"\U0001f525": A}),
    "a name in UTF-8": made('{"\U0001f525":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode()),
    "a name like that of a field": made({"dtype": A}),
    "spaces behind": made(b"{}" + b" " * 100, b""),
    "line breaks and tabs behind": made(b"{}\n\r\t\n", b""),
    "spaces within": made(b'{ "a" : {\n"dtype":"U8", "shape":[ 1 ],\t"data_offsets":[0 ,1]} }'),
    "fields in another order": made({"a": {"data_offsets": [0, 1], "shape": [1], "dtype": "U8"}}),
    "with the checksums of the reference, which has none": lambda sound: safetensors.torch.save(PLAIN),
    **{
        dtype: single(dtype=dtype, data_offsets=[0, nbytes], body=bytes(range(1, nbytes + 1)))
        for dtype, nbytes in {
            "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "U16": 2,
            "I16": 2, "F32": 4, "U32": 4, "I32": 4, "F64": 8, "U64": 8, "I64": 8, "C64": 8,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_odd_but_legal(name: str) -> None:
    data = LEGAL[name](SOUND)
    assert by_us(data) == by_reference(data) is not None


def test_where_we_are_looser_than_the_reference() -> None:
    data = safetensors_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', b"x")
    assert by_reference(data) is None, LOOSER
    assert by_us(data) is not None, LOOSER


BITS = {"U8": 8, "I16": 16, "F32": 32, "F4": 4, "BOOL": 8}


@st.composite
def tiled(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Tensors that fill a file, and its size. They are sound, unless a tensor ends in the middle of a byte."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from("abcde"), max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(BITS))), draw(st.lists(st.integers(0, 3), max_size=3))
        end = at + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


sizes = st.integers(-1, 5) | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64])
odd = st.none() | st.booleans() | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False)
fields = {
    "dtype": st.sampled_from(["U8", "I8", "F8_E4M3", "X"]) | odd,
    "shape": st.lists(sizes, max_size=3) | st.lists(sizes | odd, max_size=2) | odd,
    "data_offsets": st.lists(sizes, min_size=2, max_size=2) | st.lists(sizes | odd, max_size=3) | odd,
}
changes = st.sampled_from(sorted(fields)).flatmap(lambda field: st.tuples(st.just(field), fields[field]))


def compare(header: object, nbytes: int, tally: Counter[str]) -> bool:
    """Whatever either accepts, the other accepts, too, and finds the same. Returns whether they do."""
    body = bytes(random.Random(0).choices(b"\0\1", k=nbytes))  # cloning makes one of all other bytes of bools
    data = safetensors_file(header, body)
    found = by_us(data)
    assert found == by_reference(data)
    tally["headers compared"] += 1
    return found is not None


def test_odd_fields_against_the_reference(tally: Counter[str]) -> None:
    """One field of one tensor is odd, if any is."""
    accepted = []

    @given(sound=tiled(), change=st.none() | changes, which=st.integers(0, 3))
    def try_one(sound: tuple[dict[str, Any], int], change: tuple[str, Any] | None, which: int) -> None:
        header, nbytes = sound
        if header and change:
            header[sorted(header)[which % len(header)]].update([change])
        accepted.append(compare(header, nbytes, tally))

    try_one()
    assert len(accepted) / 4 < sum(accepted) < len(accepted)


@given(
    header=st.dictionaries(st.sampled_from("abc"), odd, max_size=3)
    | st.recursive(
        odd | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    )
)
def test_what_is_no_header_against_the_reference(header: object, tally: Counter[str]) -> None:
    compare(header, 0, tally)


@given(sound=tiled(), which=st.integers(0, 3), end=st.integers(0, 1), step=st.integers(-2, 2))
def test_offsets_against_the_reference(
    sound: tuple[dict[str, Any], int], which: int, end: int, step: int, tally: Counter[str]
) -> None:
    """One offset may be wrong."""
    header, nbytes = sound
    if header:
        header[sorted(header)[which % len(header)]]["data_offsets"][end] += step
    compare(header, nbytes, tally)
