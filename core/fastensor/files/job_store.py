"""Processes of a job talk through a store of ``torch.distributed``, in calls that end in time.

A store is there before any process group is, whatever backend the group has, and a process that does not come leaves
nothing behind that others cannot use. But nobody learns from it that a process has died: those who wait for that use a
process group (:mod:`fastensor.checkpoint.agreement`, :mod:`fastensor.select.share`).

Most calls of torch's ``TCPStore`` wait for an answer without a timeout. So does ``wait`` when its timeout is over: it
then asks the store to forget the wait. Where a cable is cut no answer comes, and no error until the kernel gives the
connection up, after a quarter of an hour or never.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.0005, 0.05


class JobStore:
    """A store, used by one thread at a time. A call that was not answered takes up the connection for as long as it may
    last. So each further one fails at once; make another ``JobStore``, with another connection.

    Args:
        connect: makes the connection.
        seconds: how long the store is waited for in each call.
        failure: makes of what a call has failed with, which is a TimeoutError if it was not answered, what is raised.
        connect_seconds: how long ``connect`` is waited for, if not as long.

    Raises:
        Exception: what ``failure`` makes.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        seconds: float,
        failure: Callable[[Exception], Exception],
        connect_seconds: float | None = None,
    ) -> None:
        self._seconds = seconds
        self._failure = failure
        self._is_silent = False
        self._connection = self._call(connect_seconds or seconds, connect)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store: ``ask("get", "name")``.

        Raises:
            Exception: what ``failure`` makes, if the store does not answer, now or in an earlier call.
        """
        return self._call(self._seconds, getattr(self._connection, method), *arguments)

    def decide(self, name: str, value: str) -> str:
        """Set a value, unless there is one. Returns what it is now, the same in all processes."""
        return self.ask("compare_set", name, "", value).decode()  # type: ignore[no-any-return]

    def _call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            if self._is_silent:
                raise TimeoutError(f"it has left an earlier call without an answer for {self._seconds:g} s")
            return call_within(seconds, function, *arguments)
        except (RuntimeError, ValueError, TimeoutError) as error:  # ValueError if the process group was destroyed
            self._is_silent = self._is_silent or isinstance(error, TimeoutError)
            raise self._failure(error) from error


def has_others(group: Any = None) -> bool:
    """True if a process group, or the job, has more processes than this one."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) != 1


def connect_to_job(prefix: str) -> Any:
    """The store of the default process group, which puts the prefix before names. It has a connection of its own where
    torch can make one: calls of one connection wait for each other."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()
    return PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)


def wait_until(is_so: Callable[[], object], seconds: float) -> bool:
    """Ask until it is so; False if that takes longer than ``seconds``. Between two questions, 0.5 ms pass at first and
    50 ms at most. A store's own ``wait`` cannot be interrupted, and logs every timeout."""
    started = time.monotonic()
    while not is_so():
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(min(max(waited / 50, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS))
    return True


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own, and wait at most ``seconds`` for it; ``inf`` is for ever.

    A call that has not returned by then, or when an interrupt ends the wait, is left to its thread, which does not keep
    the process from ending. The call may still take effect. What it was made on is in use: further calls of the same
    store wait for it, so give that up, too.

    Where no thread can be started, because the interpreter exits or there are too many, the function is called here,
    and takes as long as it takes.

    Raises:
        TimeoutError: the function has not returned in time.
        BaseException: what the function raises.
    """
    returned: Future[T] = Future()

    def call() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            returned.set_exception(error)
        else:
            returned.set_result(result)

    try:
        threading.Thread(target=call, name="fastensor-bounded-call", daemon=True).start()
    except RuntimeError:
        return function(*arguments)
    try:
        return returned.result(min(seconds, threading.TIMEOUT_MAX))
    except TimeoutError as error:
        if returned.done():  # just now, or with a TimeoutError of its own
            return returned.result()
        raise TimeoutError(f"no answer within {seconds:g} s") from error
