"""Threads that must be done with a buffer or a file before its owner goes on.

An interrupt or an exit does not cut the waits in this module short. A thread that still wrote to freed memory, or to a
descriptor that now belongs to another file, would damage foreign data. The interrupt is raised after the wait, which
lasts as long as single transfers do.
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
    """No thread can be started, or the threads accept no work: the interpreter exits, there are too many threads, or
    the threads are those of the process that this one was forked from."""


class Pool(ThreadPoolExecutor):
    """Threads of the process that has made the pool. A forked child has none of them."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._process = os.getpid()

    @property
    def is_of_parent(self) -> bool:
        """True if this process was forked from the one that has made the pool. Submitted work is never done here."""
        return self._process != os.getpid()

    @property
    def threads(self) -> frozenset[threading.Thread]:
        """The threads of the pool that have been started."""
        return frozenset(self._threads)


def usable_cores(most: int) -> int:
    """The number of threads that can compute at once, up to ``most``."""
    return min(most, len(os.sched_getaffinity(0)))


def open_pool(threads: int, name: str) -> Pool:
    """A pool all of whose threads run already. It refuses work only if the interpreter exits, or in a forked child.

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
        NoThreadsError: the pool accepts no work, because the interpreter exits, or this process was forked.
    """
    if pool.is_of_parent:
        raise NoThreadsError("the threads are those of the process that this one was forked from")
    try:
        return pool.submit(function, *arguments, **options)
    except RuntimeError as error:
        raise NoThreadsError(f"threads accept no more work ({error})") from error


def run_together(work: Callable[[], None], threads: int) -> None:
    """Run ``work``, which must not raise, in this thread and others at once; in fewer if no more can be started.

    Returns when no call of ``work`` runs any more.
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


def run_each(function: Callable[[T], R], items: Sequence[T], most: int | None = None) -> list[R]:
    """Call ``function`` with each item: in this thread, and in one more thread for each further item, if it starts.

    Args:
        function: called with one item.
        items: the items, in the order in which they are begun.
        most: the most threads, this one included; None for no limit.

    Returns the results in the order of the items, when no call runs any more. If calls raise, the first error is raised
    then, and items that were not begun are skipped.
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

    run_together(work, min(len(items), most or len(items)))
    if errors:
        raise errors[0]
    return cast("list[R]", results)


def uninterrupted_call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread that no interrupt reaches: in another one if this is the main thread, which waits."""
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    pool = Pool(1, "fastensor-call")
    try:
        return submit(pool, function, *arguments).result()
    finally:
        shut_down(pool)


def finish(futures: Iterable[Future[Any]]) -> None:
    """Return when all futures are done, with a result or an error."""
    pending = list(futures)
    uninterrupted(lambda: wait(pending))


def shut_down(pool: Pool) -> None:
    """Drop work that has not begun, and return when no other thread does work any more. Does nothing in a forked child.

    A thread of the pool may call it, because any thread may collect what the pool belongs to. What that thread is doing
    goes on.
    """
    if pool.is_of_parent:
        return

    def shut_down_and_wait() -> None:
        pool.shutdown(wait=False, cancel_futures=True)
        for thread in pool.threads - {threading.current_thread()}:
            thread.join()

    uninterrupted(shut_down_and_wait)


def uninterrupted(action: Callable[[], object]) -> None:
    """Call ``action`` until no interrupt or exit cuts it short. Raises the last interrupt afterwards."""
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
        except BaseException as error:  # noqa: BLE001  # raised below; the action itself raises nothing
            interrupt = error
    if interrupt is not None:
        raise interrupt
