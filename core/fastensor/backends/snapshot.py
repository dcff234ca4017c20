"""Snapshots: files whose bytes are copied into buffers first, and moved from there while the program goes on.

The caller's threads copy windows of the image into buffers, in order, without looking at the bytes. If the bytes come
from a device with streams, the caller only queues the copies, and the device orders them before what is queued later.
The thread that moves the file waits for the copies, takes the CRC32s and fills in headers. Buffers go back to the pool
one by one as they have been written, so a file that is larger than the pool streams through it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES, Buffer, BufferPool, Run, runs_of
from fastensor.backends.copier import Copier, Window, copy_header
from fastensor.backends.streams import Event, wait_for
from fastensor.backends.threads import run_together, usable_cores
from fastensor.errors import BackendUnavailableError
from fastensor.stitch.image import Header
from fastensor.stitch.source import Plan

_MOST_THREADS = 4
"""More threads do not copy faster: memory is the limit."""
_SMALL_SHARE = 8
"""Least ratio of all bytes to those in host memory with which one thread copies these, and queues the other copies."""
_MOST_AT_ONCE = 16
"""The most buffers that a thread fills at once. What a storage has in these is one copy if they are neighbours."""
_SHARE = 4
"""A thread takes one in so many of the buffers that would be its part of what is left: so all threads end at once."""
_AHEAD = 2 * BUFFER_COUNT
"""The buffers by which staging is ahead of moving while more is left than the pool holds. The same ones are lent again
and again, so their bytes are in the processor's cache when the CRC32s are taken, and when the disk fetches them."""


class Snapshot:
    """A planned file in buffers: a :class:`~fastensor.stitch.source.Source` that is staged before it is moved.

    One thread stages the snapshot while, or before, another one moves it. Once the snapshot is staged, it refers to
    the plan's storages no more.

    Args:
        plan: the file to copy.
        pool: lends the buffers. It has some, or buffers that others use will come back to it.
        before_window: called with the number of bytes of each window that is about to be handed over, in the thread
            that moves the snapshot; may wait, and may raise.
        while_waiting: entered while staging waits for buffers that are still to be moved.
        known_checksums: see :class:`~fastensor.stitch.source.Source`.
        throttled: whether ``before_window`` waits.
    """

    device = "staged"

    def __init__(
        self,
        plan: Plan,
        pool: BufferPool,
        *,
        before_window: Callable[[int], None] = lambda nbytes: None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        known_checksums: tuple[int, ...] | None = None,
        throttled: bool = False,
    ) -> None:
        self.nbytes = plan.nbytes
        self.known_checksums = known_checksums
        self.layout = plan.released()
        """The plan, without its storages."""
        self.storage_count = len(plan.storages)
        self._throttled = throttled
        self._plan = plan
        self._pool = pool
        self._before_window = before_window
        self._while_waiting = while_waiting
        self._changed = threading.Condition()
        self._count = -(-plan.nbytes // BUFFER_NBYTES)
        self._claimed = 0
        self._claiming = threading.Lock()
        self._filling: list[Buffer] = []
        """Buffers that have been lent and are being filled."""
        self._staged: dict[int, Buffer] = {}
        """Filled buffers by their number, counted from the file's start."""
        self._copied: dict[int, Sequence[Event]] = {}
        """By the number of a filled buffer, events that are reached when devices have copied to it."""
        self._moved: Counter[int] = Counter()
        """Bytes of each buffer that have been moved."""
        self._staging = True
        self._streams = plan.nbytes > pool.nbytes
        """True if windows may be moved before all is staged; otherwise moving would take time from staging."""
        self._begun = False
        """True once moving has begun."""
        self._failure: BaseException | None = None
        self._moving_failure: BaseException | None = None

    @property
    def throttled(self) -> bool:
        return self._throttled or self._streams or self.layout.throttled

    @property
    def checksums_first(self) -> bool:
        return self.layout.checksums_first

    def head(self, checksums: Sequence[int]) -> bytes:
        return self.layout.head(checksums)

    # --- called by the thread that saves

    def stage(self) -> None:
        """Copy everything. Returns when the plan's storages may be changed by the host, by what is queued on their
        devices' current streams from now on, and by what follows that.

        Raises:
            StateChangedError: a storage has another size than when the file was planned.
            BaseException: what :meth:`fail` was given meanwhile.
        """
        try:
            copier = Copier(self._plan.storages)
            try:
                threads = _threads(copier.host_nbytes)
                if copier.asynchronous and copier.host_nbytes <= self.nbytes // _SMALL_SHARE:
                    threads = 1
                run_together(lambda: self._fill_buffers(copier, threads), threads)
                copier.let_go()
            finally:
                if self._filling:  # no event says when what was cut off is done
                    wait_for(copier.events(), even_if_failed=True)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._plan = self.layout
            self._while_waiting = nullcontext
            self._end_staging()
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: BaseException) -> None:
        """Stop staging and moving at the next buffer, with this exception. Only the first call counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._pool.wake()

    def stop(self, failure: BaseException) -> None:
        """Fail a snapshot for which :meth:`stage` was not called, or has returned."""
        self.fail(failure)
        self._end_staging()

    def discard(self) -> None:
        """Give all buffers back, once :meth:`stage` has returned. Nothing moves them any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._staging)
            for copied in self._copied.values():
                wait_for(copied, even_if_failed=True)  # a device would go on copying to what others have got
            for buffer in dict.fromkeys((*self._staged.values(), *self._filling)):  # an interrupt may leave one in both
                self._pool.give(buffer)
            self._staged.clear()
            self._copied.clear()
            self._filling.clear()

    # --- called by the threads that move the file

    def wait_to_move(self) -> None:
        """Return when moving takes no time from staging, or the snapshot has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_be_moved() or self._failure is not None)

    def begin_moving(self) -> None:
        """Called once by each stager.

        Raises:
            BackendUnavailableError: parts of the snapshot have been moved, and their buffers given back.
        """
        if self._moved:
            raise BackendUnavailableError("a part of the snapshot has been given back; it cannot be moved again")
        self._moving_failure = None
        self._begun = True

    def window(self, offset: int, nbytes: int) -> Window:
        """Wait until a part of the file is staged. Its headers have blanks, and its CRC32s were not taken.

        Raises:
            BaseException: what :meth:`fail` or :meth:`moving_failed` was given.
        """
        number, begin = divmod(offset, BUFFER_NBYTES)
        with self._changed:
            self._changed.wait_for(lambda: self._failed() or (number in self._staged and self._may_be_moved()))
            if (failure := self._failed()) is not None:
                raise failure
            buffer, copied = self._staged[number], self._copied[number]
        self._before_window(nbytes)
        return Window(buffer, begin, offset, nbytes, events=copied)

    def give_back(self, window: Window) -> None:
        """Count a window as moved. When all bytes of its buffer are, the buffer goes back to the pool."""
        number = window.offset // BUFFER_NBYTES
        with self._changed:
            self._moved[number] += window.nbytes
            if self._moved[number] < min(BUFFER_NBYTES, self.nbytes - number * BUFFER_NBYTES):
                return
            self._pool.give(self._staged.pop(number))
            del self._copied[number]
            self._changed.notify_all()

    def moving_failed(self, failure: BaseException) -> None:
        """Raise ``failure`` from :meth:`window`, until :meth:`begin_moving` is called again."""
        with self._changed:
            self._moving_failure = failure
            self._changed.notify_all()

    # --- inside

    def _failed(self) -> BaseException | None:
        return self._failure or self._moving_failure

    def _may_be_moved(self) -> bool:
        return self._streams or not self._staging

    def _end_staging(self) -> None:
        with self._changed:
            self._staging = False
            self._changed.notify_all()

    def _fill_buffers(self, copier: Copier, threads: int) -> None:
        """The work of one of the threads: claim buffers and fill them, again and again. Raises only interrupts."""
        try:
            with copier.entered():
                while claimed := self._claim(threads):
                    number = next(iter(claimed))
                    for run in runs_of(claimed.values()):
                        self._fill(number, run, copier)
                        number += len(run.buffers)
                    copied = copier.events()
                    with self._changed:
                        self._staged |= claimed
                        self._copied |= dict.fromkeys(claimed, copied)
                        for buffer in claimed.values():
                            self._filling.remove(buffer)
                        self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  # raised by stage()
            self.fail(error)
        except BaseException as error:
            self.fail(error)
            raise

    def _claim(self, threads: int) -> dict[int, Buffer]:
        """Take buffers for the next parts of the file, of those that are idle, at least one: many at first, fewer when
        little is left for the threads. Returns the buffers by their numbers; none if nothing is left to be filled."""
        with self._claiming:
            self._wait_for_moving()
            if self._claimed == self._count or self._failure is not None:
                return {}
            buffer = self._pool.wait_and_take(
                self._filling, while_waiting=self._streaming, stopped=lambda: self._failure is not None
            )
            if buffer is None:
                return {}
            left = self._count - self._claimed
            most = min(_MOST_AT_ONCE, left if threads == 1 else max(left // (_SHARE * threads), 1), 1 + self._room())
            buffers = [buffer, *self._pool.take_idle(self._filling, most - 1)]
            first, self._claimed = self._claimed, self._claimed + len(buffers)
            return dict(enumerate(sorted(buffers, key=lambda one: one.address), first))

    def _room(self) -> int:
        """The number of buffers that may be claimed now, if they are idle."""
        left = self._count - self._claimed
        if not self._begun or left * BUFFER_NBYTES <= self._pool.nbytes:
            return left
        return _AHEAD - len(self._filling) - len(self._staged)

    def _wait_for_moving(self) -> None:
        """Wait while staging is far enough ahead of moving, unless what is left fits into the pool."""
        if self._room() <= 0 and self._claimed < self._count and self._failure is None:
            with self._streaming(), self._changed:
                self._changed.wait_for(lambda: self._room() > 0 or self._failure is not None)

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        with self._changed:
            self._streams = True
            self._changed.notify_all()
        with self._while_waiting():
            yield

    def _fill(self, number: int, run: Run, copier: Copier) -> None:
        """Fill a run, whose first buffer has a number."""
        for buffer in run.buffers:
            buffer.prepare(copier.device)
        begin = number * BUFFER_NBYTES
        for piece in self._plan.image.pieces(begin, min(begin + run.nbytes, self.nbytes)):
            if isinstance(piece.segment, Header):
                copy_header(piece, piece.segment, run.view)
            else:
                copier.copy(piece, piece.segment, run)


def _threads(nbytes: int) -> int:
    """Number of threads that copy ``nbytes`` in host memory. One is enough to queue copies of devices."""
    return max(1, min(usable_cores(_MOST_THREADS), nbytes // (2 * BUFFER_NBYTES)))
