"""Work that is done after a call has returned: by one thread of the process, one job after the other."""

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
    """A daemon thread. The first job starts it; the process does not wait for it to end."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def give(self, job: Job) -> bool:
        """Queue a job. Returns False if no thread can be started: the interpreter exits, or there are too many threads.

        Waits for nothing, so a signal handler may call this at any time, even while it interrupts this method.
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
            except Exception:  # the next job is independent of this one
                _logger.exception("work after a call has failed")
            del job


_worker = _Worker()


def do_afterwards(job: Job) -> bool:
    """Have a thread run a job soon.

    Args:
        job: runs unless the process ends before. A forked child runs none of its parent's jobs.

    Returns:
        False if no thread can be started; then the job will not run.
    """
    return _worker.give(job)


def _begin_anew() -> None:
    """In a forked child: the thread is the parent's."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_begin_anew)
