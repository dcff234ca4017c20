"""The third choice beside staying and leaving: blocks whose tensors are computed again in the backward pass.

The FlashNeuron paper's scheduler (section 3.3) chooses among tensors. Here some blocks save their inputs only, and the
scheduler chooses among what is left; the set of blocks with the least predicted time is the plan. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import accumulate

from fastensor.offload.scheduler import (
    ComputedAgain,
    OffloadPlan,
    Prediction,
    ProfiledTensor,
    StepProfile,
    TransferRates,
    badness,
    first_plan,
    improved,
    predict,
)

_MOST_TRIED, _LEAST_TRIED = 64, 8
"""The most sets of blocks that are looked at, and how many are whatever that takes."""
_MOST_LOOKED_AT = 12_000
"""The most tensors that are looked at for more sets, all sets together."""
_FIRST_TRIED = 8
"""Numbers of blocks that are tried first, evenly from none to all of an order."""


def plan_with_blocks(
    profile: StepProfile, limit: int, rates: TransferRates, among: Iterable[frozenset[int]] | None = None
) -> OffloadPlan:
    """The plan with the least predicted time, of those that leave at most ``limit`` bytes in memory. While a block is
    computed again, its tensors are among these, and those that the backward pass has done with are not.

    Blocks are tried in the order of the forward pass, and by the memory that a second of computing saves; then single
    blocks change sides, as long as that takes a fraction of a second.

    Args:
        profile: the step, in which nothing is computed again.
        limit: the most bytes of saved tensors that may stay.
        rates: how fast tensors move.
        among: sets of blocks that may be computed again; None for any.
    """
    tried = _Tried(profile, limit, rates)
    best = tried.plan(frozenset())
    if best.out and among is not None:
        best = min((tried.plan(blocks) for blocks in among), key=badness, default=best)
    elif best.out:
        for order in _orders(profile):
            best = min(best, _best_beginning(order, tried.plan), key=badness)
        best = _exchanged(best, tried.plan, _worth_computing(profile))
    return min(map(tried.improved, (best, tried.plan(frozenset()))), key=badness)


class _Tried:
    """First plans for sets of blocks, each made once."""

    def __init__(self, profile: StepProfile, limit: int, rates: TransferRates) -> None:
        self._profile, self._limit, self._rates = profile, limit, rates
        self._known: dict[frozenset[int], OffloadPlan] = {}
        self._most = min(max(_MOST_LOOKED_AT // max(len(profile.tensors), 1), _LEAST_TRIED), _MOST_TRIED)

    def plan(self, blocks: frozenset[int]) -> OffloadPlan:
        """The first plan with these blocks; one that takes for ever if they do not fit, or enough were tried."""
        if blocks not in self._known:
            self._known[blocks] = self._new_plan(blocks)
        return self._known[blocks]

    def _new_plan(self, blocks: frozenset[int]) -> OffloadPlan:
        if blocks and len(self._known) > self._most:
            return _NEVER
        rest, numbers = without_blocks(self._profile, blocks)
        if any(one.nbytes > self._limit for one in rest.again):
            return _NEVER
        return self._of_profile(first_plan(rest, self._limit, self._rates), numbers, blocks)

    def improved(self, found: OffloadPlan) -> OffloadPlan:
        """The plan after exchanges of tensors."""
        rest, numbers = without_blocks(self._profile, found.recomputed)
        out = frozenset(index for index, number in enumerate(numbers) if number in found.out)
        best = improved(rest, self._limit, self._rates, OffloadPlan(out, predict(rest, out, self._rates)))
        return self._of_profile(best, numbers, found.recomputed)

    def _of_profile(self, found: OffloadPlan, numbers: list[int], blocks: frozenset[int]) -> OffloadPlan:
        """A plan of what is left without blocks, as one of the whole profile."""
        out = frozenset(numbers[index] for index in found.out)
        return OffloadPlan(out, _with_blocks(self._profile, out, blocks, found.prediction), blocks)


_NEVER = OffloadPlan(frozenset(), Prediction(math.inf, 0.0, 0.0, 0.0, 0, 0))


def without_blocks(profile: StepProfile, blocks: Set[int]) -> tuple[StepProfile, list[int]]:
    """The profile of a step in which blocks are computed again: of their tensors there are only the inputs, and the
    backward pass is longer.

    Returns:
        The profile, without blocks that may be computed again; and the indices of its tensors in the plan of the whole
        profile (:attr:`OffloadPlan.out`).
    """
    gone = frozenset[int]().union(*(profile.blocks[block].tensors for block in blocks))
    needed = {block: first_needed(profile, block) for block in blocks}
    later = _Later({needed[block]: profile.blocks[block].seconds for block in sorted(blocks)})
    found = [
        (one.saved_at, index, one.with_needs(later.of(one.needed_at), later.of(one.held_until)))
        for index, one in enumerate(profile.tensors)
        if index not in gone
    ]
    count = len(profile.tensors)
    for block in blocks:
        one = profile.blocks[block]
        last = max((profile.tensors[index].held_until for index in one.tensors), default=math.inf)
        inputs = ProfiledTensor(one.inputs_nbytes, one.begun_at, later.of(needed[block]), 1.0, later.of(last))
        found.append((one.begun_at, count + block, inputs))
    found.sort(key=lambda one: one[:2])
    rest = StepProfile(
        tuple(tensor for *_, tensor in found),
        profile.forward_seconds,
        profile.backward_seconds + later.seconds,
        again=tuple(
            ComputedAgain(later.of(needed[block]), block_nbytes(profile, block))
            for block in sorted(blocks)
            if not math.isinf(needed[block])
        ),
        is_alone=profile.is_alone,
    )
    return rest, [index for _, index, _ in found]


class _Later:
    """Moments of a backward pass that takes longer because blocks are computed again in it.

    Args:
        seconds: by moment of the shorter backward pass, how long it stands still for that; infinity does not count.

    >>> later = _Later({1.0: 0.5, 3.0: 0.25, math.inf: 1.0})
    >>> later.of(1.0), later.of(2.0), later.of(4.0), later.of(math.inf), later.seconds
    (1.0, 2.5, 4.75, inf, 0.75)
    """

    def __init__(self, seconds: dict[float, float]) -> None:
        self._moments = sorted(moment for moment in seconds if not math.isinf(moment))
        self._seconds = list(accumulate((seconds[moment] for moment in self._moments), initial=0.0))

    @property
    def seconds(self) -> float:
        return self._seconds[-1]

    def of(self, moment: float) -> float:
        return moment + self._seconds[bisect_left(self._moments, moment)]


def first_needed(profile: StepProfile, block: int) -> float:
    """Seconds from the start of the backward pass until the block itself needs something that it has saved. Others that
    have saved the same need it before: the backward pass comes to them first."""
    return min((profile.tensors[index].held_until for index in profile.blocks[block].tensors), default=math.inf)


def block_nbytes(profile: StepProfile, block: int) -> int:
    """Bytes that a block saves."""
    return sum(profile.tensors[index].nbytes for index in profile.blocks[block].tensors)


def predict_with_blocks(profile: StepProfile, out: Set[int], blocks: Set[int], rates: TransferRates) -> Prediction:
    """Prediction of a step.

    Args:
        profile: the step without transfers, in which nothing is computed again.
        out: what leaves memory, by its indices in a plan.
        blocks: what is computed again.
        rates: how fast tensors move.
    """
    rest, numbers = without_blocks(profile, blocks)
    leaving = frozenset(index for index, number in enumerate(numbers) if number in out)
    return _with_blocks(profile, out, blocks, predict(rest, leaving, rates))


def ways(profile: StepProfile, rates: TransferRates) -> dict[str, Prediction]:
    """Predictions of a step that does one thing with all it saves. The blocks that can be are computed again, if there
    are any."""
    everything = frozenset(range(len(profile.tensors) + len(profile.blocks)))
    blocks = frozenset(block for block, one in enumerate(profile.blocks) if one.tensors)
    chosen = {"keep": (frozenset[int](), frozenset[int]()), "move": (everything, frozenset[int]())}
    if blocks:
        chosen |= {"recompute": (frozenset[int](), blocks), "recompute, move inputs": (everything, blocks)}
    return {name: predict_with_blocks(profile, out, again, rates) for name, (out, again) in chosen.items()}


def scaled(profile: StepProfile, factor: float) -> StepProfile:
    """The profile of a step with a batch that is so many times as large: times and bytes grow alike."""
    return dataclasses.replace(
        profile,
        tensors=tuple(one.scaled(factor, factor, factor) for one in profile.tensors),
        forward_seconds=profile.forward_seconds * factor,
        backward_seconds=profile.backward_seconds * factor,
        blocks=tuple(
            dataclasses.replace(
                one,
                inputs_nbytes=int(one.inputs_nbytes * factor),
                begun_at=one.begun_at * factor,
                seconds=one.seconds * factor,
            )
            for one in profile.blocks
        ),
    )


def _with_blocks(profile: StepProfile, out: Set[int], blocks: Set[int], rest: Prediction) -> Prediction:
    """The prediction of a step whose blocks are computed again, from that of what is left without them."""
    again = peak_nbytes(profile, out, blocks)
    needed = (block for block in blocks if not math.isinf(first_needed(profile, block)))
    seconds = sum(profile.blocks[block].seconds for block in needed)
    return dataclasses.replace(rest, peak_bytes=max(rest.peak_bytes, again), recompute_seconds=seconds)


def peak_nbytes(profile: StepProfile, out: Set[int], blocks: Set[int]) -> int:
    """The most bytes that are in memory at a time: see :meth:`StepProfile.peak_bytes`.

    Args:
        profile: the step.
        out: what leaves memory, by its indices in a plan.
        blocks: what is computed again.
    """
    rest, numbers = without_blocks(profile, blocks)
    return rest.peak_bytes({index for index, number in enumerate(numbers) if number in out})


def _orders(profile: StepProfile) -> Iterator[list[int]]:
    """Orders in which blocks are chosen."""
    blocks = _worth_computing(profile)
    yield blocks
    yield sorted(blocks, key=lambda block: _gain(profile, block), reverse=True)


def _worth_computing(profile: StepProfile) -> list[int]:
    """Blocks that save more than their inputs. Those that cannot be computed again save nothing, as far as it is
    known."""
    return [block for block in range(len(profile.blocks)) if _gain(profile, block) > 0]


def _gain(profile: StepProfile, block: int) -> float:
    """Bytes of memory that a second of computing a block again saves."""
    one = profile.blocks[block]
    return (block_nbytes(profile, block) - one.inputs_nbytes) / max(one.seconds, 1e-9)


def _best_beginning(order: list[int], plan: Callable[[frozenset[int]], OffloadPlan]) -> OffloadPlan:
    """The best plan with the first few blocks of an order: some numbers of blocks are tried, then those between the
    best one and its neighbours."""

    def of_first(count: int) -> OffloadPlan:
        return plan(frozenset(order[:count]))

    step = max(math.ceil(len(order) / _FIRST_TRIED), 1)
    best = min([*range(0, len(order), step), len(order)], key=lambda count: badness(of_first(count)))
    while step > 1:
        step = (step + 1) // 2
        near = [count for count in (best - step, best, best + step) if 0 <= count <= len(order)]
        best = min(near, key=lambda count: badness(of_first(count)))
    return of_first(best)


def _exchanged(best: OffloadPlan, plan: Callable[[frozenset[int]], OffloadPlan], blocks: Sequence[int]) -> OffloadPlan:
    """The plan after single blocks have changed sides, as long as that makes it better."""
    found = min((plan(best.recomputed ^ {block}) for block in blocks), key=badness, default=best)
    return best if badness(found) >= badness(best) else _exchanged(found, plan, blocks)
