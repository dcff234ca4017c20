"""Merged reads bring every value, in order of need, within their bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastensor.data.coalescing import Extents, Merging, Reads, coalesce, spans

PLACES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), min_size=1, max_size=60)


def extents_of(places: list[tuple[int, int]]) -> Extents:
    return Extents(np.array([offset for offset, _ in places]), np.array([length for _, length in places]))


def merged(extents: Extents, **how: int) -> tuple[Reads, list[tuple[int, int]]]:
    alignment = how.pop("alignment", 1)
    reads = coalesce(extents, Merging(**how), alignment=alignment)
    return reads, list(zip(reads.offsets.tolist(), reads.lengths.tolist(), strict=True))


@given(PLACES, st.integers(0, 200), st.integers(1, 3000), st.sampled_from([1, 512]))
def test_reads_hold_all_values(places: list[tuple[int, int]], gap: int, limit: int, alignment: int) -> None:
    reads, bounds = merged(extents_of(places), gap_nbytes=gap, read_nbytes=limit, alignment=alignment)
    for (offset, length), read, begin in zip(places, reads.read_of.tolist(), reads.begin_in_read.tolist(), strict=True):
        assert bounds[read][0] + begin == offset
        assert begin >= 0
        assert begin + length <= bounds[read][1]
    firsts = [reads.read_of.tolist().index(read) for read in range(len(reads))]
    assert firsts == sorted(firsts)  # in the order in which they are needed


@given(PLACES, st.integers(0, 200), st.integers(1, 3000), st.sampled_from([1, 512]))
def test_reads_are_as_large_and_as_few_as_they_may_be(
    places: list[tuple[int, int]], gap: int, limit: int, alignment: int
) -> None:
    extents = extents_of(places)
    _, bounds = merged(extents, gap_nbytes=gap, read_nbytes=limit, alignment=alignment)
    longest = max(length for _, length in places)
    for offset, length in bounds:
        assert offset % alignment == length % alignment == 0
        assert length <= limit + longest + 2 * alignment
    wanted = np.zeros(7000, bool)
    for offset, length in places:
        wanted[offset - offset % alignment : -(-(offset + length) // alignment) * alignment] = True
    for offset, length in bounds:
        unwanted = "".join("x" if byte else " " for byte in wanted[offset : offset + length]).split("x")
        assert max(map(len, unwanted)) <= gap
    ends = np.maximum.accumulate([offset + length for offset, length in sorted(bounds)])
    begins = np.array(sorted(bounds))[:, 0]
    has_gap = begins[1:] - ends[:-1] > gap
    assert (has_gap[1:] | has_gap[:-1] | (begins[2:] - begins[:-2] > limit)).all()  # no three could have been two


@given(PLACES, st.integers(0, 200), st.integers(1, 3000))
def test_spans_have_all_reads(places: list[tuple[int, int]], gap: int, limit: int) -> None:
    reads, bounds = merged(extents_of(places), gap_nbytes=0)
    found = spans(reads, Merging(gap_nbytes=gap, read_nbytes=limit))
    for number, (offset, length) in enumerate(bounds):
        begin = int(found.offsets[number])
        first = found.offsets.tolist().index(begin)
        assert begin <= offset
        assert offset + length <= begin + int(found.lengths[first])  # the first of a span has it whole
        assert first == number or not found.lengths[number]


def test_consecutive_values_are_one_read() -> None:
    """A strided order, such as Caffe's, becomes one read for several batches: the paper's figure 21."""
    offsets = np.arange(64) * 4096 + 16
    by_batches = offsets.reshape(8, 8).T.ravel()
    reads, bounds = merged(Extents(by_batches, np.full(64, 3072)))
    assert bounds == [(16, 63 * 4096 + 3072)]
    assert (reads.begin_in_read == by_batches - 16).all()


def test_without_merging_equal_values_are_read_once() -> None:
    _, bounds = merged(Extents(np.array([500, 100, 500]), np.array([10, 10, 10])), gap_nbytes=0, read_nbytes=1)
    assert bounds == [(500, 10), (100, 10)]
