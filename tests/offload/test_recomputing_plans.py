"""Plans in which blocks are computed again are as good as the best of all plans, and keep to the limit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.offload.recomputing import (
    block_nbytes,
    first_needed,
    peak_nbytes,
    plan_with_blocks,
    predict_with_blocks,
    scaled,
    ways,
    without_blocks,
)
from fastensor.offload.scheduler import (
    OffloadPlan,
    ProfiledBlock,
    ProfiledTensor,
    StepProfile,
    TransferRates,
    badness,
    plan,
    predict,
    undisturbed,
)

MOMENT = 0.001
"""Seconds from the end of the forward pass until the first tensor is needed: it has begun to leave by then."""
FREE = TransferRates(1e12, 1e12, 1 << 40, 1 << 40)


def blocks_of(sizes: list[list[int]], inputs: list[int], seconds: list[float], outside: int = 0) -> StepProfile:
    """A step of blocks that save tensors evenly in their time, after one that is outside of them."""
    tensors = [ProfiledTensor(outside, 0.0, 2 * sum(seconds))]
    blocks, begun = [], 0.0
    for saved, nbytes, time in zip(sizes, inputs, seconds, strict=True):
        first = len(tensors)
        for at, size in enumerate(saved, 1):
            moment = begun + time * at / len(saved)
            tensors.append(ProfiledTensor(size, moment, 2 * (sum(seconds) - moment) + MOMENT))
        blocks.append(ProfiledBlock(frozenset(range(first, len(tensors))), nbytes, begun, time))
        begun += time
    return StepProfile(tuple(tensors), begun, 2 * begun + MOMENT, tuple(blocks))


@st.composite
def profiles(draw: st.DrawFn, most: int = 4) -> StepProfile:
    count = draw(st.integers(1, most))
    sizes = [draw(st.lists(st.integers(1, 100), min_size=1, max_size=3)) for _ in range(count)]
    inputs = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    seconds = draw(st.lists(st.floats(0.01, 1.0), min_size=count, max_size=count))
    return blocks_of(sizes, inputs, seconds, draw(st.integers(0, 50)))


limits = st.floats(0.0, 1.1)
rates = st.builds(
    TransferRates,
    st.floats(10, 1e4),
    st.floats(10, 1e4),
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.floats(0, 0.01),
    st.floats(0, 1e-4),
)


def every_plan(profile: StepProfile, limit: int, how: TransferRates) -> Iterator[OffloadPlan]:
    """All plans that keep to a limit."""
    blocks = range(len(profile.blocks))
    for count in range(len(blocks) + 1):
        for again in map(frozenset, itertools.combinations(blocks, count)):
            _, numbers = without_blocks(profile, again)
            for chosen in itertools.product((False, True), repeat=len(numbers)):
                out = frozenset(number for number, leaves in zip(numbers, chosen, strict=True) if leaves)
                if peak_nbytes(profile, out, again) <= limit:
                    yield OffloadPlan(out, predict_with_blocks(profile, out, again, how), again)


@given(profiles(), limits, rates)
def test_a_plan_keeps_to_the_limit_and_is_predicted_as_it_is(
    profile: StepProfile, share: float, how: TransferRates
) -> None:
    limit = int(share * profile.nbytes)
    found = plan_with_blocks(profile, limit, how)
    assert peak_nbytes(profile, found.out, found.recomputed) <= limit
    assert found.prediction == predict_with_blocks(profile, found.out, found.recomputed, how)
    _, numbers = without_blocks(profile, found.recomputed)
    assert found.out <= set(numbers)


@given(profiles(), limits, rates)
def test_a_plan_is_never_worse_than_one_that_computes_nothing_again(
    profile: StepProfile, share: float, how: TransferRates
) -> None:
    limit = int(share * profile.nbytes)
    alone = plan(profile, limit, how).prediction.step_seconds
    assert plan_with_blocks(profile, limit, how).prediction.step_seconds <= alone * (1 + 1e-9)


def test_plans_are_within_a_few_percent_of_the_best_of_all() -> None:
    chance = random.Random(0)
    ratios = []
    for _ in range(60):
        count = chance.randint(1, 3)
        sizes = [[chance.randint(1, 100) for _ in range(chance.randint(1, 2))] for _ in range(count)]
        inputs = [chance.randint(0, 30) for _ in range(count)]
        profile = blocks_of(sizes, inputs, [chance.uniform(0.01, 1) for _ in range(count)], chance.randint(0, 50))
        how = TransferRates(chance.uniform(20, 2000), chance.uniform(20, 2000), 200, 200, 0.001, 1e-5)
        limit = int(chance.uniform(0, 1) * profile.nbytes)
        best = min(every_plan(profile, limit, how), key=badness)
        found = plan_with_blocks(profile, limit, how)
        ratios.append(found.prediction.step_seconds / best.prediction.step_seconds)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 1.005


@given(profiles(), rates)
def test_without_blocks_that_are_computed_again_the_step_is_the_same(profile: StepProfile, how: TransferRates) -> None:
    rest, numbers = without_blocks(profile, frozenset())
    assert numbers == list(range(len(profile.tensors)))
    everything = frozenset(numbers)
    assert predict(rest, everything, how) == predict(profile, everything, how)
    assert plan_with_blocks(profile, profile.nbytes, how).recomputed == frozenset()


@given(profiles(), st.data())
def test_the_backward_pass_is_longer_by_what_is_computed_again(profile: StepProfile, data: st.DataObject) -> None:
    again = data.draw(st.frozensets(st.integers(0, len(profile.blocks) - 1)))
    rest, numbers = without_blocks(profile, again)
    longer = sum(profile.blocks[block].seconds for block in again)
    assert rest.backward_seconds == pytest.approx(profile.backward_seconds + longer)
    found = predict_with_blocks(profile, frozenset(), again, FREE)
    assert found.recompute_seconds == pytest.approx(longer)
    assert found.step_seconds == pytest.approx(profile.forward_seconds + profile.backward_seconds + longer)
    needed = dict(zip(numbers, (one.needed_at for one in rest.tensors), strict=True))
    in_turn = sorted(again, key=lambda block: first_needed(profile, block))
    for at, block in enumerate(in_turn):
        before = sum(profile.blocks[earlier].seconds for earlier in in_turn[:at])
        assert needed[len(profile.tensors) + block] == pytest.approx(first_needed(profile, block) + before)


def test_what_is_not_needed_in_the_backward_pass_is_not_computed_again_there() -> None:
    tensors = (ProfiledTensor(10, 0.5, 2.0), ProfiledTensor(10, 1.0, math.inf))
    blocks = (ProfiledBlock(frozenset({0}), 1, 0.0, 0.5), ProfiledBlock(frozenset({1}), 1, 0.5, 0.5))
    profile = StepProfile(tensors, 1.0, 2.0, blocks)
    found = predict_with_blocks(profile, frozenset(), {0, 1}, FREE)
    assert found.recompute_seconds == 0.5
    assert found.step_seconds == 3.5


# --- what is chosen


def test_a_slow_disk_makes_blocks_be_computed_again_and_a_fast_one_has_them_move() -> None:
    profile = blocks_of([[50, 50]] * 8, [5] * 8, [0.1] * 8)
    slow = TransferRates(1.0, 1.0, 1000, 1000)
    found = plan_with_blocks(profile, 300, slow)
    assert found.recomputed
    assert not found.out
    fast = plan_with_blocks(profile, 300, TransferRates(1e9, 1e9, 1 << 20, 1 << 20))
    assert not fast.recomputed
    assert fast.out


def test_as_few_blocks_are_computed_again_as_the_limit_asks_for() -> None:
    """A block that is computed again takes 10 in place of 100. The first ones are: when the backward pass comes to
    them, those that were kept are gone, and leave the room that computing takes."""
    profile = blocks_of([[100]] * 10, [10] * 10, [0.1] * 10)
    slow = TransferRates(1.0, 1.0, 1, 1)
    counts = [len(plan_with_blocks(profile, limit, slow).recomputed) for limit in (1000, 900, 830, 600, 300)]
    assert counts == [0, 2, 2, 5, 8]
    assert plan_with_blocks(profile, 600, slow).recomputed == frozenset(range(5))


@given(profiles(), st.data())
def test_bytes_in_memory_are_those_of_a_replay(profile: StepProfile, data: st.DataObject) -> None:
    """Tensors come and go one by one. Some are needed a second time, later, as by a skip connection."""
    later = data.draw(st.lists(st.floats(0, 2), min_size=len(profile.tensors), max_size=len(profile.tensors)))
    profile = dataclasses.replace(
        profile,
        tensors=tuple(
            dataclasses.replace(one, last_needed_at=one.needed_at + more)
            for one, more in zip(profile.tensors, later, strict=True)
        ),
    )
    again = data.draw(st.frozensets(st.integers(0, len(profile.blocks) - 1)))
    rest, numbers = without_blocks(profile, again)
    out = data.draw(st.frozensets(st.sampled_from(numbers)))
    kept = [one for one, number in zip(rest.tensors, numbers, strict=True) if number not in out]
    in_memory = most = sum(one.nbytes for one in kept)
    begins = sorted((first_needed(profile, block), block_nbytes(profile, block)) for block in again)
    count = len(profile.tensors)
    whole = {count + at: one.tensors for at, one in enumerate(profile.blocks)}
    goes = sorted(
        (max(profile.tensors[at].held_until for at in whole.get(number, (number,))), one.nbytes)
        for one, number in zip(rest.tensors, numbers, strict=True)
        if number not in out
    )
    for moment, nbytes in begins:
        while goes and goes[0][0] < moment:
            in_memory -= goes.pop(0)[1]
        most = max(most, in_memory + nbytes)
    assert peak_nbytes(profile, out, again) == most


def test_the_backward_pass_is_late_at_a_block_that_is_computed_again_after_another() -> None:
    """A tensor that was needed in between is gone by then, however long the other block took."""
    profile = blocks_of([[300], [100], [10]], [10] * 3, [0.1, 0.1, 5.0])
    assert peak_nbytes(profile, frozenset(), {0, 2}) == 10 + 300
    assert peak_nbytes(dataclasses.replace(profile, is_alone=False), frozenset(), {0, 2}) == 10 + 100 + 10 + 300


def test_a_block_is_computed_again_when_it_needs_what_others_needed_before() -> None:
    """All blocks have saved one tensor, the first block first."""
    profile = blocks_of([[100], [80], [100]], [10] * 3, [1.0] * 3, outside=0)
    shared = ProfiledTensor(50, 0.5, 0.0, last_needed_at=profile.tensors[1].needed_at + 0.5)
    blocks = (dataclasses.replace(profile.blocks[0], tensors=frozenset({1, 4})), *profile.blocks[1:])
    profile = dataclasses.replace(profile, tensors=(*profile.tensors, shared), blocks=blocks)
    assert first_needed(profile, 0) == profile.tensors[1].needed_at
    assert peak_nbytes(profile, frozenset(), {0, 1}) == max(10 + 10 + 100, 10 + 10 + 80, 10 + 150)


def test_other_times_have_other_last_needs() -> None:
    profile = StepProfile((ProfiledTensor(100, 1.0, 2.0, last_needed_at=6.0),), 4.0, 8.0)
    assert scaled(profile, 2).tensors[0].held_until == 12.0
    measured = undisturbed(profile, 100, TransferRates(1.0, 1.0, 100, 100, slowdown_per_byte=0.01))
    assert measured.tensors[0].held_until == 6.0 * 7 / 8
    assert undisturbed(dataclasses.replace(profile, is_alone=False), 0, FREE).is_alone is False


def test_what_an_early_block_needs_once_more_stays_until_then() -> None:
    """A skip connection: the last block needs it first, and the first one last."""
    profile = blocks_of([[100]] * 4, [10] * 4, [0.1] * 4, outside=50)
    skip = dataclasses.replace(profile.tensors[0], needed_at=0.0, last_needed_at=profile.tensors[0].needed_at)
    gone = dataclasses.replace(skip, last_needed_at=None)
    held, freed = (
        peak_nbytes(dataclasses.replace(profile, tensors=(one, *profile.tensors[1:])), frozenset(), {0, 1, 2, 3})
        for one in (skip, gone)
    )
    assert (held, freed) == (4 * 10 + 100 + 50, 4 * 10 + 100)


def test_blocks_that_save_much_for_little_time_come_first() -> None:
    profile = blocks_of([[100]] * 5, [10] * 5, [1.0, 0.1, 1.0, 0.1, 1.0])
    found = plan_with_blocks(profile, 330, TransferRates(1.0, 1.0, 1, 1))
    assert found.recomputed == {1, 3}


def test_inputs_leave_where_they_do_not_fit() -> None:
    profile = blocks_of([[100]] * 10, [40] * 10, [1.0] * 10)
    found = plan_with_blocks(profile, 250, TransferRates(8.0, 8.0, 1000, 1000))
    assert found.recomputed
    assert any(number >= len(profile.tensors) for number in found.out)


def test_nothing_is_computed_again_where_one_block_takes_more_than_may_stay() -> None:
    profile = blocks_of([[100]] * 3, [1] * 3, [0.1] * 3)
    found = plan_with_blocks(profile, 99, TransferRates(10.0, 10.0, 1000, 1000))
    assert not found.recomputed
    assert peak_nbytes(profile, found.out, found.recomputed) <= 99


def test_a_block_that_saves_no_more_than_its_inputs_is_left_alone() -> None:
    profile = blocks_of([[10], [10]], [10, 10], [1e-6] * 2)
    assert not plan_with_blocks(profile, 15, TransferRates(1.0, 1.0, 1000, 1000)).recomputed


def test_many_blocks_are_planned_soon() -> None:
    """64 sets of blocks at most, however many blocks there are."""
    chance = random.Random(1)
    profile = blocks_of([[chance.randint(1, 100)] for _ in range(300)], [3] * 300, [0.01] * 300)
    found = plan_with_blocks(profile, profile.nbytes // 3, TransferRates(5.0, 5.0, 1000, 1000))
    assert 0 < len(found.recomputed) < 300


# --- other ways, and other batches


@given(profiles(), rates)
def test_ways_are_what_they_are_called(profile: StepProfile, how: TransferRates) -> None:
    found = ways(profile, how)
    assert set(found) == {"keep", "move", "recompute", "recompute, move inputs"}
    alone = profile.forward_seconds + profile.backward_seconds
    assert found["keep"].step_seconds == pytest.approx(alone)
    assert found["keep"].peak_bytes == profile.nbytes
    assert found["keep"].moved_bytes == found["recompute"].moved_bytes == 0
    assert found["move"].moved_bytes == profile.nbytes
    inputs = sum(one.inputs_nbytes for one in profile.blocks)
    outside = profile.nbytes - sum(block_nbytes(profile, block) for block in range(len(profile.blocks)))
    assert found["recompute, move inputs"].moved_bytes == inputs + outside


def test_a_block_that_cannot_be_computed_again_saves_no_inputs() -> None:
    blocks = (ProfiledBlock(frozenset({0}), 1, 0.0, 0.5), ProfiledBlock(frozenset(), 50, 0.5, 0.5))
    profile = StepProfile((ProfiledTensor(10, 0.5, 1.0), ProfiledTensor(20, 1.0, 0.5)), 1.0, 1.5, blocks)
    assert ways(profile, FREE)["recompute"].peak_bytes == 1 + 20


@given(profiles())
def test_a_batch_twice_as_large_takes_twice_the_time_and_memory(profile: StepProfile) -> None:
    double = scaled(profile, 2)
    assert double.nbytes == 2 * profile.nbytes
    one, two = (ways(batch, FREE)["recompute"] for batch in (profile, double))
    assert two.step_seconds == pytest.approx(2 * one.step_seconds)
    assert two.peak_bytes == 2 * one.peak_bytes
