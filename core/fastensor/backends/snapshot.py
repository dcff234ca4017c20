"""Snapshots: files whose bytes are copied into an arena first, and moved from there while the program goes on.

The caller's threads copy windows of the image into blocks, in order, without looking at the bytes; whoever moves them
takes the CRC32s and fills in headers. Blocks go back to the arena one by one as they have been written, so a file that
is larger than the arena streams through it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

from fastensor.backends.arena import BLOCK_NBYTES, Arena
from fastensor.backends.memory import Buffer
from fastensor.backends.staging import Checksums, Copier, Window, copy_header
from fastensor.backends.threads import run_together, usable_cores
from fastensor.errors import BackendUnavailableError
from fastensor.stitch.image import Header, Image
from fastensor.stitch.source import Plan

_MOST_THREADS = 4
"""More do not copy faster: memory is what limits them."""


class Snapshot:
    """A planned file in an arena: a :class:`~fastensor.backends.staging.StagedSource`.

    One thread stages it while, or before, another one moves it. Once it is staged nothing of the plan's storages is
    referred to any more.

    Args:
        plan: what to copy.
        arena: where to. It has blocks, or blocks in use by others will come back to it.
        before_window: called with the number of bytes of each window that is about to be handed over, in the thread
            that moves it; may wait, and may raise.
        while_waiting: entered while staging waits for blocks that are still to be moved.
        known_checksums: see :class:`~fastensor.stitch.source.Source`.
        throttled: whether ``before_window`` waits.
    """

    device = "staged"

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        *,
        before_window: Callable[[int], None] = lambda nbytes: None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        known_checksums: tuple[int, ...] | None = None,
        throttled: bool = False,
    ) -> None:
        self.nbytes = plan.nbytes
        self._throttled = throttled
        self.known_checksums = known_checksums
        self._plan = plan
        self._released_plan = plan.released()
        self._storage_count = len(plan.storages)
        self._arena = arena
        self._before_window = before_window
        self._while_waiting = while_waiting
        self._changed = threading.Condition()
        self._count = -(-plan.nbytes // BLOCK_NBYTES)
        self._claimed = 0
        self._claiming = threading.Lock()
        self._held: list[Buffer] = []
        """Blocks that have been taken and are being filled."""
        self._staged: dict[int, Buffer] = {}
        self._moved: Counter[int] = Counter()
        """How many bytes of each block have been moved."""
        self._staging = True
        self._streams = False
        """Whether windows may be had before all is staged. Otherwise moving would take time from staging."""
        self._failure: BaseException | None = None

    @property
    def throttled(self) -> bool:
        return self._throttled or self._streams

    @property
    def checksums_first(self) -> bool:
        return self._released_plan.checksums_first

    def head(self, checksums: Sequence[int]) -> bytes:
        return self._released_plan.head(checksums)

    def stage(self) -> None:
        """Copy everything; returns when the plan's storages are not needed any more.

        Raises:
            StateChangedError: a storage has another size than when the file was planned.
            BaseException: what :meth:`fail` was given meanwhile.
        """
        try:
            copier = Copier(self._plan.storages)
            try:
                run_together(lambda: self._fill_blocks(copier), self._threads())
            finally:
                copier.synchronize()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._plan = self._released_plan
            self._while_waiting = nullcontext
            with self._changed:
                self._staging = False
                self._changed.notify_all()
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: BaseException) -> None:
        """Stop whoever stages or moves it, at the next block, with this exception. The first one counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._arena.wake()

    def stop(self, failure: BaseException) -> None:
        """It will not be staged: :meth:`stage` was not called, or has returned."""
        self.fail(failure)
        with self._changed:
            self._staging = False
            self._changed.notify_all()

    def discard(self) -> None:
        """Give all blocks back. Nobody moves them any more; whoever stages is waited for."""
        with self._changed:
            self._changed.wait_for(lambda: not self._staging)
            for block in (*self._staged.values(), *self._held):
                self._arena.give(block)
            self._staged.clear()
            self._held.clear()

    @contextmanager
    def open_stager(self) -> Iterator[SnapshotStager]:
        """What hands over its windows.

        Raises:
            BackendUnavailableError: parts of it have been moved by another backend, and given back.
        """
        if self._moved:
            raise BackendUnavailableError("a part of the snapshot has been given back; it cannot be moved again")
        checksums = Checksums(self._storage_count)
        yield SnapshotStager(self, self._released_plan.image, checksums, self._before_window)

    def block(self, number: int, stopped: Callable[[], bool]) -> Buffer | None:
        """Wait until a block is staged.

        Args:
            number: of the block, counted from the file's start.
            stopped: asked whenever something changes; whether to give up and return None.

        Raises:
            BaseException: what :meth:`fail` was given.
        """

        def decided() -> bool:
            return (number in self._staged and self._may_be_moved()) or self._failure is not None or stopped()

        with self._changed:
            self._changed.wait_for(decided)
            if self._failure is not None:
                raise self._failure
            return None if stopped() else self._staged[number]

    def wait_to_move(self) -> None:
        """Return when moving it takes no time from staging it, or it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_be_moved() or self._failure is not None)

    def wake(self) -> None:
        """Let whoever waits in :meth:`block` ask again whether to stop."""
        with self._changed:
            self._changed.notify_all()

    def hand_back(self, number: int, nbytes: int) -> None:
        """So many bytes of a block have been moved. When all have, it goes back to the arena."""
        with self._changed:
            begin = number * BLOCK_NBYTES
            self._moved[number] += nbytes
            if self._moved[number] < min(BLOCK_NBYTES, self.nbytes - begin):
                return
            block = self._staged.pop(number)
        self._arena.give(block)

    def _may_be_moved(self) -> bool:
        return self._streams or not self._staging

    def _threads(self) -> int:
        return max(1, min(usable_cores(_MOST_THREADS), self._count // 2))

    def _fill_blocks(self, copier: Copier) -> None:
        """Work of one thread: claim blocks, one after the other, and fill them. Raises nothing but interrupts."""
        try:
            while (claimed := self._claim()) is not None:
                number, buffer = claimed
                self._fill(number, buffer, copier)
                with self._changed:
                    self._staged[number] = buffer
                    self._held.remove(buffer)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  # raised by stage()
            self.fail(error)
        except BaseException as error:
            self.fail(error)
            raise

    def _claim(self) -> tuple[int, Buffer] | None:
        with self._claiming:
            if self._claimed == self._count or self._failure is not None:
                return None
            buffer = self._arena.take(
                self._held, while_waiting=self._streaming, stopped=lambda: self._failure is not None
            )
            if buffer is None:
                return None
            self._claimed += 1
            return self._claimed - 1, buffer

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        with self._changed:
            self._streams = True
            self._changed.notify_all()
        with self._while_waiting():
            yield

    def _fill(self, number: int, buffer: Buffer, copier: Copier) -> None:
        buffer.prepare(copier.device)
        begin = number * BLOCK_NBYTES
        for piece in self._plan.image.pieces(begin, min(begin + BLOCK_NBYTES, self.nbytes)):
            if isinstance(piece.segment, Header):
                copy_header(piece, piece.segment, buffer.view)
            else:
                copier.copy(piece, piece.segment, buffer, 0)
        for event in copier.record_events():
            event.synchronize()


class SnapshotStager:
    """Hands over the windows of a snapshot. See :class:`fastensor.backends.staging.Stager`."""

    asynchronous = False

    def __init__(
        self, snapshot: Snapshot, image: Image, checksums: Checksums, before_window: Callable[[int], None]
    ) -> None:
        self._snapshot = snapshot
        self._image = image
        self._checksums = checksums
        self._before_window = before_window
        self._failure: BaseException | None = None

    @property
    def checksums(self) -> tuple[int, ...]:
        return self._checksums.values

    def begin(self, offset: int, nbytes: int) -> Window:
        number, begin = divmod(offset, BLOCK_NBYTES)
        block = self._snapshot.block(number, lambda: self._failure is not None)
        if block is None:
            raise cast(BaseException, self._failure)
        self._before_window(nbytes)
        return Window(block, begin, offset, nbytes)

    def finish(self, window: Window) -> None:
        self._checksums.take(self._image.pieces(window.offset, window.offset + window.nbytes), window.data)

    def release(self, window: Window) -> None:
        self._snapshot.hand_back(window.offset // BLOCK_NBYTES, window.nbytes)

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._snapshot.wake()
