"""How long a transfer of any size takes, by those that were measured: a latency and a bandwidth. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_FORGETTING = 0.98
"""Each measurement counts so much less than the one after it: the latest 50 or so decide."""
_ONE_SIZE = 1e-3
"""Sizes that differ by no more than about 3 % say nothing about how the time depends on the size."""


@dataclass(slots=True)
class Line:
    """Seconds as a latency plus bytes over a bandwidth, fitted to measurements of one backend in one context.

    The fit is of least squares of the relative errors: a transfer of 4 KiB counts as much as one of 4 GiB, and one that
    took ten times as long as expected has little weight.

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
        """A transfer of so many bytes took so long; ``seconds`` is above zero."""
        weight = 1.0 / (seconds * seconds)
        self._weight = _FORGETTING * self._weight + weight
        self._bytes = _FORGETTING * self._bytes + weight * nbytes
        self._bytes_squared = _FORGETTING * self._bytes_squared + weight * nbytes * nbytes
        self._seconds = _FORGETTING * self._seconds + weight * seconds
        self._product = _FORGETTING * self._product + weight * nbytes * seconds

    def seconds(self, nbytes: int) -> float:
        """What a transfer of so many bytes is expected to take. At least one was added before.

        Where only one size was measured, the larger ones are expected to take longer in proportion, and the smaller
        ones as long: that is the most that either can take.
        """
        mean_bytes, mean_seconds = self._bytes / self._weight, self._seconds / self._weight
        determinant = self._weight * self._bytes_squared - self._bytes * self._bytes
        if determinant > _ONE_SIZE * self._weight * self._bytes_squared:
            slope = (self._weight * self._product - self._bytes * self._seconds) / determinant
            latency = mean_seconds - slope * mean_bytes
            if slope >= 0 and latency >= 0:
                return latency + slope * nbytes
        return mean_seconds * max(nbytes / mean_bytes, 1.0) if mean_bytes else mean_seconds
