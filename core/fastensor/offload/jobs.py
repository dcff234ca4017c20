"""The jobs of an offload: threads that move whole ranges out and in, without the lock.

:class:`~fastensor.offload.swapper.Swapper` decides which range moves when. Here the range moves: a backend is chosen,
other threads help, and a slot, staging blocks or a bounce block are taken and given back. A job takes the lock only for
that. It changes no budget; what came of it, a result or an exception, goes to the swapper, which notes it.

The reader threads take jobs in the order in which ranges are needed. A range of several pieces has a job for each
thread: the first job leads, the others help, so that the range that is needed first has the whole disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Literal, TypeVar

from fastensor.backends.buffers import Buffer
from fastensor.backends.streams import wait_for
from fastensor.backends.threads import NoThreadsError, Pool, finish, open_pool, shut_down, submit
from fastensor.errors import OffloadError
from fastensor.offload import copying, moving
from fastensor.offload.config import OffloadConfig
from fastensor.offload.host_memory import keep_on_fork
from fastensor.offload.moving import Outgoing, Piece, Reading
from fastensor.offload.saved import SavedBytes, StoredBytes, StoredPiece
from fastensor.offload.slots import FileSlot
from fastensor.offload.statistics import Counters
from fastensor.offload.tiers import StorageTiers, cost
from fastensor.offload.trace import Trace, note_move

THREADS = 4
"""Threads that write, and as many that read."""
T = TypeVar("T")


class StoppedError(OffloadError):
    """The bytes are not needed any more, so the rest of them was not moved."""


class Jobs:
    """The threads, and what they do.

    Args:
        config: how bytes are moved.
        tiers: where to.
        lock: the lock of the tiers.
        trace: where helpers are recorded.
    """

    def __init__(
        self,
        config: OffloadConfig,
        tiers: StorageTiers,
        lock: threading.Lock,
        counters: Counters,
        trace: Trace | None = None,
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._lock = lock
        self._trace = trace
        self._pools: dict[str, Pool] = {}
        self._counters = counters
        self.closed = False
        """True if nothing is moved any more: running jobs end before their next piece."""

    @property
    def have_threads(self) -> bool:
        """True if there are threads, which take jobs."""
        return bool(self._pools) and not self.closed

    # With the lock held. ----------------------------------------------------------------------------------------------

    def submit(self, pool: Literal["write", "read"], job: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a writer thread or a reader thread run a job, after those that were submitted before.

        Raises:
            NoThreadsError: threads cannot be started, or accept no work any more.
        """
        self.start_threads()
        return submit(self._pools[pool], self._run, job, *arguments)

    def start_threads(self) -> None:
        """Start all threads, unless they run already.

        Raises:
            NoThreadsError: threads cannot be started.
        """
        if not self._pools:  # both: what is written must be readable
            with ExitStack() as opened:
                pools = {}
                for name in ("write", "read"):
                    pools[name] = open_pool(THREADS, f"fastensor-offload-{name}")
                    opened.callback(shut_down, pools[name])
                self._pools = pools
                opened.pop_all()

    def submit_read(self, job: Callable[[Reading], T], reading: Reading) -> Future[T]:
        """Have a reader thread run a job that reads a range, and others help it.

        Raises:
            NoThreadsError: threads cannot be started, or accept no work any more.
        """
        todo = reading.todo
        helpers = min(THREADS, len(todo)) - 1  # before the first job takes pieces
        read = self.submit("read", job, reading)
        read.add_done_callback(lambda _: todo.clear())  # helpers of a cancelled read have nothing to do
        with suppress(NoThreadsError):  # then the first job reads all pieces
            for _ in range(helpers):
                reading.helpers.append(self.submit("read", self._help_to_read, reading))
        return read

    # Without the lock. ------------------------------------------------------------------------------------------------

    def _run(self, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job, and count what it takes of the processors."""
        cpu = time.thread_time()
        try:
            return job(*arguments)
        finally:
            with self._lock:
                self._counters.seconds["cpu"] += time.thread_time() - cpu

    def shut_down(self) -> None:
        """Drop jobs that have not begun, and return when none runs any more. Call it after ``closed`` is set, when
        nothing more is submitted."""
        for pool in self._pools.values():
            shut_down(pool)

    def write(self, saved: SavedBytes) -> StoredBytes | Exception:
        """Write a range to a slot.

        Returns:
            The copy in the slot; or why the range stays where it is, without frames: see
            :func:`fastensor.offload.moving.write`, and :class:`StoppedError`.
        """
        try:
            with self._counters.writes.running():
                return self._store(saved)
        except BaseException as error:  # noqa: BLE001  # returned
            return _without_frames(error)

    def read(self, reading: Reading) -> OffloadError | None:
        """Read a range back from its slot, and compare the CRC32.

        Returns:
            None; or why the bytes are not there, without frames: whoever needs them raises a copy.
        """
        try:
            with self._counters.reads.running():
                self._read_slots(reading)
        except BaseException as error:  # noqa: BLE001  # returned
            failure = _without_frames(error)
            if isinstance(error, OffloadError):
                return error
            failed = OffloadError(f"an activation of {reading.saved.nbytes} bytes cannot be read: {failure}")
            failed.__cause__ = failure
            return failed
        finally:
            if reading.memory is not None:
                keep_on_fork(reading.memory)
        return None

    def _stage(self, saved: SavedBytes) -> None:
        """Copy a range to staging blocks, and free its memory on the device. Ranges larger than ``staging_bytes`` are
        written piece by piece instead."""
        if cost(saved) > self._tiers.staging_nbytes:
            return
        while True:
            with self._lock:
                if not (busy := self._tiers.busy(saved.nbytes)):
                    self._tiers.take(saved)
                    break
            wait_for(busy, even_if_failed=True)
        assert saved.source is not None
        wait_for(copying.queue_out(saved.source, saved.origin, saved.nbytes, saved.blocks, saved.ready))
        with self._lock:
            saved.source = None

    def _store(self, saved: SavedBytes) -> StoredBytes:
        """Write a range with the backend that the selector chooses, encoded if that makes it smaller."""
        with self._lock:
            slots = self._tiers.slots
        staged = copying.is_staged(saved.device) and not saved.blocks
        codecs = self._codecs_for(saved, staged=staged)
        direct = slots.direct_backends(saved.device) if staged and not saved.blocks else ()
        transfer = self._tiers.transfer("write", saved, (*direct, *slots.backends), learn=not codecs)
        if staged and not saved.blocks and transfer.used not in direct:
            self._stage(saved)
        stored = transfer.run(lambda backend: self._write_slots(saved, backend.name, codecs), slots.record_fallback)
        transfer.done(time.perf_counter() - transfer.started)
        return stored

    def _codecs_for(self, saved: SavedBytes, *, staged: bool) -> Set[str]:
        """The codecs that may make a range smaller, by a sample. A device's tensors are staged for that first; those
        that are too large to be staged are written as they are."""
        codecs = set(self._config.codecs)
        if codecs and staged:
            self._stage(saved)
        if not codecs or (staged and not saved.blocks):
            return set()
        return codecs if moving.sampled_ratio(saved, codecs) > 1 else set()

    def _write_slots(self, saved: SavedBytes, backend: str, codecs: Set[str]) -> StoredBytes:
        """Write a range to new slots with one backend. The slots are given back if that fails.

        Slots for the whole range are taken first, as large as its pieces are in memory: nothing is written of a range
        that does not fit. A piece that a codec makes smaller then gets a smaller slot.
        """
        todo = deque(moving.pieces(saved))
        is_direct = not saved.blocks and backend in self._tiers.slots.direct_backends(saved.device)
        with self._lock:
            slots = self._tiers.allocate([nbytes for _, nbytes in todo])
        try:
            with self._bounce_block(not is_direct and moving.is_copied_to_write(saved, codecs)) as bounce:
                pieces = []
                for at, piece in enumerate(self._wanted(saved, todo)):
                    out = piece if is_direct else moving.outgoing(saved, piece, codecs, bounce)
                    if isinstance(out, Outgoing) and out.encoding is not None:
                        self._shrink(slots, at, len(out.data))
                    pieces.append(self._write_piece(saved, out, slots[at], backend))
        except BaseException:
            with self._lock:
                self._tiers.free(slots)
            raise
        return StoredBytes(backend, tuple(pieces))

    def _shrink(self, slots: list[FileSlot], at: int, nbytes: int) -> None:
        """Take a smaller slot in place of one. It may be elsewhere, beside the slot before, so that no gaps remain."""
        with self._lock:
            self._tiers.free([slots.pop(at)])
            slots[at:at] = self._tiers.allocate([nbytes])

    def _write_piece(self, saved: SavedBytes, piece: Piece | Outgoing, slot: FileSlot, backend: str) -> StoredPiece:
        opened, checksum = slot.file.opened[backend], self._config.verify
        if isinstance(piece, Outgoing):
            return moving.write(saved, piece, slot, opened, checksum=checksum)
        return moving.write_from_device(saved, piece, slot, opened, checksum=checksum)

    def _read_slots(self, reading: Reading) -> None:
        """Read a range with the backend that has written it, or else with ``numpy``."""
        stored = reading.stored
        is_encoded = any(piece.encoding is not None for piece in stored.pieces)
        backends = tuple(dict.fromkeys((stored.backend, "numpy")))
        transfer = self._tiers.transfer("read", reading.saved, backends, learn=not is_encoded)
        transfer.run(lambda backend: self._read_with_helpers(reading, backend.name), self._tiers.slots.record_fallback)
        transfer.done(time.perf_counter() - transfer.started)

    def _read_with_helpers(self, reading: Reading, backend: str) -> None:
        """Read a range with one backend, together with the helpers."""
        if backend != reading.stored.backend:  # the helpers' backend does not work any more: begin again, alone
            reading.todo.clear()
            self._join(reading)
            reading.todo.extend(moving.pieces(reading.saved))
        try:
            self._read_pieces(reading, backend)
        finally:
            reading.todo.clear()
            begun = self._join(reading)
        while begun:
            begun.pop().result()

    def _join(self, reading: Reading) -> list[Future[None]]:
        """Cancel the helpers that have not begun, and wait for the others, which are returned."""
        if reading.is_one_piece:
            return []
        with self._lock:
            begun = [helper for helper in reading.helpers if not helper.cancel()]
            reading.helpers.clear()
        finish(begun)
        return begun

    def _help_to_read(self, reading: Reading) -> None:
        """Read pieces with the backend that has written the range."""
        started = time.perf_counter()
        with self._counters.reads.running():
            self._read_pieces(reading, reading.stored.backend)
        note_move(self._trace, "help to read", started, reading.saved)

    def _read_pieces(self, reading: Reading, backend: str) -> None:
        """Read pieces until none is left."""
        with self._bounce_block(moving.is_copied_to_read(reading, backend)) as bounce:
            for piece in self._wanted(reading.saved, reading.todo):
                moving.read(reading, piece, bounce, backend, verify=self._config.verify)

    def _wanted(self, saved: SavedBytes, todo: deque[Piece]) -> Iterator[Piece]:
        """Take pieces of a range, one after the other, until no thread has left one.

        Raises:
            StoppedError: the range is not needed any more.
        """
        while todo:
            try:
                piece = todo.popleft()
            except IndexError:  # another thread has taken the last piece
                return
            if saved.released or self.closed:
                raise StoppedError
            yield piece

    def _bounce_block(self, is_wanted: bool) -> AbstractContextManager[Buffer | None]:
        return self._tiers.bounce_block() if is_wanted else nullcontext()


def _without_frames(failure: BaseException) -> Exception:
    """The same exception without its frames, which would hold graphs that hold what notes the exception: a cycle
    through autograd, which no garbage collector sees."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return failure if isinstance(failure, Exception) else OffloadError(f"a thread was stopped by {failure!r}")
