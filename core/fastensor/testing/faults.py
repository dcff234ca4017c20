"""Making the Nth system call fail, or move fewer bytes than it was asked to."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from fastensor.files.arguments import checks_keywords
from fastensor.testing.calls import Call, intercepted

_fcntl, _fstat = fcntl.fcntl, os.fstat  # not intercepted


@dataclass(slots=True)
class Fault:
    """The record of an injected fault."""

    calls: int = 0
    """The number of calls so far."""
    fired: str = ""
    """The name of the call that failed or was cut short; empty before that."""


@checks_keywords
def failing_call(number: int, code: int = errno.EIO, *, name: str = "") -> AbstractContextManager[Fault]:
    """Make the ``number``-th system call of Fastensor's I/O in the block fail with ``code``, counting from 1.

    The calls of :mod:`fastensor.testing.calls` are counted, from all threads of the process, or only those with this
    ``name``. A failing call does nothing, except ``close``, which frees the descriptor as in Linux. Blocks may be
    nested. Only one thread may enter such blocks at a time.

    >>> with failing_call(1, errno.ENOSPC) as fault:
    ...     os.stat("/")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device
    >>> fault
    Fault(calls=1, fired='stat')
    """

    def fail(call: Call) -> Any:
        if call.name == "close":
            call.perform()
        raise OSError(code, os.strerror(code))

    return _injected(number, fail, name)


@checks_keywords
def short_call(number: int) -> AbstractContextManager[Fault]:
    """Make the ``number``-th system call of Fastensor's I/O in the block move about a third of the bytes.

    A signal, a full disk or a network filesystem may do that to any ``pwrite``, ``pread`` or ``preadv``, and the caller
    has to go on from there. The part is aligned only if the file is open for direct I/O. Calls that move no bytes are
    made unchanged. Calls are counted as for :func:`failing_call`.
    """
    return _injected(number, _cut_short)


@contextmanager
def _injected(number: int, outcome: Callable[[Call], Any], name: str = "") -> Iterator[Fault]:
    fault = Fault()
    lock = threading.Lock()

    def intercept(call: Call) -> Any:
        if name and call.name != name:
            return call.perform()
        with lock:
            fault.calls += 1
            chosen = fault.calls == number
            if chosen:
                fault.fired = call.name
        return outcome(call) if chosen else call.perform()

    with intercepted(intercept):
        yield fault


def _cut_short(call: Call) -> Any:
    match call.name, call.arguments:
        case "pwrite", (fd, data, *position):
            return call.function(fd, _part(fd, data), *position, **call.options)
        case "pread", (fd, nbytes, position):
            return call.function(fd, max(nbytes // 3, 1), position)
        case "preadv", (fd, [buffer, *_], *position):
            return call.function(fd, [_part(fd, buffer)], *position, **call.options)
        case _:
            return call.perform()


def _part(fd: int, buffer: Any) -> memoryview:
    view = memoryview(buffer).cast("B")
    unit = _fstat(fd).st_blksize if _fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 1
    return view[: max(view.nbytes // 3 // unit * unit, unit)]
