"""What comes in: what is wanted now, and, within a budget, what will be wanted next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Set
from contextlib import suppress
from functools import partial

from fastensor.backends.to_device import storage_on
from fastensor.errors import BackendUnavailableError, OffloadError
from fastensor.offload import copying, pieces
from fastensor.offload.cell import Cell, Home, Move
from fastensor.offload.config import OffloadConfig
from fastensor.offload.crew import Crew, Job
from fastensor.offload.depot import Depot
from fastensor.offload.failures import raise_interrupt, without_frames
from fastensor.offload.holding import Holding
from fastensor.offload.host_memory import HostMemory, keep_on_fork
from fastensor.offload.statistics import Tally


class Reader:
    """Used with the mover's lock held, but for jobs.

    Args:
        config: how much may be where.
        crew: who reads.
        depot: where from.
        tally: what is counted.
    """

    def __init__(self, config: OffloadConfig, crew: Crew, depot: Depot, tally: Tally) -> None:
        self._config = config
        self._crew = crew
        self._depot = depot
        self._tally = tally
        self.resident = Holding(config.prefetch_bytes)
        """What has been, or is being, read."""
        self._host = HostMemory(config.prefetch_bytes)
        self._to_read: deque[Cell] = deque()

    @property
    def idle_nbytes(self) -> int:
        """Memory that is kept for what is read next."""
        return self._host.idle_nbytes

    def find_room(self, nbytes: int, sooner: Set[Cell] = frozenset()) -> bool:
        """Let go of what nobody is known to want again, and of what was wanted already, longest ago, and will be again,
        but not ``sooner``. False if that is not enough."""
        for useless in (_is_done, _was_served):
            for cell in self.resident.cells():
                if self.resident.fits(nbytes):
                    return True
                if cell.reading is not None and cell.reading.is_claimed and not self._crew.jobs:
                    self._drop(cell)
                if cell.is_loaded and not cell.awaited and cell not in sooner and useless(cell):
                    self.evict(cell)
        return self.resident.fits(nbytes)

    def begin(self, cell: Cell, *, urgent: bool) -> None:
        """Have a cell read: from its blocks if it has some, or else from its slot.

        Args:
            urgent: whether somebody waits for it: before all others, and beyond the budget if need be.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read it into.
        """
        if copying.is_read_in_place(cell.device):
            storage, memory = self._host.storage(cell.lead + cell.nbytes)
        else:
            storage, memory = storage_on(cell.device, cell.nbytes), None
        ready = copying.event_now(cell.device)
        if cell.blocks:
            move = Move(len(cell.blocks), ready=ready)
        else:
            move = Move(len(cell.pieces), self._depot.transfer("read", cell, (cell.transport,)), ready)
        self.resident.add(cell, cell.nbytes, beyond=urgent)
        cell.storage, cell.memory, cell.reading, cell.prefetched = storage, memory, move, not urgent
        if urgent:
            self._to_read.appendleft(cell)
        else:
            self._to_read.append(cell)
        self._crew.call("read", self.claim)

    def work_or_wait(self, cell: Cell) -> None:
        """Do something of what is read of a cell, or wait for others who do."""
        if not self._crew.work_or_wait(partial(self.claim, cell)):
            self._drop(cell)

    def settle(self) -> None:
        """Wait until nothing is being read."""
        while reading := [cell for cell in self.resident.cells() if cell.reading is not None]:
            self.work_or_wait(reading[0])

    def claim(self, wanted: Cell | None = None) -> Job | None:
        """See :data:`fastensor.offload.crew.Claim`. What is ``wanted``, or the first."""
        cell = wanted or next(iter(self._to_read), None)
        if cell is None or cell.reading is None or cell.reading.is_claimed:
            return None
        index = cell.reading.claim()
        if cell.reading.is_claimed:
            with suppress(ValueError):
                self._to_read.remove(cell)
        return partial(self._read_piece, cell, index)

    def evict(self, cell: Cell) -> None:
        """Let go of what was read of it."""
        self.resident.remove(cell)
        cell.storage = cell.memory = None

    def release(self, cell: Cell) -> None:
        """Nobody wants it any more."""
        if cell.reading is None:
            self.evict(cell)
            return
        self._stop(cell)
        if cell.reading.is_over:
            self._read(cell)
        elif not self._crew.jobs:
            self._drop(cell)

    def stop(self) -> None:
        """Read nothing any more that nobody reads now, and keep no memory for later."""
        while self._to_read:
            self._drop(self._to_read[0])
        self._host.clear()

    def trim(self) -> None:
        """Keep no more memory for what is read next than may be."""
        self._host.trim()

    def _drop(self, cell: Cell) -> None:
        """Nobody reads it, be it that an interrupt has come before a piece was noted as read."""
        self._stop(cell)
        self.evict(cell)
        cell.reading = None  # last, or it would be taken for loaded if an interrupt came now
        self._depot.tidy(cell)

    def _stop(self, cell: Cell) -> None:
        assert cell.reading is not None
        cell.reading.stop()
        with suppress(ValueError):
            self._to_read.remove(cell)

    def _read_piece(self, cell: Cell, index: int) -> None:
        """A job."""
        failure: BaseException | None = None
        move = cell.reading
        assert move is not None
        try:
            if move.transfer is None:
                pieces.unstage(cell, index)
            else:
                pieces.read(cell, index, self._depot, verify=self._config.verify)
        except BaseException as error:  # noqa: BLE001  # raised by whoever wants the cell
            failure = without_frames(error)
        with self._crew.lock:
            move.end_piece(failure)
            if move.failure is not None:
                self._stop(cell)
            if move.is_over:
                self._read(cell)
            self._crew.tell()
        raise_interrupt(failure)

    def _read(self, cell: Cell) -> None:
        """Nobody reads it any more."""
        move = cell.reading
        assert move is not None
        if move.failure is None and cell.home is not Home.RELEASED:
            if cell.memory is not None:
                keep_on_fork(cell.memory)
            cell.reading = None
            if move.transfer is not None:
                move.transfer.done(time.perf_counter() - move.transfer.started)
                self._tally.counts["read_nbytes"] += cell.nbytes
        else:
            self.evict(cell)
            cell.reading = None  # last, as above
            if cell.home is not Home.RELEASED and isinstance(move.failure, Exception):
                self._could_not_read(cell, move, move.failure)
        self._depot.tidy(cell)

    def _could_not_read(self, cell: Cell, move: Move, failure: Exception) -> None:
        if move.transfer is not None and isinstance(failure, BackendUnavailableError) and cell.transport != "numpy":
            self._depot.slots.give_up(cell.transport, str(failure))
            cell.transport = "numpy"
            return
        if not isinstance(failure, OffloadError):
            error = OffloadError(f"an activation of {cell.nbytes} bytes cannot be read: {failure}")
            error.__cause__ = failure
            failure = error
        cell.failure = failure
        if move.transfer is not None:
            cell.home = Home.BROKEN


def _is_done(cell: Cell) -> bool:
    """It has been wanted as often as it was saved."""
    return not cell.unread


def _was_served(cell: Cell) -> bool:
    return not cell.prefetched
