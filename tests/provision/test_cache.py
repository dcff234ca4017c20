"""The cache lends no byte twice, evicts what is used last, and finds all samples if it is filled in plan order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastensor.data import EpochPlan
from fastensor.provision.cache import SampleCache
from fastensor.provision.feeding import Schedule

ROOM = 1024


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * ROOM), st.integers(0, 99)), max_size=80))
def test_no_byte_is_lent_twice_and_the_last_used_go_first(steps: list[tuple[int, int, int]]) -> None:
    """Sample s is only used at positions 10 p + s, so that no two samples share one."""
    cache, uses = SampleCache(10, nbytes=4 * ROOM), dict[int, int]()
    for sample, nbytes, place in steps:
        if cache.find(sample) is not None:
            cache.hold(sample)
            uses[sample] = 10 * place + sample
            cache.release(sample, next_use=uses[sample])
            continue
        before, next_use = {one for one in uses if cache.find(one)}, 10 * place + sample
        found = cache.place(sample, nbytes, next_use=next_use)
        gone = {one for one in before if not cache.find(one)}
        assert all(uses[one] > next_use for one in gone)
        assert max((uses[one] for one in before - gone), default=-1) < min((uses[one] for one in gone), default=9999)
        if found is None:
            assert nbytes > 0.9 * cache.nbytes or all(uses[one] < next_use for one in before - gone)
        else:
            uses[sample] = next_use
            cache.release(sample, next_use=next_use)
        check_bytes(cache, 10)


@given(st.integers(1, 40), st.integers(0, 3), st.sampled_from(["full", "block", "none"]), st.data())
def test_a_schedule_says_when_samples_are_used(n: int, seed: int, shuffle: str, data: st.DataObject) -> None:
    plan = EpochPlan(n, seed=seed, shuffle=shuffle, block_size=3)  # type: ignore[arg-type]
    uses = np.concatenate([plan.order(epoch) for epoch in range(6)]).tolist()
    schedule = Schedule(plan)
    for position in data.draw(st.lists(st.integers(0, 4 * n), max_size=6)):
        assert schedule.order(position // n)[position % n] == uses[position]
        expected = [uses.index(sample, position) for sample in range(n)]
        assert schedule.next_uses(np.arange(n), from_position=position).tolist() == expected


def run_plan(cache: SampleCache, plan: EpochPlan, nbytes: np.ndarray, *, epochs: int, ahead: int) -> int:
    """Use all samples of some epochs in plan order, while the cache is filled ahead.

    Returns:
        how many samples were read.
    """
    schedule = Schedule(plan)
    uses = np.concatenate([plan.order(epoch) for epoch in range(epochs + 1)]).tolist()
    reads = filled = 0
    for position in range(epochs * plan.n):
        while filled < min(position + ahead, epochs * plan.n):
            sample = uses[filled]
            if cache.find(sample) is None:
                if cache.place(sample, int(nbytes[sample]), next_use=filled) is None:
                    break
                cache.release(sample, next_use=filled)
                reads += 1
            filled += 1
        sample = uses[position]
        assert cache.find(sample) is not None, "a miss"
        cache.hold(sample)
        cache.release(sample, next_use=int(schedule.next_uses(np.array([sample]), from_position=position + 1)[0]))
    check_bytes(cache, plan.n)
    return reads


def check_bytes(cache: SampleCache, samples: int) -> None:
    """No two samples have a byte in common, and none is beyond the cache."""
    extents = sorted(found for sample in range(samples) if (found := cache.find(sample)) is not None)
    ends = [offset + nbytes for offset, nbytes in extents]
    assert all(end <= begin for end, (begin, _) in zip(ends, extents[1:], strict=False))
    assert sum(nbytes for _, nbytes in extents) <= cache.used_nbytes <= cache.nbytes
    assert max(ends, default=0) <= cache.nbytes
    assert cache.samples == len(extents)


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(4, 40), st.integers(1, 12), st.integers(0, 5), st.sampled_from([300, 4000]))
def test_every_sample_is_found_at_its_use(n: int, slabs: int, ahead: int, seed: int, largest: int) -> None:
    nbytes = np.random.default_rng(seed).integers(0, largest, n)
    cache = SampleCache(n, nbytes=slabs * ROOM)
    reads = run_plan(cache, EpochPlan(n, seed=seed), nbytes, epochs=4, ahead=ahead)
    assert reads <= 4 * n
    if int(nbytes.sum()) * 2 + n * 64 < cache.nbytes - largest:
        assert reads == n or cache.evictions > 0


@pytest.mark.parametrize("room", [1, 3, 10, 25, 49, 50, 60])
@pytest.mark.parametrize("ahead", [1, 5])
def test_equal_samples_are_read_as_seldom_as_possible(room: int, ahead: int) -> None:
    """As a cache does that knows the future, and looks at all samples to find which is used last."""
    n, epochs, plan = 50, 5, EpochPlan(50, seed=4)
    cache = SampleCache(n, nbytes=room * ROOM)
    reads = run_plan(cache, plan, np.full(n, ROOM), epochs=epochs, ahead=ahead)
    uses = np.concatenate([plan.order(epoch) for epoch in range(epochs + 1)]).tolist()
    assert reads == reads_of_brute_force(uses, epochs * n, room, ahead)
    if room >= n:
        assert reads == n
    elif ahead == 1 and room == 25:
        assert reads < 0.8 * n * epochs


def reads_of_brute_force(uses: list[int], count: int, room: int, ahead: int) -> int:
    cached: dict[int, int] = {}
    reads = filled = 0
    for position in range(count):
        while filled < min(position + ahead, count):
            sample = uses[filled]
            if sample not in cached:
                if len(cached) == room:
                    last = max(cached, key=cached.__getitem__)
                    if cached[last] < filled:
                        break
                    del cached[last]
                cached[sample] = filled
                reads += 1
            filled += 1
        cached[uses[position]] = uses.index(uses[position], position + 1)
    return reads


def test_samples_of_varying_size_leave_little_unused() -> None:
    """Rounding and gaps cost less than a tenth of the cache, when it has been full for long."""
    n = 2000
    nbytes = np.random.default_rng(1).integers(8 << 10, 64 << 10, n)
    cache = SampleCache(n, nbytes=16 << 20)
    run_plan(cache, EpochPlan(n), nbytes, epochs=3, ahead=20)
    assert cache.used_nbytes > 0.9 * cache.nbytes


def test_held_samples_stay() -> None:
    cache = SampleCache(10, nbytes=2 * ROOM)
    placed = [cache.place(sample, ROOM, next_use=50 + sample) for sample in (0, 1)]
    assert cache.place(2, ROOM, next_use=3) is None
    cache.release(1, next_use=51)
    cache.hold(1)
    cache.hold(1)
    assert cache.find(1) == placed[1]
    cache.release(1, next_use=51)
    assert cache.place(2, ROOM, next_use=3) is None
    cache.release(1, next_use=51)
    assert cache.place(2, ROOM, next_use=3) == placed[1]
    assert cache.find(1) is None
    assert cache.evictions == 1


def test_a_sample_evicts_only_those_that_are_used_after_it() -> None:
    cache = SampleCache(10, nbytes=ROOM)
    cache.place(0, ROOM, next_use=5)
    cache.release(0, next_use=5)
    assert cache.place(1, ROOM, next_use=6) is None
    assert cache.find(0) is not None
    assert cache.place(1, ROOM, next_use=4) is not None


def test_a_sample_that_is_larger_than_the_cache_evicts_nothing() -> None:
    cache = SampleCache(10, nbytes=4 * ROOM)
    cache.place(0, 10, next_use=7)
    cache.release(0, next_use=7)
    assert cache.place(1, 4 * ROOM + 1, next_use=1) is None
    assert cache.find(0) is not None


def stored(cache: SampleCache, *samples: int) -> np.ndarray:
    """Samples of a quarter of the cache are read, and written to the cache. Returns their offsets."""
    positions = np.array(samples)
    cache.reading(positions)
    cache.not_reading(positions)
    offsets = cache.store(positions, np.full(len(samples), ROOM), positions)
    cache.written(positions[offsets >= 0], positions[offsets >= 0])
    return offsets


def test_samples_are_found_when_they_are_written() -> None:
    cache, samples = SampleCache(10, nbytes=4 * ROOM), np.array([3, 4])
    assert cache.lacking(samples).tolist() == [3, 4]
    cache.reading(samples)
    assert cache.awaits(samples)
    assert not len(cache.lacking(samples))
    cache.not_reading(samples)
    offsets = cache.store(samples, np.array([ROOM, ROOM]), samples)
    assert cache.awaits(samples)
    assert cache.take(samples)[0].tolist() == [-1, -1]
    cache.written(samples, samples)
    assert not cache.awaits(samples)
    assert cache.take(samples)[0].tolist() == offsets.tolist()


def test_samples_of_one_batch_lie_in_a_row_or_wherever_there_is_room() -> None:
    cache = SampleCache(10, nbytes=4 * ROOM)
    assert stored(cache, 0, 1, 2).tolist() == [0, ROOM, 2 * ROOM]
    assert stored(cache, 2, 4).tolist() == [-1, 3 * ROOM]
    assert stored(cache, 7, 3).tolist() == [-1, 3 * ROOM]  # 4 is used last, 7 after all others
    assert cache.evictions == 1
    check_bytes(cache, 10)


def test_samples_that_were_not_written_are_dropped() -> None:
    cache, samples = SampleCache(10, nbytes=4 * ROOM), np.array([3, 4])
    cache.store(samples, np.array([ROOM, ROOM]), samples)
    cache.not_written(samples)
    assert (cache.samples, cache.used_nbytes, cache.awaits(samples)) == (0, 0, False)
    assert (stored(cache, 3, 4) >= 0).all()


def test_damaged_samples_are_dropped_when_nobody_holds_them() -> None:
    cache, sample = SampleCache(10, nbytes=4 * ROOM), np.array([0])
    stored(cache, 0)
    for _ in range(2):
        assert cache.take(sample)[0].tolist() == [0]
    cache.damaged(sample)
    assert cache.take(sample)[0].tolist() == [-1]
    cache.give_back(sample, sample)
    assert cache.samples == 1
    cache.give_back(sample, sample)
    assert (cache.samples, cache.counts["damaged"]) == (0, 1)
    assert stored(cache, 0).tolist() == [0]


def test_another_plan_changes_who_goes_first() -> None:
    cache = SampleCache(4, nbytes=3 * ROOM)
    for sample in range(2):
        cache.place(sample, ROOM, next_use=sample)
    cache.release(1, next_use=1)
    cache.reschedule(np.array([99, 31, 32, 33]))  # 0 is held, 2 and 3 are not in the cache
    assert cache.place(2, 3 * ROOM, next_use=32) is None  # neither 0 nor 1 has to go
    assert cache.place(2, 2 * ROOM, next_use=4) is not None
    assert [cache.find(sample) is not None for sample in range(3)] == [True, False, True]


def test_a_cache_forgets_what_is_outdated() -> None:
    """The cache still knows which sample is used last."""
    cache = SampleCache(4, nbytes=4 * ROOM)
    stored(cache, 0, 1, 2, 3)
    for epoch in range(1, 2000):
        for sample in range(4):
            cache.hold(sample)
            cache.release(sample, next_use=4 * epoch + sample)
    cache.reschedule(np.array([8000, 8003, 8001, 8002]))
    assert not cache.would_keep(1, 8003)
    assert cache.would_keep(1, 8002)


def test_without_a_cache_all_is_read_each_time() -> None:
    cache = SampleCache(10, nbytes=0)
    assert stored(cache, 1, 2).tolist() == [-1, -1]
    assert cache.take(np.array([1]))[0].tolist() == [-1]
    assert not cache.awaits(np.array([1]))
