"""The pace of a writer: below a rate, and not while others need the processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_SLICE_SECONDS = 0.05


class Pace:
    """Says when the bytes of a writer may be moved. One thread moves them; any thread may be in a hurry.

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
        self._holders: list[object] = []
        """As ``_hurried``, a token for each block of :meth:`held`."""
        self._changed = threading.Event()

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
            self._changed.wait(min(delay, _SLICE_SECONDS))
            self._changed.clear()
            delay -= _SLICE_SECONDS

    def wait_while_held(self, *, stopped: Callable[[], bool]) -> None:
        """Wait until no thread is in a block of :meth:`held`, or one is in a hurry, or ``stopped`` returns True."""
        while self._holders and not self._hurried and not stopped():
            self._changed.wait(_SLICE_SECONDS)
            self._changed.clear()

    def hurried(self) -> AbstractContextManager[None]:
        """Ignore the rate, and blocks of :meth:`held`, in the block, in which a caller waits for the end."""
        return self._among(self._hurried)

    def held(self) -> AbstractContextManager[None]:
        """Begin no file in the block, in which a caller needs the processor and the memory for itself."""
        return self._among(self._holders)

    @contextmanager
    def _among(self, tokens: list[object]) -> Iterator[None]:
        token = object()
        try:
            tokens.append(token)
            self._changed.set()
            yield
        finally:
            if token in tokens:  # no interrupt came before
                tokens.remove(token)
            self._changed.set()
