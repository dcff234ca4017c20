"""The work of an asynchronous writer's thread: saves, and steps that follow them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Literal, TypeAlias

from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint import ordering
from fastensor.checkpoint.asynchronous.pace import Pace
from fastensor.checkpoint.asynchronous.statistics import SaveCounters
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.ordering import PendingWork
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save_transaction import ByTorch, SaveTransaction
from fastensor.errors import CheckpointWriteError, SaveDroppedError
from fastensor.files.os_errors import kept_at
from fastensor.stitch.source import Plan

Drop: TypeAlias = Literal["cancelled", "replaced", "skipped"]
SaveStage: TypeAlias = Literal["staging", "queued", "writing", "durable", "failed"] | Drop
_logger = logging.getLogger("fastensor")


class Save(PendingWork):
    """One save, whose caller stages a snapshot, which the writer's thread moves to its file.

    Args:
        transaction: the save. Its target is no open file.
        place: the place of the target.
        queue, keeps: as for :class:`~fastensor.checkpoint.ordering.PendingWork`.
        pace: the pace of the writer.
        counters: the counts of the writer.
    """

    def __init__(
        self,
        transaction: SaveTransaction,
        place: str,
        *,
        queue: object,
        keeps: object,
        pace: Pace,
        counters: SaveCounters,
    ) -> None:
        super().__init__(place, leaves_file=True, queue=queue, keeps=keeps)
        self.path = transaction.where
        self.stage: SaveStage = "staging"
        self.stages: dict[SaveStage, float] = {"staging": 0.0}
        self.nbytes = 0
        self.moved_nbytes = 0
        self._transaction = transaction
        self._pace = pace
        self._counters = counters
        self._started = time.perf_counter()
        self._snapshot: Snapshot | None = None
        self._stall_seconds: float | None = None
        self._lock = threading.RLock()
        """Held while the stage, or whether the save may still be dropped, is looked at and changed."""
        self._dropped: tuple[Drop, str] | None = None
        self._committed = False
        transaction.before_publishing = self._commit

    # --- in the thread of the caller

    def open(self, snapshot: Snapshot) -> None:
        """Create the file that will take the target's place. From now on the save has to be run, or failed.

        Raises:
            CheckpointWriteError: the directory does not let files be created.
        """
        self._transaction.open()
        self._snapshot = snapshot
        self.nbytes = snapshot.nbytes

    def staged(self, seconds: float) -> None:
        """Note that everything has been copied, and that ``save`` returns after ``seconds``."""
        self._stall_seconds = seconds
        with self._lock:
            if self.stage == "staging":
                self._enter("queued")

    def run_now(self, plan: Plan | ByTorch) -> None:
        """Do all of the save in the thread of the caller, without a snapshot.

        Raises:
            Exception: as :func:`fastensor.save`.
        """
        self._snapshot = None
        self.claim()
        try:
            report = self._transaction.finish(plan)
        except BaseException as error:
            self.report()
            self.fail(error)
            raise
        self._succeed(report)

    def drop(self, why: Drop, message: str) -> bool:
        """Have the save publish nothing; False if it is too late."""
        with self._lock:
            if self._committed or self.done:
                return self._dropped is not None
            self._dropped = self._dropped or (why, f"{self.path}: {message}; {kept_at(self.path)}")
        error = SaveDroppedError(self._dropped[1])
        if is_nested():
            return True  # the caller may have interrupted the save itself, which notices later
        if self.claim():
            self.fail(error)
        elif (snapshot := self._snapshot) is not None:
            snapshot.fail(error)
        return True

    def hurried(self) -> AbstractContextManager[None]:
        return nullcontext() if self.done else self._pace.hurried()

    # --- in the thread of the writer

    def run(self) -> None:
        try:
            snapshot = self._snapshot
            assert snapshot is not None, "a save that has none is run by its caller"
            snapshot.wait_to_move()
            self._pace.wait_while_held(stopped=lambda: self._dropped is not None)
            self._check_dropped()
            ordering.wait_for_earlier(self)
            with closing(self._transaction):
                report = self._transaction.move(snapshot)
        except BaseException as error:  # noqa: BLE001  # raised by the handle, or by the writer's next call
            self.fail(error)
        else:
            self._succeed(report)

    def before_window(self, nbytes: int) -> None:
        """Keep the pace. The snapshot calls this in the thread that moves it, before each window."""
        with self._lock:
            self._check_dropped()
            if self.stage in ("staging", "queued"):
                self._enter("writing")
        self._pace.wait(nbytes, stopped=lambda: self._dropped is not None)
        self.moved_nbytes += nbytes

    def _commit(self) -> None:
        with self._lock:
            self._check_dropped()
            self._committed = True

    # --- in either

    def fail(self, error: BaseException) -> None:
        """End the save, which the caller has claimed, or has not put in the list."""
        try:
            if self._snapshot is not None:
                self._snapshot.fail(error)  # the caller may still be staging
                self._snapshot.discard()
            self._snapshot = None
            self._transaction.close()
        finally:
            if self._dropped is not None:
                self.report()  # the handle says so
                self._end(self._dropped[0], SaveDroppedError(self._dropped[1]))
            else:
                self._end("failed", _for_other_threads(error, self._transaction))

    def forget(self) -> None:
        self._lock = threading.RLock()
        self._transaction.forget()
        if not self._ended:
            self._enter("cancelled")
        super().forget()

    def _succeed(self, report: SaveReport) -> None:
        if self._snapshot is not None:
            self._snapshot.discard()
            self._snapshot = None
            report = replace(report, stall_seconds=min(self._stall_seconds or report.seconds, report.seconds))
        self.nbytes = report.nbytes
        self._end("durable", report)

    def _end(self, stage: SaveStage, outcome: SaveReport | BaseException) -> None:
        with self._lock:
            self._enter(stage)
        nbytes, shared_nbytes = (outcome.nbytes, outcome.shared_nbytes) if isinstance(outcome, SaveReport) else (0, 0)
        self._counters.count(stage, nbytes, shared_nbytes)
        self.end(outcome)

    def _enter(self, stage: SaveStage) -> None:
        self.stages = {**self.stages, stage: time.perf_counter() - self._started}
        self.stage = stage

    def _check_dropped(self) -> None:
        if self._dropped is not None:
            raise SaveDroppedError(self._dropped[1])


def _for_other_threads(error: BaseException, transaction: SaveTransaction) -> BaseException:
    """The error that other threads raise for a save that has failed."""
    if isinstance(error, Exception):
        error.add_note(f"in an asynchronous save to {transaction.where}, stage {transaction.stage!r}")
        return error
    stopped = CheckpointWriteError(
        errno.EINTR,
        f"the save was stopped in stage {transaction.stage!r} ({error!r}); {kept_at(transaction.where)}",
        transaction.where,
    )
    stopped.__cause__ = error
    return stopped


class Step(PendingWork):
    """A step that is done after earlier work at its place, such as the removal of a file.

    Args:
        place: what the step changes.
        function: does it; may raise ``OSError``.
        what: a description of the step, for messages.
        leaves_file: whether a file is at the place afterwards.
        after: a save of the same writer; the step is not done unless that has succeeded.
        queue, keeps: as for :class:`~fastensor.checkpoint.ordering.PendingWork`.
    """

    def __init__(
        self,
        place: str,
        function: Callable[[], None],
        what: str,
        *,
        leaves_file: bool,
        after: Save | None,
        queue: object,
        keeps: object,
    ) -> None:
        super().__init__(place, leaves_file=leaves_file, queue=queue, keeps=keeps)
        self._function = function
        self._what = what
        self._after = after
        self._dropped = ""
        """Reason for which the step is not done."""

    def drop(self, why: Drop, message: str) -> bool:
        self._dropped = message
        return not self.done

    def run(self) -> None:
        try:
            ordering.wait_for_earlier(self)
            if why := self._why_not():
                _logger.warning("not done, because %s: %s", why, self._what)
            else:
                self._function()
        except BaseException as error:  # noqa: BLE001  # raised by the writer's next call
            error.add_note(f"in what was to follow an asynchronous save: {self._what}")
            self.end(error)
        else:
            self.end(None)

    def _why_not(self) -> str:
        if self._dropped:
            return self._dropped
        if self._after is not None and self._after.stage != "durable":
            return f"the save to {self._after.path} was {self._after.stage}"
        return ""
