"""Choosing the next batch of each loader, and the next use of each sample. Everything here is pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from fastensor.data.coalescing import Integers
from fastensor.data.plan import EpochPlan, Positions
from fastensor.data.ring import NO_SLOT, Slot, SlotWriter
from fastensor.provision.credits import FIRST, ClientPace, turn
from fastensor.provision.engine import Registration, Start

_Key: TypeAlias = tuple[object, ...]
_MOST_ORDERS = 8
"""Orders that are kept at the same time. One more makes the oldest forgotten, and computed anew if it is used."""


class Orders:
    """The orders of epochs, each computed once for all ranks, and the one of them that the cache follows.

    Loaders that differ in nothing but their ranks and batch sizes have one order.
    """

    def __init__(self) -> None:
        self._schedules: dict[_Key, Schedule] = {}
        self.followed: _Key | None = None
        """The order that says when a sample is used next."""
        self.position = 0
        """Position of the loader that is ahead of the others."""

    def order(self, plan: EpochPlan, epoch: int) -> Positions:
        """The samples of an epoch."""
        return self._schedule(plan).order(epoch)

    def positions_of(self, batch: Start) -> Positions:
        """The samples of a batch."""
        order = self.order(batch.plan, batch.epoch)
        return next(batch.plan.batches(batch.epoch, batch.consumed, order=order))

    def follow(self, plan: EpochPlan, position: int) -> Schedule:
        """Let the cache follow an order from a position on."""
        self.followed, self.position = key_of(plan), position
        return self._schedule(plan)

    def passed(self, plan: EpochPlan, position: int) -> None:
        """Loaders of an order have come so far."""
        if key_of(plan) == self.followed:
            self.position = max(self.position, position)

    def next_uses(self, samples: Integers, plan: EpochPlan, position: int) -> Integers:
        """Next uses of samples.

        Args:
            plan: of the loader that uses them now.
            position: where that is in its order; ignored if the cache follows another one.
        """
        assert self.followed is not None
        begin = position if key_of(plan) == self.followed else self.position
        return self._schedules[self.followed].next_uses(samples, from_position=begin)

    def _schedule(self, plan: EpochPlan) -> Schedule:
        if (key := key_of(plan)) not in self._schedules:
            kept = {*[*self._schedules][1 - _MOST_ORDERS :], self.followed}
            self._schedules = {known: schedule for known, schedule in self._schedules.items() if known in kept}
            self._schedules[key] = Schedule(plan)
        return self._schedules[key]


def key_of(plan: EpochPlan) -> _Key:
    """Values on which the order of an epoch depends. The same for all ranks, and all batch sizes."""
    blocks = (plan.block_size, plan.blocks_per_group) if plan.shuffle == "block" else ()
    return (plan.n, plan.seed, plan.shuffle, *blocks)


@dataclass(slots=True)
class Flow:
    """The batches of a loader: which one is made next, and how far they are ahead of the trainer."""

    number: int
    registration: Registration
    plan: EpochPlan | None = None
    """None: it has not begun."""
    generation: int = -1
    taken: int = 0
    """Batches of this generation before this number were given out."""
    issued: int = 0
    """Those before this number are made, or were."""
    nbytes: int = 0
    """Bytes reserved for the next batch; 0 if none was made yet."""
    upcoming: Start | None = None
    """Place of the next batch to be made; None if there is none."""

    @property
    def has_credit(self) -> bool:
        """True if another batch may be made."""
        return self.upcoming is not None and self.ahead < self.registration.ahead

    @property
    def ahead(self) -> int:
        """Batches that were sent, or are made, and were not given out."""
        return self.issued - self.taken

    @property
    def room_nbytes(self) -> int:
        """Bytes that the next batch may need."""
        buffer, ahead = self.registration.buffer_nbytes, self.registration.ahead
        return self.nbytes or min(buffer // max(ahead, 2), buffer // 2)

    def begin(self, start: Start) -> None:
        """Go on somewhere else."""
        self.plan, self.generation = start.plan, start.generation
        self.taken = self.issued = start.index
        if not start.plan.steps(start.consumed):
            start = replace(start, epoch=start.epoch + 1, consumed=0)
        self.upcoming = start if start.plan.steps() else None

    def take(self, generation: int, taken: int) -> bool:
        """The trainer has been given batches before this number. It may have got some of them from a server that has
        ended: they are not made. False if that is of another generation, or makes no sense, and is of no use."""
        if generation != self.generation or not self.taken < taken <= self.issued + self.registration.ahead:
            return False
        while self.issued < taken and self.upcoming is not None:
            self.issue()
        self.taken = min(taken, self.issued)
        return True

    def issue(self) -> Start:
        """Take what is to be made next."""
        batch = self.upcoming
        assert batch is not None
        self.issued, self.upcoming = batch.index + 1, batch.following()
        return batch

    def measured(self, nbytes: int) -> None:
        """A batch of so many bytes was made."""
        self.nbytes = max(nbytes, self.nbytes - self.nbytes // 16)  # one that is unusually large is forgotten later


@dataclass(slots=True)
class BatchStream(Flow):
    """A loader whose batches are sent through a ring."""

    ring: SlotWriter = field(kw_only=True)
    is_gone: bool = False
    """True if its client has ended. What is still made for it is thrown away."""
    served: int = -1
    """The number of the task that makes its latest batch; -1 if there was none."""
    needed: int = FIRST
    """Number of batches ahead that keep the trainer from waiting, as far as was measured."""
    _pace: ClientPace = field(default_factory=ClientPace)
    _looked_up: tuple[Start, Positions] | None = None
    """The batch whose samples were looked up last, and these: it is looked at whenever a worker is free."""

    def positions(self, orders: Orders) -> Positions:
        """The samples of the upcoming batch."""
        assert self.upcoming is not None
        if self._looked_up is None or self._looked_up[0] is not self.upcoming:
            self._looked_up = self.upcoming, orders.positions_of(self.upcoming)
        return self._looked_up[1]

    @property
    def turn(self) -> tuple[bool, int, int]:
        """The key by which loaders are sorted when a worker is free."""
        return turn(self.ahead, self.needed, self.served)

    def credit(self, generation: int, taken: int, waited_seconds: float, *, now: float) -> None:
        """See :meth:`take`. The trainer has waited so long for the last batch, which it has taken now."""
        if self.take(generation, taken):
            self._pace = self._pace.taken(at=now, waited=waited_seconds)
            self.needed = self._pace.needed()

    def made(self, slot: Slot | None, nbytes: int, *, is_in_slot: bool, seconds: float) -> Slot:
        """A batch was made. Returns the slot that it is in; one without a number if it is in memory of its own.

        Args:
            slot: that it was given.
            nbytes: that it has.
            seconds: that it took.
        """
        self.measured(nbytes)
        self._pace = self._pace.made(seconds=seconds)
        if slot is not None and is_in_slot:
            return self.ring.shrink(slot, nbytes)
        self.free(slot)
        return Slot(NO_SLOT, 0, nbytes)

    def free(self, slot: Slot | None) -> None:
        """Release an unsent slot."""
        if slot is not None:
            self.ring.release(slot.sequence)


class Preloading:
    """Samples that are read for the cache only, when there is nothing else to do: those that come next.

    Args:
        plan: in the order of which.
        position: in the order of all epochs, from which on.
        size: samples that are read together.
    """

    def __init__(self, plan: EpochPlan, position: int, *, size: int) -> None:
        self.plan = plan
        self._position = position
        self._size = size
        self._in_vain = 0
        """Samples in a row that the cache had."""

    def passed(self, position: int) -> None:
        """Batches up to here are made; what is before it need not be read any more."""
        self._position = max(self._position, position)

    def go_back(self, position: int) -> None:
        """There was no room for samples from here on."""
        self._position = min(self._position, position)

    def next_chunk(self, orders: Orders) -> tuple[int, Positions] | None:
        """The next samples, some of which the cache may have, and their position in the order of all epochs. None if it
        has had all of an epoch."""
        if self._in_vain >= self.plan.n:
            return None
        begin, (epoch, consumed) = self._position, divmod(self._position, self.plan.n)
        samples = orders.order(self.plan, epoch)[consumed : consumed + self._size]
        self._position += len(samples)
        self._in_vain += len(samples)
        return begin, samples

    def found_missing(self) -> None:
        """The cache lacked some of the last chunk."""
        self._in_vain = 0


class Schedule:
    """Schedule of uses: the order of epochs, and the next use of a sample, by its position in the plan of all epochs.
    Keeps the orders of a few epochs, which take 16 bytes for each sample.

    The position of a use is ``epoch * n + place``, with the number n of samples and the place in the order of the
    epoch. So positions count the uses of all epochs, and no two uses have the same.

    >>> schedule, samples = Schedule(EpochPlan(4, shuffle="none")), np.array([1, 2])
    >>> schedule.next_uses(samples, from_position=6), schedule.next_uses(samples, from_position=7)
    (array([9, 6]), array([ 9, 10]))
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._epochs: dict[int, tuple[Positions, Positions]] = {}
        """The order of an epoch, and the place of each sample in it."""

    def order(self, epoch: int) -> Positions:
        """The samples of an epoch, in its order."""
        return self._epoch(epoch)[0]

    def next_uses(self, samples: Positions, *, from_position: int) -> Positions:
        """The first positions from the given one on at which samples are used."""
        epoch, place = divmod(from_position, self._plan.n)
        places = self._epoch(epoch)[1][samples]
        late = places < place
        if late.any():
            places = np.where(late, self._epoch(epoch + 1)[1][samples] + self._plan.n, places)
        return places + epoch * self._plan.n

    def _epoch(self, epoch: int) -> tuple[Positions, Positions]:
        if epoch not in self._epochs:
            order = self._plan.order(epoch)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            self._epochs = {known: self._epochs[known] for known in self._epochs if abs(known - epoch) < 2}
            self._epochs[epoch] = order, places
        return self._epochs[epoch]
