"""What a node reader and its clients say to each other, over a :class:`~fastensor.data.connection.Connection`.

A client opens a file, and requests values by their extents. It takes them in the order of its requests. The reader
packs consecutive values into a slot of the client's ring, and sends the client the place of the slot. If the ring has
no room for values that the client waits for, the reader sends the values themselves through the socket. So a client
gets on although it keeps old values, or wants a value that is larger than its ring.

Both processes belong to one user on one machine, so numbers are in the byte order of the machine.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np

from fastensor.data.coalescing import Extents, Integers, Merging
from fastensor.data.connection import Bytes, Message
from fastensor.data.engines.choice import Strategy
from fastensor.data.ring import ALIGNMENT
from fastensor.data.staggering import Staggering
from fastensor.errors import BackendUnavailableError, NodeReaderError
from fastensor.files import posix


class Say(IntEnum):
    """Kinds of messages. The first four are the reader's, the others the client's."""

    HELLO = 0
    """JSON: the reader's process id. The first message of each connection."""
    READY = 1
    """JSON: the engine's name. The memory of the client's ring comes along."""
    VALUES = 2
    """``PLACED``; if that says that the values have no slot, they follow, laid out as in a slot."""
    FAILED = 3
    """``REQUEST``, then JSON: an error, of a request or of ``OPEN``."""
    OPEN = 4
    """JSON: an :class:`Opening`. The descriptor of the file comes along."""
    REQUEST = 5
    """``REQUEST``, then offsets and lengths as int64."""
    WANT = 6
    """``WANT``: the client waits for the first values of a request."""
    CANCEL = 7
    """``REQUEST``: the client takes no more values of a request."""
    RELEASE = 8
    """Sequence numbers of slots as int64."""


REQUEST = struct.Struct("=q")
"""The number of a request, which the client chooses."""
WANT = struct.Struct("=qq")
"""Number of the request, and of how many values the client waits for."""
PLACED = struct.Struct("=qqqqqq")
"""Number of the request, number of the first value, count of values, and the slot: sequence number, offset, bytes."""
NO_SLOT = -1
"""The sequence number if the values have no slot."""
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (BackendUnavailableError, ValueError, MemoryError)
}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a client wants a file to be read."""

    strategy: Strategy
    mean_nbytes: float
    """The mean length of its values."""
    ring_nbytes: int
    """Bytes of the ring that the client gets."""

    def as_json(self) -> bytes:
        """The body of an ``OPEN``."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, body: memoryview) -> Self:
        """The opening in the body of an ``OPEN``.

        Raises:
            ValueError: there is no such engine.
        """
        found = json_of(body)
        strategy = found.pop("strategy")
        merging, staggering = Merging(**strategy.pop("merging")), strategy.pop("staggering")
        staggering = None if staggering is None else Staggering(**staggering)
        return cls(Strategy(**strategy, merging=merging, staggering=staggering), **found)


def layout(lengths: Integers) -> Integers:
    """Where each value begins in a slot; the last number is the length of the slot. Values are aligned as slots are.

    >>> layout(np.array([100, 10])).tolist()
    [0, 128, 192]
    """
    ends = np.cumsum(lengths + (-lengths % ALIGNMENT))
    return np.concatenate([np.zeros(1, np.int64), ends])


def extents_as_bytes(extents: Extents) -> tuple[Bytes, Bytes]:
    """The offsets and lengths of a ``REQUEST``."""
    return _as_bytes(extents.offsets), _as_bytes(extents.lengths)


def extents_of(body: memoryview) -> Extents:
    """The extents of a ``REQUEST``."""
    offsets, lengths = np.frombuffer(body[REQUEST.size :], np.int64).reshape(2, -1)
    return Extents(offsets, lengths)


def json_of(body: memoryview) -> dict[str, Any]:
    """The body of a message that is JSON."""
    found: dict[str, Any] = json.loads(bytes(body))
    return found


def error_as_json(error: Exception) -> bytes:
    """An error, for :func:`error_of`."""
    number = error.errno if isinstance(error, OSError) else None
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return json.dumps({"kind": type(error).__name__, "errno": number, "text": text}).encode()


def error_of(message: Message) -> Exception:
    """The error of a ``FAILED``, of the same type where callers may know it."""
    found = json_of(message.body[REQUEST.size :])
    if found["kind"] == posix.EndOfFile.__name__:
        return posix.EndOfFile(found["text"])
    if found["errno"] is not None:
        return OSError(found["errno"], found["text"])
    if kind := _ERRORS.get(found["kind"]):
        return kind(found["text"])
    return NodeReaderError(f"the node reader has failed: {found['kind']}: {found['text']}")


def _as_bytes(numbers: Integers) -> memoryview:
    return np.ascontiguousarray(numbers, np.int64).data.cast("B")
