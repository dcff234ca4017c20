"""Taking turns: only some of the processes of a job read at a time.

The paper on LMDBIO (section 4.6) calls this I/O staggering. Disks that seek, and servers of parallel filesystems, serve
few large reads at a time faster than many.
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fastensor.backends.threads import open_pool, shut_down, submit
from fastensor.data.coalescing import Extents
from fastensor.data.engines.base import Engine, Value, copies_of
from fastensor.files import launchers
from fastensor.files.arguments import checks_keywords
from fastensor.files.job_store import JobStore, wait_until

_CONNECT = timedelta(seconds=60)
_logger = logging.getLogger("fastensor")


@checks_keywords
@dataclass(frozen=True, slots=True)
class Staggering:
    """Turns of processes that read a file. All of them get the same.

    There are ``active`` tokens. A process that wants to read draws a number from the store. Number i gets the token
    that number ``i - active`` has had, once that one has passed it on. So tokens go to those that wait, in the order in
    which they came. (In the paper they go round a fixed order; there a process that does not read would hold up the
    others.)

    Tokens spread reads, they protect nothing: if a process holds a token for longer than ``timeout``, the next one goes
    on without waiting for it. If the store leaves a process without an answer for twice as long, its read fails.
    """

    active: int = 1
    """Processes that may read at a time."""
    store: str = ""
    """``host:port`` of a ``TCPStore``. By default that of the job, which ``MASTER_ADDR`` and ``MASTER_PORT`` name."""
    timeout: float = 30.0
    """Seconds for which a process may hold a token, before it is taken for dead."""
    name: str = "fastensor/staggering"
    """Processes with the same name take turns with each other."""

    def __post_init__(self) -> None:
        if self.active < 1:
            raise ValueError(f"active is at least 1, found {self.active}")
        if self.timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, found {self.timeout}")
        store = self.store or launchers.store_address()
        if store is None:
            raise ValueError(
                "staggering needs the store of torch.distributed, and MASTER_ADDR and MASTER_PORT, which name that of "
                "the job, are not set: pass store='host:port' of a TCPStore"
            )
        host, _, port = store.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"store is the 'host:port' of a TCPStore, found {store!r}")
        object.__setattr__(self, "store", store)


class Tokens:
    """This process's part in taking turns. Used by one thread at a time.

    Raises:
        OSError: the store cannot be reached.
    """

    def __init__(self, staggering: Staggering) -> None:
        self._staggering = staggering
        self._store: JobStore | None = None
        """None after a call that was not answered."""
        self._connected()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for a token, and hold it.

        Raises:
            OSError: the store cannot be reached.
        """
        store = self._connected()
        place, token = divmod(store.ask("add", "numbers", 1) - 1, self._staggering.active)
        name = f"{token}/turn"
        self._await(store, name, place)
        try:
            yield
        finally:
            _pass_on(store, name, place)

    def _connected(self) -> JobStore:
        if self._store is None:
            seconds = 2 * _CONNECT.total_seconds()  # so long if it accepts the connection, and then does not answer
            self._store = JobStore(self._connect, 2 * self._staggering.timeout, self._unreachable, seconds)
        return self._store

    def _connect(self) -> Any:
        # torch can be built without these, and its public names of them have no types
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.distributed_c10d import PrefixStore

        host, _, port = self._staggering.store.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=_CONNECT, wait_for_workers=False)
        return PrefixStore(f"{self._staggering.name}/{self._staggering.active}/", store)

    def _await(self, store: JobStore, name: str, place: int) -> None:
        """Wait until those that come before have had the token, or seem to be dead."""

        def turn() -> int:
            return int(store.ask("add", name, 0))

        while (before := turn()) < place:
            if not wait_until(lambda: turn() != before, self._staggering.timeout):  # called at once
                _logger.warning(
                    "a process has held the token for reading for %g s: the next one goes on without it",
                    self._staggering.timeout,
                )
                _pass_on(store, name, before)

    def _unreachable(self, error: Exception) -> OSError:
        if isinstance(error, TimeoutError):
            self._store = None
        message = f"the store {self._staggering.store} for staggering cannot be reached: {error}"
        return OSError(errno.ENOTCONN, message)


def _pass_on(store: JobStore, name: str, place: int) -> None:
    """Let the next one read, unless somebody has done so."""
    store.ask("compare_set", name, str(place), str(place + 1))


class StaggeredEngine:
    """Reads by another engine, while it has a token. See :class:`fastensor.data.engines.base.Engine`.

    A thread reads all values of a fetch in one turn, before any of them is taken. So memory holds all of them, and the
    more values a fetch has, the more is read in a turn.

    Args:
        engine: belongs to this one.
        staggering: when it may read.

    Raises:
        OSError: the store cannot be reached.
    """

    reads_ahead = True

    def __init__(self, engine: Engine, staggering: Staggering) -> None:
        self._engine = engine
        self._tokens = Tokens(staggering)
        self._pool = open_pool(1, "fastensor-staggered")

    @property
    def name(self) -> str:
        return self._engine.name

    def fetch(self, extents: Extents) -> StaggeredFetch:
        return StaggeredFetch(submit(self._pool, self._read, extents))

    def close(self) -> None:
        shut_down(self._pool)
        self._engine.close()

    def _read(self, extents: Extents) -> Sequence[Value]:
        with self._tokens.held():
            return self._engine.fetch(extents).take(0, len(extents))


class StaggeredFetch:
    """See :class:`fastensor.data.engines.base.Fetch`."""

    def __init__(self, values: Future[Sequence[Value]]) -> None:
        self._values = values
        weakref.finalize(self, values.cancel).atexit = False  # what has not begun is not read for nobody

    def take(self, begin: int, end: int, *, copied: bool = False) -> Sequence[Value]:
        values = self._values.result()[begin:end]
        return copies_of(values) if copied else values
