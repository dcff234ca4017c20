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
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from fastensor.backends.streams import are_reached, hold_back_current, wait_for
from fastensor.backends.threads import NoThreadsError
from fastensor.errors import OffloadError
from fastensor.offload import copying, moving
from fastensor.offload.config import OffloadConfig
from fastensor.offload.host_memory import HostMemory, bytes_until_short, free_host_memory, return_freed_memory
from fastensor.offload.jobs import THREADS, Jobs, StoppedError
from fastensor.offload.moving import Reading
from fastensor.offload.saved import ByteBudget, SavedBytes, StoredBytes
from fastensor.offload.statistics import ENCODED_BY, STORED_BY, WRITTEN_BY, Counters
from fastensor.offload.tiers import StorageTiers, cost
from fastensor.offload.trace import Trace

_LEAST_TO_TIDY = 256
_MOST_RATIOS = 1 << 16
"""Saved tensors whose ratio is remembered: those that were written first last."""
_MOST_IDLE_BYTES = 128 << 20
"""Bytes of tensors that are saved or needed before freed memory is returned to the system, where nothing stays."""
_LEAST_USE = 16 << 20
"""The least bytes of tensors that are saved or needed before free memory is looked at again, where a part stays. Memory
counts as short long before so few are free, because operations take more than what they save."""
_SHARE_OF_USE = 8
"""Free memory is looked at again when one in so many of the bytes that were left until it is short has been used."""
Displace: TypeAlias = "weakref.WeakMethod[Callable[[], SavedBytes | None]]"
"""See :meth:`Swapper.keep`."""
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
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
        self._host = HostMemory(config.prefetch_nbytes)
        self._pending = ByteBudget(config.staging_nbytes)
        """Ranges that are to be written, or copied to staging blocks."""
        self._in_dram = ByteBudget(self._tiers.dram_nbytes)
        """Ranges that stay in host memory while there is room."""
        self._loaded = ByteBudget(config.prefetch_nbytes)
        """Ranges that have been read back, or are being read."""
        self._saved = ByteBudget(sys.maxsize)
        """Ranges that graphs hold, wherever the bytes are."""
        self._staying: deque[Displace] = deque()
        """What stays in host memory where it was saved, unless that gets short, in the order in which it was saved."""
        self._tidy_staying_at = _LEAST_TO_TIDY
        """How many of these there are before those that no graph holds are forgotten."""
        self._away = ByteBudget(sys.maxsize)
        """Ranges that graphs hold, and that take no memory on their device."""
        self._copying: deque[SavedBytes] = deque()
        """Ranges that are being copied to staging blocks, to stay there, in the order in which that was queued."""
        self._jobs = Jobs(config, self._tiers, self._lock, counters, trace)
        self._failure: Exception | None = None
        """The first failed write, to be raised by the next call; only with ``when_full="raise"``."""
        self._ratios: dict[int, float] = {}
        """By mark, how many times smaller codecs have made a saved tensor last."""
        self._used_nbytes = 0
        """Bytes that were saved or needed since memory was last looked at, about: threads do not wait to add theirs."""
        self._look_after_nbytes = _LEAST_USE if config.keeps_some else _MOST_IDLE_BYTES
        """After the use of how many it is looked at again."""
        self.externally_referenced: set[int] = set()
        """Marks of saved tensors whose memory other owners keep alive, so that storing them frees nothing."""

    # Out. -------------------------------------------------------------------------------------------------------------

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
                blocking = self._place(saved)
                if blocking is None:
                    self._saved.add(saved, saved.nbytes)
                    self._note_place(saved)
            if blocking is None:
                return
            self._wait_for(blocking, "wait_to_write", saved)

    def keep(self, displace: Displace) -> None:
        """Note bytes that stay in host memory, unless that gets short.

        Args:
            displace: gives the range that is to be written then; None if that would free no memory. It is called with
                the lock held.
        """
        with self._lock:
            if len(self._staying) >= self._tidy_staying_at:
                self._staying = deque(one for one in self._staying if one() is not None)
                self._tidy_staying_at = _LEAST_TO_TIDY + 2 * len(self._staying)
            self._staying.append(displace)

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

    def bring(
        self, saved: SavedBytes, upcoming: Sequence[SavedBytes] = (), unexpected: Iterable[SavedBytes] = ()
    ) -> tuple[torch.UntypedStorage, int]:
        """A storage with the bytes, and the offset in the original storage at which that storage begins.

        If the bytes have to be waited for, the next ones are read ahead meanwhile. If not, call :meth:`read_ahead`.

        Args:
            saved: the range that is needed now.
            upcoming: as for :meth:`read_ahead`.
            unexpected: as for :meth:`read_ahead`.

        Raises:
            OffloadError: the bytes cannot be read, or have changed, or are lost.
        """
        with self._lock:
            self._let_go_released()
            if saved.unread:
                saved.unread -= 1
                self._count_hit(saved)
            found = self._find(saved)
        if isinstance(found, Future):
            self.read_ahead(saved, upcoming, unexpected)
        while isinstance(found, Future):
            self._wait_for(partial(_wait_until_done, [found]), "wait_to_read", saved)
            if not found.cancelled() and (storage := found.result()) is not None:
                return storage, saved.origin - saved.lead
            with self._lock:
                self._let_go_released()
                found = self._find(saved)
        return found

    def read_ahead(
        self, needed: SavedBytes, upcoming: Sequence[SavedBytes], unexpected: Iterable[SavedBytes] = ()
    ) -> int:
        """Begin to read ranges that will be needed next.

        Args:
            needed: the range that is needed now.
            upcoming: the ranges that will be needed next, in order: they are read ahead within ``prefetch_bytes``.
            unexpected: ranges that were read ahead, and are not upcoming any more.

        Returns:
            How many of the upcoming ranges, in order, stay in memory or are being read.
        """
        with self._lock:
            self._drop(unexpected)
            self._prefetch(needed, upcoming)
            self._trace_bytes()
            for number, saved in enumerate(upcoming):
                if saved.is_to_be_read or saved.write is not None or saved.copied:
                    return number
            return len(upcoming)

    def _wait_for(self, wait: Callable[[], None], what: str, saved: SavedBytes) -> None:
        started = time.perf_counter()
        wait()
        if self._trace is not None:
            self._trace.complete(what.replace("_", " "), started, tensor=saved.position, memory_bytes=saved.nbytes)
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

    def look_at_memory(self, besides: Callable[[], int]) -> int:
        """Return freed memory, and have ranges leave that were to stay, if memory is short.

        Where nothing stays, a writer thread returns freed memory, each time. Where a part stays, the next step takes
        the same memory again: it is returned if memory is short, and then at once.

        Args:
            besides: gives the bytes that steps take besides saved tensors and their transfers.

        Returns:
            The bytes that have left now, though they were to stay.
        """
        config = self.config
        with self._lock:
            self._used_nbytes = 0
            if self._jobs.closed:
                return 0
            if not config.keeps_some:
                if config.return_freed_memory and self._jobs.have_threads:
                    with suppress(NoThreadsError):  # at exit
                        self._jobs.submit("write", return_freed_memory)
                return 0
        left = bytes_until_short(config.staging_nbytes + config.prefetch_nbytes + _MOST_IDLE_BYTES)
        self._look_after_nbytes = max(left // _SHARE_OF_USE, _LEAST_USE)
        if left < 0 and config.return_freed_memory:
            return_freed_memory()
        return self._have_leave(besides)

    def _have_leave(self, besides: Callable[[], int]) -> int:
        """Have ranges written that were to stay, in the order in which they were saved, until enough memory is free for
        the transfers and ``besides``. Returns their bytes when their memory is free."""
        nbytes = 0
        while self._staying and (short := self._needed_for_transfers() + besides() - free_host_memory()) > 0:
            is_first = not self._counters.counts["displaced_bytes"]
            left = self._write_staying(short)
            if not left:
                break
            if is_first:
                _logger.warning("memory has got short: activations that were to stay in memory go to the SSD")
            nbytes += left
        return nbytes

    def _needed_for_transfers(self) -> int:
        """Bytes that transfers may still take within their budgets, beyond the memory that is kept for them."""
        with self._lock:
            self._let_go_released()
            budgets = self.config.staging_nbytes + 2 * self.config.prefetch_nbytes
            used = self._pending.nbytes + self._loaded.nbytes + self._host.idle_nbytes
            return max(budgets - used, 0)

    def _write_staying(self, nbytes: int) -> int:
        """Have ranges written that were to stay, of ``nbytes`` or more together if there are so many. Returns the bytes
        of those that have been written: the disk may be full."""
        displaced, total = list[SavedBytes](), 0
        while total < nbytes:
            with self._lock:
                saved = self._displaced()
            if saved is None:
                break
            displaced.append(saved)
            total += saved.nbytes
            self._write_later(saved)
        for saved in displaced:
            if (write := saved.write) is not None:
                self._wait_for(partial(_wait_until_done, [write]), "wait_to_write", saved)
        return sum(saved.nbytes for saved in displaced if saved.resident is None)

    def _write_later(self, saved: SavedBytes) -> None:
        """Have a range written when ``staging_bytes`` have room for it."""
        while True:
            with self._lock:
                self._let_go_released()
                if saved.released:
                    return
                if self._pending.fits(cost(saved)):
                    self._begin_write(saved)
                    return
                blocking = self._oldest_pending()
            self._wait_for(blocking, "wait_to_write", saved)

    # Ends. ------------------------------------------------------------------------------------------------------------

    def release(self, saved: SavedBytes) -> None:
        """Note that no graph needs a range any more. Called by finalizers, anywhere: waits for nothing. The next
        holder of the lock lets go of the range."""
        saved.resident = None  # the planner counts it no more
        self._released.append(saved)

    def settle(self) -> None:
        """Return when nothing is being written or read."""
        while True:
            with self._lock:
                self._let_go_released()
                jobs: list[Future[Any] | None] = [saved.write for saved in self._pending.oldest_first()]
                jobs += [saved.read for saved in self._loaded.oldest_first()]
                copied = [event for saved in self._copying for event in saved.copied]
                arrived = [event for saved in self._loaded.oldest_first() for event in saved.arrived]
                leaving = self._tiers.leaving()
            wait_for((*copied, *arrived, *leaving))
            running = [job for job in jobs if job is not None and not job.cancelled()]
            if not running and not copied:
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
            for saved in [*self._copying]:
                self._keep_after_all(saved)
            self._let_go_released()
            arriving = [event for saved in self._loaded.oldest_first() for event in saved.arrived]
            leaving = self._tiers.leaving()
        wait_for((*arriving, *leaving), even_if_failed=True)
        with self._lock:
            self._host.clear()
            self._tiers.close()
        if self.config.return_freed_memory:
            return_freed_memory()

    def forget(self) -> None:
        """In a forked child: threads, pinned memory and files are the parent's."""
        self._tiers.forget()

    def ratio_of(self, mark: int) -> float:
        """Ratio by which codecs have made the saved tensor with this mark smaller when it was written last; 1.0 if they
        have not, or it was not written."""
        with self._lock:
            return self._ratios.get(mark, 1.0)

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that graphs hold, and those of them that take memory on their device."""
        with self._lock:
            if self._released:
                self._let_go_released()
            return self._saved.nbytes, self._saved.nbytes - self._away.nbytes

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now."""
        with self._lock:
            self._let_go_released()
            held = {"pending": self._pending, "in_dram": self._in_dram, "loaded": self._loaded}
            return (
                {name: budget.nbytes for name, budget in held.items()}
                | {"idle": self._host.idle_nbytes}
                | self._tiers.sizes()
            )

    # Below: with the lock held. Out. ----------------------------------------------------------------------------------

    def _place(self, saved: SavedBytes) -> Callable[[], None] | None:
        """Let a range stay, or have it copied or written. Returns what waits for room if there is none yet."""
        nbytes, staged = cost(saved), copying.is_staged_first(saved.device)
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
            if busy := self._tiers.busy_blocks(saved.nbytes):
                return partial(wait_for, busy, even_if_failed=True)
            if not self._begin_copy(saved):
                return None
        elif in_dram:
            self._in_dram.add(saved, nbytes)
        elif not self._begin_write(saved):
            return None
        self._counters.counts["offloaded"] += 1
        self._counters.counts["offloaded_bytes"] += saved.nbytes
        self._note_peaks()
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
            saved.blocks = self._tiers.take_blocks(saved.nbytes)
            saved.copied = moving.stage(saved)
        except BaseException as error:
            copying.wait_until_left(saved.device)  # a part may have been queued
            self._tiers.give_blocks(saved)
            if not isinstance(error, _NO_MEMORY):
                raise
            self._could_not_write(saved, error)
            return False
        saved.address = saved.source.data_ptr() if saved.source is not None else 0
        self._pending.add(saved, cost(saved))
        self._in_dram.add(saved, cost(saved))
        self._copying.append(saved)
        self._trace_queued("copy out", started, saved)
        self._note_copied()
        return True

    def _note_copied(self) -> None:
        """Let go of the memory of ranges that have been copied. Those that newer ranges have displaced are written."""
        while self._copying and are_reached(self._copying[0].copied):
            saved = self._copying.popleft()
            saved.copied = ()
            self._check_unchanged(saved)
            saved.source = saved.ready = None
            self._pending.remove(saved)
            if not (saved in self._in_dram or saved.released or self._jobs.closed):
                self._begin_write(saved)
            self._note_place(saved)
            self._tidy(saved)

    def _check_unchanged(self, saved: SavedBytes) -> None:
        """Note that a range is lost whose storage was resized while it was copied: its memory was freed before."""
        source, end = saved.source, saved.origin + saved.nbytes
        if source is not None and (source.nbytes() < end or source.data_ptr() != saved.address):
            saved.failure = copying.resized(source, end)

    def _keep_after_all(self, saved: SavedBytes) -> None:
        """Leave a range, which is being copied, where it was saved. Its blocks are given back when they are copied."""
        self._copying.remove(saved)
        self._pending.remove(saved)
        self._in_dram.remove(saved)
        self._tiers.give_blocks(saved)
        saved.copied = ()

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

    def _displaced(self) -> SavedBytes | None:
        """The range that was to stay, is needed last, and is to be written now; None if writing would free no
        memory."""
        self._let_go_released()
        if self._jobs.closed or self._tiers.broken or self.config.target == "dram":
            return None
        while self._staying:
            displace = self._staying.popleft()()
            if displace is not None and (saved := displace()) is not None:
                return saved
        return None

    def _write_out(self, saved: SavedBytes) -> None:
        """In a writer thread: write a range, without the lock. Then note what came of it, with the lock held."""
        started = time.perf_counter()
        outcome = self._jobs.write(saved)
        self._trace_move("write", started, saved, outcome)
        with self._lock:
            self._let_go_released()
            saved.write = None
            self._pending.remove(saved)
            if isinstance(outcome, StoredBytes):
                saved.source = saved.ready = None
                saved.stored = outcome
                self._note_written(saved, outcome)
                self._note_displaced(saved)
            elif not isinstance(outcome, StoppedError):
                self._could_not_write(saved, outcome)
            self._note_place(saved)
            self._tidy(saved)
            self._trace_bytes()

    def _note_displaced(self, saved: SavedBytes) -> None:
        """Count a range that was to stay and has left memory."""
        if saved.resident is None:
            return
        saved.resident = None
        self._saved.add(saved, saved.nbytes)
        counts = self._counters.counts
        counts["offloaded"] += 1
        counts["offloaded_bytes"] += saved.nbytes
        counts["displaced_bytes"] += saved.nbytes

    def _note_written(self, saved: SavedBytes, stored: StoredBytes) -> None:
        counts = self._counters.counts
        counts["written_bytes"] += stored.nbytes
        counts[f"{WRITTEN_BY}{stored.backend}"] += stored.nbytes
        if stored.encoding is not None:
            counts[f"{ENCODED_BY}{stored.encoding.name}"] += saved.nbytes
            counts[f"{STORED_BY}{stored.encoding.name}"] += stored.nbytes
        if self.config.codecs:
            self._ratios[saved.mark] = saved.nbytes / max(stored.nbytes, 1)
            if len(self._ratios) > _MOST_RATIOS:
                del self._ratios[next(iter(self._ratios))]

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
        if saved.resident is None:  # or else they were counted when they were saved
            self._counters.kept["not moved"] += saved.nbytes
        counts["failed_writes"] += 1
        if counts["failed_writes"] == 1:
            _logger.warning("an activation stays in memory, because it could not be written: %s", failure)
        if isinstance(failure, OSError) and failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self._tiers.stop(str(failure))
        if self.config.when_full == "raise" and self._failure is None:
            self._failure = failure

    # In. --------------------------------------------------------------------------------------------------------------

    def _find(self, saved: SavedBytes) -> tuple[torch.UntypedStorage, int] | Future[torch.UntypedStorage | None]:
        """Result of :meth:`bring`, or the job that reads it."""
        if saved.failure is not None:
            raise type(saved.failure)(*saved.failure.args) from saved.failure.__cause__
        if saved.source is not None:
            self._take_back(saved)
            copying.check_bounds(saved.source, saved.origin + saved.nbytes)
            saved.lent = True
            return saved.source, 0
        if saved.loaded is None:
            if saved.read is None and (original := self._original(saved)) is not None:
                return original, 0
            if self._jobs.closed:
                raise OffloadError("an activation is needed that was lost when its ActivationOffload was closed")
            if saved.read is None:
                self._begin_read(saved, urgent=True)
            saved.prefetched = False
            if saved.read is not None:
                return saved.read
        assert saved.loaded is not None
        saved.prefetched = False
        self._loaded.use(saved)
        hold_back_current(saved.device, saved.arrived)
        return saved.loaded, saved.origin - saved.lead

    def _take_back(self, saved: SavedBytes) -> None:
        """Leave a range where it was saved, if its write has not begun."""
        if saved not in self._pending and saved not in self._in_dram:
            return
        if saved.copied:
            self._keep_after_all(saved)
        elif not self._cancel_write(saved):
            return
        self._in_dram.remove(saved)
        self._counters.counts["taken_back_bytes"] += saved.nbytes

    def _original(self, saved: SavedBytes) -> torch.UntypedStorage | None:
        """The storage that was saved, if it is still there: others have kept it, or what :meth:`bring` has returned."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(saved.original.cdata)
        if storage is None or storage.nbytes() < saved.origin + saved.nbytes:  # or resized
            return None
        if not saved.lent:
            self.externally_referenced.add(saved.mark)
        return storage

    def _prefetch(self, needed: SavedBytes, upcoming: Iterable[SavedBytes]) -> None:
        """Begin to read the ranges that will be needed next, as far as ``prefetch_bytes`` go."""
        if self._jobs.closed:
            return
        window = self.config.prefetch_nbytes
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
            if not self._make_room(saved.nbytes, sooner):
                return
            try:
                self._begin_read(saved, urgent=False)
            except (*_NO_MEMORY, OSError, NoThreadsError):  # read when needed, if possible
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

    def _begin_read(self, saved: SavedBytes, *, urgent: bool) -> None:
        """Have a range copied back from its staging blocks, which is queued and needs no thread, or read from its slot.
        An urgent one, which is needed now, is read before others, and beyond the budget if need be. If there is no
        memory for it, what was brought back before gives up its own.

        Raises:
            MemoryError, torch.OutOfMemoryError, OSError: there is no memory to read into.
        """
        if urgent:
            for other in self._loaded.oldest_first():
                if other.prefetched:
                    self._cancel_read(other)
            self._make_room(saved.nbytes)
        try:
            self._queue_read(saved, urgent=urgent)
        except _NO_MEMORY:
            if not (urgent and self._evict_all()):
                raise
            self._queue_read(saved, urgent=True)
        self._loaded.add(saved, saved.nbytes, beyond=urgent)
        self._note_place(saved)
        saved.prefetched = not urgent
        self._note_peaks()

    def _queue_read(self, saved: SavedBytes, *, urgent: bool) -> None:
        """Get memory for a range, and have the range copied or read into it. Raises as :meth:`_begin_read`."""
        if saved.blocks:
            started = time.perf_counter()
            target, _ = moving.new_memory(saved, self._host)
            saved.arrived = moving.unstage(saved, target)
            saved.loaded = target
            self._trace_queued("copy in", started, saved)
        else:
            reading = Reading.of(saved, self._host)
            saved.read = self._jobs.submit_read(partial(self._read_in, urgent=urgent), reading)

    def _read_in(self, reading: Reading, *, urgent: bool) -> torch.UntypedStorage | None:
        """In a reader thread: read a range, without the lock. Then note what came of it, with the lock held. None if
        that was not possible, or is not wanted any more."""
        started = time.perf_counter()
        saved, failure = reading.saved, self._jobs.read(reading)
        self._trace_move("read", started, saved, reading.stored if failure is None else failure)
        with self._lock:
            self._let_go_released()
            saved.read = None
            if failure is None:
                self._counters.counts["read_bytes"] += reading.stored.nbytes
            if failure is None and not saved.released:
                saved.loaded = reading.target
            else:
                self._evict(saved)
            is_short = failure is not None and isinstance(failure.__cause__, _NO_MEMORY)
            if failure is not None and not isinstance(failure, StoppedError) and (urgent or not is_short):
                saved.failure = failure  # or else it is read when needed, if possible
            self._tidy(saved)
            self._trace_bytes()
        return reading.target if failure is None else None

    def _cancel_read(self, saved: SavedBytes) -> None:
        """Have a range not read, if its read has not begun."""
        if saved.read is not None and saved.read.cancel():
            saved.read = None
            self._evict(saved)
            self._tidy(saved)

    def _evict(self, saved: SavedBytes) -> None:
        if saved.loaded is not None and saved.prefetched and not are_reached(saved.arrived):
            copying.keep_until_filled(saved.loaded)  # no stream waits for what was read ahead for nothing
        self._loaded.remove(saved)
        saved.loaded = None
        self._note_place(saved)

    def _evict_all(self) -> bool:
        """Evict all ranges that were brought back. Returns whether there were any."""
        found = [saved for saved in self._loaded.oldest_first() if saved.loaded is not None]
        for saved in found:
            self._evict(saved)
        return bool(found)

    def _note_place(self, saved: SavedBytes) -> None:
        """Count a range as away, or not."""
        if saved in self._saved and saved.is_to_be_read:
            self._away.add(saved, saved.nbytes)
        else:
            self._away.remove(saved)

    def _drop(self, ranges: Iterable[SavedBytes]) -> None:
        """Let go of ranges that were read ahead for nothing; of those that are being read, when room is needed."""
        for saved in ranges:
            if not saved.prefetched:
                continue
            self._cancel_read(saved)
            if saved.loaded is not None:
                self._evict(saved)
            saved.prefetched = False

    # Ends, and numbers. -----------------------------------------------------------------------------------------------

    def _let_go_released(self) -> None:
        """Give back what ranges take that no graph needs any more, or that have been copied."""
        self._host.trim()
        self._note_copied()
        self._tiers.take_back_blocks()
        while self._released:
            saved = self._released.popleft()
            saved.released, saved.unread = True, 0
            self._saved.remove(saved)
            self._note_place(saved)
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

    def _trace_move(self, what: str, started: float, saved: SavedBytes, outcome: StoredBytes | Exception) -> None:
        """Record that this thread has moved a range to or from its copy on the SSD, or tried to."""
        if self._trace is None:
            return
        found: dict[str, Any] = {"tensor": saved.position, "memory_bytes": saved.nbytes, "dtype": str(saved.dtype)}
        if isinstance(outcome, StoredBytes):
            found |= {"bytes": outcome.nbytes, "backend": outcome.backend}
            if outcome.encoding is not None:
                found["codec"] = outcome.encoding.name
        else:
            found["failed"] = str(outcome) or type(outcome).__name__
        self._trace.complete(what, started, **found)

    def _trace_queued(self, what: str, started: float, saved: SavedBytes) -> None:
        """Record that this thread has queued copies of a range."""
        if self._trace is not None:
            self._trace.complete(what, started, tensor=saved.position, memory_bytes=saved.nbytes)

    def _trace_bytes(self) -> None:
        """Record how many bytes are where."""
        if self._trace is not None:
            sizes = self._tiers.sizes()
            self._trace.count("bytes", {
                "pending": self._pending.nbytes, "staging": sizes["staged"], "loaded": self._loaded.nbytes,
                "dram": self._in_dram.nbytes, "on SSD": sizes["on_ssd"],
            })  # fmt: skip

    def _note_peaks(self) -> None:
        self._trace_bytes()
        self._counters.note_peak("peak_pending_bytes", self._pending.nbytes)
        self._counters.note_peak("peak_dram_bytes", self._in_dram.nbytes)
        self._counters.note_peak("peak_loaded_bytes", self._loaded.nbytes)


def _wait_until_done(jobs: Iterable[Future[Any]]) -> None:
    """Return when all jobs are done or cancelled. ``concurrent.futures.wait`` does not return for a job that was
    cancelled when its pool was shut down."""
    for job in jobs:
        with suppress(CancelledError):
            job.exception()
