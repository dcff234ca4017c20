"""Which loader gets the next batch."""

from __future__ import annotations

import numpy as np
import pytest

from fastensor.data.plan import EpochPlan
from fastensor.data.ring import SlotWriter
from fastensor.provision.engine import Facts, Registration, Start
from fastensor.provision.feeding import BatchStream, key_of
from fastensor.provision.tasks import Tasks
from fastensor.provision.work import Done


def test_loaders_of_an_overloaded_service_take_turns() -> None:
    """Each takes what it is sent at once, so none has anything ahead."""
    tasks = Tasks(Facts(samples=1000, fingerprint="", cache_nbytes=0, workers=1))
    streams = [BatchStream(number, Registration(), ring=SlotWriter(1 << 20)) for number in range(3)]
    for stream in streams:
        start = Start(EpochPlan(1000, seed=stream.number), 0, 0, generation=1)
        stream.begin(start)
    served = []
    for moment in range(9):
        task = tasks.next_batch(streams)
        assert task is not None
        assert task.stream is not None
        assert task.batch is not None
        served.append(task.stream.number)
        task.stream.credit(1, task.batch.index + 1, 0.0, now=float(moment))
    assert served == [0, 1, 2] * 3


def test_what_could_not_be_read_ahead_is_not_read_ahead_again() -> None:
    tasks = Tasks(Facts(samples=100, fingerprint="", cache_nbytes=1 << 20, workers=1))
    tasks.start(Start(EpochPlan(100, shuffle="none"), 0, 0))
    tried: list[int] = []
    while (task := tasks.next_preload()) is not None:
        tried += task.positions.tolist()
        assert not tasks.killed(task)
        tasks.cache.not_readable(task.positions)
        assert len(tried) <= 100
    assert tried == list(range(100))


@pytest.mark.parametrize("samples", [0, 1, 16, 47, 48, 49, 100])
@pytest.mark.parametrize("servers", [1, 3])
def test_caches_are_filled_that_have_all_samples_of_their_servers(samples: int, servers: int) -> None:
    facts, kept = Facts(samples=samples, fingerprint="", cache_nbytes=1 << 20, workers=servers), []
    for server in range(servers):
        tasks = Tasks(facts, server=server, servers=servers)
        if samples:
            tasks.start(Start(EpochPlan(samples, seed=1), 0, 0))
        while (task := tasks.next_preload()) is not None:
            assert not tasks.status()["is_filled"]
            tasks.work_of(task)
            lengths = np.full(len(task.positions), 100)
            assert (tasks.done(task, Done(task.number, 0, task.positions, lengths, task.positions[:0])) >= 0).all()
            tasks.written(task)
            kept += task.positions.tolist()
        assert tasks.status()["is_filled"]
    assert sorted(kept) == list(range(samples))


def test_the_cache_follows_an_order_that_is_in_use() -> None:
    """Another one that is used as well changes nothing, until the first one is used no more."""
    tasks = Tasks(Facts(samples=100, fingerprint="", cache_nbytes=1 << 20, workers=1))
    plans = [EpochPlan(100, seed=seed, batch_size=4) for seed in (1, 2)]
    batches = [Start(plan, 3, 8) for plan in plans]
    for _ in range(100):
        for plan, batch in zip(plans, batches, strict=True):
            positions = tasks.orders.positions_of(batch)
            assert tasks.task_of(batch, positions).positions.tolist() == plan.order(3)[8:12].tolist()
        assert tasks.orders.followed == key_of(plans[0])
    for _ in range(100):
        tasks.task_of(batches[1], positions)
    assert tasks.orders.followed == key_of(plans[1])
    task = tasks.next_preload()
    assert task is not None
    assert task.positions.tolist() == plans[1].order(3)[12:16].tolist()


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_follow_each_other_from_epoch_to_epoch(*, drop_last: bool) -> None:
    plan = EpochPlan(10, seed=1, batch_size=2, world_size=2, rank=1, drop_last=drop_last)
    tasks, stream = Tasks(Facts(10, "", 0, workers=1)), BatchStream(0, Registration(), ring=SlotWriter(1 << 20))
    expected = [batch.tolist() for epoch in (3, 4, 5) for batch in plan.batches(epoch)]
    for consumed, skipped in ((0, 0), (4, 1), (10, plan.steps())):
        stream.begin(Start(plan, 3, consumed, generation=7, index=5))
        issued = [stream.issue() for _ in expected[skipped:]]
        assert [tasks.orders.positions_of(batch).tolist() for batch in issued] == expected[skipped:]
        assert [(batch.generation, batch.index) for batch in issued] == [(7, 5 + one) for one in range(len(issued))]
    stream.begin(Start(EpochPlan(1, batch_size=2, drop_last=True), 0, 0))
    assert not stream.has_credit
