"""Choosing the client for which the next batch is made, so that none waits for batches that another one does not need
yet.

KSpeed (section III-D, "congestion-aware requests batching") measures how long data takes, and limits what is in flight
by that. Here the client's own pace counts, too. Everything is pure, and in seconds of one clock.

- A client **needs** as many batches ahead as it may take while one is made: the most that it has ever taken within
  that time, among its last :data:`REMEMBERED`, and one more. So a client of slow steps needs two, however long a batch
  takes; one that takes eight at once and then computes for a while, needs nine.
- The time to make one is that of nine in ten of its batches. If the service is overloaded, it grows, because
  batches wait for workers; more of them ahead would only make it grow further. So it counts up to
  :data:`CONGESTION` times the least that was measured, and no more.
- A worker that is free makes a batch for the client whose **turn** it is: one that has less ahead than it needs. When
  none has, batches are made further ahead, up to the limit of each client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

REMEMBERED = 64
"""Number of measurements that count; older ones are forgotten."""
CONGESTION = 4.0
"""A batch that took so many times the least has mostly waited."""
FIRST = 2
"""Batches ahead, before anything has been measured: one in use, one to follow."""
_PART = 0.9


@dataclass(frozen=True, slots=True)
class ClientPace:
    """Measurements of a client, whose batches are of about one size.

    >>> pace = ClientPace()
    >>> for step in range(10):  # a step of 0.1 s; a batch takes 0.25 s
    ...     pace = pace.taken(at=0.1 * step).made(seconds=0.25)
    >>> pace.needed()
    4
    """

    times: tuple[float, ...] = ()
    """Times at which it took its last batches, by its own clock, without the seconds that it waited for them."""
    waited: float = 0.0
    """Seconds that it has waited in all."""
    made_seconds: tuple[float, ...] = ()
    """Seconds that each of the last batches took from the decision to make it until it had arrived."""

    def taken(self, *, at: float, waited: float = 0.0) -> Self:
        """The client has taken a batch.

        Args:
            at: when. Not before the last one.
            waited: how many seconds it has waited for it. A client that waits does not show how quick it is.
        """
        total = self.waited + waited
        return replace(self, times=(*self.times, at - total)[-REMEMBERED:], waited=total)

    def made(self, *, seconds: float) -> Self:
        """A batch has arrived, so many seconds after it was decided to make it."""
        return replace(self, made_seconds=(*self.made_seconds, seconds)[-REMEMBERED:])

    @property
    def seconds(self) -> float:
        """Seconds that a batch takes, in nine of ten cases. 0 before anything was measured."""
        seconds = sorted(self.made_seconds) or [0.0]
        return min(seconds[math.ceil(_PART * len(seconds)) - 1], CONGESTION * seconds[0])

    def needed(self) -> int:
        """Number of batches that are to be ahead of the client: in the making, or waiting for it."""
        if not self.made_seconds or len(self.times) < 2:
            return FIRST
        return most_within(self.times, self.seconds) + 1


def most_within(times: tuple[float, ...], seconds: float) -> int:
    """The largest number of times that lie in an interval of this length.

    Args:
        times: in order.
        seconds: the interval, of which one end counts.

    >>> most_within((0.0, 1.0, 1.1, 1.2, 5.0), 1.0)
    3
    """
    most = first = 0
    for last, time in enumerate(times):
        while time - times[first] >= seconds and first < last:
            first += 1
        most = max(most, last - first + 1)
    return most


def turn(ahead: int, needed: int, served: int) -> tuple[bool, int, int]:
    """The key by which clients are sorted when a worker is free: those with less ahead than they need come first, among
    them those with least, and among these the one that was served least recently. If the service is overloaded, no
    client has anything ahead, and they take turns.

    Args:
        ahead: batches ahead of the client, in the making or waiting.
        needed: see :meth:`ClientPace.needed`.
        served: a number that grows with each batch that was given to a worker; that of the client's last one.

    >>> sorted([(9, 8, 1), (2, 2, 2), (3, 8, 3), (1, 4, 5), (1, 4, 4)], key=lambda one: turn(*one))
    [(1, 4, 4), (1, 4, 5), (3, 8, 3), (2, 2, 2), (9, 8, 1)]
    """
    return ahead >= needed, ahead, served
