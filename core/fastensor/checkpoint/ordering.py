"""The work that this process has accepted and not done, by path, so that all see operations in the order of the calls.

There is one list for all paths and writers, in the order in which work was accepted. Single calls change the list, so
it needs no lock, which a fork or a signal handler might find held.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from fastensor.checkpoint.location import Location, RemotePath, Target, locate
from fastensor.errors import SaveDroppedError
from fastensor.files import posix

_pending: list[PendingWork] = []
_alive: weakref.WeakSet[PendingWork] = weakref.WeakSet()
"""Work that is pending, or that a handle shows."""


class PendingWork(ABC):
    """Work that an asynchronous writer has accepted for a place. Thread-safe.

    The work is in the list until it is done; if it has failed, until the failure was raised somewhere, or logged.

    Args:
        place: the path or URL, as :func:`place_of` writes it.
        leaves_file: whether a file is at the place when the work is done.
        queue: stands for the writer that has accepted the work.
        keeps: what lives until the work is done.
    """

    def __init__(self, place: str, *, leaves_file: bool, queue: object, keeps: object) -> None:
        self.place = place
        self.leaves_file = leaves_file
        self.queue = queue
        self._keeps = keeps
        self.future: Future[Any] = Future()
        self._outcome: Any = None
        self._ended = False
        self._reported = False
        self._claim = threading.Lock()
        _alive.add(self)

    @abstractmethod
    def run(self) -> None:
        """Do the work, which the caller has claimed, and end it. Raises nothing."""

    @abstractmethod
    def drop(self, why: Any, message: str) -> bool:
        """Have the work end without touching its place, if it is not too late. A signal handler may call this.

        Returns:
            False if it is known to be too late.
        """

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def failure(self) -> BaseException | None:
        """Exception that the work has failed with."""
        return self.future.exception() if self.done else None

    def accept(self) -> None:
        """Put the work in the list, behind all others."""
        _pending.append(self)

    def claim(self) -> bool:
        """True if the caller is the one to run or end the work: the first one that asks."""
        return self._claim.acquire(blocking=False)

    def end(self, outcome: Any) -> None:
        """The work is done: the outcome is its result, or an exception that it has failed with."""
        self._outcome = outcome
        self._ended = True
        try:
            self._settle()
        finally:  # a callback may have raised an exit
            if self._reported or not isinstance(outcome, BaseException):
                self.leave()
            self._keeps = None  # if the writer goes now, it finds the failure in the list

    def report(self) -> None:
        """The caller raises the failure, if there is one: no other call shall raise it."""
        self._reported = True
        if self.done:
            self.leave()

    def take_failure(self) -> BaseException | None:
        """The failure, for the one caller who shall raise it; None if there is none, or another call has it."""
        if self._reported or self.failure is None:
            return None
        return self.failure if self.leave() else None

    def hurried(self) -> AbstractContextManager[None]:
        """In the block, a caller waits for the work."""
        return nullcontext()

    def wait(self) -> None:
        """Return when the work is done; at once if the caller must not wait (see
        :func:`~fastensor.checkpoint.nested.is_nested`)."""
        from fastensor.checkpoint.nested import is_nested  # imported by whoever has accepted the work

        if not self.done and not is_nested():
            with self.hurried():
                self.future.exception()

    def forget(self) -> None:
        """In a forked child: no lock is held, and the parent does what is not done."""
        self.future = Future()
        self._keeps = None
        if not self._ended:
            self._outcome = SaveDroppedError(f"{self.place}: the parent process does it")
        self._settle()

    def _settle(self) -> None:
        if isinstance(self._outcome, BaseException):
            self.future.set_exception(self._outcome)
        else:
            self.future.set_result(self._outcome)

    def leave(self) -> bool:
        """Take the work out of the list; False if it was not there."""
        with suppress(ValueError):
            _pending.remove(self)
            return True
        return False


def _forget_all() -> None:
    _pending.clear()  # first: a writer that only its work keeps alive would log what is pending as failed
    for work in tuple(_alive):
        work.forget()


os.register_at_fork(after_in_child=_forget_all)


def work_in(queue: object) -> list[PendingWork]:
    """Work that a writer has accepted and not done, or that has failed and was not reported, in order."""
    return [work for work in tuple(_pending) if work.queue is queue]


def pending(place: str) -> list[PendingWork]:
    """Pending work for a place."""
    return [work for work in tuple(_pending) if work.place == place and not work.done]


def will_exist(location: Location) -> bool | None:
    """True if a file will exist when all pending work for it is done; None if there is none."""
    for place in places_behind(location) if _pending else ():
        if found := pending(place):
            return found[-1].leaves_file
    return None


def wait_to_read(location: Location) -> None:
    """Return when everything that this process accepted for the file that a path leads to is done.

    Raises:
        Exception: the failure of the last of this work, unless it was raised before.
    """
    if not _pending:
        return
    for place in places_behind(location):
        found = _wait_for(place)
        if found and (failure := found[-1].take_failure()) is not None:
            raise failure


def wait_for_earlier(work: PendingWork) -> None:
    """Return when everything is done that was accepted for the same place before, by other writers too."""
    everything = tuple(_pending)
    for earlier in everything[: everything.index(work)] if work in everything else ():
        if earlier.place == work.place:
            earlier.future.exception()


def wait_to_replace(target: Target | RemotePath | object) -> None:
    """Return when everything that was accepted for a target is done."""
    if _pending and isinstance(target, Target | RemotePath):
        _wait_for(place_of(target))


def drop_replaced(target: Target | RemotePath | object) -> None:
    """Drop what was accepted for a target, because a nested save, which cannot wait, is about to replace it."""
    for work in pending(place_of(target)) if isinstance(target, Target | RemotePath) else ():
        work.drop("replaced", "a signal handler or a callback has saved to the same path")


def wait_to_read_directory(location: Location) -> None:
    """Return when everything that this process accepted for a directory, or inside of it, is done.

    Raises:
        Exception: the last failure of this work that was not raised before.
    """
    for work in reversed(wait_inside(location)):
        if (failure := work.take_failure()) is not None:
            raise failure


def wait_inside(location: Location) -> list[PendingWork]:
    """Return when everything that was accepted for a path, or inside of it, is done. Returns this work."""
    if not _pending:
        return []
    own = next(places_behind(location), "")
    inside = {work.place for work in tuple(_pending) if own and work.place.startswith(own.rstrip("/") + "/")}
    return [work for place in (own, *inside) for work in _wait_for(place)]


def _wait_for(place: str) -> list[PendingWork]:
    found = [work for work in tuple(_pending) if work.place == place]
    for work in found:
        work.wait()
    return found


def place_of(target: Target | RemotePath) -> str:
    """The place of a target, by which work for it is found."""
    return target.path if isinstance(target, Target) else _place_of_url(target)


def places_behind(location: Location) -> Iterator[str]:
    """The name of a file, and those that it leads to if it is a symlink. None for open files."""
    found = locate(location)
    if isinstance(found, RemotePath):
        yield _place_of_url(found)
    elif isinstance(found, str):
        yield from posix.names_along(found)


def _place_of_url(target: RemotePath) -> str:
    protocol = target.filesystem.protocol
    return f"{protocol if isinstance(protocol, str) else protocol[0]}://{target.path}"
