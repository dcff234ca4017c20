"""The tests that every engine of the data service passes.

Subclass :class:`ProvisionTests` in a test module and override the ``start`` fixture.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from fastensor.data.plan import EpochPlan
from fastensor.provision.encoding import decode
from fastensor.provision.engine import EngineLost, Feed, Pushed, Registration, ServiceEngine, Start
from fastensor.provision.sources import Source

SAMPLES = 48
SECONDS = 30
MANY = 100_000
"""More batches than a feed gives out before it notices that its engine was killed."""


class CountedSource:
    """Sample ``i`` is the array ``[i, i, ...]``. Each read of it adds a line to a file. Others fail while a file of
    their number exists.

    Args:
        folder: for these files. All processes that read have to see it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def fingerprint(self) -> str:
        return f"counted-{SAMPLES}"

    def read(self, positions: Any) -> list[Any]:
        with (self._folder / "reads").open("a") as file:
            file.write("".join(f"{position}\n" for position in positions))
        for position in positions:
            if (self._folder / str(position)).exists():
                raise LookupError(f"sample {position} is missing")
        return [np.full(500, int(position), np.float32) for position in positions]

    def reads(self) -> int:
        """Number of samples that were read so far."""
        path = self._folder / "reads"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def break_sample(self, position: int) -> None:
        """Let a sample fail from now on."""
        (self._folder / str(position)).touch()


class StartEngine(Protocol):
    """Starts the engine of a new service."""

    def __call__(
        self,
        source: Source,
        *,
        cache_nbytes: int,
        before_cache: Callable[[Any], Any] | None = None,
        after_cache: Callable[[Any], Any] | None = None,
    ) -> ServiceEngine: ...


def draw_before(sample: Any) -> dict[str, Any]:
    """A transform that draws random numbers."""
    return {"value": sample, "before": _draw()}


def draw_after(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that draws random numbers, and writes to the sample."""
    sample["value"] += 1
    return {**sample, "after": _draw()}


def with_process(samples: list[Any]) -> tuple[int, Any]:
    """A collate function that says where it runs."""
    return os.getpid(), np.stack(samples)


class ProvisionTests:
    """An engine pushes the batches of the plan, as far as credit reaches, and goes on after it was lost."""

    @pytest.fixture
    def start(self) -> Iterator[StartEngine]:
        """Starts engines, which the fixture closes."""
        raise NotImplementedError("override the start fixture")

    def kill(self, engine: ServiceEngine) -> None:
        """Kill the process of a server of an engine, and wait until it has ended."""
        raise NotImplementedError("override kill")

    @pytest.fixture
    def source(self, tmp_path: Path) -> CountedSource:
        """The source of the service."""
        return CountedSource(tmp_path)

    def test_batches_are_those_of_the_plan_from_epoch_to_epoch(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, seed=1, batch_size=5)
        assert (engine.facts.samples, engine.facts.fingerprint) == (SAMPLES, source.fingerprint())
        expected = [batch.tolist() for epoch in (2, 3, 4) for batch in plan.batches(epoch, 10 if epoch == 2 else 0)]
        feed = engine.register(Registration())
        feed.start(Start(plan, epoch=2, consumed=10))
        assert take(feed, 0, len(expected)) == expected
        feed.close()

    def test_samples_are_read_once(self, start: StartEngine, source: CountedSource) -> None:
        engine = start(source, cache_nbytes=1 << 20)
        plans = [EpochPlan(SAMPLES, batch_size=4, world_size=2, rank=rank) for rank in range(2)]
        feeds = [engine.register(Registration()) for _ in plans]
        for feed, plan in zip(feeds, plans, strict=True):
            feed.start(Start(plan, 0, 0))
        steps = plans[0].steps()
        found = [number for feed in feeds for batch in take(feed, 0, 3 * steps) for number in batch]
        assert sorted(found) == sorted(3 * list(range(SAMPLES)))
        assert source.reads() == SAMPLES
        hits = engine.health()["hits"]
        assert hits >= 2 * SAMPLES

    def test_no_more_comes_than_was_asked_for(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, batch_size=4)
        feed = engine.register(Registration(ahead=3))
        feed.start(Start(plan, 0, 0))
        came = [next_of(feed) for _ in range(3)]
        assert feed.pushed(0.2) is None
        assert sorted(one.index for one in came) == [0, 1, 2]
        feed.credit(0, 1, waited_seconds=0.0)
        assert next_of(feed).index == 3
        assert feed.pushed(0.2) is None

    def test_batches_that_are_kept_hold_nothing_up(self, start: StartEngine, source: CountedSource) -> None:
        """They take more memory than the loader has for them."""
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, batch_size=8)
        feed, kept, arrived = engine.register(Registration(buffer_nbytes=50_000)), [], {}
        feed.start(Start(plan, 0, 0))
        for index in range(12):
            while index not in arrived:
                one = next_of(feed)
                arrived[one.index] = one
            kept.append(decode(arrived.pop(index).content))
            feed.credit(0, index + 1, waited_seconds=0.0)
        values = [batch[:, 0].tolist() for batch in kept]
        assert values == [batch.tolist() for epoch in range(2) for batch in plan.batches(epoch)]

    def test_a_loader_that_takes_nothing_holds_no_other_up(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, batch_size=4)
        idle, busy = (engine.register(Registration(buffer_nbytes=100_000)) for _ in range(2))
        idle.start(Start(plan, 0, 0))
        busy.start(Start(plan, 0, 0))
        assert take(busy, 0, 24) == [batch.tolist() for epoch in range(2) for batch in plan.batches(epoch)]
        assert take(idle, 0, 12) == [batch.tolist() for batch in plan.batches(0)]

    def test_a_loader_can_begin_elsewhere(self, start: StartEngine, source: CountedSource) -> None:
        """Batches of before may still come, and say so."""
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, batch_size=4)
        feed = engine.register(Registration())
        for generation, epoch in enumerate((0, 5, 1)):
            feed.start(Start(plan, epoch, 0, generation=generation))
            assert take(feed, generation, 2) == [batch.tolist() for batch in plan.batches(epoch)][:2]

    def test_a_bad_sample_is_told_in_its_place(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, shuffle="none", batch_size=4)
        source.break_sample(9)
        feed = engine.register(Registration(ahead=4))
        feed.start(Start(plan, 0, 0))
        came = {one.index: one for one in (next_of(feed) for _ in range(4))}
        assert [index for index, one in came.items() if one.failure] == [2]
        assert "sample 9 is missing" in came[2].failure
        assert "Traceback" in came[2].failure

    def test_broken_samples_are_left_out(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, shuffle="none", batch_size=4)
        for position in (9, 12, 13, 14, 15):
            source.break_sample(position)
        feed = engine.register(Registration(ahead=4, on_error="skip"))
        feed.start(Start(plan, 0, 0))
        came = {one.index: one for one in (next_of(feed) for _ in range(4))}
        assert not any(one.failure for one in came.values())
        assert [came[index].cost.skipped for index in range(4)] == [0, 0, 1, 4]
        assert [came[index].cost.samples for index in range(4)] == [4, 4, 3, 1]
        batch, positions, reasons = decode(came[2].content)
        assert (batch[:, 0].tolist(), positions) == ([8, 10, 11], [9])
        assert reasons == ["LookupError: sample 9 is missing"]
        substitute, positions, _ = decode(came[3].content)
        assert len(substitute) == 1
        assert (positions, substitute[0, 0].item() in range(12, 16)) == ([12, 13, 14, 15], False)

    @pytest.mark.parametrize("cache_nbytes", [0, 40_000, 1 << 20])
    def test_random_numbers_depend_on_sample_and_epoch(
        self, start: StartEngine, source: CountedSource, cache_nbytes: int
    ) -> None:
        engine = start(source, cache_nbytes=cache_nbytes, before_cache=draw_before, after_cache=draw_after)
        plan = EpochPlan(SAMPLES, seed=3, batch_size=8)
        feed = engine.register(Registration())
        feed.start(Start(plan, 0, 0))
        batches = take_values(feed, 0, 12)
        of_epochs = [sorted(rows(part)) for part in (batches[:6], batches[6:])]
        assert [row[:2] for row in of_epochs[0]] == [row[:2] for row in of_epochs[1]]
        assert all(first[2] != second[2] for first, second in zip(*of_epochs, strict=True))
        assert [row[0] for row in of_epochs[0]] == [number + 1 for number in range(SAMPLES)]
        again = engine.register(Registration())
        again.start(Start(EpochPlan(SAMPLES, seed=3, batch_size=48), 0, 0))
        assert sorted(rows(take_values(again, 0, 1))) == of_epochs[0]

    def test_functions_of_a_loader_run_elsewhere(self, start: StartEngine, source: CountedSource) -> None:
        engine = start(source, cache_nbytes=1 << 20)
        feed = engine.register(Registration(collate_fn=with_process))
        feed.start(Start(EpochPlan(SAMPLES, batch_size=4), 0, 0))
        process, values = take_values(feed, 0, 1)[0]
        assert process != os.getpid()
        assert values.shape == (4, 500)

    def test_the_cache_can_be_filled_before(self, start: StartEngine, source: CountedSource) -> None:
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, batch_size=4)
        engine.preload(plan, 0)
        while engine.health()["cached_samples"] < SAMPLES:
            pass
        feed = engine.register(Registration())
        feed.start(Start(plan, 0, 0))
        assert take(feed, 0, 12) == [batch.tolist() for batch in plan.batches(0)]
        assert source.reads() == SAMPLES

    def test_it_goes_on_after_it_was_lost(self, start: StartEngine, source: CountedSource) -> None:
        """From where the trainer is, with the numbers that batches had before."""
        engine, plan = start(source, cache_nbytes=1 << 20), EpochPlan(SAMPLES, seed=1, batch_size=4)
        expected = [batch.tolist() for batch in plan.batches(0)]
        feed = engine.register(Registration())
        feed.start(Start(plan, 0, 0))
        arrived: dict[int, Any] = {}
        assert take(feed, 0, 5, arrived=arrived) == expected[:5]
        self.kill(engine)
        with pytest.raises(EngineLost):
            take(feed, 0, MANY, begin=5, arrived=arrived)
        feed.close()
        engine.recover()
        feed = engine.register(Registration())
        feed.start(Start(plan, 0, 5 * 4, index=5))
        assert take(feed, 0, 7, begin=5) == expected[5:]


def next_of(feed: Feed) -> Pushed:
    """Next item of a feed; fails if there is none."""
    pushed = feed.pushed(SECONDS)
    assert pushed is not None, "nothing was pushed"
    return pushed


def take_values(
    feed: Feed, generation: int, count: int, *, begin: int = 0, arrived: dict[int, Any] | None = None
) -> list[Any]:
    """The next ``count`` batches of a generation, in order, as a loader takes them.

    Args:
        arrived: batches that came before those in front of them. Give the same to calls that go on with a generation.
    """
    arrived = {} if arrived is None else arrived
    for index in range(begin, begin + count):
        while index not in arrived:
            one = next_of(feed)
            if one.generation == generation:
                assert not one.failure, one.failure
                arrived[one.index] = decode(memoryview(bytearray(one.content)))
        feed.credit(generation, index + 1, waited_seconds=0.0)
    return [arrived.pop(index) for index in range(begin, begin + count)]


def take(feed: Feed, generation: int, count: int, **options: Any) -> list[list[int]]:
    """The numbers of the samples of the next ``count`` batches. See :func:`take_values`."""
    return [batch[:, 0].int().tolist() for batch in take_values(feed, generation, count, **options)]


def rows(batches: list[Any]) -> list[tuple[float, ...]]:
    """Number of each sample, and the random numbers that its transforms have drawn."""
    return [
        row
        for batch in batches
        for row in zip(batch["value"][:, 0].tolist(), batch["before"].tolist(), batch["after"].tolist(), strict=True)
    ]


def _draw() -> float:
    return random.random() + float(np.random.random()) + torch.rand(()).item()
