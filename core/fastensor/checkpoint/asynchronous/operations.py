"""What an asynchronous writer has accepted and does in its turn: saves, and steps that follow them."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Literal, Protocol

from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint import ordering
from fastensor.checkpoint.asynchronous.handle import SaveHandle, SaveStage
from fastensor.checkpoint.asynchronous.pace import Pace
from fastensor.checkpoint.report import SaveReport
from fastensor.checkpoint.save_transaction import SaveTransaction
from fastensor.errors import CheckpointWriteError, SaveDroppedError
from fastensor.stitch.source import Plan

Drop = Literal["cancelled", "replaced", "skipped"]
_logger = logging.getLogger("fastensor")


class Owner(Protocol):
    """The writer, as its operations see it."""

    pace: Pace

    def ended(self, operation: Operation) -> None:
        """It is done; whether somebody is told of its failure already, it says."""

    def told(self, operation: Operation) -> None:
        """Somebody is told of its failure. May be called before it has ended, and again."""

    def is_draining(self) -> bool:
        """Whether the calling thread is the writer's own, which must not wait for what it has to do itself."""

    def again(self, step: Step) -> bool:
        """Have a step done behind what is pending; False if something was accepted for its place meanwhile."""

    def give_up(self, save: Save, why: Drop, message: str) -> bool:
        """Drop a save; whether it will leave what is at its path."""

    def hurried(self) -> AbstractContextManager[None]:
        """Somebody waits in the block."""


class Operation:
    """Something that was accepted for a place and is done in its turn. Thread-safe."""

    def __init__(self, place: str, owner: Owner, *, leaves_file: bool) -> None:
        self.place = place
        """As :mod:`fastensor.checkpoint.ordering` knows it."""
        self.leaves_file = leaves_file
        """Whether there is a file at the place once it is done."""
        self.failure: BaseException | None = None
        self.is_told = False
        """Whether somebody has been told of the failure, or of why there is none to tell of."""
        self._owner = owner
        self._lock = threading.RLock()
        self._ended: Future[None] = Future()
        self._busy_thread: int | None = None
        """The caller's, while it is at work for this operation: it must not wait for itself."""
        _made.add(self)

    @property
    def done(self) -> bool:
        return self._ended.done()

    @property
    def succeeded(self) -> bool:
        return self.done and self.failure is None

    def settle(self) -> None:
        if self.done or self.is_in_hands or self._owner.is_draining():
            return
        with self.hurried():
            wait([self._ended])

    def raise_failure(self) -> None:
        if self.failure is not None and self.tell():
            raise self.failure

    def tell(self) -> bool:
        """Somebody is about to be told of the failure; False if somebody else has been."""
        with self._lock:
            first, self.is_told = not self.is_told, True
        with suppress(ReferenceError):  # the writer is gone, and has left it in the log
            self._owner.told(self)
        return first

    def hurried(self) -> AbstractContextManager[None]:
        return nullcontext() if self.done else self._owner.hurried()

    @property
    def is_in_hands(self) -> bool:
        """Whether the calling thread is at work for it, and something like a signal handler has come between."""
        return self._busy_thread == threading.get_ident()

    def forget(self) -> None:
        """In a forked child: no lock is held, and what was not done is the parent's business."""
        self._lock = threading.RLock()
        self._ended = Future()
        self._ended.set_result(None)

    def _end(self, failure: BaseException | None) -> None:
        if not self.done:
            self.failure = failure
            owner = self._owner
            owner.ended(self)
            self._owner = weakref.proxy(owner)  # a failure that nobody has been told of keeps no writer alive
            self._ended.set_result(None)


class Save(Operation):
    """A save: prepared, opened with a snapshot, staged by the caller, and run by the writer's thread."""

    def __init__(self, place: str, owner: Owner, transaction: SaveTransaction) -> None:
        super().__init__(place, owner, leaves_file=True)
        self.transaction = transaction
        self.handle = SaveHandle(transaction.where, self)
        self.nbytes = 0
        self.moved_nbytes = 0
        self._snapshot: Snapshot | None = None
        self.outcome: SaveStage | None = None
        self.replaced_by: Save | None = None
        self._dropped: tuple[Drop, str] | None = None
        self._committed = False
        self._stall_seconds: float | None = None
        transaction.before_publishing = self._commit

    def open(self, snapshot: Snapshot) -> None:
        """Create the file that will take the target's place. From now on it has to be run, or failed.

        Raises:
            CheckpointWriteError: the directory does not let files be created.
        """
        self.transaction.open()
        self._busy_thread = threading.get_ident()
        self._snapshot = snapshot
        self.nbytes = snapshot.nbytes

    def stage(self, snapshot: Snapshot) -> None:
        """Copy everything, in the caller's threads. Returns early if the save is dropped.

        Raises:
            BaseException: it could not be copied, or moving it has failed already. This is told then.
        """
        try:
            snapshot.stage()
        except SaveDroppedError:
            pass  # the handle tells
        except BaseException:
            self.tell()
            raise
        finally:
            self._busy_thread = None

    def staged(self, seconds: float) -> None:
        """The caller goes on, after so long."""
        self._stall_seconds = seconds
        with self._lock:
            if self.handle.stage == "staging":
                self.handle.enter("queued")

    def before_window(self, nbytes: int) -> None:
        """For the snapshot: called in the thread that moves it."""
        with self._lock:
            if self.handle.stage in ("staging", "queued"):
                self.handle.enter("writing")
        self._owner.pace.wait(nbytes, stopped=lambda: self._dropped is not None)
        self.moved_nbytes += nbytes

    def cancel(self) -> bool:
        return self.give_up("cancelled", "the save was cancelled")

    def give_up(self, why: Drop, message: str) -> bool:
        """Drop it wherever it is; whether it will leave what is at its path."""
        return self._owner.give_up(self, why, message)

    def drop(self, why: Drop, message: str) -> bool:
        """See to it that nothing is published; False if it is too late."""
        with self._lock:
            if self._committed or self.done:
                return self._dropped is not None
            self._dropped = self._dropped or (why, f"{self.handle.path}: {message}; what was there before is kept")
            snapshot = self._snapshot
        if snapshot is not None:
            snapshot.fail(SaveDroppedError(message))
        return True

    def run(self) -> None:
        """Move the snapshot to where it is to be, and tell what came of it."""
        try:
            if self._snapshot is not None:
                self._snapshot.wait_to_move()
            self._check_dropped()
            ordering.wait_for_earlier(self, self.place)
            with self.transaction:
                report = self.transaction.move(self._snapshot)
        except BaseException as error:  # noqa: BLE001  # told to whoever asks, or calls next
            self.fail(error)
        else:
            self._succeed(report)

    def run_now(self, plan: Plan | None) -> None:
        """Do all of it in the caller's thread, without a snapshot.

        Raises:
            Exception: as :func:`fastensor.save`. This is told then.
        """
        self._busy_thread = self._snapshot = None
        try:
            with self.transaction:
                ordering.wait_to_replace(self.transaction.target)
                report = self.transaction.move(plan)
        except BaseException as error:
            self.tell()
            self.fail(error)
            raise
        self._succeed(report)

    def lose(self) -> None:
        if not self.done:
            self.fail(SystemExit("the thread that wrote has died"))

    def forget(self) -> None:
        super().forget()
        self.transaction.forget()
        self.handle.forget(SaveDroppedError(f"{self.handle.path}: the process that was forked saves it"))

    def _check_dropped(self) -> None:
        if self._dropped is not None:
            raise SaveDroppedError(self._dropped[1])

    def _commit(self) -> None:
        with self._lock:
            self._check_dropped()
            self._committed = True

    def _succeed(self, report: SaveReport) -> None:
        if self._snapshot is not None:
            self._snapshot.discard()
            self._snapshot = None
            report = replace(report, stall_seconds=min(self._stall_seconds or report.seconds, report.seconds))
        self.nbytes = report.nbytes
        self.outcome = "durable"
        self._end(None)
        self.handle.end("durable", report)  # its callbacks come last: they may use the writer

    def fail(self, error: BaseException) -> None:
        """End it. Nobody is at it any more, but perhaps somebody who stages."""
        try:
            if self._snapshot is not None:
                self._snapshot.fail(error)  # somebody may still be staging
                self._snapshot.discard()
            self._busy_thread = self._snapshot = None
            self.transaction.close()
        finally:
            told: BaseException
            if self._dropped is not None:
                self.is_told = True
                self.outcome, told = self._dropped[0], SaveDroppedError(self._dropped[1])
            else:
                self.outcome, told = "failed", _as_told_elsewhere(error, self.transaction)
            self._end(told)
            self.handle.end(self.outcome, told)  # its callbacks come last: they may use the writer


def _as_told_elsewhere(error: BaseException, transaction: SaveTransaction) -> BaseException:
    """What is raised in another thread than the one that failed."""
    if isinstance(error, Exception):
        error.add_note(f"in an asynchronous save to {transaction.where}, stage {transaction.stage!r}")
        return error
    stopped = CheckpointWriteError(
        errno.EINTR,
        f"the save was stopped in stage {transaction.stage!r} ({error!r}); what was there before is kept",
        transaction.where,
    )
    stopped.__cause__ = error
    return stopped


class Step(Operation):
    """Something to be done once the saves before it are durable; not at all if the last of them leaves no file.

    Args:
        function: does it; may raise ``OSError``.
        what: says what, for messages.
        leaves_file: whether there is a file at the place afterwards.
        after: the last save before it, if that was not done when the step was accepted.
    """

    def __init__(
        self,
        place: str,
        owner: Owner,
        function: Callable[[], None],
        what: str,
        *,
        leaves_file: bool,
        after: Save | None,
    ) -> None:
        super().__init__(place, owner, leaves_file=leaves_file)
        self.after = after
        self.what = what
        self.function = function

    def run(self) -> None:
        after = self.after
        while after is not None and after.replaced_by is not None:
            after = after.replaced_by
        if after is not None and not after.done:
            if not self._owner.again(self):
                self._end(None)
            return
        if after is not None and not after.succeeded:
            _logger.warning("not done, because the save to %s left no file: %s", after.place, self.what)
            self._end(None)
            return
        try:
            ordering.wait_for_earlier(self, self.place)
            self.function()
        except BaseException as error:  # noqa: BLE001  # told to whoever asks, or calls next
            error.add_note(f"in what was to follow an asynchronous save: {self.what}")
            self._end(error)
        else:
            self._end(None)

    def lose(self) -> None:
        if not self.done:
            self._end(RuntimeError(f"the thread has died that was at it: {self.what}"))


_made: weakref.WeakSet[Operation] = weakref.WeakSet()


def _forget_all() -> None:
    for operation in list(_made):
        operation.forget()


os.register_at_fork(after_in_child=_forget_all)
