"""What is still to be done at which path, by this process: so that everybody in it sees operations in call order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Protocol

from fastensor.checkpoint.location import Location, RemotePath, locate
from fastensor.checkpoint.publish import Target

_MOST_LINKS = 40


class Operation(Protocol):
    """A save, or a removal, that has been accepted and is not done, or has failed and nobody has been told."""

    @property
    def leaves_file(self) -> bool:
        """Whether there is a file at its place once it is done."""

    @property
    def done(self) -> bool:
        """Whether it is, whatever came of it."""

    def settle(self) -> None:
        """Return when it is done, whatever came of it. At once if the calling thread is at it itself."""

    def raise_failure(self) -> None:
        """Raise what it failed with, if nobody has been told yet."""


_operations: dict[str, list[Operation]] = {}
_lock = threading.RLock()  # a signal handler may save


def _forget_all() -> None:
    global _lock
    _lock = threading.RLock()
    _operations.clear()


os.register_at_fork(after_in_child=_forget_all)  # they are the parent's


def begin(operation: Operation, place: str) -> None:
    """The operation is to be done, behind those that are there already."""
    with _lock:
        _operations.setdefault(place, []).append(operation)


def end(operation: Operation, place: str) -> None:
    """It is done and nobody needs to be told. Calling it again does nothing."""
    with _lock:
        found = _operations.get(place, [])
        if operation in found:
            found.remove(operation)
        if not found:
            _operations.pop(place, None)


def is_last(operation: Operation, place: str) -> bool:
    """Whether nothing was accepted for the place after an operation."""
    with _lock:
        found = _operations.get(place, [])
        return bool(found) and found[-1] is operation


def pending(place: str) -> list[Operation]:
    """What was accepted for a place and is not done."""
    with _lock:
        return [operation for operation in _operations.get(place, ()) if not operation.done]


def foretell(location: Location) -> bool | None:
    """Whether a file will be there once all is done that was accepted for it; None if nothing is to be done."""
    for place in places_behind(location) if _operations else ():
        if found := pending(place):
            return found[-1].leaves_file
    return None


def wait_to_read(location: Location) -> None:
    """Return when everything that this process accepted for the file that a path leads to is done.

    Raises:
        Exception: what the last of it failed with, unless somebody has been told.
    """
    if not _operations:
        return
    for place in places_behind(location):
        operations = _settle(place)
        if operations:
            operations[-1].raise_failure()


def wait_for_earlier(operation: Operation, place: str) -> None:
    """Return when everything is done that was accepted for the place before an operation, be it by other writers."""
    with _lock:
        found = _operations.get(place, [])
        earlier = found[: found.index(operation)] if operation in found else []
    for one in earlier:
        one.settle()


def wait_to_replace(target: Target | RemotePath | object) -> None:
    """Return when everything that was accepted for a target is done."""
    if isinstance(target, Target | RemotePath):
        _settle(place_of(target))


def wait_to_remove(location: Location) -> None:
    """Return when everything that was accepted for a path, or inside of it, is done."""
    if _operations:
        own = next(places_behind(location), "")
        for place in own, *places_inside(own):
            _settle(place)


def _settle(place: str) -> list[Operation]:
    with _lock:
        found = list(_operations.get(place, ()))
    for operation in found:
        operation.settle()
    return found


def place_of(target: Target | RemotePath) -> str:
    """What a target is known as here."""
    return target.path if isinstance(target, Target) else _place_of_url(target)


def places_behind(location: Location) -> Iterator[str]:
    """The name of a file, and those that it leads to if it is a symlink. None for open files."""
    found = locate(location)
    if isinstance(found, RemotePath):
        yield _place_of_url(found)
    elif isinstance(found, str):
        path = found
        for _ in range(_MOST_LINKS):
            directory, name = os.path.split(path)
            path = os.path.join(os.path.realpath(directory), name)
            yield path
            try:
                path = os.path.join(os.path.dirname(path), os.readlink(path))
            except OSError:  # not a link, or not there
                return


def places_inside(directory: str) -> list[str]:
    """Where there is something to be done below a place; nowhere below none."""
    with _lock:
        return [place for place in _operations if directory and place.startswith(directory.rstrip("/") + "/")]


def _place_of_url(target: RemotePath) -> str:
    protocol = target.filesystem.protocol
    return f"{protocol if isinstance(protocol, str) else protocol[0]}://{target.path}"
