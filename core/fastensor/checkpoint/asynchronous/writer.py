"""``fastensor.AsyncWriter``: saves that take no more of the caller's time than copying the state once."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self, Unpack, cast

from fastensor.backends import stream
from fastensor.backends.buffers import BufferPool
from fastensor.backends.registry import announce, available_names
from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint import files, ordering
from fastensor.checkpoint.asynchronous import exits
from fastensor.checkpoint.asynchronous.handle import SaveHandle
from fastensor.checkpoint.asynchronous.pace import Pace
from fastensor.checkpoint.asynchronous.settings import WhenBusy, WriterSettings
from fastensor.checkpoint.asynchronous.statistics import SaveCounters, WriterStatistics
from fastensor.checkpoint.asynchronous.work import Save, Step
from fastensor.checkpoint.location import RemotePath, Target
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.ordering import PendingWork
from fastensor.checkpoint.writing.save import SaveOptions, SaveSettings
from fastensor.checkpoint.writing.save_transaction import ByTorch, SaveTransaction
from fastensor.errors import SaveDroppedError
from fastensor.files.afterwards import Worker
from fastensor.files.arguments import checks_keywords, checks_keywords_with
from fastensor.files.os_errors import PERHAPS_KEPT
from fastensor.files.shown import given, shown
from fastensor.files.words import counted, human_size
from fastensor.stitch.source import Plan

_logger = logging.getLogger("fastensor")

_QUIET_SECONDS = 2.0
"""Waits that take longer say so, again and again."""
LEAST_STAGING_NBYTES = 32 << 20
"""Staging memory that is reserved at least: small checkpoints need not wait for each other."""
_GRACE_SECONDS = 2.0
"""Seconds that a save that was given up may take to notice."""


@checks_keywords
class AsyncWriter:
    """Saves checkpoints while the program goes on.

    :meth:`save` returns when all that is to be saved has been copied into staging memory; from then on it may change.
    Copies of storages on a GPU are queued by then, and not waited for: they follow what was queued on the current
    stream, and what is queued there later follows them. Another stream that changes the state has to wait for the
    current one, as always.

    A thread moves the copies to their files, one after the other, in the order of the calls. This process sees
    everything in that order, too: loading, replacing, converting or removing a file waits for what was
    accepted for it before. Other processes only ever see whole files.

    Args:
        staging_bytes: how much memory staging may take, at least 4 MiB, as a number or a text (``"2GiB"``); it is
            mapped when it is needed, touched once, and kept until :meth:`close`. A checkpoint that is larger streams
            through it. None means enough for the largest checkpoint so far, or 32 MiB, but no more than half of the
            memory that is available when it is first asked for (limits of cgroups counted), shared by the processes
            that the launcher started on this machine.
        when_busy: what to do when earlier saves still need so much of the staging memory that a new one would have to
            wait: ``"wait"``; ``"skip"`` the new one; or replace queued ones by it, so that the ``"latest"`` is kept (it
            waits if that is not enough). What is dropped is logged, and its handle says so. Two checkpoints can only
            be there at a time if ``staging_bytes`` is enough for two.
        max_bytes_per_second: how fast files may be written, as a number or a text (``"500MB"``). The rate does not
            count while a caller waits for a file.
        exit_seconds: how long :meth:`close`, and the exit of the interpreter, wait for what is pending before it is
            given up; what was at the paths before is kept then.
        preemption_seconds: if given, SIGTERM ends the process only when what is pending is durable, or after so many
            seconds; a handler that the program has installed before is called at once and decides by itself, and so
            does one that was installed later and calls this one. Works in the main thread only. What could not be
            done asynchronously is not waited for.

    A failure that no handle has shown is raised once, by the next call: :meth:`save` (before anything is accepted),
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
        staging_bytes: int | str | None = None,
        when_busy: WhenBusy = "wait",
        max_bytes_per_second: float | str | None = None,
        exit_seconds: float = 600.0,
        preemption_seconds: float | None = None,
    ) -> None:
        # A child that is forked while a thread imports a module would wait for ever for that module. So what the thread
        # that writes needs is imported here.
        import fastensor.backends.pipeline
        import fastensor.select.current  # noqa: F401

        available_names()
        self._settings = WriterSettings(
            cast(int | None, staging_bytes),  # which becomes a number there, like the rate
            when_busy,
            cast(float | None, max_bytes_per_second),
            exit_seconds,
            preemption_seconds,
        )
        self._closed = self._released = False
        self._counters = SaveCounters()
        self._begin_empty()
        exits.watch(self, preemption_seconds)

    @shown
    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        pending, ended = len(self._pending_saves()), self._counters.ends.total()
        return f"({', '.join(given(self._settings))}): {counted(pending, 'saves')} pending, {ended} ended{closed}"

    def _begin_empty(self) -> None:
        self._worker = Worker("fastensor-drain")
        self._pool = BufferPool(self._settings.staging_budget)
        self._pace = Pace(self._settings.max_bytes_per_second)
        self._turn = threading.Lock()
        """Held while a save is staged: blocks are taken in the order of the saves."""
        self._finalizer = weakref.finalize(self, _let_go, self._worker)

    @checks_keywords_with(SaveOptions.__annotations__)
    def save(self, obj: object, path: str | os.PathLike[str], **options: Unpack[SaveOptions]) -> SaveHandle:
        """Save as :func:`fastensor.save` does, but return when all of ``obj`` has been copied.

        Args:
            obj: as for :func:`fastensor.save`. It is pickled, and its tensors are copied, before this returns; CUDA
                tensors behind the work that was queued on the devices' current streams, on streams of their own.
            path: a path or a URL. Its directory must exist.
            options: as for :func:`fastensor.save`.

        Returns:
            A handle, which need not be kept. The save is done already if it was skipped, or could not be done
            asynchronously, which is logged: when torch has to write the file by itself, or the file has to be written
            in place (see :func:`fastensor.save`), when the interpreter exits, in a callback of another handle, or in a
            signal handler that interrupts Fastensor.

        Raises:
            Exception: what an earlier save failed with, unless that was raised before; nothing is accepted then. Or as
                :func:`fastensor.save`, for everything that is wrong with the object, the options or the target.
        """
        started = time.perf_counter()
        nested = is_nested()
        try:
            self._check_open()
            if not nested:  # which may be the last chance to save
                self._raise_failure()
            if not isinstance(path, str | os.PathLike):
                raise TypeError(
                    f"expected a path or a URL, found {type(path).__name__}; fastensor.save takes open files"
                )
            transaction, planner = SaveSettings(**options).prepare(obj, path)
            assert isinstance(transaction.target, Target | RemotePath)
            save = Save(
                transaction,
                ordering.place_of(transaction.target),
                queue=self._worker,
                keeps=self,
                pace=self._pace,
                counters=self._counters,
            )
            with nullcontext() if nested else self._turn:
                plan = transaction.plan(planner)
                if isinstance(plan, ByTorch):  # it has been logged why
                    save.run_now(plan)
                elif nested or exits.exiting():
                    _announce("the interpreter exits" if exits.exiting() else "a signal handler or a callback saves")
                    save.run_now(plan)
                else:
                    self._save_later(save, transaction, plan, started)
            return SaveHandle(save)
        finally:
            self._counters.stall(time.perf_counter() - started)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint as soon as what was saved after it is durable.

        A pending save to that very path is given up, if nothing was saved after it; else it comes first. If the last
        save before this call leaves no new file, because it fails or is dropped for another one, the checkpoint stays,
        and that is logged: it may be the only one.

        Args:
            path: a file, a symlink but not its target, or a directory with all it holds, which is waited for: something
                may be saved into a new one next. Nothing happens if there is none.

        Raises:
            Exception: what an earlier save failed with, unless that was raised before; nothing is removed then.
            OSError: the checkpoint cannot be removed. If the removal has to wait, the next call raises this.
        """
        path = files.absolute(path)
        place = next(ordering.places_behind(path), "")
        is_directory = files.is_directory(path)
        take_away = files.remove_at_once if is_directory else files.remove_file_at_once
        if is_directory:
            ordering.wait_inside(path)  # other writers may save into it, too
        saves = self._pending_saves()  # before failures are looked for: a save is in one of the two
        self._raise_failure()
        while saves and saves[-1].place == place and saves[-1].drop("cancelled", "its file was removed"):
            saves.pop()
        if not saves:
            ordering.wait_inside(path)
            take_away(path)
            return
        step = self._follow(place, lambda: take_away(path), f"removing {path}", leaves_file=False, after=saves[-1])
        if is_directory:
            step.wait()
            if (failure := step.take_failure()) is not None:
                raise failure

    def wait(self, timeout: float | None = None) -> None:
        """Return when everything is durable that was accepted so far.

        Args:
            timeout: seconds to wait at most; None means for ever.

        Raises:
            TimeoutError: it takes longer. It goes on.
            RuntimeError: a signal handler calls this, and has interrupted Fastensor; or a callback of another writer's
                save.
            Exception: what a save failed with, unless that was raised before; of several the first, with notes of the
                others.
        """
        if not self._drain(timeout):
            raise TimeoutError(f"not done after {timeout:g} s: {self._describe_pending()}; it goes on")
        self._raise_failure(all_of_them=True)

    @property
    def closed(self) -> bool:
        """True if :meth:`close` has been called."""
        return self._closed

    def close(self, timeout: float | None = None) -> None:
        """:meth:`wait`, and release the memory. Calling it again does nothing.

        In a callback of one of its own saves this waits for nothing, and the writer only accepts no more saves: the
        next call waits, or the exit of the interpreter.

        Args:
            timeout: seconds to wait at most, after which what is pending is given up; None means ``exit_seconds``.

        Raises:
            TimeoutError: it took longer. What was at the paths of the saves that were given up is kept.
            Exception: as :meth:`wait`.
        """
        if self._released:
            return
        if not self._worker.is_current:
            _check_may_wait()
        self._closed = True
        if self._worker.is_current:  # a callback of a save: the next call of this method waits, or the exit
            return
        timeout = self._settings.exit_seconds if timeout is None else timeout
        drained = False
        try:
            drained = self._drain(timeout)
            if not drained:
                lost = self._describe_pending()
                self._abandon(f"it was not done {timeout:g} s after the writer was closed")
                late = TimeoutError(f"given up after {timeout:g} s: {lost}; {PERHAPS_KEPT}")
                for failure in self._take_failures():
                    late.add_note(f"and before: {failure!r}")
                raise late
        except KeyboardInterrupt:
            self._abandon("it was interrupted")
            raise
        finally:
            self._released = True
            self._worker.stop(wait=drained)
            self._pool.close()
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

    def statistics(self) -> WriterStatistics:
        """Counts of what has been done so far, and of what is going on."""
        stages = Counter(save.stage for save in self._pending_saves())
        ends = self._counters.ends
        return WriterStatistics(
            staging=stages["staging"],
            queued=stages["queued"],
            writing=stages["writing"],
            durable=ends["durable"],
            failed=ends["failed"],
            cancelled=ends["cancelled"],
            skipped=ends["skipped"],
            replaced=ends["replaced"],
            nbytes=self._counters.nbytes,
            stall_seconds=self._counters.stall_seconds,
            staging_bytes=self._pool.nbytes,
            peak_staging_bytes=self._pool.peak_nbytes,
            shared_nbytes=self._counters.shared_nbytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self._settings)

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]  # a copy begins like any other

    # --- for the end of the process, and the beginning of another

    def _finish_at_exit(self, seconds: float | None) -> None:
        """Wait for what is pending, and give up what takes too long.

        Args:
            seconds: how long to wait at most; None means ``exit_seconds``.
        """
        seconds = self._settings.exit_seconds if seconds is None else seconds
        try:
            if not self._drain(max(seconds - _GRACE_SECONDS, seconds / 2)):
                _logger.error("given up at exit, after %g s: %s", seconds, self._describe_pending())
                self._abandon("the process exited")
        except KeyboardInterrupt:
            _logger.error("given up at exit, interrupted: %s", self._describe_pending())
            self._abandon("the process exited, and waiting for it was interrupted")

    def _forget_pending(self) -> None:
        """In a forked child: what is pending is the parent's, and so is the memory."""
        self._finalizer.detach()
        self._counters.forget_threads()
        self._begin_empty()

    # --- inside

    def _save_later(self, save: Save, transaction: SaveTransaction, plan: Plan, started: float) -> None:
        snapshot = None
        try:
            if transaction.is_in_place():  # no staging memory is needed, and none is waited for
                _announce("the file has to be written in place")
                save.run_now(plan)
                return
            if self._settings.when_busy == "skip" and self._skips(save, 1):  # before anything is compared
                return
            plan = transaction.share(plan)
            if self._skips(save, plan.nbytes):
                return
            remote = isinstance(transaction.target, RemotePath)
            snapshot = Snapshot(
                plan,
                self._pool,
                before_window=save.before_window,
                while_waiting=self._pace.hurried,
                known_checksums=stream.checksums_of(plan) if remote and plan.checksums_first else None,
                throttled=self._settings.max_bytes_per_second is not None,
            )
            save.open(snapshot)
            if self._settings.when_busy == "latest":
                self._make_room(save, plan.nbytes)
            if not self._accept(save):
                _announce("no thread can be started")
                save.run_now(plan)
                return
            snapshot.stage()
        except SaveDroppedError:
            pass  # the handle says so
        except BaseException as error:
            save.report()
            if snapshot is not None:
                snapshot.stop(error)
            if save.claim():
                save.fail(error)
            raise
        save.staged(time.perf_counter() - started)

    def _skips(self, save: Save, nbytes: int) -> bool:
        """Reserve staging memory. True if there is no room for so many bytes, and the save was dropped for that."""
        self._reserve(nbytes)
        if self._settings.when_busy != "skip" or self._pool.has_room(nbytes):
            return False
        _logger.warning("skipped, because earlier saves are not done: %s", save.path)
        save.drop("skipped", "the save was skipped, because earlier ones were not done")
        return True

    def _reserve(self, nbytes: int) -> None:
        """Map as much staging memory as a file needs and the budget allows."""
        pool = self._pool
        # A budget of the user's may be for several files at a time, ours is for one, or some small ones.
        is_ours = self._settings.staging_bytes is None
        pool.reserve(max(nbytes, LEAST_STAGING_NBYTES) if is_ours else nbytes + pool.nbytes - pool.free_nbytes)

    def _make_room(self, save: Save, nbytes: int) -> None:
        """Drop queued saves, the oldest first, until there is room."""
        for old in self._pending_saves():
            if self._pool.has_room(nbytes):
                break
            if old.stage == "queued" and old.drop("replaced", f"the save was replaced by the one to {save.path}"):
                _logger.warning("replaced by the save to %s: %s", save.path, old.path)

    def _accept(self, work: PendingWork) -> bool:
        """Accept work, which the thread does in its turn. False if there is no thread; then nothing is accepted."""
        work.accept()
        if self._worker.give(partial(_run_next, self._worker)):
            return True
        work.leave()
        return False

    def _follow(
        self, place: str, function: Callable[[], None], what: str, *, leaves_file: bool, after: Save | None
    ) -> Step:
        step = Step(place, function, what, leaves_file=leaves_file, after=after, queue=self._worker, keeps=self)
        try:
            accepted = (is_nested() or not exits.exiting()) and self._accept(step)
        except BaseException as error:
            step.report()
            if step.claim():
                step.end(error)
            raise
        if not accepted:
            self._drain(self._settings.exit_seconds)
            step.run()
            if step.failure is not None:
                raise step.failure
        return step

    def _pending_saves(self) -> list[Save]:
        return [work for work in ordering.work_in(self._worker) if isinstance(work, Save) and not work.done]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the writer has been closed; make another one")

    def _take_failures(self, most: int | None = None) -> list[BaseException]:
        """The failures that were not raised, which the caller raises."""
        failures = (work.take_failure() for work in ordering.work_in(self._worker))
        return list(islice((failure for failure in failures if failure is not None), most))

    def _raise_failure(self, *, all_of_them: bool = False) -> None:
        failures = self._take_failures(None if all_of_them else 1)
        for other in failures[1:]:
            failures[0].add_note(f"and then: {other!r}")
        if failures:
            raise failures[0]

    def _drain(self, timeout: float | None) -> bool:
        """Wait until nothing is pending, and say so if it takes long; False if it takes longer than the timeout. In a
        callback of one of its own saves nothing is waited for.

        Raises:
            RuntimeError: a signal handler that interrupts Fastensor calls this, or a callback of another writer's save.
        """
        if self._worker.is_current:
            return True
        _check_may_wait()
        drained = threading.Event()
        if not self._worker.has_thread or not self._worker.give(drained.set):
            return True
        started = time.monotonic()
        left_before = self._left_nbytes()
        with self._pace.hurried():
            while True:
                elapsed = time.monotonic() - started
                left = None if timeout is None else timeout - elapsed
                if drained.wait(_QUIET_SECONDS if left is None else min(max(left, 0), _QUIET_SECONDS)):
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

    def _abandon(self, message: str) -> None:
        """Give up everything that is pending: what was at the paths before is kept."""
        for save in self._pending_saves():
            save.drop("cancelled", message)
        stopped = threading.Event()
        if self._worker.has_thread and self._worker.give(stopped.set):
            stopped.wait(_GRACE_SECONDS)

    def _left_nbytes(self) -> int:
        return sum(save.nbytes - save.moved_nbytes for save in self._pending_saves())

    def _describe_pending(self) -> str:
        saves = self._pending_saves()
        names = ", ".join(save.path for save in saves)
        left = human_size(self._left_nbytes())
        return f"{counted(len(saves), 'checkpoints')} of which {left} are to be written ({names})"


def _run_next(worker: Worker) -> None:
    """In the thread of a writer: do the first of its work that is left."""
    for work in ordering.work_in(worker):
        if work.claim():
            work.run()
            return


def _announce(reason: str) -> None:
    announce("saving asynchronously", reason)


def _check_may_wait() -> None:
    if is_nested():
        raise RuntimeError(
            "a signal handler cannot wait for what it interrupts, nor can a callback for another writer; let it return"
        )


def _let_go(worker: Worker) -> None:
    """A writer is gone. Its failures have been raised nowhere."""
    for work in ordering.work_in(worker):
        if (failure := work.take_failure()) is not None:
            _logger.error("an asynchronous save had failed: %s", failure, exc_info=failure)
    worker.stop()
