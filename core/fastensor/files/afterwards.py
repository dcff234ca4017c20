"""What is left to be done when a call has returned: one thread of the process does it, one thing after the other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]

_logger = logging.getLogger("fastensor")


class _Worker:
    """A daemon thread that is started with the first job and ends with the process, which does not wait for it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def give(self, job: Job) -> bool:
        """Returns False if there is no thread and none can be started: the interpreter exits, or there are too many.

        May be called by a signal handler at any time, also while this thread is in here: waits for nothing.
        """
        if not self._started and self._starting.acquire(blocking=False):
            try:
                threading.Thread(target=self._work, name="fastensor-afterwards", daemon=True).start()
                self._started = True
            except RuntimeError:
                return False
            finally:
                self._starting.release()
        self._jobs.put(job)
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:  # the next one has nothing to do with it
                _logger.exception("what was left to be done after a call has failed")
            del job


_worker = _Worker()


def do_afterwards(job: Job) -> bool:
    """Have a thread do something soon.

    Args:
        job: what. If the process ends or forks before, it is not done, or not in the child.

    Returns:
        False if no thread can be started: then it will not be done.
    """
    return _worker.give(job)


def _begin_anew() -> None:
    """In a forked child: the thread is the parent's."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_begin_anew)
