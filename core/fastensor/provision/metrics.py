"""Statistics of a data service: recorded, named for Prometheus, and as a table for people. All is pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from fastensor.files.shown import record_repr
from fastensor.files.words import human_seconds, human_size

_BOUNDS_PER_DECADE = 16
BOUNDS: tuple[float, ...] = tuple(10 ** (step / _BOUNDS_PER_DECADE - 6) for step in range(8 * _BOUNDS_PER_DECADE + 1))
"""Upper bounds of the waits that are counted together, in seconds, from 1 µs to 100 s. Each is 15 % above the last."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Histogram of a client's waits for batches.

    >>> waits = Waits()
    >>> for milliseconds in (1, 1, 1, 50):
    ...     waits = waits.with_wait(milliseconds / 1000)
    >>> round(waits.quantile(0.5), 4), round(waits.quantile(0.99), 4), waits.count
    (0.001, 0.05, 4)
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """Numbers of waits up to each of the :data:`BOUNDS`, and of longer ones."""
    seconds: float = 0.0
    """Sum of all waits."""
    longest: float = 0.0
    """In seconds."""

    __repr__ = record_repr

    @property
    def count(self) -> int:
        """Number of waits."""
        return sum(self.counts)

    def with_wait(self, seconds: float) -> Self:
        """These waits and another one."""
        number = bisect_left(BOUNDS, seconds)
        counts = (*self.counts[:number], self.counts[number] + 1, *self.counts[number + 1 :])
        return replace(self, counts=counts, seconds=self.seconds + seconds, longest=max(self.longest, seconds))

    def quantile(self, part: float) -> float:
        """Seconds that were enough for this part of the waits. Up to 15 % too large; 0 without waits."""
        wanted, seen = math.ceil(part * self.count), 0
        for bound, count in zip((*BOUNDS, math.inf), self.counts, strict=True):
            seen += count
            if seen >= wanted > 0:
                return min(bound, self.longest)
        return 0.0


PREFIX = "fastensor_provision_"
"""Prefix of the names of all metrics."""
COUNTERS: Mapping[str, str] = {
    "batches": "Batches given to a client",
    "samples": "Samples in these batches",
    "nbytes": "Bytes of these batches",
    "hits": "Samples that were in the cache already",
    "read_nbytes": "Bytes of samples that were read from the source",
    "skipped": "Samples that were left out because they could not be made",
}
"""Descriptions of the counters of each client, by the fields of :class:`Served`."""
GAUGES: Mapping[str, str] = {
    "samples": "Samples in the cache",
    "used_nbytes": "Bytes of the cache that are in use",
    "nbytes": "Bytes of the cache",
}
"""Descriptions of the gauges of a cache, by the attributes of :class:`~fastensor.provision.cache.SampleCache`."""
WAITS = "Waits of clients for a batch"
EVICTIONS = "Samples that had to make room in the cache"


def exposed_name(name: str) -> str:
    """The name of a metric, with the units that Prometheus names.

    >>> exposed_name("read_nbytes")
    'fastensor_provision_read_bytes'
    """
    return PREFIX + name.replace("nbytes", "bytes")


@dataclass(frozen=True, slots=True)
class Served:
    """Counts of what a client was given, in an epoch or since it began."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    """Bytes of the batches."""
    hits: int = 0
    """Samples that were in the cache already when it was time to read them."""
    read_nbytes: int = 0
    """Bytes of the samples that were read from the source and prepared for the cache."""
    skipped: int = 0
    """Samples that were left out because they could not be made."""
    seconds: float = 0.0
    """From the first batch to the last one."""
    waits: Waits = Waits()

    __repr__ = record_repr

    @property
    def hit_rate(self) -> float:
        """The part of the samples that were in the cache already. 0 without samples."""
        return self.hits / self.samples if self.samples else 0.0

    @property
    def waiting(self) -> float:
        """The part of the time that the client has waited. 0 without time."""
        return min(self.waits.seconds / self.seconds, 1.0) if self.seconds > 0 else 0.0

    def with_batch(self, *, samples: int, nbytes: int, hits: int, read_nbytes: int, skipped: int = 0) -> Served:
        """This and another batch. What it has is said as here."""
        return Served(
            self.batches + 1,
            self.samples + samples,
            self.nbytes + nbytes,
            self.hits + hits,
            self.read_nbytes + read_nbytes,
            self.skipped + skipped,
            self.seconds,
            self.waits,
        )

    def summary(self) -> dict[str, int | float]:
        """The counts, for people and monitors. Waits are in seconds."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "wait_seconds": self.waits.seconds,
            "wait_p50": self.waits.quantile(0.5),
            "wait_p99": self.waits.quantile(0.99),
        }


def table(rows: Mapping[str, Served]) -> str:
    """A table for people, such as of the clients of a service at the end of an epoch.

    >>> print(table({"rank 0": Served(batches=2, samples=8, nbytes=4096, hits=6, read_nbytes=1024, seconds=2.0)}))
            batches  samples  given  in cache    read  wait p50  p99  waiting
    rank 0        2        8  4 KiB      75 %  1 KiB       0 s  0 s      0 %
    """
    head = ("", "batches", "samples", "given", "in cache", "read", "wait p50", "p99", "waiting")
    cells = [head, *(_cells(name, served) for name, served in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in cells
    ]
    return "\n".join(lines)


def _cells(name: str, served: Served) -> tuple[str, ...]:
    return (
        name,
        str(served.batches),
        str(served.samples),
        human_size(served.nbytes),
        f"{100 * served.hit_rate:.0f} %",
        human_size(served.read_nbytes),
        human_seconds(served.waits.quantile(0.5)),
        human_seconds(served.waits.quantile(0.99)),
        f"{100 * served.waiting:.0f} %",
    )
