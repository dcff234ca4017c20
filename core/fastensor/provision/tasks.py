"""Choosing the next tasks of workers, by what they have done. No process and no connection is touched here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastensor.data.coalescing import Integers
from fastensor.data.plan import EpochPlan, Positions
from fastensor.data.ring import Slot
from fastensor.provision.cache import SampleCache
from fastensor.provision.engine import Facts, Start
from fastensor.provision.feeding import BatchStream, Orders, Preloading, key_of
from fastensor.provision.work import Done, Work

_NONE = np.zeros(0, np.int64)
_MOST_ATTEMPTS = 3
"""A task that so many workers have been killed with is not given to another one."""
_NEIGHBOURS = 16
"""Number of consecutive samples that one server keeps."""
_STRANGE = 32
"""The cache follows another order when so many batches in a row were of other orders than its own."""
_MOST_PRELOADED = 16
"""Samples that are read together for the cache only. A batch may have to wait for them."""


def owners(positions: Positions, servers: int) -> Positions:
    """The number of the server that keeps each sample. Neighbours, which may be read together, have the same."""
    return positions // _NEIGHBOURS % servers


@dataclass(slots=True, eq=False)
class Task:
    """Task of a worker: a batch for a loader, or samples for the cache."""

    number: int
    stream: BatchStream | None
    """Whom the batch is for. None: only samples are read."""
    batch: Start | None
    """Its place. None: the samples are read for the cache only."""
    plan: EpochPlan
    position: int
    """In the order of all epochs: when the samples are used next, at the earliest."""
    positions: Positions
    slot: Slot | None = None
    begun_seconds: float = field(default_factory=time.monotonic)
    """Time at which it was begun."""
    attempts: int = 0
    """Workers that have been killed with it."""
    offsets: Integers = field(default_factory=lambda: _NONE)
    """Offsets of the samples in the cache, -1 for those that are not there."""
    writes: Integers = field(default_factory=lambda: _NONE)
    """Positions of the samples that the worker was told to write to the cache."""


class Tasks:
    """Pending tasks for the loaders of a service. See the module.

    Args:
        facts: of the service.
        server: the number of the server that keeps samples here.
        servers: how many there are. Each has its part of the samples, and of the cache.
    """

    def __init__(self, facts: Facts, *, server: int = 0, servers: int = 1) -> None:
        self.orders = Orders()
        self._server, self._servers = server, servers
        begins = range(server * _NEIGHBOURS, facts.samples, servers * _NEIGHBOURS)
        self._samples = len(begins) * _NEIGHBOURS - max(begins[-1] + _NEIGHBOURS - facts.samples, 0) if begins else 0
        """The number of samples that are kept here."""
        self.cache = SampleCache(facts.samples, nbytes=facts.cache_nbytes // servers if facts.samples else 0)
        self._strange = 0
        """Batches in a row that were not of the order that the cache follows."""
        self._numbers = 0
        self._again: list[Task] = []
        """Tasks of workers that were killed."""
        self._preloading: Preloading | None = None
        self._cache_is_full = False
        """True if it has had no room for samples that come next, and no batch was made since."""

    def start(self, start: Start) -> None:
        """Let the cache follow an order, and be filled in it, from a place on."""
        plan, position = start.plan, start.epoch * start.plan.n + start.consumed
        self._strange = 0
        schedule = self.orders.follow(plan, position)
        if self.cache.nbytes:
            self.cache.reschedule(schedule.next_uses(np.arange(plan.n), from_position=position))
            size = min(plan.batch_size, _MOST_PRELOADED) * self._servers
            self._preloading = Preloading(plan, position, size=size)
            self._cache_is_full = False

    def next_batch(self, loaders: Iterable[BatchStream]) -> Task | None:
        """A batch for the loader that needs one most.

        Args:
            loaders: those that can be sent one.
        """
        while self._again:
            task = self._again.pop()
            if task.stream is not None and not task.stream.is_gone:
                return task
        for stream in sorted((one for one in loaders if one.has_credit), key=lambda one: one.turn):
            if self.cache.awaits(positions := stream.positions(self.orders)):
                continue  # samples that are read now are not read twice
            placed = stream.ring.place(stream.room_nbytes)
            if placed is not None or not stream.ahead:  # there is room again when the trainer drops a batch
                task = self.task_of(stream.issue(), positions)
                stream.served = task.number
                return replace(task, stream=stream, slot=None if placed is None else placed[0])
        return None

    def task_of(self, batch: Start, positions: Positions) -> Task:
        """Task that reads for a batch: the samples of it that are kept here. The cache follows its order, unless it
        follows another one that is in use."""
        plan, begin = batch.plan, batch.epoch * batch.plan.n
        self._strange = 0 if self.orders.followed == key_of(plan) else self._strange + 1
        if self.orders.followed is None or self._strange > _STRANGE:
            self.start(batch)
        after = begin + plan.consumed_after(1, batch.consumed)
        self.orders.passed(plan, begin + batch.consumed)
        if self._preloading is not None and key_of(plan) == self.orders.followed:
            self._preloading.passed(after)
        return Task(self._next_number(), None, batch, plan, after, self._own(positions))

    def next_preload(self) -> Task | None:
        """Samples that the cache has not, and that will be used soon."""
        while self._preloading is not None and not self._cache_is_full:
            if (found := self._preloading.next_chunk(self.orders)) is None:
                return None
            position, chunk = found
            if len(lacking := self.cache.lacking(self._own(chunk))):
                self._preloading.found_missing()
                if not self.cache.would_keep(len(lacking), position + len(chunk)):
                    self._preloading.go_back(position)
                    self._cache_is_full = True
                    return None
                self.cache.counts["preloaded"] += len(lacking)
                return Task(self._next_number(), None, None, self._preloading.plan, position, lacking)
        return None

    def work_of(self, task: Task) -> Work:
        """Message to a worker. The samples are held from now on."""
        task.offsets, lengths = self.cache.take(task.positions)
        self.cache.reading(task.positions[task.offsets < 0])
        loader = -1 if task.stream is None else task.stream.number
        epoch = 0 if task.batch is None else task.batch.epoch
        if task.batch is not None:
            hits = int((task.offsets >= 0).sum())
            self.cache.counts["hits"] += hits
            self.cache.counts["misses"] += len(task.positions) - hits
        where = (task.slot.offset, task.slot.nbytes) if task.slot is not None else (0, 0)
        return Work(task.number, loader, task.plan.seed, epoch, *where, task.positions, task.offsets, lengths)

    def done(self, task: Task, done: Done) -> Integers:
        """A worker has done a task. Returns where it is to write the samples that it has read, -1 for none.

        What it could not read for the cache is not read ahead again; the loader that needs it will be told.
        """
        self.cache.damaged(done.lost)
        if task.batch is None:
            self.cache.not_readable(np.setdiff1d(task.positions[task.offsets < 0], done.read))
        self.finished(task)
        offsets = self.cache.store(done.read, done.lengths, self._next_uses(task, done.read))
        task.writes = done.read[offsets >= 0]
        self._cache_is_full = task.batch is None and len(task.writes) < len(done.read)
        if self._cache_is_full and self._preloading is not None:
            self._preloading.go_back(task.position)
        return offsets

    def written(self, task: Task) -> None:
        """A worker has written the samples of a task."""
        self.cache.written(task.writes, self._next_uses(task, task.writes))

    def finished(self, task: Task) -> None:
        """A worker does not use the samples of a task any more."""
        self.cache.not_reading(task.positions[task.offsets < 0])
        used = task.positions[task.offsets >= 0]
        self.cache.give_back(used, self._next_uses(task, used))

    def postpone(self, task: Task) -> None:
        """The worker that was to do a task has ended before: another one does it."""
        self.finished(task)
        self._again.append(task)

    def killed(self, task: Task) -> bool:
        """A worker has ended while it did a task. Returns whether it is tried once more: what was read ahead is not."""
        task.attempts += 1
        if task.batch is not None and task.attempts < _MOST_ATTEMPTS:
            self.postpone(task)
            return True
        self.finished(task)
        return False

    def status(self) -> dict[str, Any]:
        """Counts, for people and monitors."""
        cache = self.cache
        if not cache.nbytes:
            return {**cache.counts, "is_filled": True}
        has_all = cache.samples + cache.unreadable == self._samples
        return {
            **cache.counts,
            "cached_samples": cache.samples,
            "cached_nbytes": cache.used_nbytes,
            "evictions": cache.evictions,
            "is_filled": self._cache_is_full or cache.evictions > 0 or has_all,
        }

    def _own(self, positions: Positions) -> Positions:
        """The positions whose samples this server keeps."""
        return positions if self._servers == 1 else positions[owners(positions, self._servers) == self._server]

    def _next_uses(self, task: Task, samples: Integers) -> Integers:
        if not len(samples):
            return _NONE
        position = task.position if task.batch is not None else max(task.position, self.orders.position)
        return self.orders.next_uses(samples, task.plan, position)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
