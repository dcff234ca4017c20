"""The paper's form of its dictionaries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.select.context import Context
from fastensor.select.dictionary import Change, Dictionary, DictionaryError
from fastensor.select.paper_csv import from_csv, to_csv
from fastensor.select.selector import Selector

MIB = 1 << 20
WRITE, READ = Context("write"), Context("read")
FIGURE_4 = "32,\"[[0.0192, 'cpy'], [0.0213, 'npy'], [0.0376, 'pt'], 'cpy']\"\n"


def learned(*changes: Change) -> Dictionary:
    dictionary = Dictionary()
    for change in changes:
        dictionary.apply(change)
    return dictionary


def test_the_papers_example() -> None:
    dictionary = from_csv(FIGURE_4, WRITE)
    entry = dictionary.of(WRITE, 32 * MIB)
    assert {name: timing.seconds for name, timing in entry.timings.items()} == {
        "gds": 0.0192,
        "numpy": 0.0213,
        "torch": 0.0376,
    }
    assert entry.best == "gds"
    assert len(dictionary) == 1
    assert to_csv(dictionary, "WDic") == FIGURE_4.replace("32,", "32.0,")
    assert to_csv(dictionary, "RDic") == to_csv(dictionary, "WRDic") == ""


def test_the_three_of_them() -> None:
    dictionary = learned(
        Change(WRITE, MIB, "direct", 1.0),
        Change(WRITE, MIB, "numpy", 2.0),
        Change(WRITE, MIB, "torch", 0.5),
        Change(WRITE, 2 * MIB, "direct", 9.0),
        Change(READ, MIB, "direct", 3.0),
        Change(READ, MIB, "numpy", 1.5),
        Change(Context("read", warm=True), MIB, "numpy", 0.25),
        Change(Context("write", warm=True), MIB, "numpy", 0.125),
        Change(Context("write", "cuda"), MIB, "gds", 7.0),
    )
    assert to_csv(dictionary, "WDic") == (
        "1.0,\"[[2.0, 'npy'], [0.5, 'pt'], [1.0, 'direct'], 'pt']\"\n2.0,\"[[9.0, 'direct'], 'direct']\"\n"
    )
    assert to_csv(dictionary, "RDic") == "1.0,\"[[1.5, 'npy'], [3.0, 'direct'], 'npy']\"\n"
    assert to_csv(dictionary, "WRDic") == "1.0,\"[[3.5, 'npy'], [4.0, 'direct'], 'npy']\"\n"
    assert to_csv(dictionary, "RDic", resident=True) == "1.0,\"[[0.25, 'npy'], 'npy']\"\n"
    assert to_csv(dictionary, "WRDic", unsynced=True, resident=True) == "1.0,\"[[0.375, 'npy'], 'npy']\"\n"
    assert to_csv(dictionary, "WDic", "cuda") == "1.0,\"[[7.0, 'cpy'], 'cpy']\"\n"


def test_what_others_may_write() -> None:
    """Empty lines, spaces, double quotes, whole seconds, lists that are not complete, ties, sizes of one bucket."""
    text = (
        "\n"
        ' 1.40 , " [[1, ""cpy""]]" \n'
        "22.5,\"[[0.5, 'npy'], [0.5, 'mine'], 'mine']\"\r\n"
        "22.6,\"[[0.5, 'npy'], 'npy']\"\n"
    )
    dictionary = from_csv(text, READ)
    assert dictionary.of(READ, int(1.4 * MIB)).timings["gds"].count == 1
    assert {name: timing.count for name, timing in dictionary.of(READ, int(22.5 * MIB)).timings.items()} == {
        "numpy": 2,
        "mine": 1,
    }
    assert len(from_csv("", READ)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "line 1: expected 2 columns, found 1"),
        (FIGURE_4 + "1,2,3", "line 2: expected 2 columns, found 3"),
        ("size,list", "line 1, column 1: expected a size in MB, found 'size'"),
        ("\n-1,[]", "line 2, column 1: expected a size in MB, found '-1'"),
        ("nan,[]", "column 1"),
        ("1e300,[]", "column 1"),
        ("1,[]", "line 1, column 2: expected [[seconds, 'tool'], ..., 'best tool'], found '[]'"),
        ("1,cpy", "line 1, column 2: expected [[seconds"),
        ("1,__import__('os').abort()", "line 1, column 2: expected [[seconds"),
        ("1," + "[" * 5000, "line 1, column 2: expected [[seconds"),
        ("1,\"[['cpy', 1]]\"", "line 1, column 2, item 1: expected [seconds, 'tool'], found \"['cpy', 1]\""),
        ("1,\"[[1, 'cpy'], [-1, 'npy']]\"", "item 2"),
        ("1,\"[[1e999, 'cpy']]\"", "item 1"),
        ("1,\"[[True, 'cpy']]\"", "item 1"),
        (f"1,\"[[1{'0' * 400}, 'cpy']]\"", "item 1"),
        ("1,\"[[1, '']]\"", "item 1"),
        ("1,\"[[1, 'cpy'], [2, 'gds']]\"", "line 1, column 2: a tool occurs twice"),
        ("1,\"[[1, 'cpy'], 'npy']\"", "the best tool, numpy, is none of those before it"),
        ("1,\"['npy']\"", "the best tool, numpy, is none of those before it"),
        ("1,\"[[1, 'cpy'], [2, 'npy'], 'npy']\"", "said to be numpy, but gds takes less time"),
        ("1," + "x" * 200_000, "line 1"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(DictionaryError) as caught:
        from_csv(text, WRITE)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 50), st.sampled_from(["gds", "numpy", "mine 'or' \"yours\""]), st.floats(0, 1e9))
    ),
    st.sampled_from([("WDic", WRITE), ("RDic", READ)]),
)
def test_round_trip(timings: list[tuple[int, str, float]], which: Any) -> None:
    name, context = which
    text = to_csv(learned(*(Change(context, *timing) for timing in timings)), name)
    again = from_csv(text, context)
    assert to_csv(again, name) == text
    assert len(again) == len({key for key, _ in learned(*(Change(context, *timing) for timing in timings))})


def test_what_is_imported_is_not_tried_again() -> None:
    """The paper's *SpecificDic* decides."""
    selector = Selector(from_csv("1.0,\"[[0.5, 'npy'], [0.1, 'pt'], [9.9, 'direct'], 'pt']\"\n", WRITE))
    assert selector.choose(MIB, WRITE, ("direct", "numpy", "torch")).backend == "torch"
    assert selector.statistics().explored == 0
