"""The swapper: when saved bytes move out and in. Writer and reader threads, one lock, and three byte budgets.

CONTRIBUTING draws the places that the bytes of a saved tensor go through. Decisions are made with the lock held, and
take no time; jobs move bytes without the lock. A thread that needs the result of a job waits for its ``Future``,
without the lock. When a graph goes, a finalizer queues its ranges, because finalizers run anywhere; the next holder of
the lock releases them.

The reader threads take jobs in the order in which ranges are needed. A range of several pieces has a job for each
thread: the first job leads, the others help, so that the range that is needed first has the whole disk.

An unexpected exception, such as Ctrl-C, may leave the records half changed. Then the swapper is closed: graphs that
still need its bytes raise, and the next step begins with a new one.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from fastensor.backends.base import Backend
from fastensor.backends.buffers import Buffer
from fastensor.backends.threads import NoThreadsError, Pool, finish, open_pool, shut_down, submit
from fastensor.backends.to_device import storage_on
from fastensor.errors import OffloadError
from fastensor.files.budgets import available_memory, local_processes
from fastensor.offload import copying, moving
from fastensor.offload.config import OffloadConfig
from fastensor.offload.host_memory import HostMemory, keep_on_fork, return_freed_memory
from fastensor.offload.saved import ByteBudget, SavedBytes, StoredBytes
from fastensor.offload.statistics import WRITTEN_BY, Counters
from fastensor.offload.tiers import StorageTiers, cost, device_backends

THREADS = 4
"""Threads that write, and as many that read."""
_SHARE_OF_FREE_MEMORY = 0.5
_logger = logging.getLogger("fastensor")


class SavedHandle:
    """The graphs' handle of a range of bytes. When the handle goes, the bytes are released."""

    __slots__ = ("__weakref__", "saved", "swapper")

    def __init__(self, saved: SavedBytes, swapper: Swapper) -> None:
        self.saved = saved
        self.swapper = swapper
        # No __del__: weak references are dead when a finalizer runs, so no step shares a handle that goes.
        weakref.finalize(self, swapper.release, saved).atexit = False


class Swapper:
    """Moves saved bytes out and in. Call every public method from any thread.

    Args:
        config: how many bytes may be where.
        counters: what is counted, with the lock held.
    """

    def __init__(self, config: OffloadConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._released: deque[SavedBytes] = deque()
        """Ranges that no graph needs any more, appended by finalizers."""
        dram_nbytes = _dram_budget(config)
        self._tiers = StorageTiers(config, dram_nbytes, 2 * THREADS)
        self._host = HostMemory(config.prefetch_bytes)
        self._pools: dict[str, Pool] = {}
        self._pending = ByteBudget(config.staging_bytes)
        """Ranges that are to be written, or copied to staging blocks."""
        self._in_dram = ByteBudget(dram_nbytes)
        """Ranges that stay in host memory while there is room."""
        self._loaded = ByteBudget(config.prefetch_bytes)
        """Ranges that have been read back, or are being read."""
        self._failure: Exception | None = None
        """The first failed write, to be raised by the next call; only with ``when_full="raise"``."""
        self.externally_referenced: set[int] = set()
        """Marks of saved tensors whose memory other owners keep alive, so that storing them frees nothing."""

    # Out. -------------------------------------------------------------------------------------------------------------

    def admit(self, saved: SavedBytes) -> None:
        """Take a range over. Waits while more than ``staging_bytes`` would be pending.

        Raises:
            OffloadError: see :meth:`raise_failure`.
        """
        self.raise_failure()
        if saved.device.type == "cpu" and self._config.return_freed_memory:
            return_freed_memory()
        while True:
            with self._lock:
                self._let_go_released()
                blocking = self._place(saved)
            if blocking is None:
                return
            self._wait_for(blocking, "wait_to_write")

    def share(self, saved: SavedBytes) -> None:
        """Note that one more saved tensor is on the range, whose handle the caller holds."""
        with self._lock:
            saved.unread += 1

    def raise_failure(self) -> None:
        """
        Raises:
            OffloadError: a write has failed, and ``when_full="raise"``. Each failure is raised once.
        """
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise OffloadError(f"an activation could not be written: {failure}") from failure

    # In. --------------------------------------------------------------------------------------------------------------

    def bring(
        self, saved: SavedBytes, upcoming: Iterable[SavedBytes] = (), unexpected: Iterable[SavedBytes] = ()
    ) -> tuple[torch.UntypedStorage, int]:
        """A storage with the bytes, and the offset in the original storage at which that storage begins.

        Args:
            saved: the range that is needed now.
            upcoming: the ranges that will be needed next, in order: they are read ahead within ``prefetch_bytes``.
            unexpected: ranges that were read ahead, and are not upcoming any more.

        Raises:
            OffloadError: the bytes cannot be read, or have changed, or are lost.
        """
        needed = True
        while True:
            with self._lock:
                self._let_go_released()
                if needed and saved.unread:
                    saved.unread -= 1
                    self._count_hit(saved)
                found = self._at_hand(saved)
                if found is None:
                    read = saved.read or self._begin_read(saved, urgent=True)
                    saved.prefetched = False
                if needed:
                    self._drop(unexpected)
                    self._prefetch(saved, upcoming)
                    needed = False
            if found is None:
                self._wait_for(read, "wait_to_read")
                if not read.cancelled() and (storage := read.result()) is not None:
                    found = storage, saved.origin - saved.lead
            if found is not None:
                return found

    def _wait_for(self, job: Future[Any], what: str) -> None:
        started = time.perf_counter()
        wait([job])
        with self._lock:
            self._counters.seconds[what] += time.perf_counter() - started

    def check_process(self) -> None:
        """
        Raises:
            OffloadError: this is a forked child, whose locks and threads are not there.
        """
        if os.getpid() != self._process:
            raise OffloadError("an activation of the parent process is needed in a forked child, which has none")

    # Ends. ------------------------------------------------------------------------------------------------------------

    def release(self, saved: SavedBytes) -> None:
        """Note that no graph needs a range any more. Called by finalizers, anywhere: waits for nothing. The next
        holder of the lock lets go of the range."""
        self._released.append(saved)

    def settle(self) -> None:
        """Return when nothing is being written or read."""
        while True:
            with self._lock:
                self._let_go_released()
                jobs: list[Future[Any] | None] = [saved.write for saved in self._pending.oldest_first()]
                jobs += [saved.read for saved in self._loaded.oldest_first()]
            running = [job for job in jobs if job is not None]
            if not running:
                return
            wait(running)

    def close(self) -> None:
        """Stop the threads, and give files and memory back. What is not in the memory that it was saved from is lost:
        graphs that need it raise. Calling it again does nothing."""
        self._closed = True
        with self._lock:
            for saved in self._pending.oldest_first():
                self._cancel_write(saved)
            pools = list(self._pools.values())
        for pool in pools:
            shut_down(pool)
        with self._lock:
            self._let_go_released()
            self._host.clear()
            self._tiers.close()

    def forget(self) -> None:
        """In a forked child: threads, pinned memory and files are the parent's."""
        self._tiers.forget()

    # Numbers. ---------------------------------------------------------------------------------------------------------

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now."""
        with self._lock:
            self._let_go_released()
            held = {"pending": self._pending, "in_dram": self._in_dram, "loaded": self._loaded}
            used = {name: budget.nbytes for name, budget in held.items()}
            return used | {"idle": self._host.idle_nbytes} | self._tiers.sizes()

    # Below: with the lock held. Admission and writing. ----------------------------------------------------------------

    def _place(self, saved: SavedBytes) -> Future[None] | None:
        """Let a range stay, or have it written. Returns a job to wait for if there is no room yet."""
        nbytes, staged = cost(saved), copying.is_staged_first(saved.device)
        in_dram = nbytes <= self._in_dram.limit
        only_dram = self._config.target == "dram"
        if (
            self._closed
            or self._tiers.broken
            or (only_dram and not (staged and in_dram and self._in_dram.fits(nbytes)))
        ):
            self._counters.counts["kept_bytes"] += saved.nbytes
            return None
        while in_dram and not self._in_dram.fits(nbytes):
            oldest = self._in_dram.oldest_first()[0]
            being_staged = oldest in self._pending
            if not being_staged and not self._pending.fits(cost(oldest)):
                return self._oldest_write()
            self._in_dram.remove(oldest)
            if not being_staged:
                self._begin_write(oldest)
        if (staged or not in_dram) and not self._pending.fits(nbytes):
            return self._oldest_write()
        if in_dram:
            self._in_dram.add(saved, nbytes)
        if (staged or not in_dram) and not self._begin_write(saved):
            return None
        self._counters.counts["offloaded"] += 1
        self._counters.counts["offloaded_bytes"] += saved.nbytes
        self._note_peaks()
        return None

    def _oldest_write(self) -> Future[None]:
        write = self._pending.oldest_first()[0].write
        assert write is not None
        return write

    def _begin_write(self, saved: SavedBytes) -> bool:
        """Have a range written. False if there are no threads, so that the range stays in memory."""
        try:
            saved.write = submit(self._pool("write"), self._write_out, saved)
        except NoThreadsError as error:
            self._stop_offloading(str(error))
            self._could_not_write(saved, error)
            return False
        self._pending.add(saved, cost(saved))
        return True

    def _pool(self, operation: str) -> Pool:
        if not self._pools:  # both: what is written must be readable
            with ExitStack() as opened:
                pools = {}
                for name in ("write", "read"):
                    pools[name] = open_pool(THREADS, f"fastensor-offload-{name}")
                    opened.callback(shut_down, pools[name])
                self._pools = pools
                opened.pop_all()
        return self._pools[operation]

    def _cancel_write(self, saved: SavedBytes) -> bool:
        """Have a range not written. False if its write has begun."""
        if saved.write is not None:
            if not saved.write.cancel():
                return False
            saved.write = None
            self._pending.remove(saved)
        return True

    def _could_not_write(self, saved: SavedBytes, failure: BaseException) -> None:
        """Leave a range in memory, and report that."""
        self._in_dram.remove(saved)
        counts = self._counters.counts
        counts["kept_bytes"] += saved.nbytes
        counts["failed_writes"] += 1
        if counts["failed_writes"] == 1:
            _logger.warning("an activation stays in memory, because it could not be written: %s", failure)
        if isinstance(failure, OSError) and failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self._stop_offloading(str(failure))
        if self._config.when_full == "raise" and self._failure is None:
            self._failure = _without_frames(failure)

    def _stop_offloading(self, reason: str) -> None:
        if not self._tiers.broken:
            _logger.error("no activations are offloaded any more: %s", reason)
        self._tiers.broken = reason

    # Reading. ---------------------------------------------------------------------------------------------------------

    def _at_hand(self, saved: SavedBytes) -> tuple[torch.UntypedStorage, int] | None:
        """See :meth:`bring`; None if the bytes have to be read."""
        if saved.failure is not None:
            raise type(saved.failure)(*saved.failure.args) from saved.failure.__cause__
        if saved.source is not None:
            self._take_back(saved)
            copying.check_bounds(saved.source, saved.origin + saved.nbytes)
            return saved.source, 0
        if saved.loaded is not None:
            saved.prefetched = False
            self._loaded.use(saved)
            return saved.loaded, saved.origin - saved.lead
        if saved.read is None and (original := self._original(saved)) is not None:
            return original, 0
        if self._closed:
            raise OffloadError("an activation is needed that was lost when its ActivationOffload was closed")
        return None

    def _take_back(self, saved: SavedBytes) -> None:
        """Leave a range where it was saved, if its write has not begun."""
        if (saved in self._pending or saved in self._in_dram) and self._cancel_write(saved):
            self._in_dram.remove(saved)
            self._counters.counts["taken_back_bytes"] += saved.nbytes

    def _original(self, saved: SavedBytes) -> torch.UntypedStorage | None:
        """The storage that was saved, if others have kept it."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(saved.original.cdata)
        if storage is None or storage.nbytes() < saved.origin + saved.nbytes:  # or resized
            return None
        self.externally_referenced.add(saved.mark)
        return storage

    def _prefetch(self, needed: SavedBytes, upcoming: Iterable[SavedBytes]) -> None:
        """Begin to read the ranges that will be needed next, as far as ``prefetch_bytes`` go."""
        if self._closed:
            return
        window = self._config.prefetch_bytes
        sooner = {needed}
        for saved in upcoming:
            sooner.add(saved)
            if saved.write is not None and saved.source is not None and saved.nbytes <= window:
                window -= saved.nbytes
                self._take_back(saved)
            if saved.loaded is not None or saved.read is not None or not saved.is_away:
                continue
            if saved.failure is not None or self._original(saved) is not None:
                continue
            if not self._make_room(saved.nbytes, sooner):
                return
            try:
                self._begin_read(saved, urgent=False)
            except (MemoryError, torch.OutOfMemoryError, OSError, NoThreadsError):  # read when needed, if possible
                return

    def _make_room(self, nbytes: int, sooner: Set[SavedBytes] = frozenset()) -> bool:
        """Evict ranges that no saved tensor is known to need again, then those that were needed already and will be
        again, but none that is needed ``sooner``. False if that is not enough."""
        for was_needed_before in (False, True):
            for saved in self._loaded.oldest_first():
                if self._loaded.fits(nbytes):
                    return True
                if saved.loaded is None or saved in sooner or saved.prefetched:
                    continue
                if was_needed_before or not saved.unread:
                    self._evict(saved)
        return self._loaded.fits(nbytes)

    def _begin_read(self, saved: SavedBytes, *, urgent: bool) -> Future[torch.UntypedStorage | None]:
        """Have a range read, from its staging blocks or else from its slot.

        Args:
            urgent: whether a thread waits for the range, which is then read before others, and beyond the budget if
                need be.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read into.
        """
        if urgent:
            for other in self._loaded.oldest_first():
                if other.prefetched:
                    self._cancel_read(other)
            self._make_room(saved.nbytes)
        memory: memoryview | None = None
        if copying.is_read_in_place(saved.device):
            storage, memory = self._host.storage(saved.lead + saved.nbytes)
        else:
            storage = storage_on(saved.device, saved.nbytes)
        free, pool = copying.event_now(saved.device), self._pool("read")
        todo = deque(() if saved.blocks else moving.pieces(saved))
        read_pieces = partial(self._read_pieces, saved, storage, memory, free, todo)
        helpers: list[Future[dict[int, int]]] = []
        fill: Callable[[], None] = partial(self._fetch, saved, storage, todo, read_pieces, helpers)
        if saved.blocks:
            fill = partial(moving.unstage, saved, storage, free)
        saved.read = read = submit(pool, self._read_in, saved, storage, memory, fill)
        read.add_done_callback(lambda _: todo.clear())  # helpers of a cancelled read have nothing to do
        with suppress(NoThreadsError):  # then the first job reads all pieces
            helpers += [submit(pool, read_pieces) for _ in range(min(THREADS, len(todo)) - 1)]
        self._loaded.add(saved, saved.nbytes, beyond=urgent)
        saved.prefetched = not urgent
        self._note_peaks()
        return read

    def _cancel_read(self, saved: SavedBytes) -> None:
        """Have a range not read, if its read has not begun."""
        if saved.read is not None and saved.read.cancel():
            saved.read = None
            self._evict(saved)
            self._tidy(saved)

    def _evict(self, saved: SavedBytes) -> None:
        self._loaded.remove(saved)
        saved.loaded = None

    def _drop(self, ranges: Iterable[SavedBytes]) -> None:
        """Let go of ranges that were read ahead for nothing; of those that are being read, when room is needed."""
        for saved in ranges:
            self._cancel_read(saved)
            if saved.loaded is not None and saved.prefetched:
                self._evict(saved)
            saved.prefetched = False

    # Releasing, and counting. -----------------------------------------------------------------------------------------

    def _let_go_released(self) -> None:
        """Give back what ranges take that no graph needs any more."""
        self._host.trim()
        while self._released:
            saved = self._released.popleft()
            saved.released, saved.unread = True, 0
            self._in_dram.remove(saved)
            self._cancel_write(saved)
            self._cancel_read(saved)
            if saved.read is None:
                self._evict(saved)
            self._tidy(saved)

    def _tidy(self, saved: SavedBytes) -> None:
        """Give back what a range needs no more, once no job uses the range."""
        if saved.write is not None or saved.read is not None:
            return
        if saved.released or saved.source is not None or saved.stored is not None:
            self._tiers.give_blocks(saved)
        if saved.released:
            stored, saved.stored = saved.stored, None
            if stored is not None:
                self._tiers.free(stored.slot)
            saved.source = None

    def _count_hit(self, saved: SavedBytes) -> None:
        if saved.is_away:
            late = "prefetch_late" if saved.read is not None else "misses"
            self._counters.counts["prefetch_hits" if saved.loaded is not None else late] += 1

    def _note_peaks(self) -> None:
        for name, budget in (("pending", self._pending), ("dram", self._in_dram), ("loaded", self._loaded)):
            self._counters.note_peak(f"peak_{name}_bytes", budget.nbytes)

    # Jobs: without the lock. ------------------------------------------------------------------------------------------

    def _write_out(self, saved: SavedBytes) -> None:
        """A job: copy a range to staging blocks if it is on a device, and to the SSD unless it stays in host memory."""
        stored: StoredBytes | None = None
        failure: BaseException | None = None
        try:
            stored = self._store(saved)
        except BaseException as error:  # noqa: BLE001  # reported below: the range stays in memory
            failure = error
        with self._lock:
            self._let_go_released()
            saved.write = None
            self._pending.remove(saved)
            if stored is not None:
                saved.source = saved.ready = None
                saved.stored = stored
                self._counters.counts["written_bytes"] += saved.nbytes
                self._counters.counts[f"{WRITTEN_BY}{stored.backend}"] += saved.nbytes
            elif failure is None:
                if not (saved in self._in_dram or saved.released or self._closed):  # newer ranges have taken its place
                    self._begin_write(saved)
            elif not isinstance(failure, moving.StoppedError):
                self._could_not_write(saved, failure)
            self._tidy(saved)
        del failure  # it holds this frame

    def _store(self, saved: SavedBytes) -> StoredBytes | None:
        """Write a range to a slot. None if it stays in staging blocks.

        Raises:
            Exception: the range stays where it is; see :func:`fastensor.offload.moving.write`.
        """
        staged = copying.is_staged_first(saved.device) and not saved.blocks
        if saved in self._in_dram:
            self._stage(saved)
            return None
        with self._lock:
            slots = self._tiers.slots
        direct = device_backends(slots, saved.device) if staged else ()
        transfer = self._tiers.transfer("write", saved, (*direct, *slots.backends))
        if staged and transfer.used not in direct:
            self._stage(saved)
        stored = transfer.run(lambda backend: self._write_slot(saved, backend.name), slots.record_fallback)
        transfer.done(time.perf_counter() - transfer.started)
        return stored

    def _stage(self, saved: SavedBytes) -> None:
        """Copy a range to staging blocks, and free its memory on the device. Ranges larger than ``staging_bytes`` are
        written piece by piece instead."""
        with self._lock:
            if saved not in self._in_dram and cost(saved) > self._config.staging_bytes:
                return
            saved.blocks = self._tiers.take_blocks(saved.nbytes)
        moving.stage(saved, saved.blocks)
        with self._lock:
            saved.source = None

    def _write_slot(self, saved: SavedBytes, backend: str) -> StoredBytes:
        with self._lock:
            slot = self._tiers.allocate(saved)
            self._counters.note_peak("peak_ssd_bytes", self._tiers.sizes()["on_ssd"])
        try:
            with self._bounce_block(moving.is_copied_to_write(saved, slot, backend)) as bounce:
                crc32 = moving.write(
                    saved, slot, backend, bounce, checksum=self._config.verify,
                    is_stopped=lambda: saved.released or self._closed,
                )  # fmt: skip
        except BaseException:
            with self._lock:
                self._tiers.free(slot)
            raise
        return StoredBytes(slot, backend, crc32)

    def _read_in(
        self, saved: SavedBytes, target: torch.UntypedStorage, memory: memoryview | None, fill: Callable[[], None]
    ) -> torch.UntypedStorage | None:
        """A job: read a range back to ``target``, which ``fill`` fills. None if that was not possible, or is not wanted
        any more."""
        failure: BaseException | None = None
        try:
            fill()
        except BaseException as error:  # noqa: BLE001  # noted below, and raised by whoever needs the range
            failure = error
        if memory is not None:
            keep_on_fork(memory)
        with self._lock:
            self._let_go_released()
            saved.read = None
            if failure is None and not saved.released:
                saved.loaded = target
            else:
                self._evict(saved)
            if failure is not None and not isinstance(failure, moving.StoppedError):
                saved.failure = _as_offload_error(saved, failure)
            self._tidy(saved)
        found = target if failure is None else None
        del failure  # it holds this frame
        return found

    def _fetch(
        self,
        saved: SavedBytes,
        target: torch.UntypedStorage,
        todo: deque[tuple[int, int]],
        read_pieces: Callable[..., dict[int, int]],
        helpers: list[Future[dict[int, int]]],
    ) -> None:
        """Read a range from its slot, together with the jobs that help, and compare the CRC32.

        Args:
            todo: the pieces that no thread has taken.
            read_pieces: what helpers call, too: reads pieces with a backend.
            helpers: jobs that have the backend that has written the range. Complete once the lock was held.
        """
        stored = saved.stored
        assert stored is not None
        transfer = self._tiers.transfer("read", saved, tuple(dict.fromkeys((stored.backend, "numpy"))))

        def read(backend: Backend) -> dict[int, int]:
            if backend.name != stored.backend:  # the helpers' backend does not work any more: begin again, alone
                todo.clear()
                self._join(helpers)
                todo.extend(moving.pieces(saved))
            try:
                crc32s = read_pieces(backend.name)
            finally:
                todo.clear()
                begun = self._join(helpers)
            while begun:
                crc32s |= begun.pop().result()
            return crc32s

        crc32s = transfer.run(read, self._tiers.slots.record_fallback)
        if self._config.verify:
            moving.check(saved, stored, target, crc32s)
        transfer.done(time.perf_counter() - transfer.started)
        with self._lock:
            self._counters.counts["read_bytes"] += saved.nbytes

    def _join(self, helpers: list[Future[dict[int, int]]]) -> list[Future[dict[int, int]]]:
        """Cancel the helpers that have not begun, and wait for the others, which are returned."""
        with self._lock:
            begun = [helper for helper in helpers if not helper.cancel()]
            helpers.clear()
        finish(begun)
        return begun

    def _read_pieces(
        self,
        saved: SavedBytes,
        target: torch.UntypedStorage,
        memory: memoryview | None,
        free: torch.cuda.Event | None,
        todo: deque[tuple[int, int]],
        backend: str = "",
    ) -> dict[int, int]:
        """A job: read pieces of a range, by default with the backend that has written the range. See
        :func:`fastensor.offload.moving.read_pieces`."""
        stored = saved.stored
        assert stored is not None
        backend = backend or stored.backend
        with self._bounce_block(moving.is_copied_to_read(saved, stored, backend, memory)) as bounce:
            return moving.read_pieces(
                saved, stored, backend, target, memory, bounce, free, todo, verify=self._config.verify,
                is_stopped=lambda: saved.released or self._closed,
            )  # fmt: skip

    def _bounce_block(self, is_wanted: bool) -> AbstractContextManager[Buffer | None]:
        return self._tiers.bounce_block() if is_wanted else nullcontext()


def _as_offload_error(saved: SavedBytes, failure: BaseException) -> OffloadError:
    """An error to be raised by whoever needs the range: a copy of it each time."""
    _without_frames(failure)
    if isinstance(failure, OffloadError):
        return failure
    error = OffloadError(f"an activation of {saved.nbytes} bytes cannot be read: {failure}")
    error.__cause__ = failure
    return error


def _without_frames(failure: BaseException) -> Exception:
    """The same exception without its frames, which would hold graphs that hold what notes the exception: a cycle
    through autograd, which no garbage collector sees."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return failure if isinstance(failure, Exception) else OffloadError(f"a thread was stopped by {failure!r}")


def _dram_budget(config: OffloadConfig) -> int:
    if config.dram_bytes is not None:
        return config.dram_bytes
    if config.target != "dram":
        return 0
    return int(available_memory() * _SHARE_OF_FREE_MEMORY) // local_processes()
