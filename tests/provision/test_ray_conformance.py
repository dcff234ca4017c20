"""The engine on Ray is an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytest.importorskip("ray", reason="the engine on Ray needs it: pip install 'fastensor[ray]'")

from provision.rays import local_ray

from fastensor.provision.engine import Engine, Facts
from fastensor.provision.making import Contents
from fastensor.provision.ray.client import RayEngine, joined
from fastensor.provision.sources import Source
from fastensor.testing import ProvisionTests
from fastensor.testing.provision import StartEngine

NUMBERS = count()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


class TestRay(ProvisionTests):
    """One server: each takes seconds to start, because it imports torch."""

    servers = 1

    @pytest.fixture
    def start(self, ray: Any) -> Iterator[StartEngine]:
        engines: list[Engine] = []

        def start(
            source: Source,
            *,
            cache_nbytes: int,
            before_cache: Callable[[Any], Any] | None = None,
            after_cache: Callable[[Any], Any] | None = None,
        ) -> Engine:
            facts = Facts(len(source), source.fingerprint(), cache_nbytes, workers=self.servers)
            name = f"conformance-{os.getpid()}-{next(NUMBERS)}"
            engines.append(joined(facts, Contents(source, before_cache, after_cache), name, address="", keeper="none"))
            return engines[-1]

        yield start
        for engine in engines:
            engine.close()

    def kill(self, engine: Engine) -> None:
        """All actors, for good: Ray replaces a server by itself."""
        import ray

        assert isinstance(engine, RayEngine)
        for actor in (engine._manager, *engine._servers):
            ray.kill(actor)


@pytest.mark.torture
class TestServersOfRay(TestRay):
    """Several servers, which need samples of each other."""

    servers = 3
