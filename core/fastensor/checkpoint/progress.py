"""The progress of long transfers, as users' callbacks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from fastensor.errors import FastensorError

Progress: TypeAlias = Callable[[int, int], None]
"""Called after every few MiB with the bytes done so far and the bytes to do in all, in the thread that has called
Fastensor. What it raises ends the work."""


class _StoppedError(FastensorError):
    """Carries the exception of a user's callback. No backend is blamed for an error of this package, so that none is
    tried instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the callback for the progress has raised {error!r}")
        self.error = error


@contextmanager
def reporting(progress: Progress | None) -> Iterator[Progress]:
    """Let a user's callback be called anywhere in the block, and raise what it has raised at the end of the block.

    Args:
        progress: the callback; None if nobody wants to know.

    Yields:
        The function to call in its place.

    Raises:
        TypeError: it cannot be called.
    """
    if progress is None:
        yield lambda done, total: None
        return
    if not callable(progress):
        raise TypeError(f"progress is a function of two numbers of bytes, found {type(progress).__name__}")

    def call(done: int, total: int) -> None:
        try:
            progress(done, total)
        except Exception as error:
            raise _StoppedError(error) from error

    try:
        yield call
        return
    except _StoppedError as stopped:
        error = stopped.error
    raise error


def tell_part(tell: Progress, before: int, total: int, done: int, of_part: int = 0) -> None:
    """Add what is done of a file, or of a part of one, to what was done before. It is ``total`` that counts."""
    tell(min(before + done, total), total)


class Meter:
    """Adds up the bytes of one transfer. Use it in one thread.

    Args:
        progress: is told.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = -1

    def begin(self, total: int) -> None:
        """Begin, or begin anew: there are so many bytes to do."""
        self._done, self._total = 0, total

    def add(self, nbytes: int) -> None:
        """Count bytes as done. Bytes that are read twice are counted up to the total."""
        self._done = min(self._done + nbytes, self._total)
        self._progress(self._done, self._total)

    def finish(self, nbytes: int) -> None:
        """All is done. ``nbytes`` is the total if the transfer has not begun to count."""
        total = nbytes if self._total < 0 else self._total
        if self._done != total:
            self._progress(total, total)
        self._done = self._total = total
