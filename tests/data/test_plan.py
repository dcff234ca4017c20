"""Orders of epochs: each sample once, whatever the ranks are and wherever an epoch is resumed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.data import EpochPlan

SHUFFLES = st.sampled_from(["full", "block", "none"])


def plans_of(world_size: int, **arguments: object) -> list[EpochPlan]:
    """The plans of all ranks."""
    return [EpochPlan(world_size=world_size, rank=rank, **arguments) for rank in range(world_size)]  # type: ignore[arg-type]


def steps_of(plans: list[EpochPlan], epoch: int, consumed: int) -> list[list[np.ndarray]]:
    """For each step the batches of all ranks, which must take equally many."""
    return list(map(list, zip(*(plan.batches(epoch, consumed) for plan in plans), strict=True)))


@given(data=st.data())
def test_each_sample_is_taken_once_over_resumptions_by_other_ranks(data: st.DataObject) -> None:
    arguments = {
        "n": data.draw(st.integers(0, 300), "n"),
        "seed": data.draw(st.integers(0, 5), "seed"),
        "shuffle": data.draw(SHUFFLES, "shuffle"),
        "block_size": data.draw(st.integers(1, 20), "block_size"),
        "blocks_per_group": data.draw(st.integers(1, 5), "blocks_per_group"),
    }
    n, consumed, taken = arguments["n"], 0, []
    for is_last in (False, False, True):  # an epoch, resumed twice
        plans = plans_of(
            data.draw(st.integers(1, 8), "world_size"),
            batch_size=data.draw(st.integers(1, 9), "batch_size"),
            **arguments,
        )
        steps = steps_of(plans, 3, consumed)
        assert len(steps) == plans[0].steps(consumed)
        if not is_last:
            steps = steps[: data.draw(st.integers(0, len(steps)), "steps")]
        for batches in steps:
            sizes = [len(batch) for batch in batches]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            samples = np.concatenate(batches).tolist()
            if len(set(samples)) < plans[0].world_size:  # too few are left for a sample of each rank
                samples = list(set(samples))
            taken += samples
        consumed = plans[0].consumed_after(len(steps), consumed)
        assert consumed == len(taken)
    assert sorted(taken) == list(range(n))


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 9), SHUFFLES)
def test_dropping_the_last_leaves_whole_batches(n: int, world_size: int, batch_size: int, shuffle: str) -> None:
    plans = plans_of(world_size, n=n, batch_size=batch_size, shuffle=shuffle, drop_last=True, block_size=7)
    taken = [batch for batches in steps_of(plans, 0, 0) for batch in batches]
    assert {len(batch) for batch in taken} <= {batch_size}
    assert len(np.unique([*taken])) == sum(map(len, taken)) == n // (world_size * batch_size) * world_size * batch_size


def test_epochs_and_seeds_differ_and_orders_repeat() -> None:
    plan = EpochPlan(1000, seed=1)
    assert plan.order(0).tolist() == EpochPlan(1000, seed=1, batch_size=7, world_size=3).order(0).tolist()
    orders = [plan.order(0), plan.order(1), EpochPlan(1000, seed=2).order(0), EpochPlan(1000, shuffle="none").order(0)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_orders_are_those_of_earlier_versions() -> None:
    """A state that was saved must mean the same samples after an update of NumPy or of Fastensor."""
    assert EpochPlan(8, seed=3).order(2).tolist() == [1, 7, 0, 2, 4, 5, 6, 3]
    block = EpochPlan(11, seed=3, shuffle="block", block_size=3, blocks_per_group=2)
    assert block.order(2).tolist() == [1, 5, 2, 0, 3, 4, 8, 7, 9, 10, 6]


def test_blocks_stay_within_their_groups() -> None:
    plan = EpochPlan(1000, shuffle="block", block_size=10, blocks_per_group=5)
    order = plan.order(0)
    for begin in range(0, 1000, 50):
        blocks = np.unique(order[begin : begin + 50] // 10)
        assert len(blocks) == 5
        assert len(np.unique(order[begin : begin + 50])) == 50
    assert (np.diff(order) != 1).mean() > 0.9  # the samples of a group are mixed


def test_ranks_divide_the_blocks_of_a_group() -> None:
    """With 32 blocks in a group, and 4 ranks, each rank reads little more than 8 blocks."""
    plans = plans_of(4, n=32 * 64 * 4, batch_size=128, shuffle="block", block_size=64, blocks_per_group=32)
    for plan in plans:
        read = np.concatenate(list(plan.batches(0)))[: 32 * 64 // 4] // 64
        assert len(np.unique(read)) <= 12


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_mixing_is_what_steps_see(shuffle: str) -> None:
    """The formula agrees with counting, to 3 %."""
    block_size = 120 if shuffle == "none" else 50
    arguments = {"batch_size": 100, "block_size": block_size, "blocks_per_group": 20}
    plan, full = (EpochPlan(200_000, shuffle=how, **arguments) for how in (shuffle, "full"))  # type: ignore[arg-type]
    found = [np.mean([len(np.unique(batch // block_size)) for batch in one.batches(0)]) for one in (plan, full)]
    assert plan.mixing == pytest.approx(found[0] / found[1], rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n is at least 0, found -1"),
        ({"batch_size": 0}, "batch_size is at least 1, found 0"),
        ({"world_size": 2, "rank": 2}, r"rank is less than world_size \(2\), found 2"),
        ({"shuffle": "blocks"}, "shuffle is one of .*'block'.* found 'blocks'"),
        ({"block_size": 0}, "block_size is at least 1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochPlan(**{"n": 10, **arguments})  # type: ignore[arg-type]
