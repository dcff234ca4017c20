"""The metrics of a server, by Ray's own means: each node of Ray exports those of its actors to Prometheus."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from fastensor.provision.cache import SampleCache
from fastensor.provision.metrics import BOUNDS, COUNTERS, EVICTIONS, GAUGES, WAITS, Served, exposed_name

_BOUNDS = [bound for number, bound in enumerate(BOUNDS) if number % 4 == 0]


class Exported:
    """Metrics of a server. Prometheus sees the names with ``ray_`` before them.

    Args:
        service: its name.
        server: the number of this one.
    """

    def __init__(self, service: str, server: int) -> None:
        tags = {"service": service, "server": str(server)}
        ranked = (*tags, "rank")
        self._counters = {name: Counter(exposed_name(name), text, ranked) for name, text in COUNTERS.items()}
        self._waits = Histogram(exposed_name("wait_seconds"), WAITS, _BOUNDS, ranked)
        self._gauges = {name: Gauge(exposed_name(f"cache_{name}"), text, tuple(tags)) for name, text in GAUGES.items()}
        self._evictions = Counter(exposed_name("cache_evictions"), EVICTIONS, tuple(tags))
        self._evicted = 0
        """Evictions that were exported."""
        for metric in (*self._counters.values(), self._waits, *self._gauges.values(), self._evictions):
            metric.set_default_tags(tags)

    def add(self, rank: int, made: Served, waited_seconds: float | None, cache: SampleCache) -> None:
        """Count what was made for a rank since the last call.

        Args:
            rank: of the loader.
            made: the batches.
            waited_seconds: for how long the rank has waited for a batch, if it has said so.
            cache: of the server.
        """
        of_rank = {"rank": str(rank)}
        for name, counter in self._counters.items():
            if number := getattr(made, name):
                counter.inc(number, of_rank)
        if waited_seconds is not None:
            self._waits.observe(waited_seconds, of_rank)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(cache, name))
        if evicted := cache.evictions - self._evicted:
            self._evictions.inc(evicted)
            self._evicted = cache.evictions
