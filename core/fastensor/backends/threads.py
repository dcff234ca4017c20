"""Threads that must be done with a buffer or a file before its owner goes on.

An interrupt or an exit does not cut these waits short: a thread that still wrote to memory that has been freed, or to
a descriptor that has been closed and given to another file, would damage what it does not know. It is raised
afterwards; what is waited for are single transfers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

from fastensor.errors import BackendUnavailableError

T = TypeVar("T")
R = TypeVar("R")


class NoThreadsError(BackendUnavailableError):
    """None can be started, or they accept no more work: the interpreter exits, there are too many, or they are those of
    the process that this one was forked from."""


class Pool(ThreadPoolExecutor):
    """Threads of the process that has made it: none of them lives in a forked child."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._process = os.getpid()

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that has made it. What was given to it is never done here."""
        return self._process != os.getpid()


def usable_cores(most: int) -> int:
    """How many threads can compute at once, up to ``most``."""
    return min(most, len(os.sched_getaffinity(0)))


def open_pool(threads: int, name: str) -> Pool:
    """A pool all of whose threads run: later work only fails to be accepted if the interpreter exits, or in a forked
    child.

    Raises:
        NoThreadsError: a thread cannot be started, because the interpreter exits or there are too many.
    """
    pool = Pool(threads, name)
    everyone = threading.Barrier(threads)
    try:
        started = [pool.submit(everyone.wait) for _ in range(threads)]
    except BaseException as error:
        everyone.abort()
        shut_down(pool)
        if not isinstance(error, RuntimeError):
            raise
        raise NoThreadsError(f"no thread can be started ({error})") from error
    finish(started)
    return pool


def submit(pool: Pool, function: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
    """Give work to a pool.

    Raises:
        NoThreadsError: it accepts none any more, because the interpreter exits, or this process was forked.
    """
    if pool.is_of_parent:
        raise NoThreadsError("the threads are those of the process that this one was forked from")
    try:
        return pool.submit(function, *arguments, **options)
    except RuntimeError as error:
        raise NoThreadsError(f"threads accept no more work ({error})") from error


def run_together(work: Callable[[], None], threads: int) -> None:
    """Run ``work``, which must not raise, in this thread and others at once, fewer if no more can be started.

    Returns when none of them runs any more.
    """
    others = []
    try:
        for number in range(threads - 1):
            other = threading.Thread(target=work, name=f"fastensor-work_{number}", daemon=True)
            try:
                other.start()
            except RuntimeError:  # the interpreter exits, or there are too many
                break
            others.append(other)
        work()
    finally:
        for other in others:
            uninterrupted(other.join)


def run_each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``function`` with each item, in this thread and one other for each further item, as far as they start.

    Returns the results in the order of the items, when none of the calls runs any more. The first error that one of
    them raises is raised then; items that have not been begun by that time are left out.
    """
    if len(items) == 1:
        return [function(items[0])]
    results: list[R | None] = [None] * len(items)
    errors: list[BaseException] = []
    todo = iter(range(len(items)))

    def work() -> None:
        for number in todo:
            if errors:
                break
            try:
                results[number] = function(items[number])
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)

    run_together(work, len(items))
    if errors:
        raise errors[0]
    return cast("list[R]", results)


def uninterrupted_call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread to which no interrupt comes: another one if this is the main one, which waits."""
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    pool = Pool(1, "fastensor-call")
    try:
        return submit(pool, function, *arguments).result()
    finally:
        shut_down(pool)


def finish(futures: Iterable[Future[int]]) -> None:
    """Return when all of them are done, whatever came of them."""
    pending = list(futures)
    uninterrupted(lambda: wait(pending))


def shut_down(pool: Pool) -> None:
    """Drop what has not begun and return when nothing runs any more: at once in a forked child, where nothing does."""
    if not pool.is_of_parent:
        uninterrupted(lambda: pool.shutdown(wait=True, cancel_futures=True))


def uninterrupted(action: Callable[[], object]) -> None:
    """Call it again until no interrupt, or exit, cuts it short, which is raised then."""
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
        except BaseException as error:  # noqa: BLE001  # raised below; the action itself raises nothing
            interrupt = error
    if interrupt is not None:
        raise interrupt
