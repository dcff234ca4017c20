"""``fastensor.AsyncWriter``: saves that take no more of the caller's time than copying the state once."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, Unpack

from fastensor.backends import stream
from fastensor.backends.arena import Arena
from fastensor.backends.fallback import announce
from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint import files, ordering
from fastensor.checkpoint.asynchronous import exits
from fastensor.checkpoint.asynchronous.handle import SaveHandle
from fastensor.checkpoint.asynchronous.operations import Drop, Operation, Save, Step
from fastensor.checkpoint.asynchronous.pace import Pace
from fastensor.checkpoint.asynchronous.queue import WorkQueue, in_drain_thread
from fastensor.checkpoint.asynchronous.settings import WhenBusy, WriterSettings
from fastensor.checkpoint.asynchronous.statistics import WriterStatistics
from fastensor.checkpoint.location import RemotePath
from fastensor.checkpoint.publish import Target
from fastensor.checkpoint.save import SaveOptions, SaveSettings
from fastensor.checkpoint.save_transaction import Planner
from fastensor.stitch.source import Plan

_logger = logging.getLogger("fastensor")

_QUIET_SECONDS = 2.0
"""Waits that take longer say so, again and again."""
_LEAST_NBYTES = 32 << 20
"""Of staging memory: small checkpoints need not wait for each other."""
_GRACE_SECONDS = 2.0
"""How long a save that was given up may take to notice."""


class _CannotWaitError(RuntimeError):
    """There is no thread, or no time, to do something later."""


class AsyncWriter:
    """Saves checkpoints while the program goes on.

    :meth:`save` returns when all that is to be saved has been copied into staging memory; from then on it may change.
    A thread moves the copies to their files, one after the other, in the order of the calls. For whoever is in this
    process things happen in that order, too: loading, replacing, converting or removing a file waits for what was
    accepted for it before. Other processes only ever see whole files.

    Args:
        staging_bytes: how much memory staging may take, at least 4 MiB; it is mapped when it is needed, touched once,
            and kept until :meth:`close`. A checkpoint that is larger streams through it. None means enough for the
            largest checkpoint so far, or 32 MiB, but no more than half of the memory that is available when it is first
            asked for (limits of cgroups counted), shared by the processes that the launcher started on this machine.
        when_busy: what to do when earlier saves still need so much of the staging memory that a new one would have to
            wait: ``"wait"``; ``"skip"`` the new one; or replace queued ones by it, so that the ``"latest"`` is kept (it
            waits if that is not enough). What is dropped is logged, and its handle says so. Two checkpoints can only
            be there at a time if ``staging_bytes`` is enough for two.
        max_bytes_per_second: how fast files may be written. It does not count while somebody waits for them.
        exit_seconds: how long :meth:`close`, and the exit of the interpreter, wait for what is pending before it is
            given up; what was at the paths before is kept then.
        preemption_seconds: if given, SIGTERM ends the process only when what is pending is durable, or after so many
            seconds; a handler that the program has installed before is called at once and decides by itself, and so
            does one that was installed later and calls this one. Works in the main thread only. What could not be
            done asynchronously is not waited for.

    What was not told by a handle is raised once by the next call: :meth:`save` (before anything is accepted),
    :meth:`remove`, :meth:`wait`, :meth:`close`, or a load of that path. Afterwards saves work again if the cause is
    gone.

    Every method may be called from several threads. A forked child starts with nothing pending: that is its parent's.
    Picklable: the copy has the same settings and nothing pending.

    >>> import os, tempfile, torch, fastensor
    >>> state = {"weight": torch.zeros(3)}
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> with fastensor.AsyncWriter() as writer:
    ...     handle = writer.save(state, path)
    ...     _ = state["weight"].add_(1)
    >>> handle.result().durable, fastensor.load(path)["weight"]
    (True, tensor([0., 0., 0.]))
    """

    def __init__(
        self,
        *,
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        max_bytes_per_second: float | None = None,
        exit_seconds: float = 600.0,
        preemption_seconds: float | None = None,
    ) -> None:
        self._settings = WriterSettings(
            staging_bytes, when_busy, max_bytes_per_second, exit_seconds, preemption_seconds
        )
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._nbytes = 0
        self._stall_seconds = 0.0
        self._failures: deque[Operation] = deque()
        """Those that nobody has been told of."""
        self._begin_empty()
        self._report_failures = weakref.finalize(self, _log_failures, self._failures)
        exits.watch(self, preemption_seconds)

    def _begin_empty(self) -> None:
        self._queue = WorkQueue("fastensor-drain")
        self._arena = Arena(self._settings.staging_budget)
        self.pace = Pace(self._settings.max_bytes_per_second)
        self._turn = threading.RLock()  # a signal handler may save, too
        """Held while a save is staged: blocks are taken in the order of the saves."""
        self._staged_save: Save | None = None

    def save(self, obj: object, path: str | os.PathLike[str], **options: Unpack[SaveOptions]) -> SaveHandle:
        """Save as :func:`fastensor.save` does, but return when all of ``obj`` has been copied.

        Args:
            obj: as for :func:`fastensor.save`. It is pickled, and its tensors are copied, before this returns; CUDA
                tensors behind the work that was queued on the devices' current streams, on streams of their own.
            path: a path or a URL. Its directory must exist.
            options: as for :func:`fastensor.save`.

        Returns:
            A handle, which need not be kept. It is done already if the save was skipped, or if it could not be done
            asynchronously, which is logged: when torch has to write the file by itself, or the file has to be written
            in place (see :func:`fastensor.save`), when the interpreter exits, in a callback of another handle, or in a
            signal handler that interrupts another save.

        Raises:
            Exception: what an earlier save failed with, if nobody has been told; nothing is accepted then. Or as
                :func:`fastensor.save`, for everything that is wrong with the object, the options or the target.
        """
        started = time.perf_counter()
        try:
            self._check_open()
            self._raise_failure()
            if not isinstance(path, str | os.PathLike):
                raise TypeError(
                    f"expected a path or a URL, found {type(path).__name__}; fastensor.save takes open files"
                )
            transaction, plan = SaveSettings(**options).prepare(obj, path)
            assert isinstance(transaction.target, Target | RemotePath)
            save = Save(ordering.place_of(transaction.target), self, transaction)
            if reason := self._reason_to_wait():
                self._save_in_between(save, plan, reason)
                return save.handle
            with self._turn:
                outer, self._staged_save = self._staged_save, save
                try:
                    self._save(save, transaction.plan(plan), started)
                finally:
                    self._staged_save = outer
            return save.handle
        finally:
            with self._queue.changed:
                self._stall_seconds += time.perf_counter() - started

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint as soon as what was saved after it is durable.

        A save of that very path that is pending is given up, if nothing was saved after it; else it comes first. If the
        last save before this call fails, the file stays, and that is logged: it may be the only one.

        Args:
            path: a file, a symlink but not its target, or a directory with all it holds, which is waited for: something
                may be saved into a new one next. Nothing happens if there is none.

        Raises:
            Exception: what an earlier save failed with, if nobody has been told; nothing is removed then.
            OSError: it cannot be removed. If the removal has to wait, the next call raises this.
        """
        path = files.absolute(path)
        place = next(ordering.places_behind(path), "")
        is_directory = files.is_directory(path)
        take_away = files.remove_at_once if is_directory else files.remove_file_at_once
        if is_directory:
            ordering.wait_to_remove(path)  # other writers may save into it, too
        with self._queue.changed:  # a save is pending, or its failure is known: there is nothing between
            self._raise_failure()
            saves = self._pending_saves()
        while saves and saves[-1].place == place and self.give_up(saves[-1], "cancelled", "its file was removed"):
            saves.pop()
        after = saves[-1] if saves else None
        step = self._follow(
            Step(place, self, lambda: take_away(path), f"removing {path}", leaves_file=False, after=after)
        )
        if after is None or is_directory:
            step.settle()
            step.raise_failure()

    def in_turn(self, function: Callable[[], None], place: str, what: str) -> None:
        """Have something done that leaves a file at a place, in its turn, whatever comes of the saves before it."""
        self._follow(Step(place, self, function, what, leaves_file=True, after=None))

    def wait(self, timeout: float | None = None) -> None:
        """Return when everything is durable that was accepted so far.

        Args:
            timeout: seconds to wait at most; None means for ever.

        Raises:
            TimeoutError: it takes longer. It goes on.
            Exception: what a save failed with, if nobody has been told; of several the first, with notes of the others.
        """
        if not self._drain(timeout):
            raise TimeoutError(f"not done after {timeout:g} s: {self._describe_pending()}; it goes on")
        self._raise_failure(all_of_them=True)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def settle(self) -> None:
        """Wait as :meth:`wait` does, for ``exit_seconds`` at most, and raise nothing: that is left to the next call."""
        self._drain(self._settings.exit_seconds)

    def log_failures(self) -> None:
        """Log what nobody has been told of, so that no call raises it: there is something worse to be seen."""
        try:
            self._raise_failure(all_of_them=True)
        except Exception as failure:
            _logger.error("an asynchronous save had failed: %s", failure, exc_info=failure)

    def close(self, timeout: float | None = None) -> None:
        """:meth:`wait`, and release the memory. Calling it again does nothing.

        Args:
            timeout: seconds to wait at most, after which what is pending is given up; None means ``exit_seconds``.

        Raises:
            TimeoutError: it took longer. What was at the paths of the saves that were given up is kept.
            Exception: as :meth:`wait`.
        """
        if self._closed:
            return
        self._check_interruption()
        timeout = self._settings.exit_seconds if timeout is None else timeout
        self._closed = True
        try:
            if not self._drain(timeout):
                lost = self._describe_pending()
                self.abandon(f"it was not done {timeout:g} s after the writer was closed")
                late = TimeoutError(f"given up after {timeout:g} s: {lost}; what was there before is kept")
                for failure in self._take_failures():
                    late.add_note(f"and before: {failure!r}")
                raise late
        except KeyboardInterrupt:
            self.abandon("it was interrupted")
            raise
        finally:
            self._arena.close()
        self._raise_failure(all_of_them=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. If the block has raised, that is what is seen, and failures of saves are logged."""
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            _logger.error("%s", failure, exc_info=failure)

    def abandon(self, message: str) -> None:
        """Give up everything that is pending: what was at the paths before is kept.

        Args:
            message: why, for the handles.
        """
        for work in self._queue.works():
            if isinstance(work, Save):
                self.give_up(work, "cancelled", message)
        self._queue.join(_GRACE_SECONDS)

    def statistics(self) -> WriterStatistics:
        """What has been done so far, and what is going on."""
        with self._queue.changed:
            stages = Counter(save.handle.stage for save in self._pending_saves())
            return WriterStatistics(
                staging=stages["staging"],
                queued=stages["queued"],
                writing=stages["writing"],
                durable=self._counts["durable"],
                failed=self._counts["failed"],
                cancelled=self._counts["cancelled"],
                skipped=self._counts["skipped"],
                replaced=self._counts["replaced"],
                nbytes=self._nbytes,
                stall_seconds=self._stall_seconds,
                staging_nbytes=self._arena.nbytes,
                peak_staging_nbytes=self._arena.peak_nbytes,
            )

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self._settings)

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]  # a copy begins like any other

    # --- for its operations

    def ended(self, operation: Operation) -> None:
        with self._queue.changed:
            if isinstance(operation, Save):
                self._counts[str(operation.outcome)] += 1
                self._nbytes += operation.nbytes if operation.failure is None else 0
            if operation.failure is None or operation.is_told:
                ordering.end(operation, operation.place)
            else:
                self._failures.append(operation)

    def told(self, operation: Operation) -> None:
        with self._queue.changed:
            if operation in self._failures:
                self._failures.remove(operation)
                ordering.end(operation, operation.place)

    def is_draining(self) -> bool:
        return self._queue.is_working()

    def again(self, step: Step) -> bool:
        with self._queue.changed:
            is_last = ordering.is_last(step, step.place)
            if is_last:
                self._queue.put(step)
            return is_last

    def give_up(self, save: Save, why: Drop, message: str) -> bool:
        dropped = save.drop(why, message)
        if dropped and not save.is_in_hands and self._queue.withdraw(save):
            save.run()  # nothing is written: it cleans up
        return dropped

    @contextmanager
    def hurried(self) -> Iterator[None]:
        self.pace.hurry()
        try:
            yield
        finally:
            self.pace.resume()

    # --- for the end of the process, and the beginning of another

    def finish_at_exit(self, seconds: float | None) -> None:
        """Wait for what is pending, and give up what takes too long.

        Args:
            seconds: how long to wait at most; None means ``exit_seconds``.
        """
        seconds = self._settings.exit_seconds if seconds is None else seconds
        try:
            if not self._drain(max(seconds - _GRACE_SECONDS, seconds / 2)):
                _logger.error("given up at exit, after %g s: %s", seconds, self._describe_pending())
                self.abandon("the process exited")
        except KeyboardInterrupt:
            _logger.error("given up at exit, interrupted: %s", self._describe_pending())
            self.abandon("the process exited, and waiting for it was interrupted")

    def forget_pending(self) -> None:
        """In a forked child: what is pending is the parent's, and so is the memory."""
        self._failures.clear()
        self._arena.forget()
        self._begin_empty()

    # --- inside

    def _save(self, save: Save, plan: Plan | None, started: float) -> None:
        if plan is None:
            save.run_now(None)
            return
        if self._is_in_place(save):  # no staging memory is needed, and none is waited for
            announce("saving asynchronously", "the file has to be written in place")
            save.run_now(plan)
            return
        self._reserve(plan.nbytes)
        if self._settings.when_busy == "skip" and not self._arena.has_room(plan.nbytes):
            _logger.warning("skipped, because earlier saves are not done: %s", save.handle.path)
            save.drop("skipped", "the save was skipped, because earlier ones were not done")
            save.run()
            return
        remote = isinstance(save.transaction.target, RemotePath)
        known = stream.checksums_of(plan) if remote and plan.checksums_first else None
        throttled = self._settings.max_bytes_per_second is not None
        snapshot = Snapshot(
            plan,
            self._arena,
            before_window=save.before_window,
            while_waiting=self.hurried,
            known_checksums=known,
            throttled=throttled,
        )
        try:
            save.open(snapshot)
            if self._settings.when_busy == "latest":
                self._make_room(save, plan.nbytes)
            self._accept(save)
            save.stage(snapshot)
        except _CannotWaitError as error:
            announce("saving asynchronously", str(error))
            save.run_now(plan)
        except BaseException as error:
            save.tell()
            snapshot.stop(error)
            if save not in self._queue.works() and not save.done:  # in this order, or it may have ended in between
                save.fail(error)
            raise
        else:
            save.staged(time.perf_counter() - started)

    def _is_in_place(self, save: Save) -> bool:
        try:
            return save.transaction.is_in_place()
        except BaseException as error:
            save.tell()
            save.fail(error)
            raise

    def _save_in_between(self, save: Save, plan: Planner, reason: str) -> None:
        """Do all of a save now, in a thread that cannot wait for what it has interrupted."""
        announce("saving asynchronously", reason)
        if self._staged_save is not None and self._staged_save.place == save.place:
            self._staged_save.drop("replaced", "a signal handler has saved to the same path")
        planned = save.transaction.plan(plan)
        if in_drain_thread():  # what is pending there would come later, and may wait for this thread
            for earlier in ordering.pending(save.place):
                if isinstance(earlier, Save):
                    earlier.give_up("replaced", "a callback has saved to the same path")
        save.run_now(planned)

    def _follow(self, step: Step) -> Step:
        try:
            self._accept(step)
        except _CannotWaitError:
            self.settle()
            step.run()
        return step

    def _reason_to_wait(self) -> str:
        """Why a save cannot be done asynchronously; empty if it can."""
        if in_drain_thread():
            return "a callback saves in the thread that writes"
        if self._staged_save is not None and self._staged_save.is_in_hands:
            return "a signal handler saves while a save is being staged"
        return ""

    def _accept(self, operation: Save | Step) -> None:
        """Have it done in its turn.

        Raises:
            _CannotWaitError: nothing can be left pending any more.
        """
        with self._queue.changed:
            if exits.exiting() and not self._queue.is_working():
                raise _CannotWaitError("the interpreter exits")
            try:
                ordering.begin(operation, operation.place)
                self._queue.put(operation)
            except BaseException as error:
                self._queue.withdraw(operation)
                if operation not in self._queue.works():
                    ordering.end(operation, operation.place)
                if isinstance(error, RuntimeError):
                    raise _CannotWaitError(str(error)) from error
                raise

    def _reserve(self, nbytes: int) -> None:
        """Map as much staging memory as a file needs and the budget allows."""
        arena = self._arena
        # A budget of the user's may be for several files at a time, ours is for one, or some small ones.
        is_ours = self._settings.staging_bytes is None
        arena.reserve(max(nbytes, _LEAST_NBYTES) if is_ours else nbytes + arena.nbytes - arena.free_nbytes)

    def _make_room(self, save: Save, nbytes: int) -> None:
        """Drop queued saves, the oldest first, until there is room. What was to follow them follows this one."""
        for old in self._pending_saves():
            if self._arena.has_room(nbytes):
                break
            if old.handle.stage != "queued":
                continue
            old.replaced_by = save
            if self.give_up(old, "replaced", f"the save was replaced by the one to {save.handle.path}"):
                _logger.warning("replaced by the save to %s: %s", save.handle.path, old.handle.path)
            else:
                old.replaced_by = None

    def _pending_saves(self) -> list[Save]:
        return [work for work in self._queue.works() if isinstance(work, Save) and not work.done]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the writer has been closed; make another one")

    def _check_interruption(self) -> None:
        if self._staged_save is not None and self._staged_save.is_in_hands:
            raise RuntimeError("a signal handler cannot wait for the save that it interrupts; let it return first")

    def _take_failures(self, most: int | None = None) -> list[BaseException]:
        """What nobody has been told of; somebody is now."""
        with self._queue.changed:
            failed = [one for one in tuple(self._failures)[:most] if one.tell()]
        return [one.failure for one in failed if one.failure is not None]

    def _raise_failure(self, *, all_of_them: bool = False) -> None:
        failures = self._take_failures(None if all_of_them else 1)
        for other in failures[1:]:
            failures[0].add_note(f"and then: {other!r}")
        if failures:
            raise failures[0]

    def _drain(self, timeout: float | None) -> bool:
        """Wait until nothing is pending, and say so if it takes long; False if it takes longer than the timeout."""
        self._check_interruption()
        started = time.monotonic()
        left_before = self._left_nbytes()
        with self.hurried():
            while True:
                elapsed = time.monotonic() - started
                left = None if timeout is None else timeout - elapsed
                if self._queue.join(_QUIET_SECONDS if left is None else min(max(left, 0), _QUIET_SECONDS)):
                    return True
                if left is not None and left <= 0:
                    return False
                elapsed = time.monotonic() - started
                speed = (left_before - self._left_nbytes()) / elapsed
                _logger.warning(
                    "waiting for %s; %.0f s so far, %s to go",
                    self._describe_pending(),
                    elapsed,
                    f"about {self._left_nbytes() / speed:.0f} s" if speed > 0 else "an unknown time",
                )

    def _left_nbytes(self) -> int:
        return sum(save.nbytes - save.moved_nbytes for save in self._pending_saves())

    def _describe_pending(self) -> str:
        saves = self._pending_saves()
        names = ", ".join(save.handle.path for save in saves)
        return f"{len(saves)} checkpoints of which {self._left_nbytes() / 1e6:.0f} MB are to be written ({names})"


def _log_failures(failures: deque[Operation]) -> None:
    """Nobody has been told of these, and the writer is gone."""
    for operation in failures:
        ordering.end(operation, operation.place)
        _logger.error("an asynchronous save had failed: %s", operation.failure, exc_info=operation.failure)
