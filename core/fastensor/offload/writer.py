"""What goes out, in the order in which it was saved: to blocks of host memory if it is on a device, and to the SSD."""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from contextlib import suppress
from functools import partial

from fastensor.errors import OffloadError
from fastensor.offload import copying, pieces
from fastensor.offload.cell import Cell, Home, Move
from fastensor.offload.config import OffloadConfig
from fastensor.offload.crew import Crew, Job
from fastensor.offload.depot import Depot, cost
from fastensor.offload.failures import raise_interrupt, without_frames
from fastensor.offload.holding import Holding
from fastensor.offload.statistics import WRITTEN_BY, Tally
from fastensor.select.transfer import Transfer, is_to_blame

_logger = logging.getLogger("fastensor")


class Writer:
    """Used with the mover's lock held, but for jobs.

    Args:
        config: how much may be where.
        crew: who writes.
        depot: where to.
        tally: what is counted.
        dram_nbytes: how much may rest in host memory.
    """

    def __init__(self, config: OffloadConfig, crew: Crew, depot: Depot, tally: Tally, dram_nbytes: int) -> None:
        self._config = config
        self._crew = crew
        self._depot = depot
        self._tally = tally
        self.pending = Holding(config.staging_bytes)
        """What is to be staged or written, and is not yet."""
        self.resting = Holding(dram_nbytes)
        """What is in host memory, or on its way there, and stays there while there is room."""
        self.failure: BaseException | None = None
        """To be raised by the next step, or tensor."""
        self._to_stage: deque[Cell] = deque()
        self._to_write: deque[Cell] = deque()

    def admit(self, cell: Cell) -> None:
        """Take a cell over, as soon as there is room."""
        nbytes = cost(cell)
        staged = copying.is_staged_first(cell.device)
        rests = nbytes <= self.resting.budget
        while True:  # whoever waits releases the lock, and what was found before may be different then
            if self._config.target == "dram" and not (rests and self.resting.fits(nbytes)):
                self._keep(cell)
                return
            if rests and not self.resting.fits(nbytes):
                self._move_on(self.resting.oldest)
            elif (staged or not rests) and not self.pending.fits(nbytes):
                self._wait()
            else:
                break
        self._tally.counts["offloaded"] += 1
        self._tally.counts["offloaded_nbytes"] += cell.nbytes
        if rests:
            self.resting.add(cell, nbytes)
        if not staged and rests:
            cell.home = Home.RESTING
            return
        self.pending.add(cell, nbytes)
        (self._to_stage if staged else self._to_write).append(cell)
        self._crew.call("write", self.claim)

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        while len(self.pending):
            self._wait()

    def claim(self) -> Job | None:
        """See :data:`fastensor.offload.crew.Claim`."""
        return self._claim_staging() or self._claim_piece()

    def take_back(self, cell: Cell) -> None:
        """It is needed, and where it was saved from still: it stays there."""
        self._forget(cell)
        cell.home = Home.KEPT
        self._tally.counts["taken_back_nbytes"] += cell.nbytes
        self._crew.tell()

    def put_off(self, cell: Cell) -> None:
        """It is needed, and in host memory: likely nobody wants it any more before it is its turn."""
        with suppress(ValueError):
            self._to_write.remove(cell)
            self._to_write.append(cell)

    def release(self, cell: Cell) -> None:
        """Nobody wants it any more: it is not written, or only what has begun to be."""
        if cell.writing is None:
            self._forget(cell)
            return
        self._stop(cell)
        if cell.writing.is_over:
            self._written(cell)

    def stop(self) -> None:
        """Write nothing any more: what is not on the SSD stays in memory."""
        for cell in (*self._to_stage, *self._to_write):
            if cell.writing is None:
                self.take_back(cell)
                continue
            cell.writing.failure = _Closed()
            self._stop(cell)
            if cell.writing.is_over:
                self._written(cell)

    # Below: what is chosen, what is done, and what comes of it. -------------------------------------------------------

    def _move_on(self, oldest: Cell) -> None:
        """Send what rests to the SSD; or wait until there is room on the way."""
        if oldest in self.pending:  # still being staged: it goes on from there
            self.resting.remove(oldest)
        elif self.pending.fits(cost(oldest)):
            self.resting.remove(oldest)
            self.pending.add(oldest, cost(oldest))
            self._enqueue(oldest)
        else:
            self._wait()

    def _wait(self) -> None:
        started = time.perf_counter()
        if not self._crew.work_or_wait(self.claim):
            for cell in self.pending.cells():  # an interrupt has come before it was in a queue, or noted as written
                self._forget(cell)
                cell.writing = None
                if cell.home is not Home.RELEASED:
                    self._keep(cell)
                self._depot.tidy(cell)
        self._tally.seconds["waited_to_write"] += time.perf_counter() - started

    def _enqueue(self, cell: Cell) -> None:
        cell.home = Home.QUEUED
        self._to_write.append(cell)
        self._crew.call("write", self.claim)

    def _forget(self, cell: Cell) -> None:
        """It is on no way any more, and does not rest."""
        self.resting.remove(cell)
        self.pending.remove(cell)
        for queue in (self._to_stage, self._to_write):
            with suppress(ValueError):
                queue.remove(cell)

    def _keep(self, cell: Cell) -> None:
        cell.home = Home.KEPT
        self._tally.counts["kept_nbytes"] += cell.nbytes

    def _stop(self, cell: Cell) -> None:
        """No more pieces of it are claimed."""
        assert cell.writing is not None
        cell.writing.stop()
        with suppress(ValueError):
            self._to_write.remove(cell)

    def _claim_staging(self) -> Job | None:
        while self._to_stage:
            cell = self._to_stage[0]
            if not cell.transport and cell not in self.resting:
                self._begin_straight(cell)
            if cell.home is Home.KEPT:
                continue
            if cell.writing is not None or not self._fits_into_blocks(cell):
                self._to_stage.popleft()
                self._to_write.append(cell)
            elif self._depot.find_blocks(cell):
                self._to_stage.popleft()
                cell.home, cell.writing = Home.WRITING, Move(1)
                cell.writing.claim()
                return partial(self._stage, cell)
            elif self._crew.jobs or self._to_write:  # there will be blocks
                return None
            else:  # what is in blocks could not be written
                self._forget(cell)
                self._keep(cell)
                self._crew.tell()
        return None

    def _claim_piece(self) -> Job | None:
        while self._to_write:
            cell = self._to_write[0]
            if cell.writing is None and not self._begin(cell, self._choose(cell)):
                continue
            assert cell.writing is not None
            index = cell.writing.claim()
            if cell.writing.is_claimed:
                self._to_write.popleft()
            return partial(self._write, cell, index)
        return None

    def _fits_into_blocks(self, cell: Cell) -> bool:
        """If not, it is written a piece at a time, and has its memory until that is done."""
        return cell in self.resting or cost(cell) <= self._config.staging_bytes

    def _begin_straight(self, cell: Cell) -> None:
        """Begin to write it from the device, if that is what is chosen."""
        try:
            slots = self._depot.slots
        except OffloadError:  # which is told when it is to be written
            return
        straight = tuple(name for name in slots.transports if slots.moves(name, cell.device))
        if not straight:
            return
        transfer = self._depot.transfer("write", cell, (*straight, *slots.transports))
        if slots.moves(transfer.used, cell.device):
            self._begin(cell, transfer)
        else:
            cell.transport = transfer.used

    def _choose(self, cell: Cell) -> Transfer | None:
        """Who writes what is in host memory, or goes through it."""
        try:
            slots = self._depot.slots
        except OffloadError as error:
            self._could_not_write(cell, error)
            return None
        names = [name for name in slots.transports if not slots.moves(name, cell.device)] or slots.transports
        return self._depot.transfer("write", cell, (cell.transport,) if cell.transport in names else tuple(names))

    def _begin(self, cell: Cell, transfer: Transfer | None) -> bool:
        """Find a place for it. False if it stays in memory."""
        if transfer is None:
            return False
        try:
            count = self._depot.find_slot(cell)
        except (OSError, OffloadError) as error:
            self._could_not_write(cell, error)
            return False
        cell.home, cell.transport, cell.writing = Home.WRITING, transfer.used, Move(count, transfer)
        self._tally.note_peak("peak_ssd_nbytes", self._depot.slots.used_nbytes)
        return True

    def _stage(self, cell: Cell) -> None:
        """A job."""
        failure: BaseException | None = None
        try:
            pieces.stage(cell)
        except BaseException as error:  # noqa: BLE001  # noted
            failure = without_frames(error)
        with self._crew.lock:
            cell.writing = None
            if cell.home is Home.RELEASED:
                self._forget(cell)
            elif failure is not None:
                self._could_not_write(cell, failure)
            else:
                cell.source = None
                if cell in self.resting:
                    self.pending.remove(cell)
                    cell.home = Home.RESTING
                else:
                    self._enqueue(cell)
            self._depot.tidy(cell)
            self._crew.tell()
        raise_interrupt(failure)

    def _write(self, cell: Cell, index: int) -> None:
        """A job."""
        failure: BaseException | None = None
        crc32 = 0
        try:
            crc32 = pieces.write(cell, index, self._depot, checksum=self._config.verify)
        except BaseException as error:  # noqa: BLE001  # noted
            failure = without_frames(error)
        with self._crew.lock:
            move = cell.writing
            assert move is not None
            cell.crc32s[index] = crc32
            move.end_piece(failure)
            if move.failure is not None:
                self._stop(cell)
            if move.is_over:
                self._written(cell)
            self._crew.tell()
        raise_interrupt(failure)

    def _written(self, cell: Cell) -> None:
        """Nobody writes it any more."""
        move, cell.writing = cell.writing, None
        assert move is not None
        assert move.transfer is not None
        if cell.home is Home.RELEASED:
            self._forget(cell)
        elif move.failure is None:
            move.transfer.done(time.perf_counter() - move.transfer.started)
            cell.home, cell.source, cell.ready = Home.STORED, None, None
            self._forget(cell)
            self._tally.counts["written_nbytes"] += cell.nbytes
            self._tally.counts[f"{WRITTEN_BY}{cell.transport}"] += cell.nbytes
        elif self._is_given_up(cell, move):
            self._depot.free_slot(cell)
            cell.transport = ""
            self._enqueue(cell)
        else:
            self._depot.free_slot(cell)
            self._could_not_write(cell, move.failure)
        self._depot.tidy(cell)

    def _is_given_up(self, cell: Cell, move: Move) -> bool:
        """Whether it was the backend that could not write it, and another one may."""
        assert move.transfer is not None
        slots = self._depot.slots
        if not (isinstance(move.failure, Exception) and is_to_blame(move.failure)):
            return False
        if not any(name != cell.transport for name in slots.transports):
            return False
        move.transfer.failed(str(move.failure))
        slots.give_up(cell.transport, str(move.failure))
        return True

    def _could_not_write(self, cell: Cell, failure: BaseException) -> None:
        """It stays in memory, and that is told."""
        without_frames(failure)
        self._forget(cell)
        self._keep(cell)
        self._crew.tell()
        if not isinstance(failure, Exception):  # an interrupt, or the end
            return
        counts = self._tally.counts
        counts["failed_writes"] += 1
        if counts["failed_writes"] == 1:
            _logger.warning("an activation stays in memory, because it could not be written: %s", failure)
        if isinstance(failure, OSError) and not _is_out_of_space(failure):
            self._depot.broken = str(failure)
            _logger.error("no activations are offloaded any more: %s", failure)
        if self._config.when_full == "raise" and self.failure is None:
            self.failure = failure


class _Closed(BaseException):
    """What is being written need not be any more: no failure."""


def _is_out_of_space(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
