"""Messages between the processes of a service on Ray, and the record that all of them find by its name.

The facts of a service and the user's objects are kept by Ray's global control store, where actors find them whenever
Ray starts them again. The objects are pickled by ``cloudpickle``, as those of Ray's tasks are, so functions of a script
or a notebook come along.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ray import cloudpickle

from fastensor.data.plan import EpochPlan
from fastensor.data.skipping import OnError, Skipped
from fastensor.provision.engine import Cost, EngineLost, Facts
from fastensor.provision.feeding import Place
from fastensor.provision.pickling import pickling
from fastensor.provision.ray import names

if TYPE_CHECKING:
    from fastensor.provision.making import UserObjects


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The credit for one batch. Whoever gets it knows the rest: the order of the epoch is a function of the plan."""

    loader: str
    """Its name: that of its client, ``/``, and what tells the client's loaders apart."""
    plan: EpochPlan
    place: Place
    taken: int
    """Batches of the generation before this number were given out."""
    needed: int
    """Number of batches ahead that keep the trainer from waiting."""
    waited_seconds: float | None
    """Seconds that the trainer has waited for the batch that it has taken last; None if that was said before."""
    collate_fn: bytes
    """A pickle; empty: as a ``DataLoader`` does it."""
    servers: int
    """Number of servers of the service, as the client knows it: it decides which one keeps a sample."""
    on_error: OnError = "raise"
    """Treatment of samples that cannot be made."""


def client_of(loader: str) -> str:
    """The name of the client that a loader is of."""
    return loader.partition("/")[0]


class EncodedSamples(NamedTuple):
    """The samples of a batch that one server keeps, encoded."""

    memory: npt.NDArray[np.uint8]
    """All of them, each at a multiple of :data:`~fastensor.data.ring.ALIGNMENT`."""
    begins: list[int]
    lengths: list[int]
    cost: Cost
    seconds: float
    """Seconds that it took to find them."""
    skipped: dict[int, Skipped] = {}  # noqa: RUF012  # nobody writes to it
    """By their places, those that could not be read: they have no bytes."""


class Made(NamedTuple):
    """A batch, or the reason why it cannot be made."""

    content: npt.NDArray[np.uint8] | None
    """A value of :mod:`fastensor.provision.encoding`."""
    cost: Cost
    seconds: float
    """Seconds that it took to make it, without those in which others were served."""
    failure: str = ""


def pickled(value: Any, what: str) -> bytes:
    """A user's object for other processes.

    Args:
        what: names the object in the error.

    Raises:
        ProvisionError: it cannot be pickled.
    """
    with pickling(what, "It may hold no open files or locks"):
        found: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return found


class _Published(NamedTuple):
    """Record of a service. It is kept under one key, the name of the service, so that it comes from one process."""

    facts: Facts
    paths: list[str]
    """Paths on which the process that has published it finds modules."""
    contents_key: str
    """Under this key the pickled :class:`~fastensor.provision.making.UserObjects` are kept. They may be long, and most
    processes need only the facts."""


def publish(name: str, facts: Facts, contents: bytes) -> Facts:
    """Keep what a service serves, and where this process finds modules, unless another process has done so.

    Args:
        contents: the pickled :class:`~fastensor.provision.making.UserObjects`.

    Returns:
        the facts that count: those of whoever was first.

    Raises:
        EngineLost: the service has ended meanwhile.
    """
    if names.kept(name) is None:
        _publish(name, facts, contents)
    return facts_of(name)


def _publish(name: str, facts: Facts, contents: bytes) -> None:
    """First keep the contents, then what refers to them, unless another process has been quicker with its own.

    The key of the contents is new each time. A digest of them would be the same when a job starts its service again,
    and the supervisor that is about to end could drop them while they are published anew. If a process is killed within
    this function, its contents may stay in the memory of the head node until the cluster ends.
    """
    contents_key = f"{name}/{secrets.token_hex(8)}"
    paths = [path or os.getcwd() for path in sys.path]
    published = pickle.dumps(_Published(facts, paths, contents_key))
    names.keep(contents_key, contents)
    names.keep(name, published)
    if names.kept(name) != published:
        names.drop(contents_key)


def facts_of(name: str) -> Facts:
    """The facts of a service.

    Raises:
        EngineLost: it has ended.
    """
    return _published(name).facts


def contents_of(name: str) -> UserObjects:
    """The user's objects, in a process that finds modules from now on where that one finds them which has published
    the objects.

    Raises:
        EngineLost: the service has ended.
    """
    published = _published(name)
    contents = names.kept(published.contents_key)
    if contents is None:
        raise EngineLost(f"the data service {name} has ended")
    sys.path += [path for path in published.paths if path not in sys.path]
    found: UserObjects = cloudpickle.loads(contents)
    return found


def withdraw(name: str) -> None:
    """Have nothing kept of a service, nor of its contents."""
    with suppress(EngineLost):  # that was done before
        published = _published(name)
        names.drop(name)
        names.drop(published.contents_key)


def _published(name: str) -> _Published:
    kept = names.kept(name)
    if kept is None:
        raise EngineLost(f"the data service {name} has ended")
    found: _Published = pickle.loads(kept)
    return found
