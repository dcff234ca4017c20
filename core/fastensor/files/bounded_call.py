"""Calls that may never return: those of a store or a process group of ``torch.distributed``.

Most calls of torch's ``TCPStore`` wait for an answer without a timeout. So does ``wait`` when its timeout is over: it
then asks the store to forget the wait. Where a cable is cut no answer comes, and no error until the kernel gives the
connection up, after a quarter of an hour or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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
