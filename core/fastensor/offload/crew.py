"""Threads that look for jobs, and threads of the training, which do jobs, too, while they wait for what comes of them.

All decisions are made with one lock held; jobs are done without it. So nothing depends on a thread being there.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from queue import SimpleQueue
from typing import TypeAlias

from fastensor.backends.threads import NoThreadsError, Pool, open_pool, shut_down, submit
from fastensor.select.context import Operation

THREADS = 4
"""That write, and as many that read."""
Job: TypeAlias = Callable[[], None]
Claim: TypeAlias = Callable[[], Job | None]
"""Says what is to be done next, if there is something. Called with the lock held."""


class Crew:
    """Every method but :meth:`dismiss` is called with :attr:`lock` held; jobs are called without it.

    Args:
        at_entry: called with the lock held after each job.
    """

    def __init__(self, at_entry: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.jobs = 0
        """That somebody does now."""
        self._at_entry = at_entry
        self._waiting: list[SimpleQueue[None]] = []
        """Of each thread that waits for a change. (A Condition may be left without its lock by an interrupt.)"""
        self._changes = 0
        """How often something has."""
        self._pools: dict[Operation, Pool] = {}
        self._working: defaultdict[Operation, set[int]] = defaultdict(set)
        """Threads that look for jobs. They enter themselves: no interrupt comes to them."""
        self._called: Counter[Operation] = Counter()
        """Those that have been called since one has entered itself."""
        self._closed = False

    def tell(self) -> None:
        """Something has changed that others may wait for."""
        self._changes += 1
        wake = map(methodcaller("put", None), self._waiting)
        deque(wake, 0)  # one call: no interrupt comes in between
        del self._waiting[:]

    def work_or_wait(self, claim: Claim) -> bool:
        """Do something of what is waited for, or wait until something changes. The lock is released meanwhile.

        Returns:
            False if nothing is to be done, nobody does anything, and so nothing would ever change.
        """
        changes = self._changes
        job = claim()
        if job is None:
            if changes == self._changes:
                if not self.jobs and not any(self._working.values()):
                    return False
                self._wait()
            return True
        self.jobs += 1
        try:
            self._unlocked(job)
        finally:
            self.jobs -= 1
            self.tell()
        self._at_entry()
        return True

    def call(self, operation: Operation, claim: Claim) -> None:
        """See that threads look for work. Where there are none, whoever waits does it."""
        self.tell()
        if len(self._working[operation]) + self._called[operation] >= THREADS or self._closed:
            return
        with suppress(NoThreadsError):
            if operation not in self._pools:
                self._pools[operation] = open_pool(THREADS, f"fastensor-offload-{operation}")
            self._called[operation] += 1
            submit(self._pools[operation], self._work, operation, claim)

    def dismiss(self) -> None:
        """Return when none of its threads is left. Others may do jobs still."""
        with self.lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
            self.tell()
        for pool in pools:
            shut_down(pool)

    def wait_until_idle(self) -> None:
        """Return when nobody does a job."""
        while self.jobs:
            self._wait()

    def _wait(self) -> None:
        """Return when something has changed. The lock is released meanwhile."""
        told: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(told)
        self._unlocked(told.get)

    def _unlocked(self, action: Callable[[], object]) -> None:
        """Call it without the lock, which is held again afterwards, even if interrupts come again and again."""
        held = [True]
        interrupt: BaseException | None = None
        try:
            del held[0]  # no call: no interrupt comes before the lock is released
            self.lock.release()
            action()
        finally:
            while not held:
                try:
                    held.extend(map(self.lock.acquire, (True,)))  # one call: no interrupt comes in between
                except BaseException as error:  # noqa: BLE001  # raised below
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def _work(self, operation: Operation, claim: Claim) -> None:
        """What a thread does: jobs, until there are none."""
        job: Job | None = None
        try:
            with self.lock:
                self._working[operation].add(threading.get_ident())
                self._called[operation] = 0
            while True:
                with self.lock:
                    if job is not None:
                        job = None
                        self.jobs -= 1
                    self._at_entry()
                    job = claim()
                    self.tell()
                    if job is None:
                        self._working[operation].discard(threading.get_ident())
                        return
                    self.jobs += 1
                job()
        finally:
            with self.lock:
                self.jobs -= job is not None
                self._working[operation].discard(threading.get_ident())
                self.tell()
