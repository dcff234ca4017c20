"""Messages between a node reader and its clients, over a :class:`~fastensor.data.connection.Connection`.

The greeting is the reader's process id. A client opens a file, and requests values by their extents. It takes them in
the order of its requests. The reader packs consecutive values into a slot of the client's ring, and sends the client
the place of the slot. If the ring has no room for values that the client waits for, the reader sends the values
themselves through the socket. So a client gets on although it keeps old values, or wants a value that is larger than
its ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastensor.data.coalescing import Extents, Integers
from fastensor.data.engines.choice import Strategy
from fastensor.data.ring import ALIGNMENT, Slot
from fastensor.errors import BackendUnavailableError, NodeReaderError
from fastensor.files import posix

# of the reader


class Ready(NamedTuple):
    """The file is open. The memory of the client's ring comes along."""

    engine: str


class Values(NamedTuple):
    """Consecutive values of a request. If they have no slot, they come along, laid out as in a slot."""

    request: int
    first: int
    """The number of the first of them in the request."""
    values: int
    """Number of these values."""
    slot: Slot


class Failed(NamedTuple):
    """A request, or an ``Opening``, has failed."""

    request: int
    """-1: the opening."""
    error: Exception


# of the client


class Opening(NamedTuple):
    """A client's options for reading a file. The descriptor of the file comes along."""

    strategy: Strategy
    mean_nbytes: float
    """The mean length of its values."""
    ring_nbytes: int
    """Bytes of the ring that the client gets."""


class Request(NamedTuple):
    """Values that the client will take."""

    number: int
    """Number of the client's choice."""
    extents: Extents


class Wait(NamedTuple):
    """The client waits for the first values of a request."""

    request: int
    values: int
    """Number of these values."""


class Cancel(NamedTuple):
    """The client takes no more values of a request."""

    request: int


class Release(NamedTuple):
    """Slots that are free again, by their sequence numbers."""

    sequences: list[int]


def layout(lengths: Integers) -> Integers:
    """Offset of each value in a slot; the last number is the length of the slot. Values are aligned as slots are.

    >>> layout(np.array([100, 10])).tolist()
    [0, 128, 192]
    """
    ends = np.cumsum(lengths + (-lengths % ALIGNMENT))
    return np.concatenate([np.zeros(1, np.int64), ends])


def sent_error(error: Exception) -> Exception:
    """An error for another process: of the same type where callers may know it, with what can be pickled."""
    for kind in (posix.EndOfFile, BackendUnavailableError, ValueError, MemoryError):
        if type(error) is kind:
            return kind(getattr(error, "strerror", None) or str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror or str(error))
    return NodeReaderError(f"the node reader has failed: {type(error).__name__}: {error}")
