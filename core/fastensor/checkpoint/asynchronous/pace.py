"""Keeping a drain below a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SLICE_SECONDS = 0.05


class Pace:
    """Spreads bytes over time. Used by one thread; :meth:`hurry` and :meth:`resume` by any.

    Args:
        bytes_per_second: the rate that is kept on average, from one call of :meth:`wait` to the next; None for none.
        clock: seconds that never go back.
    """

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._due = 0.0
        self._lock = threading.RLock()
        self._waiting = 0
        self._hurried = threading.Event()

    def delay(self, nbytes: int) -> float:
        """Seconds to wait before so many bytes may be moved; they are taken as moved then."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        begin = max(self._due, now)
        self._due = begin + nbytes / self._rate
        return begin - now

    def wait(self, nbytes: int, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many bytes may be moved, or somebody is in a hurry, or it is stopped."""
        delay = 0.0 if self._hurried.is_set() else self.delay(nbytes)
        while delay > 0 and not stopped() and not self._hurried.wait(min(delay, _SLICE_SECONDS)):
            delay -= _SLICE_SECONDS

    def hurry(self) -> None:
        """Somebody waits for the end: the rate does not count until :meth:`resume`."""
        with self._lock:
            self._waiting += 1
            self._hurried.set()

    def resume(self) -> None:
        """One of those who were in a hurry is not any more."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._hurried.clear()
