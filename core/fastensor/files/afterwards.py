"""Threads that run jobs one after the other, and the shared one for work that is left when a call has returned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from fastensor.files.forks import first_in_children

Job: TypeAlias = Callable[[], object]

_logger = logging.getLogger("fastensor")


class Worker:
    """A daemon thread that does jobs in the order in which they came. The thread starts with the first job, and ends
    with the process, which does not wait for it, or by :meth:`stop`.

    Every method may be called from any thread.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # may be used by signal handlers
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()
        """Held by the thread that runs jobs. If an interrupt has left a second thread behind, the second one waits."""

    def give(self, job: Job) -> bool:
        """Queue a job. What the job raises is logged.

        Returns:
            False if no thread can be started: the interpreter exits, or there are too many threads.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None
                if not isinstance(error, RuntimeError):
                    raise
                return False
        self._jobs.put(job)
        return True

    @property
    def is_current(self) -> bool:
        """True in the worker's thread, in which its jobs run."""
        return self._thread is threading.current_thread()

    @property
    def has_thread(self) -> bool:
        """True if a job was given since the worker was made or stopped."""
        return self._thread is not None

    def stop(self, *, wait: bool = False) -> None:
        """Have the thread end when all jobs are done. Give no more jobs.

        Args:
            wait: whether to return only when the thread has ended.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if wait:
                thread.join()

    def _work(self) -> None:
        with self._working:
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException:  # the next job is independent of this one
                    _logger.exception("a job of the thread %s has failed", self._name)
                del job
        self._jobs.put(None)  # for a second thread, if there is one


_worker = Worker("fastensor-afterwards")


def do_afterwards(job: Job) -> bool:
    """Have a thread run a job soon. Waits for nothing, so a signal handler may call this at any time.

    Args:
        job: runs unless the process ends before. A forked child runs none of its parent's jobs.

    Returns:
        False if no thread can be started; then the job will not run.
    """
    return _worker.give(job)


def _begin_anew() -> None:
    """In a forked child: the thread is the parent's."""
    global _worker
    _worker = Worker("fastensor-afterwards")


first_in_children(_begin_anew)
