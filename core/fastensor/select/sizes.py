"""Sizes: buckets whose sizes share their timings, and a model of the time of a transfer of any size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

_PER_OCTAVE = 2
LEAST_BUCKET = 12 * _PER_OCTAVE
"""The bucket of all sizes up to 4 KiB."""
_FORGETTING = 0.98
"""Weight of a measurement relative to the next one: about the latest 50 decide."""
_ONE_SIZE = 1e-3
"""Below this relative variance (sizes within about 3 %), the slope is not fitted."""


@lru_cache(1024)
def bucket_of(nbytes: int) -> int:
    """The bucket of a size: the next power of the square root of two, by its exponent.

    >>> [bucket_of(nbytes) for nbytes in (0, 4096, 4097, 1 << 20, (1 << 20) + 1)]
    [24, 24, 25, 40, 41]
    """
    return max(ceil(log2(nbytes) * _PER_OCTAVE), LEAST_BUCKET) if nbytes > 1 else LEAST_BUCKET


@lru_cache(1024)
def size_of(bucket: int) -> int:
    """The largest size in a bucket, in bytes. Timings are scaled to this size.

    >>> size_of(40), bucket_of(size_of(41))
    (1048576, 41)
    """
    return int(2 ** (bucket / _PER_OCTAVE))


def scaled(seconds: float, nbytes: int) -> float:
    """The time of a transfer, scaled to the largest size in its bucket.

    >>> round(scaled(0.3, 800 << 10), 3), scaled(0.3, 10)
    (0.384, 0.3)
    """
    bucket = bucket_of(nbytes)
    return seconds if bucket == LEAST_BUCKET else seconds * size_of(bucket) / nbytes


@dataclass(slots=True)
class Line:
    """Latency plus bytes over bandwidth, fitted to measurements of one backend in one context.

    The fit minimizes squares of relative errors: a transfer of 4 KiB counts as much as one of 4 GiB, and a transfer
    that took ten times as long as expected has little weight.

    >>> line = Line()
    >>> for nbytes in (1000, 2000, 3000):
    ...     line.add(nbytes, 1.0 + nbytes / 1000)
    >>> round(line.seconds(10_000), 6)
    11.0
    """

    _weight: float = 0.0
    _bytes: float = 0.0
    _bytes_squared: float = 0.0
    _seconds: float = 0.0
    _product: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a measurement; ``seconds`` is above zero."""
        weight = 1.0 / (seconds * seconds)
        self._weight = _FORGETTING * self._weight + weight
        self._bytes = _FORGETTING * self._bytes + weight * nbytes
        self._bytes_squared = _FORGETTING * self._bytes_squared + weight * nbytes * nbytes
        self._seconds = _FORGETTING * self._seconds + weight * seconds
        self._product = _FORGETTING * self._product + weight * nbytes * seconds

    def seconds(self, nbytes: int) -> float:
        """The expected time of a transfer of ``nbytes``. At least one measurement was added before.

        If only one size was measured, larger sizes are expected to take longer in proportion, and smaller sizes equally
        long: that is the most that either can take.
        """
        mean_bytes, mean_seconds = self._bytes / self._weight, self._seconds / self._weight
        determinant = self._weight * self._bytes_squared - self._bytes * self._bytes
        if determinant > _ONE_SIZE * self._weight * self._bytes_squared:
            slope = (self._weight * self._product - self._bytes * self._seconds) / determinant
            latency = mean_seconds - slope * mean_bytes
            if slope >= 0 and latency >= 0:
                return latency + slope * nbytes
        return mean_seconds * max(nbytes / mean_bytes, 1.0) if mean_bytes else mean_seconds
