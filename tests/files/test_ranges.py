"""Ranges are lent once, as long as one is free that is large enough, and are all free in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.files.ranges import FreeRanges, class_of, rounded

COUNT = 97


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_range_of_the_class_of_a_rounded_size_is_large_enough(size: int, other: int) -> None:
    needed = rounded(size)
    assert size <= needed <= size * 33 / 32 + 1
    assert rounded(needed) == needed
    assert (class_of(other) >= class_of(needed)) == (other >= needed)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=200))
def test_ranges_are_lent_once_and_refused_only_if_none_is_large_enough(steps: list[tuple[bool, int]]) -> None:
    ranges, lent = FreeRanges(COUNT), list[tuple[int, int]]()
    for takes, number in steps:
        if not takes:
            if lent:
                ranges.add(*lent.pop(number % len(lent)))
            continue
        free = ["."] * COUNT
        for begin, size in lent:
            free[begin : begin + size] = "x" * size
        found = ranges.take(number)
        assert (found is not None) == ("." * number in "".join(free))
        if found is not None:
            assert free[found : found + number] == ["."] * number
            lent.append((found, number))
        assert ranges.free == COUNT - sum(size for _, size in lent)
    while lent:
        ranges.add(*lent.pop())
    assert ranges.take(COUNT) == 0, "there are no gaps left"


def test_what_is_taken_in_turn_lies_in_turn_in_each_step() -> None:
    ranges, steps = FreeRanges(256), list[list[int | None]]()
    for _ in range(3):
        held = [(ranges.take(size), size) for size in (1, 18, 1)]
        steps.append([begin for begin, _ in held])
        for begin, size in reversed(held):
            assert begin is not None
            ranges.add(begin, size)
    assert steps == 3 * [[0, 1, 19]]


def test_a_range_is_freed_once() -> None:
    ranges = FreeRanges(10)
    for _ in range(3):
        assert ranges.take(2) is not None
    ranges.add(0, 2)
    ranges.add(2, 2)
    for begin in (0, 2):
        with pytest.raises(AssertionError, match="free already"):
            ranges.add(begin, 2)
