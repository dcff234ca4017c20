"""The swapper: decides when saved bytes move out and in. One lock, and three byte budgets.

CONTRIBUTING draws the places that the bytes of a saved tensor go through. Decisions are made with the lock held, and
copies of a device are queued with it held. Nobody waits for either. Threads
run :meth:`Swapper._write_out` and :meth:`Swapper._read_in`: each moves the bytes of one range
without the lock (:class:`~fastensor.offload.jobs.Jobs`), and then takes the lock and notes what came of it. Whoever
needs the result waits for the ``Future``, without the lock. When a graph goes, a finalizer queues its ranges, because
finalizers run anywhere; the next holder of the lock releases them.

An unexpected exception, such as Ctrl-C, may leave the records half changed. Then the swapper is closed: graphs that
still need its bytes raise, and the next step begins with a new one.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from fastensor.backends.streams import wait_for
from fastensor.backends.threads import NoThreadsError
from fastensor.errors import OffloadError
from fastensor.offload import copying
from fastensor.offload.config import OffloadConfig
from fastensor.offload.host_memory import bytes_until_short, return_freed_memory
from fastensor.offload.jobs import THREADS, Jobs, StoppedError
from fastensor.offload.loaded import NO_MEMORY, LoadedRanges
from fastensor.offload.moving import Reading
from fastensor.offload.saved import ByteBudget, SavedBytes, StoredBytes
from fastensor.offload.statistics import Counters
from fastensor.offload.tiers import StorageTiers, cost
from fastensor.offload.trace import Trace, note_move

_MOST_RATIOS = 1 << 16
"""Saved tensors whose ratio is remembered: those that were written first last."""
_MOST_IDLE_BYTES = 128 << 20
"""Bytes of tensors that are saved or needed before freed memory is returned to the system, where nothing stays."""
_LEAST_USE = 16 << 20
"""The least bytes of tensors that are saved or needed before free memory is looked at again, where a part stays. Memory
counts as short long before so few are free, because operations take more than what they save."""
_SHARE_OF_USE = 8
"""Free memory is looked at again when one in so many of the bytes that were left until it is short has been used."""
_logger = logging.getLogger("fastensor")


class Swapper:
    """Moves saved bytes out and in. Call every public method from any thread.

    Args:
        config: how many bytes may be where.
        counters: what is counted, with the lock held.
        trace: what is recorded; None if nothing is.
    """

    def __init__(self, config: OffloadConfig, counters: Counters, trace: Trace | None = None) -> None:
        self.config = config
        self._trace = trace
        self._counters = counters
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[SavedBytes] = deque()
        """Ranges that no graph needs any more, appended by finalizers."""
        self._tiers = StorageTiers(config, counters, 2 * THREADS)
        self._jobs = Jobs(config, self._tiers, self._lock, counters, trace)
        self._pending = ByteBudget(config.staging_nbytes, partial(counters.note_peak, "peak_pending_bytes"))
        """Ranges that are to be written, or copied to staging blocks."""
        self._in_dram = ByteBudget(self._tiers.dram_nbytes, partial(counters.note_peak, "peak_dram_bytes"))
        """Ranges that stay in host memory while there is room."""
        note = partial(counters.note_peak, "peak_loaded_bytes")
        self._loaded = LoadedRanges(config.prefetch_nbytes, note, self._tiers, self._submit_read, trace)
        """Ranges that have come back, or are about to."""
        self._saved = ByteBudget()
        """Ranges that graphs hold, wherever the bytes are."""
        self._unmoved = ByteBudget()
        """Ranges that graphs hold, and whose bytes are still in the memory that they were saved in."""
        self._failure: Exception | None = None
        """The first failed write, to be raised by the next call; only with ``when_full="raise"``."""
        self._ratios: dict[int, float] = {}
        """By mark, how many times smaller codecs make a saved tensor."""
        self._used_nbytes = 0
        """Bytes that were saved or needed since memory was last looked at, about: threads do not wait to add theirs."""
        self._look_after_nbytes = _LEAST_USE if config.keeps_some else _MOST_IDLE_BYTES
        """After the use of how many it is looked at again."""
        self._until_system_nbytes = 0
        """After the use of how many more the system is asked again how much is free, which takes 0.9 ms. The C library
        says in 0.3 ms how large its holes are."""
        self.externally_referenced: set[int] = set()
        """Marks of saved tensors whose memory other owners keep alive, so that storing them frees nothing."""

    # Out. -------------------------------------------------------------------------------------------------------------

    def set_budgets(self, staging_nbytes: int, prefetch_nbytes: int) -> None:
        """Have other budgets from now on. Waits until nothing is on its way; if something is all the same, by another
        thread, or it is closed, they stay as they are."""
        if (self._pending.limit, self._loaded.limit) == (staging_nbytes, prefetch_nbytes):
            return
        self.settle()
        with self._lock:
            if self._pending.nbytes or self._jobs.closed:
                return
            self._pending.limit = staging_nbytes
            self._tiers.set_staging(staging_nbytes)
            self._loaded.set_limit(prefetch_nbytes)

    def start_threads(self) -> None:
        """Start the threads now, not with the first job. Without threads, everything stays in memory."""
        with self._lock, suppress(NoThreadsError):  # the first job reports that
            self._jobs.start_threads()

    def admit(self, saved: SavedBytes) -> None:
        """Take a range over. Waits while more than ``staging_bytes`` would be pending.

        Raises:
            OffloadError: see :meth:`raise_failure`.
        """
        self.raise_failure()
        while True:
            with self._lock:
                self._let_go_released()
                blocking = self._admit(saved)
            if blocking is None:
                return
            self._wait_for(blocking, "wait_to_write", saved)

    def share(self, saved: SavedBytes) -> None:
        """Note that one more saved tensor is on the range, whose handle the caller holds."""
        with self._lock:
            saved.unread += 1

    def raise_failure(self) -> None:
        """Raise OffloadError, once, if a write has failed and ``when_full="raise"``."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise OffloadError(f"an activation could not be written: {failure}") from failure

    # In. --------------------------------------------------------------------------------------------------------------

    def bring(self, saved: SavedBytes, upcoming: Sequence[SavedBytes] = ()) -> tuple[torch.UntypedStorage, int]:
        """A storage with the bytes, and the offset in the original storage at which that storage begins.

        If the bytes have to be waited for, the next ones are read ahead meanwhile. If not, call :meth:`read_ahead`.

        Args:
            saved: the range that is needed now.
            upcoming: as for :meth:`read_ahead`.

        Raises:
            OffloadError: the bytes cannot be read, or have changed, or are lost.
        """
        with self._lock:
            self._let_go_released()
            if saved.unread:
                saved.unread -= 1
                self._count_hit(saved)
            found = self._find(saved, upcoming)
        if isinstance(found, Future):
            self.read_ahead(saved, upcoming)
        while isinstance(found, Future):
            self._wait_for(partial(_wait_until_done, [found]), "wait_to_read", saved)
            if not found.cancelled() and (storage := found.result()) is not None:
                return storage, saved.origin - saved.lead
            with self._lock:
                self._let_go_released()
                found = self._find(saved, upcoming)
        return found

    def read_ahead(self, needed: SavedBytes, upcoming: Sequence[SavedBytes]) -> int:
        """Begin to read ranges that will be needed next.

        Args:
            needed: the range that is needed now.
            upcoming: the ranges that will be needed next, in order: they are read ahead within ``prefetch_bytes``.

        Returns:
            How many of the upcoming ranges, in order, stay in memory or are being read.
        """
        with self._lock:
            self._prefetch(needed, upcoming)
            self._trace_bytes()
            for number, saved in enumerate(upcoming):
                if saved.is_to_be_read or saved.write is not None or saved.copied:
                    return number
            return len(upcoming)

    def _wait_for(self, wait: Callable[[], None], what: str, saved: SavedBytes) -> None:
        started = time.perf_counter()
        wait()
        note_move(self._trace, what.replace("_", " "), started, saved)
        with self._lock:
            self._counters.seconds[what] += time.perf_counter() - started

    def check_process(self) -> None:
        """Raise OffloadError in a forked child, which has no locks and threads of the parent."""
        if os.getpid() != self._process:
            raise OffloadError("an activation of the parent process is needed in a forked child, which has none")

    def note_use(self, nbytes: int) -> bool:
        """Note that a tensor in host memory is saved, whether it stays or leaves, or is needed.

        Returns:
            Whether it is time for :meth:`look_at_memory`.
        """
        self._used_nbytes += nbytes
        return self._used_nbytes >= self._look_after_nbytes and os.getpid() == self._process

    def look_at_memory(self, room_for_holes: int) -> None:
        """Return freed memory to the system: by a writer thread, each time, where nothing stays. Where a part stays,
        the next step takes the same memory again: it is returned if memory is short, or the heap has more of it than
        the pass may take, and then at once.

        Args:
            room_for_holes: how many more bytes of it the heap may have.
        """
        config, left = self.config, room_for_holes
        self._until_system_nbytes -= self._used_nbytes
        self._used_nbytes = 0
        if config.keeps_some:
            if self._until_system_nbytes <= 0:
                until_short = bytes_until_short(self._pending.limit + self._loaded.limit + _MOST_IDLE_BYTES)
                self._until_system_nbytes = max(until_short // _SHARE_OF_USE, _LEAST_USE)
                left = min(left, until_short)
            until_holes = max(room_for_holes // _SHARE_OF_USE, _LEAST_USE)
            self._look_after_nbytes = min(until_holes, self._until_system_nbytes)
            if left < 0 and config.return_freed_memory:
                return_freed_memory()
        elif config.return_freed_memory:
            with self._lock, suppress(NoThreadsError):  # at exit
                if self._jobs.have_threads:
                    self._jobs.submit("write", return_freed_memory)

    def transit_bytes(self) -> int:
        """Bytes of memory that transfers take now of their budgets, ``dram_bytes`` included."""
        with self._lock:
            in_both = sum(cost(saved) for saved in self._tiers.copying if saved in self._in_dram)
            return self._pending.nbytes + self._in_dram.nbytes - in_both + self._loaded.nbytes

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
                is_copying = bool(self._tiers.copying)
                events = (*self._tiers.events(), *self._loaded.events())
            wait_for(events)
            running = [job for job in jobs if job is not None and not job.cancelled()]
            if not running and not is_copying:
                return
            _wait_until_done(running)

    def close(self) -> None:
        """Stop the threads, and give files and memory back. What is not in the memory that it was saved from is lost:
        graphs that need it raise. Calling it again changes nothing."""
        self._jobs.closed = True
        with self._lock:
            for saved in self._pending.oldest_first():
                self._cancel_write(saved)
        self._jobs.shut_down()
        with self._lock:
            for saved in list(self._tiers.copying):
                self._keep_after_all(saved)
            self._let_go_released()
            events = (*self._tiers.events(), *self._loaded.events())
        wait_for(events, even_if_failed=True)
        with self._lock:
            self._loaded.host.clear()
            self._tiers.close()
        if self.config.return_freed_memory:
            return_freed_memory()

    def forget(self) -> None:
        """In a forked child: threads, pinned memory and files are the parent's."""
        self._tiers.forget()

    def ratio_of(self, mark: int) -> float | None:
        """Ratio by which codecs have made the saved tensor with this mark smaller when it was written last, or its
        sample; None if neither is known."""
        return self._ratios.get(mark)

    def note_ratio(self, mark: int, ratio: float) -> None:
        """Note by how much codecs make a saved tensor smaller, by a sample."""
        with self._lock:
            self._ratios[mark] = ratio
            if len(self._ratios) > _MOST_RATIOS:
                del self._ratios[next(iter(self._ratios))]

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that graphs hold, and those of them that take memory on their device."""
        with self._lock:
            if self._released:
                self._let_go_released()
            return self._saved.nbytes, self._unmoved.nbytes + self._loaded.nbytes

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now."""
        with self._lock:
            self._let_go_released()
            return {
                "pending": self._pending.nbytes,
                "in_dram": self._in_dram.nbytes,
                "loaded": self._loaded.nbytes,
                "idle": self._loaded.host.idle_nbytes,
            } | self._tiers.sizes()

    # Below: with the lock held. Out. ----------------------------------------------------------------------------------

    def _admit(self, saved: SavedBytes) -> Callable[[], None] | None:
        """Take a range over. Returns what waits for room if there is none yet."""
        blocking = self._place(saved)
        if blocking is None:
            self._saved.add(saved, saved.nbytes)
            if saved.source is not None:  # or else it was copied at once
                self._unmoved.add(saved, saved.nbytes)
            self._trace_bytes()
        return blocking

    def _place(self, saved: SavedBytes) -> Callable[[], None] | None:
        """Let a range stay, or have it copied or written. Returns what waits for room if there is none yet."""
        nbytes, staged = cost(saved), copying.is_staged(saved.device)
        in_dram = nbytes <= self._in_dram.limit
        no_room = self.config.target == "dram" and not (staged and in_dram and self._in_dram.fits(nbytes))
        if self._jobs.closed or self._tiers.broken or no_room:
            self._counters.kept["not moved"] += saved.nbytes
            return None
        if in_dram and (blocking := self._make_room_in_dram(nbytes)) is not None:
            return blocking
        is_copied = staged or not in_dram
        if is_copied and not self._pending.fits(nbytes):
            return self._oldest_pending()
        if in_dram and is_copied:
            if busy := self._tiers.busy(saved.nbytes):
                return partial(wait_for, busy, even_if_failed=True)
            if not self._begin_copy(saved):
                return None
        elif in_dram:
            self._in_dram.add(saved, nbytes)
        elif not self._begin_write(saved):
            return None
        self._counters.counts["offloaded"] += 1
        self._counters.counts["offloaded_bytes"] += saved.nbytes
        return None

    def _make_room_in_dram(self, nbytes: int) -> Callable[[], None] | None:
        """Have the oldest ranges written that stay in host memory. Returns what waits for room if they are too many."""
        while not self._in_dram.fits(nbytes):
            oldest = self._in_dram.oldest_first()[0]
            if not oldest.copied and not self._pending.fits(cost(oldest)):
                return self._oldest_pending()
            self._in_dram.remove(oldest)
            if not oldest.copied:
                self._begin_write(oldest)
        return None

    def _oldest_pending(self) -> Callable[[], None]:
        """Function that waits for the copy or the write that was begun longest ago."""
        oldest = self._pending.oldest_first()[0]
        if oldest.copied:
            return partial(wait_for, oldest.copied)
        assert oldest.write is not None
        return partial(_wait_until_done, [oldest.write])

    def _begin_copy(self, saved: SavedBytes) -> bool:
        """Have a range copied to staging blocks, where it stays. False if there is no memory, so that the range stays
        on its device. Nothing waits: the device copies when it has computed the bytes."""
        started = time.perf_counter()
        try:
            self._tiers.begin_copy(saved)
        except NO_MEMORY as error:
            self._could_not_write(saved, error)
            return False
        self._pending.add(saved, cost(saved))
        self._in_dram.add(saved, cost(saved))
        note_move(self._trace, "copy out", started, saved)
        self._note_copied()
        return True

    def _note_copied(self) -> None:
        """Let go of the memory of ranges that have been copied. Those for which newer ranges left no room are
        written."""
        for saved in self._tiers.copied():
            self._pending.remove(saved)
            self._unmoved.remove(saved)
            if not (saved in self._in_dram or saved.released or self._jobs.closed):
                self._begin_write(saved)
            self._tiers.tidy(saved)

    def _keep_after_all(self, saved: SavedBytes) -> None:
        """Leave a range, which is being copied, where it was saved. Its blocks are given back when they are copied."""
        self._pending.remove(saved)
        self._in_dram.remove(saved)
        self._tiers.leave(saved)

    def _begin_write(self, saved: SavedBytes) -> bool:
        """Have a range written. False if there are no threads, so that the range stays in memory."""
        try:
            saved.write = self._jobs.submit("write", self._write_out, saved)
        except NoThreadsError as error:
            self._tiers.stop(str(error))
            self._could_not_write(saved, error)
            return False
        self._pending.add(saved, cost(saved))
        return True

    def _write_out(self, saved: SavedBytes) -> None:
        """In a writer thread: write a range, without the lock. Then note what came of it, with the lock held."""
        started = time.perf_counter()
        outcome = self._jobs.write(saved)
        note_move(self._trace, "write", started, saved, outcome)
        with self._lock:
            self._let_go_released()
            saved.write = None
            self._pending.remove(saved)
            if isinstance(outcome, StoredBytes):
                saved.source = saved.ready = None
                saved.stored = outcome
                self._note_written(saved, outcome)
            elif not isinstance(outcome, StoppedError):
                self._could_not_write(saved, outcome)
            if saved.source is None:
                self._unmoved.remove(saved)
            self._tiers.tidy(saved)
            self._trace_bytes()

    def _note_written(self, saved: SavedBytes, stored: StoredBytes) -> None:
        self._counters.counts["written_bytes"] += stored.nbytes
        self._counters.written_by[stored.backend] += stored.nbytes
        for piece in stored.pieces:
            if piece.encoding is not None:
                self._counters.encoded[piece.encoding.name] += piece.memory_nbytes
                self._counters.encoded_to[piece.encoding.name] += piece.nbytes
        if self.config.codecs:
            self._ratios[saved.mark] = saved.nbytes / max(stored.nbytes, 1)

    def _cancel_write(self, saved: SavedBytes) -> bool:
        """Have a range not written. False if its write has begun."""
        if saved.write is not None:
            if not saved.write.cancel():
                return False
            saved.write = None
            self._pending.remove(saved)
        return True

    def _could_not_write(self, saved: SavedBytes, failure: Exception) -> None:
        """Leave a range in memory, and report that."""
        self._in_dram.remove(saved)
        counts = self._counters.counts
        self._counters.kept["not moved"] += saved.nbytes
        counts["failed_writes"] += 1
        if counts["failed_writes"] == 1:
            _logger.warning("an activation stays in memory, because it could not be written: %s", failure)
        if isinstance(failure, OSError) and failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self._tiers.stop(str(failure))
        if self.config.when_full == "raise" and self._failure is None:
            self._failure = failure

    # In. --------------------------------------------------------------------------------------------------------------

    def _find(
        self, saved: SavedBytes, upcoming: Sequence[SavedBytes]
    ) -> tuple[torch.UntypedStorage, int] | Future[torch.UntypedStorage | None]:
        """Result of :meth:`bring`, or the job that reads it."""
        if saved.failure is not None:
            raise type(saved.failure)(*saved.failure.args) from saved.failure.__cause__
        if saved.source is not None:
            self._take_back(saved)
            copying.check_bounds(saved.source, saved.origin + saved.nbytes)
            saved.was_needed = True
            return saved.source, 0
        if saved.loaded is None:
            if saved.read is None and (original := self._original(saved)) is not None:
                return original, 0
            if self._jobs.closed:
                raise OffloadError("an activation is needed that was lost when its ActivationOffload was closed")
            if saved.read is None:
                self._loaded.bring(saved, set(upcoming))
            saved.prefetched = False
            if saved.read is not None:
                return saved.read
        return self._loaded.get(saved)

    def _take_back(self, saved: SavedBytes) -> None:
        """Leave a range where it was saved, if its write has not begun."""
        if saved not in self._pending and saved not in self._in_dram:
            return
        if saved.copied:
            self._keep_after_all(saved)
        elif self._cancel_write(saved):
            self._in_dram.remove(saved)
        else:
            return
        self._counters.counts["taken_back_bytes"] += saved.nbytes

    def _original(self, saved: SavedBytes) -> torch.UntypedStorage | None:
        """The storage that was saved, if it is still there: others have kept it, or what :meth:`bring` has returned."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(saved.original.cdata)
        if storage is None or storage.nbytes() < saved.origin + saved.nbytes:  # or resized
            return None
        if not saved.was_needed:
            self.externally_referenced.add(saved.mark)
        return storage

    def _prefetch(self, needed: SavedBytes, upcoming: Iterable[SavedBytes]) -> None:
        """Begin to read the ranges that will be needed next, as far as ``prefetch_bytes`` go."""
        if self._jobs.closed:
            return
        window = self._loaded.limit
        sooner = {needed}
        for saved in upcoming:
            sooner.add(saved)
            is_leaving = saved.write is not None or bool(saved.copied)
            if is_leaving and saved.source is not None and saved.nbytes <= window:
                window -= saved.nbytes
                self._take_back(saved)
            if saved.loaded is not None or saved.read is not None or not saved.is_away:
                continue
            if saved.failure is not None or self._original(saved) is not None:
                continue
            try:
                if not self._loaded.bring_ahead(saved, sooner):
                    return
            except (*NO_MEMORY, OSError, NoThreadsError):  # read when needed, if possible
                return

    def _submit_read(self, reading: Reading, urgent: bool) -> Future[torch.UntypedStorage | None]:
        return self._jobs.submit_read(partial(self._read_in, urgent=urgent), reading)

    def _read_in(self, reading: Reading, *, urgent: bool) -> torch.UntypedStorage | None:
        """In a reader thread: read a range, without the lock. Then note what came of it, with the lock held. None if
        that was not possible, or is not wanted any more."""
        started = time.perf_counter()
        saved, failure = reading.saved, self._jobs.read(reading)
        note_move(self._trace, "read", started, saved, reading.stored if failure is None else failure)
        with self._lock:
            self._let_go_released()
            self._loaded.note_read(reading, succeeded=failure is None)
            if failure is None:
                self._counters.counts["read_bytes"] += reading.stored.nbytes
            is_short = failure is not None and isinstance(failure.__cause__, NO_MEMORY)
            if failure is not None and not isinstance(failure, StoppedError) and (urgent or not is_short):
                saved.failure = failure  # or else it is read when needed, if possible
            self._tiers.tidy(saved)
            self._trace_bytes()
        return reading.target if failure is None else None

    # Ends, and numbers. -----------------------------------------------------------------------------------------------

    def _let_go_released(self) -> None:
        """Give back what ranges take that no graph needs any more, or that have been copied."""
        self._loaded.host.trim()
        self._note_copied()
        while self._released:
            saved = self._released.popleft()
            saved.released, saved.unread = True, 0
            for budget in (self._saved, self._unmoved, self._in_dram):
                budget.remove(saved)
            self._cancel_write(saved)
            self._loaded.cancel(saved)
            if saved.read is None:
                self._loaded.evict(saved)
            self._tiers.tidy(saved)

    def _count_hit(self, saved: SavedBytes) -> None:
        if saved.is_away:
            late = "prefetch_late" if saved.read is not None else "misses"
            self._counters.counts["prefetch_hits" if saved.loaded is not None else late] += 1

    def _trace_bytes(self) -> None:
        """Record how many bytes are where."""
        if self._trace is not None:
            sizes = self._tiers.sizes()
            self._trace.count("bytes", {
                "pending": self._pending.nbytes, "staging": sizes["staged"], "loaded": self._loaded.nbytes,
                "dram": self._in_dram.nbytes, "on SSD": sizes["on_ssd"],
            })  # fmt: skip


def _wait_until_done(jobs: Iterable[Future[Any]]) -> None:
    """Return when all jobs are done or cancelled. ``concurrent.futures.wait`` does not return for a job that was
    cancelled when its pool was shut down."""
    for job in jobs:
        with suppress(CancelledError):
            job.exception()
