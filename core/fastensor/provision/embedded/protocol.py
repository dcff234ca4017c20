"""Messages between server, workers and clients, over a :class:`~fastensor.data.connection.Connection`: these
records, and those of :mod:`fastensor.provision.engine` and :mod:`fastensor.provision.work`.

A client begins with ``Register``, and then sends ``Start`` and ``Credit``. One that keeps the server alive sends
``AskStatus``, and ``Start`` to have the cache filled from there on. A worker is given ``Work``, and answers ``Done`` or
``Broken``.
"""

from __future__ import annotations

from typing import NamedTuple

from fastensor.data.coalescing import Integers
from fastensor.data.ring import Slot
from fastensor.data.skipping import OnError
from fastensor.provision.engine import Cost, Facts, Registration

# server to client


class Hello(NamedTuple):
    """The first message of each connection. The spec comes along, so that each client can start the service again."""

    pid: int
    facts: Facts


class Registered(NamedTuple):
    """A loader is registered. The memory of its ring comes along. If it is not, the error comes in place of this."""


class BatchReady(NamedTuple):
    """A batch, or why it cannot be made. One without a slot comes in memory of its own."""

    generation: int
    number: int
    """In its generation."""
    slot: Slot
    cost: Cost
    failure: str = ""


# client to server


class Register(NamedTuple):
    """A loader is to be served."""

    registration: Registration
    """Without its function."""
    collate_fn: bytes
    """A pickle of that; empty: none. Only workers unpickle it."""


class Credit(NamedTuple):
    """See :meth:`fastensor.provision.engine.Feed.credit`."""

    generation: int
    taken: int
    waited_seconds: float
    dropped: list[int]
    """Slots that are free again, by their sequence numbers."""


class AskStatus(NamedTuple):
    """Ask for the state of the service. The answer is a dict."""


# server to worker, and back


class AddLoader(NamedTuple):
    """The memory of its ring comes along."""

    number: int
    collate_fn: bytes
    on_error: OnError


class ForgetLoader(NamedTuple):
    """A loader has gone."""

    number: int


class StoreSamples(NamedTuple):
    """Offsets to which samples are written that were read for a task."""

    task: int
    offsets: Integers
    """In the cache; -1: nowhere."""


class SamplesStored(NamedTuple):
    """The samples were written."""

    task: int


class Broken(NamedTuple):
    """A task has failed."""

    task: int
    traceback: str


# server to forkserver, and back


class Fork(NamedTuple):
    """Workers are to be made."""

    places: list[int]


class Forked(NamedTuple):
    """A worker was made. The connection to it comes along."""

    pid: int
    place: int
