"""FlashNeuron's scheduler (section 3.3): chooses the saved tensors that leave memory, by measurements of a step. Pure.

A profile says when each tensor is saved and needed again, by a clock that stands still while hooks wait. A prediction
replays the step with some of the tensors going out and coming back over a disk of known bandwidth, and says how much
longer the step takes. The plan is the selection with the least predicted time among a few candidates: the paper's phase
1, which takes tensors from the beginning of the forward pass until the rest fits; the same among larger tensors only,
because each transfer has its price; the paper's phase 2, which prefers tensors that can be compressed; and all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MOST_LOOKED_AT = 20_000
"""The most tensors that are looked at to improve a plan, all exchanges together."""
_SIZE_STEPS = (1, 2, 4, 8)
"""Phase 1 is tried among tensors of at least the average size, its half, its quarter and its eighth, too."""


@dataclass(frozen=True, slots=True)
class ProfiledTensor:
    """A tensor that a step has saved."""

    nbytes: int
    saved_at: float
    """Seconds from the start of the forward pass until the tensor was saved."""
    needed_at: float
    """Seconds from the start of the backward pass until the tensor was needed first; infinity if it never was."""
    ratio: float = 1.0
    """Ratio of its bytes to its encoded bytes; 1 if they do not get smaller."""
    last_needed_at: float | None = None
    """Seconds from the start of the backward pass until the last of the operations that have saved the tensor needed
    it; infinity if one of them never did; None if only one has saved it."""

    @property
    def held_until(self) -> float:
        """Seconds from the start of the backward pass until its graph holds the tensor no more."""
        return self.needed_at if self.last_needed_at is None else self.last_needed_at

    def scaled(self, nbytes: float, forward: float, backward: float) -> ProfiledTensor:
        """The tensor of a step whose bytes, and times of either pass, are so many times as large."""
        one = ProfiledTensor(int(self.nbytes * nbytes), self.saved_at * forward, 0.0, self.ratio)
        return one.with_needs(self.needed_at * backward, self.held_until * backward)

    def with_needs(self, first: float, last: float) -> ProfiledTensor:
        """The tensor, if it is needed at other times."""
        return ProfiledTensor(self.nbytes, self.saved_at, first, self.ratio, last)

    @property
    def moved_bytes(self) -> float:
        """The bytes that a transfer moves."""
        return self.nbytes / self.ratio


@dataclass(frozen=True, slots=True)
class ProfiledBlock:
    """A part of the model that saves tensors, which can be computed again from its inputs."""

    tensors: frozenset[int]
    """Indices of what it saves."""
    inputs_nbytes: int
    """Bytes of its inputs, which are saved instead if the block is computed again."""
    begun_at: float
    """Seconds from the start of the forward pass until the block began."""
    seconds: float
    """The time of its forward pass."""


@dataclass(frozen=True, slots=True)
class ComputedAgain:
    """A block that the backward pass computes again."""

    at: float
    """Seconds from the start of the backward pass until that begins."""
    nbytes: int
    """Bytes of the tensors that the block saves then, until they are needed."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One forward pass and its backward pass, without the time that hooks took."""

    tensors: tuple[ProfiledTensor, ...]
    """In the order in which they were saved."""
    forward_seconds: float
    backward_seconds: float
    blocks: tuple[ProfiledBlock, ...] = ()
    """What may be computed again, in the order of the forward pass, and is not. Blocks do not overlap."""
    again: tuple[ComputedAgain, ...] = ()
    """What is computed again. Its tensors are not among :attr:`tensors`."""
    is_alone: bool = True
    """False if tensors of other forward passes may take the memory of those that the backward pass has done with."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors)

    def kept_bytes(self, out: Set[int]) -> int:
        """Bytes of the tensors that stay if those of these indices leave memory."""
        return sum(one.nbytes for index, one in enumerate(self.tensors) if index not in out)

    def peak_bytes(self, out: Set[int]) -> int:
        """The most bytes that are in memory at a time, if the tensors of these indices leave: when the forward pass
        ends, or when a block has been computed again. What the backward pass has done with is gone by then.

        >>> tensors = (ProfiledTensor(5, 0.0, 3.0), ProfiledTensor(7, 1.0, 1.0))
        >>> StepProfile(tensors, 2.0, 4.0, again=(ComputedAgain(2.0, 4),)).peak_bytes(frozenset())
        12
        >>> StepProfile(tensors, 2.0, 4.0, again=(ComputedAgain(2.0, 8),)).peak_bytes(frozenset())
        13
        """
        if not self.again:
            return self.kept_bytes(out)
        stay = [index for index in range(len(self.tensors)) if index not in out]
        return int((self._held()[stay].sum(axis=0) + self._besides()).max())

    def first_to_leave(self, order: Sequence[int], limit: int) -> frozenset[int]:
        """The first tensors of an order, so many that the others, and all that are not in the order, take at most
        ``limit`` bytes; all of the order, if they take more even then.

        Args:
            order: indices of tensors.
            limit: the most of :meth:`peak_bytes`.
        """
        held = self._held()
        gone = np.cumsum(np.vstack([0 * held[:1], held[[*order]]]), axis=0)
        fits = (held.sum(axis=0) + self._besides() - gone <= limit).all(axis=1)
        return frozenset(order[: int(fits.argmax()) if fits.any() else len(order)])

    def _held(self) -> npt.NDArray[np.int64]:
        """The bytes of each tensor (rows) in memory at the moments (columns) at which there may be most, if it stays:
        the end of the forward pass, and those of :attr:`again`."""
        nbytes = np.array([one.nbytes for one in self.tensors], dtype=np.int64)
        until = np.array([one.held_until for one in self.tensors])
        moments = np.array([-math.inf, *(one.at if self.is_alone else -math.inf for one in self.again)])
        return nbytes[:, None] * (until[:, None] >= moments)

    def _besides(self) -> npt.NDArray[np.int64]:
        """The bytes beside those of tensors at these moments."""
        return np.array([0, *(one.nbytes for one in self.again)], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Bandwidths of tensors, and budgets of bytes on the way."""

    write_bandwidth: float
    """Bytes per second."""
    read_bandwidth: float
    """Bytes per second."""
    staging_bytes: int
    """The most bytes that are saved and not written yet."""
    prefetch_bytes: int
    """The most bytes that are read before they are needed."""
    seconds_per_tensor: float = 0.0
    """Time that training stands still for each tensor that goes and comes back, whatever its size."""
    slowdown_per_byte: float = 0.0
    """Seconds by which computing takes longer for each byte that moves: transfers and computing share a CPU, and memory
    that was returned to the system has to be cleared before it is used again."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a step with some tensors offloaded."""

    step_seconds: float
    wait_to_write_seconds: float
    """Time that the forward pass waits for writes."""
    wait_to_read_seconds: float
    """Time that the backward pass waits for reads."""
    slowdown_seconds: float
    """Time by which transfers slow computing down, and time that hooks take without waiting."""
    peak_bytes: int
    """The most bytes of saved tensors that are in memory at a time in the forward pass, or while the backward pass
    computes a block again."""
    moved_bytes: int
    """Bytes that are written, and later read."""
    recompute_seconds: float = 0.0
    """Time that the backward pass takes to compute blocks again."""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The tensors that leave memory."""

    out: frozenset[int]
    """Indices of these tensors in the profile. The inputs of a block that is computed again have the index of the block
    behind those of all tensors."""
    prediction: Prediction
    recomputed: frozenset[int] = frozenset()
    """Indices of the blocks that are computed again, whose tensors neither stay nor leave."""


def predict(profile: StepProfile, out: Set[int], rates: TransferRates) -> Prediction:
    """Replay a step.

    Writes and reads go one after the other at the disk's bandwidth. The forward pass waits while more than
    ``staging_bytes`` would be on the way out; a read begins when ``prefetch_bytes`` have room, and the backward pass
    waits for what is not there yet. A tensor whose write has not begun when it is needed is taken back.

    Args:
        profile: the step without offloading.
        out: indices of the tensors that leave memory.
        rates: how fast they move.
    """
    waited, begins, peak = _forward(profile, out, rates)
    backward_at = profile.forward_seconds + waited
    waited_to_read = _backward(profile, out, rates, begins, backward_at)
    moved = sum(profile.tensors[index].moved_bytes for index in out)
    slowdown = 2 * moved * rates.slowdown_per_byte + len(out) * rates.seconds_per_tensor
    return Prediction(
        profile.forward_seconds + profile.backward_seconds + waited + waited_to_read + slowdown,
        waited,
        waited_to_read,
        slowdown,
        peak,
        int(moved),
    )


def _forward(profile: StepProfile, out: Set[int], rates: TransferRates) -> tuple[float, dict[int, float], int]:
    """Seconds that the forward pass waits; the time at which each write begins; and the most bytes in memory."""
    waited = channel_free = 0.0
    pending: deque[tuple[float, int]] = deque()  # end of the write, bytes
    pending_bytes = kept_bytes = peak = 0
    begins = {}
    for index, tensor in enumerate(profile.tensors):
        now = tensor.saved_at + waited
        while pending and (
            pending[0][0] <= now or (index in out and pending_bytes + tensor.nbytes > rates.staging_bytes)
        ):
            end, nbytes = pending.popleft()
            pending_bytes -= nbytes
            waited += max(end - now, 0.0)
            now = max(end, now)
        if index in out:
            begins[index] = max(now, channel_free)
            channel_free = begins[index] + tensor.moved_bytes / rates.write_bandwidth
            pending.append((channel_free, tensor.nbytes))
            pending_bytes += tensor.nbytes
        else:
            kept_bytes += tensor.nbytes
        peak = max(peak, kept_bytes + pending_bytes)
    return waited, begins, peak


def _backward(
    profile: StepProfile, out: Set[int], rates: TransferRates, begins: dict[int, float], started: float
) -> float:
    """Seconds that the backward pass waits."""
    waited, channel_free = 0.0, started
    ahead: deque[tuple[float, int]] = deque()  # when the tensor is used, bytes
    ahead_bytes = 0
    for index in sorted(out, key=lambda index: profile.tensors[index].needed_at):
        tensor = profile.tensors[index]
        needed = started + tensor.needed_at + waited
        if math.isinf(needed) or begins[index] >= needed:
            continue
        begin = channel_free
        while ahead and ahead_bytes + tensor.nbytes > rates.prefetch_bytes:
            used, nbytes = ahead.popleft()
            ahead_bytes -= nbytes
            begin = max(begin, used)
        channel_free = begin + tensor.moved_bytes / rates.read_bandwidth
        waited += max(channel_free - needed, 0.0)
        ahead.append((max(channel_free, needed), tensor.nbytes))
        ahead_bytes += tensor.nbytes
    return waited


def undisturbed(profile: StepProfile, moved_bytes: float, rates: TransferRates) -> StepProfile:
    """The profile of a step without its transfers, which have made computing slower. No more than half of the time is
    put down to them.

    Args:
        profile: the step as it was measured, without the time that hooks took.
        moved_bytes: bytes that were written in its forward pass, and read in its backward pass.
        rates: how much slower transfers make it.

    >>> measured = StepProfile((ProfiledTensor(100, 2.0, 4.0),), 4.0, 8.0)
    >>> alone = undisturbed(measured, 100, TransferRates(1.0, 1.0, 100, 100, slowdown_per_byte=0.01))
    >>> alone.forward_seconds, alone.backward_seconds, alone.tensors[0].saved_at, alone.tensors[0].needed_at
    (3.0, 7.0, 1.5, 3.5)
    """
    slower = moved_bytes * rates.slowdown_per_byte
    forward, backward = (
        max(1 - slower / seconds, 0.5) if seconds else 1.0
        for seconds in (profile.forward_seconds, profile.backward_seconds)
    )
    tensors = (one.scaled(1, forward, backward) for one in profile.tensors)
    blocks = (
        dataclasses.replace(one, begun_at=one.begun_at * forward, seconds=one.seconds * forward)
        for one in profile.blocks
    )
    return dataclasses.replace(
        profile,
        tensors=tuple(tensors),
        forward_seconds=profile.forward_seconds * forward,
        backward_seconds=profile.backward_seconds * backward,
        blocks=tuple(blocks),
    )


def linear(profile: StepProfile, limit: int, least_bytes: float = 0) -> frozenset[int]:
    """Phase 1: tensors from the beginning of the forward pass, until the rest is at most ``limit`` bytes.

    Args:
        profile: the step.
        limit: the most bytes that may stay.
        least_bytes: smaller tensors are not taken.

    >>> tensors = tuple(ProfiledTensor(size, at, 6.0 - at) for at, size in enumerate([3, 1, 2, 2]))
    >>> profile = StepProfile(tensors, 4.0, 6.0)
    >>> sorted(linear(profile, 4)), sorted(linear(profile, 4, least_bytes=2))
    ([0, 1], [0, 2])
    """
    large = [index for index, tensor in enumerate(profile.tensors) if tensor.nbytes >= max(least_bytes, 1)]
    return profile.first_to_leave(large, limit)


def compressible(profile: StepProfile, selected: Set[int], rates: TransferRates) -> frozenset[int]:
    """Phase 2: replace tensors that do not get smaller by others that do, until the transfer hides behind the forward
    pass, or none is left.

    In each turn the last tensor of the selection that does not get smaller goes back, and the tensors with the highest
    ratios that are not selected take its place, until they are at least as large.

    Args:
        profile: the step.
        selected: what phase 1 has selected.
        rates: how fast tensors move.
    """
    chosen = set(selected)
    tensors = profile.tensors
    friendly = sorted(
        (index for index, one in enumerate(tensors) if one.ratio > 1 and index not in chosen),
        key=lambda index: tensors[index].ratio,
    )
    stubborn = sorted(index for index in chosen if tensors[index].ratio <= 1)
    while friendly and stubborn and _write_seconds(profile, chosen, rates) > profile.forward_seconds:
        last = stubborn.pop()
        replacements: list[int] = []
        while friendly and sum(tensors[index].nbytes for index in replacements) < tensors[last].nbytes:
            replacements.append(friendly.pop())
        if sum(tensors[index].nbytes for index in replacements) < tensors[last].nbytes:
            break  # what is left is not as large: the limit would not hold
        chosen.remove(last)
        chosen.update(replacements)
    return frozenset(chosen)


def _write_seconds(profile: StepProfile, out: Set[int], rates: TransferRates) -> float:
    return sum(profile.tensors[index].moved_bytes for index in sorted(out)) / rates.write_bandwidth


def plan(profile: StepProfile, limit: int, rates: TransferRates) -> OffloadPlan:
    """The selection with the least predicted time, of those that leave at most ``limit`` bytes in memory. No block is
    computed again: see :func:`fastensor.offload.recomputing.plan_with_blocks`.

    The best candidate is improved by exchanging tensors, as long as that takes some milliseconds.

    Args:
        profile: the step.
        limit: the most bytes of saved tensors that may stay.
        rates: how fast tensors move.
    """
    return improved(profile, limit, rates, first_plan(profile, limit, rates))


def first_plan(profile: StepProfile, limit: int, rates: TransferRates) -> OffloadPlan:
    """The best of the candidates that fit."""
    fitting = (out for out in _candidates(profile, limit, rates) if profile.peak_bytes(out) <= limit)
    return min((OffloadPlan(out, predict(profile, out, rates)) for out in fitting), key=badness)


def improved(profile: StepProfile, limit: int, rates: TransferRates, best: OffloadPlan) -> OffloadPlan:
    """A plan after exchanges of tensors that make it better."""
    exchanges = _MOST_LOOKED_AT // max(len(profile.tensors), 1)
    is_better = True
    while is_better:
        is_better = False
        for exchanged in _exchanges(profile, best.out):
            if not exchanges:
                return best
            exchanges -= 1
            out = best.out ^ exchanged
            if profile.peak_bytes(out) > limit:
                continue
            if badness(other := OffloadPlan(out, predict(profile, out, rates))) < badness(best):
                best, is_better = other, True
                break
    return best


def badness(one: OffloadPlan) -> tuple[float, int]:
    """What a plan has least, if it is the best: time, and bytes that move."""
    return one.prediction.step_seconds, one.prediction.moved_bytes


def _candidates(profile: StepProfile, limit: int, rates: TransferRates) -> Iterator[frozenset[int]]:
    first = linear(profile, limit)
    yield first
    if not first:
        return  # all fit
    average = profile.nbytes / sum(one.nbytes > 0 for one in profile.tensors)
    starts = [first, *(linear(profile, limit, average / step) for step in _SIZE_STEPS)]
    yield from starts[1:]
    for start in starts:
        yield compressible(profile, start, rates)
    yield frozenset(index for index, tensor in enumerate(profile.tensors) if tensor.nbytes)


def _exchanges(profile: StepProfile, out: Set[int]) -> Iterator[frozenset[int]]:
    """Indices that may change sides: one tensor, one of each side, or one that leaves for two that stay. None if
    everything stays."""
    if not out:
        return
    yield from (frozenset({index}) for index in range(len(profile.tensors)))
    stay = [index for index in range(len(profile.tensors)) if index not in out]
    leaving = sorted(out, reverse=True)
    yield from (frozenset({one, other}) for one in leaving for other in stay)
    yield from (frozenset({one, *two}) for one in leaving for two in itertools.combinations(stay, 2))
