"""Copying between addresses."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fastensor.backends import memory


@given(
    rows=st.integers(0, 4), more=st.integers(-130, 130), before=st.integers(0, 70), place=st.integers(0, 70)
)  # fmt: skip
@example(rows=0, more=0, before=0, place=0)
@example(rows=2, more=63, before=1, place=2)
@example(rows=2, more=64, before=1, place=2)
@example(rows=2, more=65, before=0, place=1)
@example(rows=3, more=64, before=1, place=0)
def test_memory_is_copied_whole_and_nothing_else_is_changed(rows: int, more: int, before: int, place: int) -> None:
    nbytes = max(rows * memory._ROW_STEP + more, 0)
    source = np.frombuffer(random.Random(nbytes).randbytes(nbytes + 100), np.uint8)
    target = np.zeros(nbytes + 100, np.uint8)
    memory.copy_memory(target.ctypes.data + place, source.ctypes.data + before, nbytes)
    assert np.array_equal(target[place : place + nbytes], source[before : before + nbytes])
    assert not target[:place].any()
    assert not target[place + nbytes :].any()
