"""Which tensors leave memory: the paper's two phases, and plans that are as good as the best of all selections."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.offload.scheduler import (
    ProfiledTensor,
    StepProfile,
    TransferRates,
    compressible,
    linear,
    plan,
    predict,
    undisturbed,
)

MIB = 1 << 20
NO_LIMITS = TransferRates(1e12, 1e12, 1 << 40, 1 << 40)


def step(sizes: list[int], ratios: list[float] | None = None, seconds: float = 1.0) -> StepProfile:
    """A step that saves a tensor each ``seconds``, and needs them in reverse."""
    count = len(sizes)
    ratios = ratios or [1.0] * count
    tensors = (
        ProfiledTensor(size, (at + 1) * seconds, (count - 1 - at) * seconds, ratio)
        for at, (size, ratio) in enumerate(zip(sizes, ratios, strict=True))
    )
    return StepProfile(tuple(tensors), (count + 1) * seconds, count * seconds)


def rates(write: float, read: float = math.inf, **more: float) -> TransferRates:
    return TransferRates(write, read, **{"staging_bytes": 1 << 40, "prefetch_bytes": 1 << 40, **more})  # type: ignore[arg-type]


def names(selection: frozenset[int]) -> str:
    return "".join("ABCDEFG"[index] for index in sorted(selection))


@given(st.lists(st.integers(1, MIB), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_step_is_known_without_the_transfers_that_have_slowed_it_down(
    sizes: list[int], share: float, slower: float
) -> None:
    """A prediction for what was moved while the step was measured is the time that was measured."""
    out = frozenset(range(round(share * len(sizes))))
    measured, how = step(sizes), rates(1e12, 1e12, slowdown_per_byte=slower / sum(sizes) / 2)
    moved = sum(sizes[index] for index in out)
    alone = undisturbed(measured, moved, how)
    seconds = measured.forward_seconds + measured.backward_seconds
    assert predict(alone, out, how).step_seconds == pytest.approx(seconds, rel=1e-4)
    assert alone.nbytes == measured.nbytes
    times = [one.saved_at for one in alone.tensors] + [alone.forward_seconds]
    assert times == sorted(times)


def test_no_more_than_half_of_a_step_is_put_down_to_transfers() -> None:
    alone = undisturbed(step([1]), 1, rates(1.0, slowdown_per_byte=100.0))
    assert (alone.forward_seconds, alone.backward_seconds) == (1.0, 0.5)


# --- the paper's walk-through (section 3.3, Figure 6): seven tensors, A to G, and a device of 8 MB


def test_phase_1_takes_tensors_from_the_beginning_until_the_rest_fits() -> None:
    seven = step([2, 3, 1, 2, 2, 2, 2])
    assert names(linear(seven, 8)) == "ABC"
    assert names(linear(seven, 14)) == ""
    assert names(linear(seven, 0)) == "ABCDEFG"


def test_the_first_schedule_is_taken_if_transfers_hide_behind_the_forward_pass() -> None:
    seven = step([2, 3, 1, 2, 2, 2, 2], [1, 1, 2, 1, 4, 4, 2])
    assert compressible(seven, linear(seven, 8), rates(write=1.0)) == linear(seven, 8)


def test_phase_2_replaces_the_last_incompressible_tensor_by_the_most_compressible_ones() -> None:
    """B goes back, and E and F, of the highest ratios, take its place: then the transfer takes (2 + 1/2 + 4/4) seconds
    at 1 MB/s; at half of that, A goes back as well, and G comes."""
    seven = step([2, 3, 1, 2, 2, 2, 2], [1, 1, 2, 1, 4, 4, 2], seconds=0.5)
    assert seven.forward_seconds == 4.0
    assert names(compressible(seven, linear(seven, 8), rates(write=1.0))) == "ACEF"
    assert names(compressible(seven, linear(seven, 8), rates(write=0.5))) == "CEFG"


def test_phase_2_ends_when_no_compressible_tensor_is_left() -> None:
    seven = step([2, 3, 1, 2, 2, 2, 2], [1, 1, 1, 1, 4, 1, 1], seconds=0.1)
    chosen = compressible(seven, linear(seven, 8), rates(write=0.1))
    assert names(chosen) == "ABE"  # C, the last one, makes room for E; nothing is as large as B
    kept = sum(one.nbytes for index, one in enumerate(seven.tensors) if index not in chosen)
    assert kept <= 8


# --- predictions


def test_nothing_moves_at_no_cost() -> None:
    found = predict(step([1, 2, 3]), frozenset(), rates(write=1.0))
    assert (found.step_seconds, found.moved_bytes, found.peak_bytes) == (7.0, 0, 6)


def test_a_forward_pass_waits_for_a_full_stage() -> None:
    """Four tensors of 4 bytes a second apart, at 2 bytes a second, of which two fit.

    The last one waits from 4 to 5, until the second one is written.
    """
    found = predict(step([4, 4, 4, 4]), frozenset(range(4)), rates(write=2.0, staging_bytes=8))
    assert found.wait_to_write_seconds == pytest.approx(1.0)
    assert found.peak_bytes == 8


def test_a_backward_pass_waits_for_reads() -> None:
    one = StepProfile((ProfiledTensor(10, 0.0, 1.0),), 20.0, 1.0)
    found = predict(one, frozenset({0}), rates(write=1.0, read=4.0))
    assert found.wait_to_read_seconds == pytest.approx(1.5)
    assert found.step_seconds == pytest.approx(22.5)


def test_what_is_needed_before_its_write_begins_is_taken_back() -> None:
    late = step([1, 1, 1])
    found = predict(late, frozenset({1, 2}), rates(write=0.1, read=1e-6))
    assert found.wait_to_read_seconds > 1000  # the first one is being written
    assert predict(late, frozenset({2}), rates(write=0.1, read=1e-6)).wait_to_read_seconds > 1000
    never = StepProfile((ProfiledTensor(1, 0.0, math.inf),), 1.0, 1.0)
    assert predict(never, frozenset({0}), rates(write=1.0, read=1e-6)).step_seconds == 2.0


def test_reads_begin_when_there_is_room() -> None:
    """Two tensors are needed at once; the second one's read begins when the first one is used."""
    two = StepProfile((ProfiledTensor(4, 0.0, 10.0), ProfiledTensor(4, 0.0, 0.0)), 100.0, 10.0)
    roomy, tight = (predict(two, frozenset({0, 1}), rates(write=1.0, read=0.5, prefetch_bytes=room)) for room in (8, 4))
    assert roomy.wait_to_read_seconds == tight.wait_to_read_seconds == pytest.approx(8.0)
    three = StepProfile(tuple(ProfiledTensor(4, 0.0, at) for at in (0.0, 10.0, 10.0)), 100.0, 10.0)
    roomy, tight = (
        predict(three, frozenset({0, 1, 2}), rates(write=1.0, read=0.5, prefetch_bytes=room)) for room in (12, 4)
    )
    assert tight.wait_to_read_seconds > roomy.wait_to_read_seconds


# --- plans


def test_everything_stays_if_it_fits() -> None:
    assert not plan(step([MIB] * 9), 9 * MIB, NO_LIMITS).out
    assert not plan(StepProfile((), 0.0, 0.0), 0, NO_LIMITS).out


def test_everything_leaves_if_nothing_may_stay() -> None:
    assert plan(step([MIB] * 3), 0, NO_LIMITS).out == {0, 1, 2}


def cases(count: int) -> Iterator[tuple[StepProfile, int, TransferRates]]:
    random_ = random.Random(0)
    for number in range(count):
        sizes = [random_.choice([1, 2, 4, 8, 16]) if number % 2 else 4 for _ in range(8)]
        at = list(itertools.accumulate(random_.random() * 2 if number % 2 else 1.0 for _ in sizes))
        forward = at[-1] + random_.random()
        needed = sorted((2 * (forward - one) * random_.uniform(0.9, 1) for one in at), reverse=True)
        ratios = [random_.choice([1.0, 1.0, 1.0, 2.0, 4.0]) if number % 3 == 0 else 1.0 for _ in sizes]
        tensors = (ProfiledTensor(*one) for one in zip(sizes, at, needed, ratios, strict=True))
        profile = StepProfile(tuple(tensors), forward, 2 * forward)
        bandwidth = sum(sizes) / forward * random_.choice([0.3, 0.6, 1, 2])
        limit = int(profile.nbytes * random_.choice([0.2, 0.5, 0.8]))
        yield profile, limit, TransferRates(bandwidth, bandwidth * 1.5, 16, 16, 0.05, 0.001)


def test_plans_are_about_as_good_as_the_best_of_all_selections() -> None:
    found = []
    for profile, limit, speed in cases(150):
        chosen = plan(profile, limit, speed)
        assert profile.kept_bytes(chosen.out) <= limit
        assert chosen.prediction == predict(profile, chosen.out, speed)
        everything = range(len(profile.tensors))
        selections = map(frozenset, itertools.chain(*(itertools.combinations(everything, n) for n in range(9))))
        best = min(
            predict(profile, out, speed).step_seconds
            for out in selections
            if profile.nbytes - sum(profile.tensors[index].nbytes for index in out) <= limit
        )
        found.append(chosen.prediction.step_seconds / best)
    assert mean(found) < 1.01
    assert max(found) < 1.35
    assert min(found) > 1 - 1e-9


tensors = st.builds(
    ProfiledTensor,
    st.integers(1, 1 << 40),
    st.floats(0, 1e6),
    st.floats(0, 1e6) | st.just(math.inf),
    st.floats(1, 16),
)


@given(
    st.lists(tensors, max_size=12),
    st.integers(0, 1 << 42),
    st.floats(1, 1e12),
    st.integers(1, 1 << 41),
    st.integers(0, 1 << 41),
)
def test_any_profile_can_be_planned(
    some: list[ProfiledTensor], limit: int, bandwidth: float, staging: int, prefetch: int
) -> None:
    profile = StepProfile(tuple(sorted(some, key=lambda one: one.saved_at)), 1e6, 1e6)
    speed = TransferRates(bandwidth, bandwidth, staging, prefetch)
    found = plan(profile, limit, speed)
    assert sum(one.nbytes for index, one in enumerate(profile.tensors) if index not in found.out) <= limit
    assert found.prediction.step_seconds >= 2e6
    assert found.prediction.step_seconds <= predict(profile, linear(profile, limit), speed).step_seconds
    assert found.prediction.step_seconds <= predict(profile, frozenset(range(len(some))), speed).step_seconds
