"""The cache lends no byte twice, evicts what is used last, and finds all samples if it is filled in plan order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastensor.data import EpochPlan
from fastensor.provision.cache import Cache
from fastensor.provision.next_uses import NextUses, PositionSet, Schedule
from fastensor.provision.slabs import SlabSpace

SLAB = 1024


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * SLAB)), max_size=100))
def test_no_byte_is_lent_twice_and_all_are_free_again(steps: list[tuple[bool, int]]) -> None:
    space = SlabSpace(8 * SLAB, slab_nbytes=SLAB)
    taken: dict[int, int] = {}
    for takes, number in steps:
        if not takes:
            if taken:
                begin = sorted(taken)[number % len(taken)]
                space.give_back(begin, taken.pop(begin))
            continue
        used = np.zeros(8 * SLAB, bool)
        for begin, nbytes in taken.items():
            used[begin : begin + space.taken_nbytes(nbytes)] = True
        found = space.take(number)
        assert (found is not None) == room_for(used, space.taken_nbytes(number))
        if found is not None:
            assert found % 64 == 0
            assert not used[found : found + space.taken_nbytes(number)].any()
            if number <= SLAB:
                assert found // SLAB == (found + max(number, 1) - 1) // SLAB
            else:
                assert found % SLAB == 0
            taken[found] = number
    for begin, nbytes in taken.items():
        space.give_back(begin, nbytes)
    assert space.take(8 * SLAB) == 0


def room_for(used: np.ndarray, nbytes: int) -> bool:
    """Whether the smallest range that is enough is free somewhere: in a slab, or of whole slabs."""
    if nbytes > SLAB:
        return "f" * (nbytes // SLAB) in "".join("x" if slab.any() else "f" for slab in used.reshape(-1, SLAB))
    units = used.reshape(8, -1, 64).any(axis=2)
    return any("f" * (nbytes // 64) in "".join("x" if unit else "f" for unit in slab) for slab in units)


@given(
    st.integers(1, 5000), st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 30)), max_size=60), st.integers(0, 9)
)
def test_a_set_of_positions_is_a_set(size: int, steps: list[tuple[bool, int]], seed: int) -> None:
    present = np.random.default_rng(seed).random(size) < seed / 100
    positions, expected = PositionSet(present), set(np.flatnonzero(present).tolist())
    for adds, number in steps:
        (positions.add if adds else positions.discard)(number % size)
        (expected.add if adds else expected.discard)(number % size)
        assert positions.largest() == max(expected, default=None)
    while expected:
        positions.discard(max(expected))
        expected.remove(max(expected))
        assert positions.largest() == max(expected, default=None)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 19)), max_size=60))
def test_the_last_of_the_next_uses_is_found(steps: list[tuple[int, int]]) -> None:
    """Sample s is only used at positions 20 e + s of epoch e, so that no two samples share one."""
    uses, expected = NextUses(20), dict[int, int]()
    for epoch, sample in steps:
        if epoch:
            uses.set(sample, position=20 * (epoch + len(expected)) + sample)
            expected[sample] = 20 * (epoch + len(expected)) + sample
        else:
            uses.remove(sample)
            expected.pop(sample, None)
        last = max(expected, key=expected.__getitem__, default=None)
        assert uses.furthest() == (None if last is None else (last, expected[last]))
    uses.reset(np.array([expected.get(sample, -1) for sample in range(20)]))
    while expected:
        last = max(expected, key=expected.__getitem__)
        assert uses.furthest() == (last, expected.pop(last))
        uses.remove(last)
    assert uses.furthest() is None


def test_two_samples_cannot_be_used_at_the_same_position() -> None:
    uses = NextUses(10)
    uses.set(3, position=15)
    with pytest.raises(ValueError, match="sample 4 cannot be used at 15, where sample 3 is"):
        uses.set(4, position=15)


@given(st.integers(1, 40), st.integers(0, 3), st.sampled_from(["full", "block", "none"]), st.data())
def test_a_schedule_says_when_samples_are_used(n: int, seed: int, shuffle: str, data: st.DataObject) -> None:
    plan = EpochPlan(n, seed=seed, shuffle=shuffle, block_size=3)  # type: ignore[arg-type]
    uses = np.concatenate([plan.order(epoch) for epoch in range(6)]).tolist()
    schedule = Schedule(plan)
    for position in data.draw(st.lists(st.integers(0, 4 * n), max_size=6)):
        assert schedule.sample_at(position) == uses[position]
        expected = [uses.index(sample, position) for sample in range(n)]
        assert [schedule.next_use(sample, from_position=position) for sample in range(n)] == expected
        assert schedule.next_uses(from_position=position).tolist() == expected


def run_plan(cache: Cache, plan: EpochPlan, nbytes: np.ndarray, *, epochs: int, ahead: int) -> int:
    """Use all samples of some epochs in plan order, while the cache is filled ahead.

    Returns:
        how many samples were read.
    """
    schedule = Schedule(plan)
    reads = filled = 0
    for position in range(epochs * plan.n):
        while filled < min(position + ahead, epochs * plan.n):
            sample = schedule.sample_at(filled)
            if cache.find(sample) is None:
                if cache.place(sample, int(nbytes[sample]), next_use=filled) is None:
                    break
                cache.release(sample, next_use=filled)
                reads += 1
            filled += 1
        sample = schedule.sample_at(position)
        assert cache.find(sample) is not None, "a miss"
        cache.hold(sample)
        cache.release(sample, next_use=schedule.next_use(sample, from_position=position + 1))
        check_bytes(cache)
    return reads


def check_bytes(cache: Cache) -> None:
    assert cache.used_nbytes <= cache.nbytes


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(4, 40), st.integers(1, 12), st.integers(0, 5), st.sampled_from([300, 4000]))
def test_every_sample_is_found_at_its_use(n: int, slabs: int, ahead: int, seed: int, largest: int) -> None:
    nbytes = np.random.default_rng(seed).integers(0, largest, n)
    cache = Cache(n, nbytes=slabs * SLAB, slab_nbytes=SLAB)
    reads = run_plan(cache, EpochPlan(n, seed=seed), nbytes, epochs=4, ahead=ahead)
    assert reads <= 4 * n
    if int(nbytes.sum()) * 2 + n * 64 < cache.nbytes - largest:
        assert reads == n or cache.evictions > 0


@pytest.mark.parametrize("room", [1, 3, 10, 25, 49, 50, 60])
@pytest.mark.parametrize("ahead", [1, 5])
def test_equal_samples_are_read_as_seldom_as_possible(room: int, ahead: int) -> None:
    """As a cache does that knows the future, and looks at all samples to find which is used last."""
    n, epochs, plan = 50, 5, EpochPlan(50, seed=4)
    cache = Cache(n, nbytes=room * SLAB, slab_nbytes=SLAB)
    reads = run_plan(cache, plan, np.full(n, SLAB), epochs=epochs, ahead=ahead)
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
    cache = Cache(n, nbytes=16 << 20, slab_nbytes=4 << 20)
    run_plan(cache, EpochPlan(n), nbytes, epochs=3, ahead=20)
    assert cache.used_nbytes > 0.9 * cache.nbytes


@given(nbytes=st.integers(1 << 12, 1 << 40))
def test_slabs_leave_little_of_the_cache(nbytes: int) -> None:
    assert 0.96 * nbytes <= Cache(1, nbytes=nbytes).nbytes <= nbytes


def test_held_samples_stay() -> None:
    cache = Cache(10, nbytes=2 * SLAB, slab_nbytes=SLAB)
    placed = [cache.place(sample, SLAB, next_use=50 + sample) for sample in (0, 1)]
    assert cache.place(2, SLAB, next_use=3) is None
    cache.release(1, next_use=51)
    assert cache.hold(1) == cache.hold(1) == placed[1]
    cache.release(1, next_use=51)
    assert cache.place(2, SLAB, next_use=3) is None
    with pytest.raises(ValueError, match="sample 1 is held"):
        cache.evict(1)
    cache.release(1, next_use=51)
    assert cache.place(2, SLAB, next_use=3) == placed[1]
    assert cache.find(1) is None
    assert cache.evictions == 1


def test_a_sample_evicts_only_those_that_are_used_after_it() -> None:
    cache = Cache(10, nbytes=SLAB, slab_nbytes=SLAB)
    cache.place(0, SLAB, next_use=5)
    cache.release(0, next_use=5)
    assert cache.place(1, SLAB, next_use=6) is None
    assert cache.find(0) is not None
    assert cache.place(1, SLAB, next_use=4) is not None


def test_a_sample_that_is_never_used_again_makes_room() -> None:
    cache = Cache(10, nbytes=SLAB, slab_nbytes=SLAB)
    cache.place(0, SLAB, next_use=5)
    cache.release(0, next_use=None)
    assert (cache.samples, cache.used_nbytes, cache.evictions) == (0, 0, 0)
    assert cache.place(1, SLAB, next_use=6) is not None


def test_damaged_samples_are_dropped_and_placed_again() -> None:
    cache = Cache(10, nbytes=4 * SLAB, slab_nbytes=SLAB)
    cache.place(0, 3 * SLAB, next_use=5)
    cache.release(0, next_use=5)
    cache.evict(0)
    assert cache.find(0) is None
    assert cache.place(0, 4 * SLAB, next_use=5) is not None


def test_another_plan_changes_who_goes_first() -> None:
    cache = Cache(3, nbytes=3 * SLAB, slab_nbytes=SLAB)
    for sample in range(3):
        cache.place(sample, SLAB, next_use=sample)
        if sample:
            cache.release(sample, next_use=sample)
    cache.evict(2)
    cache.reschedule(np.array([99, 31, 32]))  # 0 is held, 2 is not in the cache
    assert cache.place(2, 3 * SLAB, next_use=32) is None  # neither 0 nor 1 has to go
    assert cache.place(2, 2 * SLAB, next_use=4) is not None
    assert [cache.find(sample) is not None for sample in range(3)] == [True, False, True]


def test_misuse_says_what_is_wrong() -> None:
    cache = Cache(10, nbytes=4 * SLAB, slab_nbytes=SLAB)
    cache.place(0, 10, next_use=1)
    with pytest.raises(ValueError, match="sample 0 is in the cache already"):
        cache.place(0, 10, next_use=1)
    with pytest.raises(ValueError, match="sample 1 has 4097 bytes, the cache 4096"):
        cache.place(1, 4 * SLAB + 1, next_use=1)
    with pytest.raises(ValueError, match="sample 1 is not in the cache"):
        cache.evict(1)
    with pytest.raises(KeyError):
        cache.hold(1)
    with pytest.raises(KeyError):
        cache.release(1, next_use=1)
    with pytest.raises(ValueError, match="at least one slab"):
        Cache(10, nbytes=63)
