"""The embedded engine is an engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from programs import Program
from provision.conftest import has_ended

from fastensor.provision.embedded.client import EmbeddedEngine
from fastensor.provision.embedded.spec import packed
from fastensor.provision.engine import Engine, Facts
from fastensor.provision.making import Contents
from fastensor.provision.sources import Source
from fastensor.testing import ProvisionTests
from fastensor.testing.provision import StartEngine

NUMBERS = count()


class TestEmbedded(ProvisionTests):
    @pytest.fixture
    def start(self, warm_services: list[Program]) -> Iterator[StartEngine]:
        engines: list[Engine] = []

        def start(
            source: Source,
            *,
            cache_nbytes: int,
            before_cache: Callable[[Any], Any] | None = None,
            after_cache: Callable[[Any], Any] | None = None,
        ) -> Engine:
            facts = Facts(len(source), source.fingerprint(), cache_nbytes, workers=2)
            spec_fd = packed(facts, None, Contents(source, before_cache, after_cache))
            engines.append(EmbeddedEngine(f"local:conformance-{os.getpid()}-{next(NUMBERS)}", spec_fd=spec_fd))
            return engines[-1]

        yield start
        for engine in engines:
            engine.close()

    def kill(self, engine: Engine) -> None:
        pid = engine.health()["pid"]
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
