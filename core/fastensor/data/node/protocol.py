"""Messages between a node reader and its clients, over a :class:`~fastensor.data.connection.Connection`.

The greeting is the reader's process id. A client opens a file. It gets the memory of its ring, with the name of the
engine, and the bytes that the values of a slot have together at most, although a slot has one value at least. Then it
requests values by their extents, and takes them in the order of its requests. The reader packs consecutive values into
a slot of the client's ring, and sends the client the place of the slot. Both cut a request into slots in the same way.
If the ring has no room for values that the client waits for, the reader sends the values themselves. So a client gets
on although it keeps old values, or wants a value that is larger than its ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastensor.data.coalescing import Extents, Integers, Reads
from fastensor.data.engines.choice import Strategy
from fastensor.data.ring import ALIGNMENT, Slot
from fastensor.data.skipping import reason_of
from fastensor.data.worker_errors import can_be_sent
from fastensor.errors import NodeReaderError

# of the reader


class Values(NamedTuple):
    """The values of one span of a request."""

    request: int
    span: int
    """Its number in the request."""
    place: Slot | bytearray
    """The slot that they are in; or the values, laid out as in a slot."""


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


class Needs(NamedTuple):
    """What the client waits for, and what it needs no more."""

    request: int
    """The request that it waits for."""
    span: int
    """Number of the last span whose values the client waits for."""
    cancelled: list[int]
    """Requests of which it takes no more values."""
    dropped: list[int]
    """Slots that are free again, by their sequence numbers."""


# of both


def spans_of(lengths: Integers, nbytes: int) -> list[slice]:
    """Cut a request into spans, each of which goes into one slot.

    Args:
        lengths: of its values.
        nbytes: that a slot should have at most. It has one value at least.

    >>> spans_of(np.array([64, 10, 64, 1000, 1]), 128)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    ends = layout(lengths)[1:]
    spans: list[slice] = []
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + nbytes, side="right")), first + 1)
        spans.append(slice(first, last))
        first = last
    return spans


def layout(lengths: Integers) -> Integers:
    """Offset of each value in a slot; the last number is the length of the slot. Values are aligned as slots are.

    >>> layout(np.array([100, 10])).tolist()
    [0, 128, 192]
    """
    ends = np.cumsum(lengths + (-lengths % ALIGNMENT))
    return np.concatenate([np.zeros(1, np.int64), ends])


def as_reads(lengths: Integers, nbytes: int) -> Reads:
    """A request as reads of its spans, one after the other."""
    spans, places = spans_of(lengths, nbytes), layout(lengths)
    read_of = np.repeat(np.arange(len(spans)), [span.stop - span.start for span in spans])
    offsets = places[[span.start for span in spans]]
    return Reads(offsets, np.diff(offsets, append=places[-1]), read_of, places[:-1] - offsets[read_of])


def sent_error(error: Exception) -> Exception:
    """An error for another process: the error itself, or its words if its class cannot be pickled."""
    error = error.with_traceback(None)  # which would keep what its frames hold
    return error if can_be_sent(error) else NodeReaderError(f"the node reader has failed: {reason_of(error)}")
