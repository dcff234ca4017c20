"""Moving activations out and in, behind the back of the training.

A cell's bytes are in the memory that they were saved from, until a :class:`fastensor.offload.writer.Writer` has put
them in host memory or on the SSD; from there a :class:`fastensor.offload.reader.Reader` reads them as often as they are
wanted. Whoever does it is of a :class:`fastensor.offload.crew.Crew`; the places are a
:class:`fastensor.offload.depot.Depot`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from typing import Self

import torch

from fastensor.errors import OffloadError
from fastensor.offload import copying
from fastensor.offload.cell import Cell, Home
from fastensor.offload.config import OffloadConfig, processes_here
from fastensor.offload.crew import Crew
from fastensor.offload.depot import Depot
from fastensor.offload.holding import Holding
from fastensor.offload.host_memory import return_freed_memory
from fastensor.offload.reader import Reader
from fastensor.offload.statistics import Tally
from fastensor.offload.writer import Writer

_SHARE_OF_FREE_MEMORY = 0.5


class Token(partial[object]):
    """Held by the graph, and by nothing else: when it goes, nobody wants the cell any more.

    Its finalizer, in any thread, and between any two instructions of it, waits for nothing, and begins with one call in
    C that notes that: no interrupt comes before.
    """

    cell: Cell
    mover: Mover

    def __new__(cls, cell: Cell, mover: Mover) -> Self:
        steps: list[Callable[[], object]] = [partial(mover.released.append, cell), mover.take_in]
        token = super().__new__(cls, deque, map(call, steps), 0)
        token.cell, token.mover = cell, mover
        return token

    __del__ = partial.__call__


class Mover:
    """Cells, where they are, and the threads that move them. Every method may be called from several threads.

    Args:
        config: how much may be where.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._process = os.getpid()
        self._closed = False
        self.released: deque[Cell] = deque()
        """What nobody wants any more, and is not sorted out yet."""
        self._tally = Tally()
        self._crew = Crew(self._sort_out)
        dram_nbytes = _dram_budget(config)
        self._depot = Depot(config, dram_nbytes)
        self._writer = Writer(config, self._crew, self._depot, self._tally, dram_nbytes)
        self._reader = Reader(config, self._crew, self._depot, self._tally)
        self.alive_anyway: set[int] = set()
        """Marks of tensors whose memory was not freed by storing them."""

    def admit(self, cell: Cell) -> None:
        """Take over a cell's memory. Waits while there is more to write than may be.

        Raises:
            OffloadError: see :meth:`raise_failure`.
        """
        self.raise_failure()
        with self._crew.lock:
            self._sort_out()
            if cell.device.type == "cpu" and self._config.return_freed_memory:
                return_freed_memory()
            if self._moves(cell):
                self._writer.admit(cell)
            else:
                cell.home = Home.KEPT
                self._tally.counts["kept_nbytes"] += cell.nbytes

    def share(self, cell: Cell) -> bool:
        """One handle more will be unpacked. False if the last one is just going."""
        with self._crew.lock:
            self._sort_out()
            if cell.home is Home.RELEASED:
                return False
            cell.unread += 1
            return True

    def raise_failure(self) -> None:
        """
        Raises:
            OffloadError: a cell could not be written, and that is to be raised, once.
        """
        with self._crew.lock:
            failure, self._writer.failure = self._writer.failure, None
        if failure is not None:
            raise OffloadError(f"an activation could not be written: {failure}") from failure

    def check_process(self) -> None:
        """
        Raises:
            OffloadError: this is a forked child, where no thread may hold the locks that are held.
        """
        if os.getpid() != self._process:
            raise OffloadError("an activation of the parent process is wanted in a forked child, which has none")

    def forget(self) -> None:
        """In a forked child: what is pinned, and in the files, is its parent's."""
        self._depot.forget()

    def bring(self, cell: Cell) -> tuple[torch.UntypedStorage, int]:
        """A storage with the cell's bytes, and where in the storage that they are from it begins.

        Raises:
            OffloadError: they cannot be read, or have changed.
        """
        with self._crew.lock:
            self._sort_out()
            if cell.unread:
                cell.unread -= 1
                self._count_hit(cell)
            cell.awaited += 1
            try:
                while (found := self._at_hand(cell)) is None:
                    self._read(cell)
            finally:
                cell.awaited -= 1
            cell.prefetched = False
            return found

    def prefetch(self, cells: Iterable[Cell], wanted: Cell) -> None:
        """Begin to read what will be wanted next, in that order, as far as the budget goes, after what is ``wanted``
        now."""
        with self._crew.lock:
            self._sort_out()
            if self._closed:
                return
            window = self._config.prefetch_bytes
            sooner = {wanted}
            for cell in cells:
                sooner.add(cell)
                if cell.home is Home.QUEUED and cell.source is not None and cell.nbytes <= window:
                    window -= cell.nbytes
                    self._writer.take_back(cell)
                if (
                    cell is wanted
                    or cell.storage is not None
                    or not _is_away(cell)
                    or self._still_alive(cell) is not None
                ):
                    continue
                if not self._reader.find_room(cell.nbytes, sooner):
                    break
                try:
                    self._reader.begin(cell, urgent=False)
                except (MemoryError, torch.OutOfMemoryError, OSError):  # it is read when it is needed, if it can be
                    break

    def drop(self, cells: Iterable[Cell]) -> None:
        """Let go of what was prefetched for these cells; of those that are being read, as soon as they have been."""
        with self._crew.lock:
            self._sort_out()
            for cell in cells:
                if cell.is_loaded and cell.prefetched:
                    self._reader.evict(cell)
                cell.prefetched = False

    def settle(self) -> None:
        """Wait until nothing is on its way to the SSD or back, and sort out what nobody wants any more."""
        with self._crew.lock:
            self._sort_out()
            self._writer.settle()
            self._reader.settle()

    def counted(self) -> tuple[Counter[str], dict[str, float]]:
        """What has been counted so far, and how long was waited."""
        with self._crew.lock:
            peaks = {f"peak_{what}_nbytes": held.peak_nbytes for what, held in self._holdings().items()}
            return self._tally.counts + Counter(peaks), dict(self._tally.seconds)

    def gauge(self) -> dict[str, int]:
        """How much is where, in bytes."""
        with self._crew.lock:
            self._sort_out()
            held = {what: holding.nbytes for what, holding in self._holdings().items()}
            return held | {"idle": self._reader.idle_nbytes} | self._depot.sizes()

    def take_in(self) -> None:
        """Sort out what nobody wants any more. If somebody holds the lock, that one does, or the next."""
        if os.getpid() != self._process:
            return
        acquired: list[bool] = []
        try:
            acquired.extend(map(self._crew.lock.acquire, (False,)))  # one call: no interrupt comes in between
            if acquired[0]:
                self._sort_out()
        finally:
            if acquired and acquired[0]:
                self._crew.lock.release()

    def close(self) -> None:
        """Stop the threads and give files and memory back. What is stored is lost; what is in memory stays there."""
        with self._crew.lock:
            self._closed = True
            self._writer.stop()
        self._crew.dismiss()
        with self._crew.lock:
            self._crew.wait_until_idle()
            self._sort_out()
            self._writer.stop()  # what has been staged meanwhile
            self._reader.stop()
            self._depot.close()

    # Below: with the lock held. --------------------------------------------------------------------------------------

    def _moves(self, cell: Cell) -> bool:
        """Whether anything is moved: it is not if that is closed or broken, nor if it is where it should be already."""
        in_host_memory = not copying.is_staged_first(cell.device)
        return not (self._closed or self._depot.broken or (self._config.target == "dram" and in_host_memory))

    def _read(self, cell: Cell) -> None:
        """Do something of it, or wait for others who do."""
        started = time.perf_counter()
        if cell.reading is None:
            self._reader.find_room(cell.nbytes)
            self._reader.begin(cell, urgent=True)
        self._reader.work_or_wait(cell)
        self._tally.seconds["waited_to_read"] += time.perf_counter() - started

    def _at_hand(self, cell: Cell) -> tuple[torch.UntypedStorage, int] | None:
        """See :meth:`bring`; None if it has to be read."""
        if cell.home in (Home.QUEUED, Home.RESTING) and cell.source is not None:
            self._writer.take_back(cell)
        if cell.failure is not None:
            raise self._failure_of(cell)
        if cell.source is not None:
            copying.check_bounds(cell.source, cell.origin + cell.nbytes)
            return cell.source, 0
        if cell.is_loaded:
            assert cell.storage is not None
            self._reader.resident.use(cell)
            return cell.storage, cell.origin - cell.lead
        if cell.reading is not None:
            return None
        if (alive := self._still_alive(cell)) is not None:
            return alive, 0
        if cell.home is Home.STORED and self._closed:
            raise OffloadError("an activation is wanted that was lost when its ActivationOffload was closed")
        if cell.home is Home.QUEUED:
            self._writer.put_off(cell)
        return None

    def _failure_of(self, cell: Cell) -> BaseException:
        failure = cell.failure
        assert failure is not None
        if cell.home is not Home.BROKEN:  # it may be tried again
            cell.failure = None
        again = type(failure)(*failure.args)
        again.__cause__ = failure.__cause__
        return again

    def _still_alive(self, cell: Cell) -> torch.UntypedStorage | None:
        """The storage that it was saved from, if others have kept it."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(cell.live.cdata)
        if storage is None or storage.nbytes() < cell.origin + cell.nbytes:  # or resized
            return None
        self.alive_anyway.add(cell.mark)
        return storage

    def _count_hit(self, cell: Cell) -> None:
        if _is_away(cell):
            late = "prefetch_late" if cell.reading is not None else "misses"
            self._tally.counts["prefetch_hits" if cell.is_loaded else late] += 1

    def _holdings(self) -> dict[str, Holding]:
        return {"pending": self._writer.pending, "resting": self._writer.resting, "resident": self._reader.resident}

    def _sort_out(self) -> None:
        """Take in what finalizers have left."""
        self._reader.trim()
        while self.released:
            cell = self.released[0]  # and away afterwards: an interrupt may come, and doing it again does no harm
            cell.home = Home.RELEASED
            self._writer.release(cell)
            self._reader.release(cell)
            self._depot.tidy(cell)
            self._crew.tell()
            del self.released[0]


def _is_away(cell: Cell) -> bool:
    """Whether it is to be read before it can be used."""
    return cell.source is None and (bool(cell.blocks) or cell.home is Home.STORED)


def _dram_budget(config: OffloadConfig) -> int:
    if config.dram_bytes is not None:
        return config.dram_bytes
    if config.target != "dram":
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * _SHARE_OF_FREE_MEMORY) // processes_here()
