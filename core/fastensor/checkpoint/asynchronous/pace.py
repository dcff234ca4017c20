"""Keeping a writer below a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SLICE_SECONDS = 0.05


class Pace:
    """Spreads bytes over time. One thread moves them; any thread may be in a hurry.

    Args:
        bytes_per_second: the rate that is kept on average, from one call of :meth:`wait` to the next; None for none.
        clock: seconds that never go back.
    """

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._due = 0.0
        self._hurried: list[object] = []
        """A token for each thread in a hurry. Single calls change the list, so it needs no lock."""
        self._hurry = threading.Event()

    def delay(self, nbytes: int) -> float:
        """The seconds to wait before ``nbytes`` bytes may be moved. The bytes count as moved from then on."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        begin = max(self._due, now)
        self._due = begin + nbytes / self._rate
        return begin - now

    def wait(self, nbytes: int, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``nbytes`` bytes may be moved, or a thread is in a hurry, or ``stopped`` returns True."""
        delay = 0.0 if self._hurried else self.delay(nbytes)
        while delay > 0 and not self._hurried and not stopped():
            self._hurry.wait(min(delay, _SLICE_SECONDS))
            self._hurry.clear()
            delay -= _SLICE_SECONDS

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Ignore the rate in the block, in which a caller waits for the end."""
        token = object()
        try:
            self._hurried.append(token)
            self._hurry.set()
            yield
        finally:
            if token in self._hurried:  # no interrupt came before
                self._hurried.remove(token)
