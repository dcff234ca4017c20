"""Doing one thing after the other, in a thread that lives as long as there is something to do."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol


class Work(Protocol):
    """Something to be done in its turn."""

    def run(self) -> None:
        """Do it. What comes of it is the work's own business: nothing is raised."""

    def lose(self) -> None:
        """The thread that was at it has died. Nothing to be done if it was done by then."""


_here = threading.local()


def in_drain_thread() -> bool:
    """Whether the calling thread is the one of any queue: what it waits for may wait for it."""
    return getattr(_here, "drains", False)


class WorkQueue:
    """Works in the order in which they came. Every method may be called from several threads at once.

    The thread is a daemon: it does not keep the interpreter from exiting, and is not there when nothing is to be done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition(threading.RLock())  # a signal handler may save, too
        """Notified when a work is done."""
        self.waiting: deque[Work] = deque()
        self.current: Work | None = None

    def works(self) -> list[Work]:
        """What is not done, in order."""
        with self.changed:
            return [*([] if self.current is None else [self.current]), *self.waiting]

    def put(self, work: Work) -> None:
        """Have it done behind all others.

        Raises:
            RuntimeError: no thread can be started, because the interpreter exits or there are too many.
        """
        with self.changed:
            self.waiting.append(work)
            try:
                self._see_to_thread()
            except RuntimeError:
                self.waiting.remove(work)
                raise

    def withdraw(self, work: Work) -> bool:
        """Take it back, unless it has been begun or done; whether that was so."""
        with self.changed:
            if work not in self.waiting:
                return False
            self.waiting.remove(work)
            self.changed.notify_all()
            return True

    def is_working(self) -> bool:
        """Whether the calling thread is the one that works."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None = None) -> bool:
        """Return when all that is there now has been done, or it took too long; whether it is done.

        At once in the thread that works: it cannot wait for itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            works = [] if self.is_working() else self.works()
            if works:
                self._see_to_thread()  # an interrupt may have come before it was started
            while any(work is self.current or work in self.waiting for work in works):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self.changed.wait(left)
            return True

    def _see_to_thread(self) -> None:
        """Start a thread if none lives. An interrupt may keep one from that: if it comes after all, it has no part."""
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread = thread  # an interrupt may come while it starts
        try:
            thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def _work(self) -> None:
        _here.drains = True
        try:
            while (work := self._next()) is not None:
                work.run()
                with self.changed:
                    self.current = None
                    self.changed.notify_all()
        finally:
            self._end()

    def _next(self) -> Work | None:
        with self.changed:
            if self._thread is not threading.current_thread():
                return None
            if self.waiting:
                self.current = self.waiting.popleft()
            else:
                self._thread = None  # from here on, others start a new one
            return self.current

    def _end(self) -> None:
        """Something may have killed the thread: others go on with what it leaves behind."""
        with self.changed:
            if self._thread is not threading.current_thread():
                return
            self._thread = None
            lost = [] if self.current is None else [self.current]
            self.current = None
            try:
                if self.waiting:
                    self._start()
            except RuntimeError:
                lost += self.waiting
                self.waiting.clear()
        for work in lost:
            work.lose()
        with self.changed:
            self.changed.notify_all()
