"""Pending saves when the process exits, is terminated by SIGTERM, or forks."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from fastensor.files.afterwards import Worker

if TYPE_CHECKING:
    from fastensor.checkpoint.asynchronous.writer import AsyncWriter

_watched: weakref.WeakSet[AsyncWriter] = weakref.WeakSet()
"""Writers to finish. Pending work keeps its writer alive, so weak references are enough."""
_deadline: float | None = None
"""Time at which the process will be killed after a SIGTERM, by ``time.monotonic()``."""


def watch(writer: AsyncWriter, preemption_seconds: float | None) -> None:
    """Finish what is pending in a writer before the process exits, and before SIGTERM ends it.

    Raises:
        ValueError: SIGTERM can only be handled by the main thread.
    """
    if preemption_seconds is not None:
        _preemption.install(preemption_seconds)
    _register()
    _watched.add(writer)


_registered = False
_exiting = False


def exiting() -> bool:
    """True if it is too late to leave anything pending."""
    return _exiting


def _register() -> None:
    global _registered, _exiting
    if _registered:
        return
    _registered = True
    # Before the interpreter stops to start threads, which writing needs; atexit comes after that.
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_finish_at_exit)
    except RuntimeError:  # the interpreter starts no threads any more
        _exiting = True


def _finish_at_exit() -> None:
    global _exiting
    _exiting = True
    # After a deadline that has passed, the program has survived its SIGTERM, and may take its usual time.
    _finish_all(_deadline if _deadline is not None and _deadline > time.monotonic() else None)


def _finish_all(deadline: float | None) -> None:
    for writer in list(_watched):
        writer._finish_at_exit(None if deadline is None else max(deadline - time.monotonic(), 0))


def _after_fork() -> None:
    for writer in list(_watched):
        writer._forget_pending()


os.register_at_fork(after_in_child=_after_fork)


class _Preemption:
    """Delays the end of the process by SIGTERM until pending saves are durable.

    The handler itself waits for nothing: it may have interrupted code that holds any lock. A thread waits, and then
    sends the signal again.

    The handler only ends the process where the signal would have ended it. A handler that was there before, or that was
    installed since and calls this one (a Trainer's does), decides by itself; only the deadline is noted then.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._previous: Any = None
        self._pid = 0
        """The process that has installed the handler; 0 if none has."""
        self._worker = Worker("fastensor-preemption")
        self._begun = False
        self._finished = False

    def install(self, seconds: float) -> None:
        self._seconds = max(seconds, self._seconds)
        if self._pid == os.getpid():
            return
        try:
            previous = signal.signal(signal.SIGTERM, self._handle)
        except ValueError as error:
            raise ValueError(
                "preemption_seconds: SIGTERM can only be handled in the main thread; make the writer there"
            ) from error
        if previous != self._handle:  # not the one that a forked child has from its parent
            self._previous = previous
        self._pid = os.getpid()
        self._worker = Worker("fastensor-preemption")
        self._worker.give(lambda: None)  # a signal handler must not be the first to need the thread
        self._begun = self._finished = False

    def _handle(self, number: int, frame: Any) -> None:
        if self._previous == signal.SIG_IGN:
            return
        has_something_to_wait_for = self._pid == os.getpid()  # a forked child has not
        if callable(self._previous) or signal.getsignal(signal.SIGTERM) != self._handle:
            self._begun = self._finished = False  # whatever was begun, the process goes on
            if has_something_to_wait_for:
                self._note_deadline()
            if callable(self._previous):
                self._previous(number, frame)
        elif self._finished or not has_something_to_wait_for:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._begun:
            self._begun = True
            self._note_deadline()
            self._worker.give(self._finish)

    def _note_deadline(self) -> None:
        """The first deadline holds until it has passed: a second signal does not prolong it."""
        global _deadline
        now = time.monotonic()
        if _deadline is None or _deadline <= now:
            _deadline = now + self._seconds

    def _finish(self) -> None:
        try:
            _finish_all(_deadline)
        finally:
            self._finished = True
            os.kill(os.getpid(), signal.SIGTERM)


_preemption = _Preemption()
