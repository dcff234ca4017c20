"""The embedded engine is an engine."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from programs import Program
from provision.conftest import has_ended

from fastensor.data.plan import EpochPlan
from fastensor.provision.embedded.client import EmbeddedEngine
from fastensor.provision.embedded.spec import packed
from fastensor.provision.engine import EngineLost, Facts, Registration, ServiceEngine, Start
from fastensor.provision.making import UserObjects
from fastensor.provision.sources import Source
from fastensor.testing import ProvisionTests
from fastensor.testing.provision import MANY, SAMPLES, CountedSource, StartEngine, take

NUMBERS = count()


class TestEmbedded(ProvisionTests):
    @pytest.fixture
    def start(self, warm_services: list[Program]) -> Iterator[StartEngine]:
        engines: list[ServiceEngine] = []

        def start(
            source: Source,
            *,
            cache_nbytes: int,
            before_cache: Callable[[Any], Any] | None = None,
            after_cache: Callable[[Any], Any] | None = None,
        ) -> ServiceEngine:
            facts = Facts(len(source), source.fingerprint(), cache_nbytes, workers=2)
            spec_fd = packed(facts, UserObjects(source, before_cache, after_cache))
            engines.append(EmbeddedEngine(f"local:conformance-{os.getpid()}-{next(NUMBERS)}", spec_fd=spec_fd))
            return engines[-1]

        yield start
        for engine in engines:
            engine.close()

    def kill(self, engine: ServiceEngine) -> None:
        pid = engine.health()["pid"]
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)

    def test_what_a_caller_holds_goes_without_the_garbage_collector(
        self, start: StartEngine, source: CountedSource
    ) -> None:
        """Although calls have failed: the one that looks for a server before it is started, and one to a dead one."""

        def call() -> weakref.ref[CountedSource]:
            held = CountedSource(Path())
            engine = start(source, cache_nbytes=1 << 20)
            feed = engine.register(Registration())
            feed.start(Start(EpochPlan(SAMPLES, batch_size=4), 0, 0))
            self.kill(engine)
            with suppress(EngineLost):
                take(feed, 0, MANY)
            feed.close()
            return weakref.ref(held)

        gc.collect()
        gc.disable()
        try:
            assert call()() is None
        finally:
            gc.enable()
