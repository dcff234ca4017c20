"""Moving activations out and in, behind the back of the training: who may begin what when, and in which memory.

A cell goes from ``QUEUED`` by ``WRITING`` to ``STORED``, and from there by ``READING`` to ``LOADED`` and back, as often
as it is wanted. Until it is stored it is in memory, where it is taken back from if it is needed so soon. All decisions
are made with one lock held; bytes are moved without it, a piece at a time, by threads that claim pieces, and by the
threads of the training when they have to wait. So nothing depends on a thread being there.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TypeAlias

import torch
from isal import isal_zlib

from fastensor.backends import registry
from fastensor.backends.arena import BLOCK_NBYTES, Arena
from fastensor.backends.memory import Buffer
from fastensor.backends.threads import NoThreadsError, open_pool, shut_down, submit
from fastensor.backends.to_device import storage_on
from fastensor.errors import BackendUnavailableError, CorruptActivationError, OffloadError
from fastensor.offload.cell import Cell, State
from fastensor.offload.config import OffloadConfig, processes_here
from fastensor.offload.copying import check_bounds, copy_in, copy_out
from fastensor.offload.host_memory import HostMemory, return_freed_memory
from fastensor.offload.slots import SlotFiles
from fastensor.select.context import Context, Operation
from fastensor.select.current import current_selector
from fastensor.select.selector import Selector
from fastensor.select.transfer import Transfer, is_to_blame

THREADS = 4
"""That write, and as many that read."""
STAGED_FIRST = {"cuda"}
"""Kinds of devices whose memory is to be free as soon as the bytes are in the host's."""
READ_IN_PLACE = {"cpu"}
"""Kinds of devices whose memory is read into from the disk; for others there are pieces of host memory between."""
Job: TypeAlias = Callable[[], None]
WRITTEN_BY = "written by "
"""What counts by backend begin with."""
_SHARE_OF_FREE_MEMORY = 0.5
_logger = logging.getLogger("fastensor")


class Token:
    """Held by the graph, and by nothing else: when it goes, nobody wants the cell any more."""

    __slots__ = ("__weakref__", "cell", "mover")

    def __init__(self, cell: Cell, mover: Mover) -> None:
        self.cell = cell
        self.mover = mover

    def __del__(self) -> None:
        self.mover.let_go(self.cell)


class Mover:
    """Cells, where they are, and the threads that move them. Every method may be called from several threads.

    Args:
        config: how much may be where.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._process = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._jobs = 0
        """That somebody does now."""
        self._changes = 0
        """How often something has."""
        self._released: deque[Cell] = deque()
        self._slots: SlotFiles | None = None
        self._selector: Selector | None = None
        """None if a backend was named."""
        self._host = HostMemory(config.prefetch_bytes)
        self._dram_nbytes = _dram_budget(config)
        self._staged = Arena(lambda: self._dram_nbytes + config.staging_bytes // BLOCK_NBYTES * BLOCK_NBYTES)
        self._bounce = Arena(lambda: 2 * THREADS * BLOCK_NBYTES)
        self._pools: dict[Operation, ThreadPoolExecutor] = {}
        self._running: Counter[Operation] = Counter()
        """Threads that look for work."""
        self._to_stage: deque[Cell] = deque()
        self._to_write: deque[Cell] = deque()
        self._to_read: deque[Cell] = deque()
        self._resting: dict[Cell, None] = {}
        self._resident: dict[Cell, None] = {}
        """Those that are, or will be, ``LOADED``; the one that was wanted longest ago is the first."""
        self._pending_nbytes = 0
        """Of cells that are to be stored, and are not yet."""
        self._resting_nbytes = 0
        self._resident_nbytes = 0
        self._failure: BaseException | None = None
        """To be raised by the next :meth:`admit`."""
        self._broken = ""
        """Why nothing is written any more; empty if it is."""
        self._closed = False
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """That threads of the training have waited."""
        self.alive_anyway: set[int] = set()
        """Marks of tensors whose memory was not freed by storing them."""

    # What the engine calls. ------------------------------------------------------------------------------------------

    def admit(self, cell: Cell) -> None:
        """Take over a cell's memory. Waits while there is more to write than may be.

        Raises:
            OffloadError: see :meth:`raise_failure`.
        """
        self.raise_failure()
        with self._changed:
            self._sort_out()
            if cell.device.type == "cpu" and self._config.return_freed_memory:
                return_freed_memory()
            if self._why_nothing_moves(cell):
                self._keep(cell)
                return
            self.counts["offloaded"] += 1
            self.counts["offloaded_nbytes"] += cell.nbytes
            if self._is_staged_first(cell):
                self._admit_to_staging(cell)
            else:
                self._settle(cell)

    def raise_failure(self) -> None:
        """
        Raises:
            OffloadError: a cell could not be written, and that is to be raised, once.
        """
        with self._changed:
            failure, self._failure = self._failure, None
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
        """In a forked child: what is pinned is its parent's."""
        self._staged.forget()
        self._bounce.forget()

    def bring(self, cell: Cell) -> tuple[torch.UntypedStorage, int]:
        """A storage with the cell's bytes, and where in the storage that they are from it begins.

        Raises:
            OffloadError: they cannot be read, or have changed.
        """
        with self._changed:
            self._sort_out()
            if cell.unread:
                cell.unread -= 1
                self._count_hit(cell)
            started = time.perf_counter()
            while True:
                if cell.state in (State.QUEUED, State.RESTING):
                    self._take_back(cell)
                if cell.state is State.BROKEN:
                    assert cell.failure is not None
                    raise type(cell.failure)(*cell.failure.args) from cell.failure.__cause__
                if cell.source is not None:
                    check_bounds(cell.source, cell.origin + cell.nbytes)
                    return cell.source, 0
                if cell.blocks:
                    return self._unstage(cell), cell.origin
                if cell.storage is not None and cell.state in (State.LOADED, State.KEPT):
                    if cell in self._resident:
                        self._resident[cell] = self._resident.pop(cell)
                    return cell.storage, cell.origin
                if cell.state is State.STORED:
                    if self._closed:
                        raise OffloadError(
                            "an activation is wanted that was lost when its ActivationOffload was closed"
                        )
                    if (alive := self._still_alive(cell)) is not None:
                        return alive, 0
                    self._make_room(cell.nbytes)
                    self._begin_to_read(cell, urgent=True)
                self._work_or_wait(partial(self._claim_read, cell))
                now = time.perf_counter()
                self.seconds["waited_to_read"] += now - started
                started = now

    def prefetch(self, cells: Iterable[Cell]) -> None:
        """Begin to read what will be wanted next, in that order, as far as the budget goes."""
        with self._changed:
            self._sort_out()
            if self._closed:
                return
            window = self._config.prefetch_bytes
            for cell in cells:
                if cell.state is State.QUEUED and not self._is_staged_first(cell) and cell.nbytes <= window:
                    window -= cell.nbytes
                    self._take_back(cell)
                if cell.state is not State.STORED or self._still_alive(cell) is not None:
                    continue
                if not self._make_room(cell.nbytes):
                    break
                try:
                    self._begin_to_read(cell, urgent=False)
                except (MemoryError, torch.OutOfMemoryError, OSError):  # it is read when it is needed, if it can be
                    break

    def drop(self, cells: Iterable[Cell]) -> None:
        """Those were not wanted after all: what was read of them may go."""
        with self._changed:
            self._sort_out()
            for cell in cells:
                if cell.state is State.LOADED and cell.prefetched:
                    self._evict(cell)

    def settle(self) -> None:
        """Wait until nothing is on its way to the SSD, and sort out what nobody wants any more."""
        with self._changed:
            self._sort_out()
            while self._pending_nbytes:
                self._work_or_wait(self._claim_write)

    def counted(self) -> tuple[Counter[str], dict[str, float]]:
        """What has been counted so far, and how long was waited."""
        with self._changed:
            return Counter(self.counts), dict(self.seconds)

    def gauge(self) -> dict[str, int]:
        """How much is where, in bytes."""
        with self._changed:
            self._sort_out()
            return {
                "pending": self._pending_nbytes,
                "resting": self._resting_nbytes,
                "resident": self._resident_nbytes,
                "idle": self._host.idle_nbytes,
                "staged": self._staged.nbytes + self._bounce.nbytes,
                "on_ssd": self._slots.used_nbytes if self._slots else 0,
                "reserved_on_ssd": self._slots.reserved_nbytes if self._slots else 0,
            }

    def close(self) -> None:
        """Stop the threads and give files and memory back. What is stored is lost; what is in memory stays there."""
        with self._changed:
            self._closed = True
            for cell in (*self._to_stage, *self._to_write):
                if cell.state is State.QUEUED:
                    self._take_back(cell)
                else:
                    cell.failure = OffloadError("it was closed")
                    self._claim_no_more(cell, self._to_write)
                    if not cell.moving:
                        self._written(cell)
            pools, self._pools = list(self._pools.values()), {}
            self._tell()
        for pool in pools:
            shut_down(pool)
        with self._changed:
            while self._jobs:  # of threads that wait for something
                self._changed.wait()
            self._sort_out()
            while self._to_read:
                cell = self._to_read.popleft()
                self._leave_residence(cell)
                cell.state = State.STORED
            if self._slots is not None:
                self._slots.close()
                self._slots = None
            self._staged.close()
            self._bounce.close()
            self._host.clear()

    # Everything below is called with the lock held, but for jobs. -----------------------------------------------------

    def _why_nothing_moves(self, cell: Cell) -> str:
        if self._closed:
            return "it is closed"
        if self._config.target == "dram" and cell.device.type not in STAGED_FIRST:
            return "it is in host memory already"
        return self._broken

    def _settle(self, cell: Cell) -> None:
        """The bytes are in host memory. They stay there while they are among the latest."""
        if self._config.target == "dram" or self._dram_nbytes:
            cell.state = State.RESTING
            self._resting[cell] = None
            self._resting_nbytes += self._cost(cell)
            self._note_peak("resting_nbytes", self._resting_nbytes)
            while self._resting_nbytes > self._dram_nbytes:
                oldest = next(iter(self._resting))
                if self._config.target == "ssd" and not oldest.blocks:
                    self._wait_for_room(self._cost(oldest))
                if oldest not in self._resting:  # it was wanted, or let go of, meanwhile
                    continue
                self._leave_rest(oldest)
                if self._config.target == "dram":
                    self._keep(oldest)
                else:
                    self._enqueue(oldest)
        else:
            self._wait_for_room(self._cost(cell))
            self._enqueue(cell)

    def _enqueue(self, cell: Cell) -> None:
        """It is to be written."""
        cell.state = State.QUEUED
        self._pending_nbytes += self._cost(cell)
        self._note_peak("pending_nbytes", self._pending_nbytes)
        self._to_write.append(cell)
        self._call_threads("write")

    def _admit_to_staging(self, cell: Cell) -> None:
        if self._config.target == "dram" and self._resting_nbytes + self._cost(cell) > self._dram_nbytes:
            self._keep(cell)
            return
        self._wait_for_room(self._cost(cell))
        self._pending_nbytes += self._cost(cell)
        self._note_peak("pending_nbytes", self._pending_nbytes)
        self._to_stage.append(cell)
        self._call_threads("write")

    def _wait_for_room(self, nbytes: int) -> None:
        started = time.perf_counter()
        while self._pending_nbytes and self._pending_nbytes + nbytes > self._config.staging_bytes:
            self._work_or_wait(self._claim_write)
        self.seconds["waited_to_write"] += time.perf_counter() - started

    def _work_or_wait(self, claim: Callable[[], Job | None]) -> None:
        """Do something of what is waited for, or wait until something changes."""
        changes = self._changes
        job = claim()
        if job is None:
            if changes == self._changes:
                self._changed.wait()
            return
        self._jobs += 1
        self._changed.release()
        try:
            job()
        finally:
            self._changed.acquire()
            self._jobs -= 1
            self._tell()
        self._sort_out()

    def _tell(self) -> None:
        """Something has changed that others may wait for."""
        self._changes += 1
        self._changed.notify_all()

    def _call_threads(self, operation: Operation) -> None:
        """See that threads look for work. Where there are none, whoever waits does it."""
        self._tell()
        if self._running[operation] >= THREADS or self._closed:
            return
        with suppress(NoThreadsError):
            if operation not in self._pools:
                self._pools[operation] = open_pool(THREADS, f"fastensor-offload-{operation}")
            submit(self._pools[operation], self._work, operation)
            self._running[operation] += 1

    def _work(self, operation: Operation) -> None:
        """What a thread does: jobs, until there are none."""
        claim = self._claim_write if operation == "write" else self._claim_read
        job: Job | None = None
        try:
            while True:
                with self._changed:
                    if job is not None:
                        self._jobs -= 1
                    self._sort_out()
                    job = claim()
                    self._tell()
                    if job is None:
                        return
                    self._jobs += 1
                job()
        finally:
            with self._changed:
                self._jobs -= job is not None
                self._running[operation] -= 1
                self._tell()

    # Out. ----------------------------------------------------------------------------------------------------------

    def _claim_write(self) -> Job | None:
        if self._to_stage:
            cell = self._to_stage[0]
            count = -(-cell.nbytes // BLOCK_NBYTES)
            self._staged.reserve(self._staged.nbytes - self._staged.free_nbytes + count * BLOCK_NBYTES)
            if self._staged.free_nbytes < count * BLOCK_NBYTES and not self._jobs and not self._to_write:
                self._to_stage.popleft()  # nobody will give blocks back: what is in them could not be written
                self._no_longer_pending(cell)
                self._keep(cell)
                self._tell()
                return self._claim_write()
            if self._staged.free_nbytes >= count * BLOCK_NBYTES:
                self._to_stage.popleft()
                cell.state, cell.moving = State.WRITING, 1
                for _ in range(count):
                    self._staged.take(cell.blocks, while_waiting=nullcontext, stopped=lambda: False)
                return partial(self._stage, cell)
        while self._to_write:
            cell = self._to_write[0]
            if cell.state is State.QUEUED and not self._begin_to_write(cell):
                self._to_write.popleft()
                continue
            index = cell.claimed
            cell.claimed += 1
            cell.moving += 1
            if cell.claimed == len(cell.pieces):
                self._to_write.popleft()
            return partial(self._write_piece, cell, index)
        return None

    def _begin_to_write(self, cell: Cell) -> bool:
        """Find a place for it. False if it stays in memory."""
        try:
            if self._slots is None:
                self._slots = self._open_slots()
            slot = self._slots.allocate(cell.nbytes)
        except (OSError, OffloadError) as error:
            self._could_not_write(cell, error)
            return False
        if slot is None:
            self._could_not_write(cell, OffloadError(f"ssd_bytes leave no room for {cell.nbytes} bytes more"))
            return False
        cell.slot, cell.state = slot, State.WRITING
        cell.pieces = list(slot.pieces())
        cell.crc32s = [0] * len(cell.pieces)
        cell.claimed = cell.moving = 0
        cell.transfer = self._transfer("write", cell, self._slots.transports)
        cell.transport = cell.transfer.used
        cell.transfer.started = time.perf_counter()
        self._note_peak("ssd_nbytes", self._slots.used_nbytes)
        return True

    def _open_slots(self) -> SlotFiles:
        if self._closed:
            raise OffloadError("it is closed")
        try:
            slots = SlotFiles(self._config)
        except OffloadError as error:
            self._broken = str(error)
            raise
        if self._config.backend == registry.AUTO:
            self._selector = current_selector(slots.files[0].folder, of="activations")
        return slots

    def _transfer(self, operation: Operation, cell: Cell, names: tuple[str, ...]) -> Transfer:
        """What chooses the backend, and hears how long it took."""
        context = Context(operation, cell.device.type)
        return Transfer(
            names,
            cell.nbytes,
            context,
            self._selector,
            choose=operation == "write",
            mode="write_read",
            default=names[0],
        )

    def _stage(self, cell: Cell) -> None:
        """A job: copy all of it to the host."""
        failure: BaseException | None = None
        try:
            assert cell.source is not None
            for number, block in enumerate(cell.blocks):
                position = number * BLOCK_NBYTES
                copy_out(
                    cell.source, cell.origin + position, min(BLOCK_NBYTES, cell.nbytes - position), block, cell.ready
                )
        except BaseException as error:  # noqa: BLE001  # noted
            failure = _without_frames(error)
        with self._changed:
            cell.moving = 0
            if cell.state is State.RELEASED or failure is not None:
                self._give_blocks_back(cell)
            if cell.state is State.RELEASED:
                self._no_longer_pending(cell)
                cell.source = None
            elif failure is not None:
                self._could_not_write(cell, failure)
            else:
                cell.source = None
                self._no_longer_pending(cell)
                self._settle(cell)
            self._tell()
        _raise_interrupt(failure)

    def _write_piece(self, cell: Cell, index: int) -> None:
        """A job."""
        failure: BaseException | None = None
        crc32 = 0
        try:
            assert self._slots is not None
            position, place = cell.pieces[index]
            nbytes = cell.piece_nbytes(index)
            with self._block_of(cell, position) as block:
                if not cell.blocks:
                    assert cell.source is not None
                    copy_out(cell.source, cell.origin + position, nbytes, block, cell.ready)
                block.array[nbytes : place.extent.nbytes] = 0
                if self._config.verify:
                    crc32 = isal_zlib.crc32(block.view[:nbytes])
                self._slots.write(cell.transport, place, block.view[: place.extent.nbytes])
        except BaseException as error:  # noqa: BLE001  # noted
            failure = _without_frames(error)
        with self._changed:
            cell.crc32s[index] = crc32
            cell.failure = cell.failure or failure
            cell.moving -= 1
            if cell.failure is not None:
                self._claim_no_more(cell, self._to_write)
            if not cell.moving and cell.claimed == len(cell.pieces):
                self._written(cell)
            self._tell()
        _raise_interrupt(failure)

    def _written(self, cell: Cell) -> None:
        """Nobody writes it any more."""
        assert self._slots is not None
        assert cell.slot is not None
        assert cell.transfer is not None
        transfer, cell.transfer = cell.transfer, None
        if cell.state is State.WRITING and cell.failure is None:
            transfer.done(time.perf_counter() - transfer.started)
            cell.state, cell.source, cell.ready = State.STORED, None, None
            self._give_blocks_back(cell)
            self._no_longer_pending(cell)
            self.counts["written_nbytes"] += cell.nbytes
            self.counts[f"{WRITTEN_BY}{cell.transport}"] += cell.nbytes
            return
        self._slots.free(cell.slot)
        cell.slot = None
        failure, cell.failure = cell.failure, None
        if cell.state is State.RELEASED:
            transfer.withdraw()
            self._no_longer_pending(cell)
            self._drop(cell)
        elif (
            isinstance(failure, Exception)
            and is_to_blame(failure)
            and any(name != cell.transport for name in self._slots.transports)
        ):
            transfer.failed(str(failure))
            self._slots.give_up(cell.transport, str(failure))
            cell.state = State.QUEUED
            self._to_write.appendleft(cell)
            self._call_threads("write")
        else:
            transfer.withdraw()
            assert failure is not None
            self._could_not_write(cell, failure)

    def _could_not_write(self, cell: Cell, failure: BaseException) -> None:
        """It stays in memory, and that is told."""
        self._no_longer_pending(cell)
        self._keep(cell)
        self._tell()
        if not isinstance(failure, Exception):  # an interrupt
            return
        self.counts["failed_writes"] += 1
        if self.counts["failed_writes"] == 1:
            _logger.warning("an activation stays in memory, because it could not be written: %s", failure)
        if isinstance(failure, OSError) and not _is_out_of_space(failure):
            self._broken = str(failure)
            _logger.error("no activations are offloaded any more: %s", failure)
        if self._config.when_full == "raise" and self._failure is None:
            self._failure = failure

    def _keep(self, cell: Cell) -> None:
        cell.state = State.KEPT
        self.counts["kept_nbytes"] += cell.nbytes

    def _take_back(self, cell: Cell) -> None:
        """It is needed before anything was done: it stays where it is."""
        if cell.state is State.RESTING:
            self._leave_rest(cell)
        else:
            (self._to_write if cell in self._to_write else self._to_stage).remove(cell)
            self._no_longer_pending(cell)
        cell.state = State.KEPT
        self.counts["taken_back_nbytes"] += cell.nbytes
        self._tell()

    # In. -----------------------------------------------------------------------------------------------------------

    def _claim_read(self, wanted: Cell | None = None) -> Job | None:
        """A piece of the cell that is the first, or that is wanted."""
        cell = wanted or next(iter(self._to_read), None)
        if cell is None or cell not in self._to_read:
            return None
        index = cell.claimed
        cell.claimed += 1
        cell.moving += 1
        if cell.claimed == len(cell.pieces):
            self._to_read.remove(cell)
        return partial(self._read_piece, cell, index)

    def _begin_to_read(self, cell: Cell, *, urgent: bool) -> None:
        if cell.device.type in READ_IN_PLACE:
            cell.storage, cell.memory = self._host.storage(cell.nbytes)
        else:
            cell.storage, cell.memory = storage_on(cell.device, cell.nbytes), None
            cell.ready = event_now(cell.device)
        cell.transfer = self._transfer("read", cell, (cell.transport,))
        cell.state, cell.claimed, cell.moving, cell.prefetched = State.READING, 0, 0, not urgent
        cell.transfer.started = time.perf_counter()
        self._resident[cell] = None
        self._resident_nbytes += cell.nbytes
        self._note_peak("resident_nbytes", self._resident_nbytes)
        if urgent:
            self._to_read.appendleft(cell)
        else:
            self._to_read.append(cell)
        self._call_threads("read")

    def _read_piece(self, cell: Cell, index: int) -> None:
        """A job."""
        failure: BaseException | None = None
        try:
            assert self._slots is not None
            assert cell.storage is not None
            position, place = cell.pieces[index]
            nbytes = cell.piece_nbytes(index)
            if cell.memory is not None:
                target = cell.memory[position : position + place.extent.nbytes]
                self._slots.read(cell.transport, place, target)
                self._verify(cell, index, target[:nbytes])
            else:
                with self._bounce_block() as block:
                    self._slots.read(cell.transport, place, block.view[: place.extent.nbytes])
                    self._verify(cell, index, block.view[:nbytes])
                    copy_in(cell.storage, position, nbytes, block, cell.ready)
        except BaseException as error:  # noqa: BLE001  # raised by whoever wants the cell
            failure = _without_frames(error)
        with self._changed:
            cell.failure = cell.failure or failure
            cell.moving -= 1
            if cell.failure is not None:
                self._claim_no_more(cell, self._to_read)
            if not cell.moving and cell.claimed == len(cell.pieces):
                self._read(cell)
            self._tell()
        _raise_interrupt(failure)

    def _verify(self, cell: Cell, index: int, data: memoryview) -> None:
        if self._config.verify and (found := isal_zlib.crc32(data)) != cell.crc32s[index]:
            place = cell.pieces[index][1]
            raise CorruptActivationError(
                f"an activation of {cell.nbytes} bytes has changed on the disk of {place.file.folder}: "
                f"{data.nbytes} bytes at offset {place.extent.begin} have CRC32 {found:08x}, expected "
                f"{cell.crc32s[index]:08x}. The disk is not to be trusted; take another folder"
            )

    def _read(self, cell: Cell) -> None:
        """Nobody reads it any more."""
        assert self._slots is not None
        assert cell.transfer is not None
        transfer, cell.transfer = cell.transfer, None
        if cell.failure is None and cell.state is State.READING:
            transfer.done(time.perf_counter() - transfer.started)
            self.counts["read_nbytes"] += cell.nbytes
            cell.state = State.LOADED
            return
        transfer.withdraw()
        self._leave_residence(cell)
        if cell.state is State.RELEASED:
            self._drop(cell)
        elif isinstance(cell.failure, BackendUnavailableError) and cell.transport != "numpy":
            self._slots.give_up(cell.transport, str(cell.failure))
            cell.failure, cell.transport, cell.state = None, "numpy", State.STORED
        elif not isinstance(cell.failure, Exception):  # an interrupt
            cell.failure, cell.state = None, State.STORED
        else:
            assert cell.failure is not None
            cell.state = State.BROKEN
            if not isinstance(cell.failure, OffloadError):
                error = OffloadError(f"an activation of {cell.nbytes} bytes cannot be read: {cell.failure}")
                error.__cause__ = cell.failure
                cell.failure = error

    def _still_alive(self, cell: Cell) -> torch.UntypedStorage | None:
        """The storage that it was saved from, if others have kept it."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(cell.live.cdata)
        if storage is None or storage.nbytes() < cell.origin + cell.nbytes:  # or resized
            return None
        self.alive_anyway.add(cell.mark)
        return storage

    def _make_room(self, nbytes: int) -> bool:
        """Let go of what was wanted longest ago, and nobody is known to want again. False if that is not enough."""
        for cell in list(self._resident):
            if self._resident_nbytes + nbytes <= self._config.prefetch_bytes:
                break
            if cell.state is State.LOADED and not cell.unread:
                self._evict(cell)
        return not self._resident_nbytes or self._resident_nbytes + nbytes <= self._config.prefetch_bytes

    def _evict(self, cell: Cell) -> None:
        self._leave_residence(cell)
        cell.state = State.STORED

    def _unstage(self, cell: Cell) -> torch.UntypedStorage:
        """Bring back what is in host memory, to where it was. The lock is released meanwhile."""
        blocks = list(cell.blocks)
        cell.borrowed += 1
        self._changed.release()
        copied = False
        try:
            storage, event = storage_on(cell.device, cell.nbytes), event_now(cell.device)
            for number, block in enumerate(blocks):
                position = number * BLOCK_NBYTES
                copy_in(storage, position, min(BLOCK_NBYTES, cell.nbytes - position), block, event)
            copied = True
        finally:
            self._changed.acquire()
            cell.borrowed -= 1
            if cell.state is State.KEPT and copied:
                cell.storage = storage
            if cell.state is not State.WRITING and (copied or cell.state is not State.KEPT):
                self._give_blocks_back(cell)
        return storage

    def _count_hit(self, cell: Cell) -> None:
        if cell.state in (State.STORED, State.READING, State.LOADED):
            ready = cell.state is State.LOADED
            self.counts["prefetch_hits" if ready else "prefetch_late" if cell.state is State.READING else "misses"] += 1

    # Letting go. -----------------------------------------------------------------------------------------------------

    def let_go(self, cell: Cell) -> None:
        """Nobody wants a cell any more. Called by finalizers, in any thread, between any two instructions of it: waits
        for nothing. If somebody holds the lock, that one sorts it out, or the next."""
        self._released.append(cell)
        if os.getpid() == self._process and self._changed.acquire(blocking=False):
            try:
                self._sort_out()
            finally:
                self._changed.release()

    def _sort_out(self) -> None:
        while self._released:
            self._release(self._released.popleft())

    def _release(self, cell: Cell) -> None:
        """Nobody wants it any more. What is being moved is let go of afterwards."""
        state, cell.state = cell.state, State.RELEASED
        if state is State.RESTING:
            self._leave_rest(cell)
        elif state is State.QUEUED:
            (self._to_write if cell in self._to_write else self._to_stage).remove(cell)
            self._no_longer_pending(cell)
        elif state is State.WRITING or state is State.READING:
            self._claim_no_more(cell, self._to_write if state is State.WRITING else self._to_read)
            if cell.moving:
                return
            if state is State.WRITING:
                self._written(cell)
            else:
                self._read(cell)
            return
        elif state is State.LOADED:
            self._leave_residence(cell)
        self._drop(cell)
        self._tell()

    def _drop(self, cell: Cell) -> None:
        """Give back all that it has."""
        if cell.slot is not None and self._slots is not None:
            self._slots.free(cell.slot)
        self._give_blocks_back(cell)
        cell.slot = cell.source = cell.storage = cell.memory = None

    def _claim_no_more(self, cell: Cell, queue: deque[Cell]) -> None:
        if cell.claimed < len(cell.pieces):
            cell.claimed = len(cell.pieces)
            queue.remove(cell)

    def _no_longer_pending(self, cell: Cell) -> None:
        self._pending_nbytes -= self._cost(cell)

    def _leave_rest(self, cell: Cell) -> None:
        del self._resting[cell]
        self._resting_nbytes -= self._cost(cell)

    def _leave_residence(self, cell: Cell) -> None:
        del self._resident[cell]
        self._resident_nbytes -= cell.nbytes
        cell.storage = cell.memory = None

    def _give_blocks_back(self, cell: Cell) -> None:
        while cell.blocks and not cell.borrowed:
            self._staged.give(cell.blocks.pop())

    @contextmanager
    def _bounce_block(self) -> Iterator[Buffer]:
        """A block for a piece on its way. There are as many as threads; what is more waits for one."""
        self._bounce.reserve(2 * THREADS * BLOCK_NBYTES)
        holder: list[Buffer] = []
        block = self._bounce.take(holder, while_waiting=nullcontext, stopped=lambda: False)
        assert block is not None
        try:
            yield block
        finally:
            self._bounce.give(block)

    def _block_of(self, cell: Cell, position: int) -> AbstractContextManager[Buffer]:
        """Host memory for a piece that is written: its own if it is there already."""
        return nullcontext(cell.blocks[position // BLOCK_NBYTES]) if cell.blocks else self._bounce_block()

    def _cost(self, cell: Cell) -> int:
        """What a cell takes of the budgets: whole blocks if it is to be in them."""
        if cell.device.type not in STAGED_FIRST:
            return cell.nbytes
        return -(-cell.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES

    def _is_staged_first(self, cell: Cell) -> bool:
        return cell.device.type in STAGED_FIRST and self._cost(cell) <= self._config.staging_bytes

    def _note_peak(self, what: str, nbytes: int) -> None:
        self.counts[f"peak_{what}"] = max(self.counts[f"peak_{what}"], nbytes)


def _without_frames(failure: BaseException) -> BaseException:
    """The same. Its frames would hold those of their callers, with graphs that hold what the failure is noted in: a
    circle through autograd, which no collector sees."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return failure


def _raise_interrupt(failure: BaseException | None) -> None:
    """Whoever works must not lose what is no failure of the work."""
    if failure is not None and not isinstance(failure, Exception):
        raise failure


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """Comes when all is done that was queued on the device's current stream so far."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _dram_budget(config: OffloadConfig) -> int:
    if config.dram_bytes is not None:
        return config.dram_bytes
    if config.target != "dram":
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * _SHARE_OF_FREE_MEMORY) // processes_here()


def _is_out_of_space(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
