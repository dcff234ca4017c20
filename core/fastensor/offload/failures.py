"""What becomes of exceptions in jobs, which are raised by whoever is concerned, later and in another thread."""

from __future__ import annotations


def without_frames(failure: BaseException) -> BaseException:
    """The same. Its frames would hold those of their callers, with graphs that hold what the failure is noted in: a
    circle through autograd, which no collector sees."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return failure


def raise_interrupt(failure: BaseException | None) -> None:
    """Whoever works must not lose what is no failure of the work."""
    if failure is not None and not isinstance(failure, Exception):
        raise failure
