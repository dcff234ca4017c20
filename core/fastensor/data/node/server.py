"""The node reader: one thread of one process, which reads for all clients of a machine.

The reader goes round its clients, and gives each one the next slot of values, if its ring has room. What several
clients have requested since the last round is merged into one fetch, in the order in which they need it. So the engine
sees the order of the whole machine, and one process has reads in flight.

A client whose ring is full delays no other client. When a client ends, however it does, the kernel closes its
connection, and the reader drops what the client has requested. What goes wrong with one client ends its connection
only. The reader ends with its last client.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from fastensor.data.coalescing import Extents, Integers
from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.engines.base import Engine, Fetch
from fastensor.data.engines.choice import Strategy
from fastensor.data.node.protocol import (
    Cancel,
    Failed,
    Opening,
    Ready,
    Release,
    Request,
    Values,
    Wait,
    layout,
    sent_error,
)
from fastensor.data.ring import NO_SLOT, Slot, SlotWriter
from fastensor.data.serving import LocalClient, LocalServer

_SLOT_NBYTES = 256 << 10
"""A slot has values of at most this many bytes together, or a quarter of the ring if that is less; but one at least."""
_LONGEST_VALUE_NBYTES = 4 << 30
"""A value of LMDB has less."""
_LARGEST_FILE_NBYTES = 1 << 62
_Key: TypeAlias = tuple[int, int, Strategy]
"""The device and the inode of a file, and how it is read."""


class Span(NamedTuple):
    """Consecutive values of a request that go into one slot."""

    first: int
    values: int


def are_extents(found: object) -> bool:
    """True if these are extents of one value or more, such as a file can have."""
    if not isinstance(found, Extents):
        return False
    arrays = (found.offsets, found.lengths)
    if any(type(one) is not np.ndarray or one.dtype != np.int64 or one.ndim != 1 for one in arrays):
        return False
    limits = (_LARGEST_FILE_NBYTES, _LONGEST_VALUE_NBYTES)
    has_values = 0 < len(found.offsets) == len(found.lengths)
    return has_values and all(one.min() >= 0 and one.max() < limit for one, limit in zip(arrays, limits, strict=True))


def spans_of(lengths: Integers, nbytes: int) -> list[Span]:
    """Cut a request into slots.

    Args:
        lengths: of its values.
        nbytes: that a slot should have at most. It has one value at least.

    >>> spans_of(np.array([64, 10, 64, 1000, 1]), 128)
    [Span(first=0, values=2), Span(first=2, values=1), Span(first=3, values=1), Span(first=4, values=1)]
    """
    ends = layout(lengths)[1:]
    spans: list[Span] = []
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + nbytes, side="right")), first + 1)
        spans.append(Span(first, last - first))
        first = last
    return spans


def interleaved(requests: Sequence[Sequence[Span]]) -> list[tuple[int, Span]]:
    """The spans of several requests in turns: the first span of each, then the second one of each, and so on.

    Returns:
        For each span the number of its request, and the span.
    """
    numbered = [(place, number, span) for number, spans in enumerate(requests) for place, span in enumerate(spans)]
    return [(number, span) for _, number, span in sorted(numbered)]


@dataclass(slots=True)
class _SharedFetch:
    """A fetch, which several requests may share; or the error with which it has failed."""

    fetch: Fetch | None = None
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values that go into one slot."""

    reading: _SharedFetch
    begin: int
    """The number of the first of them in the fetch."""
    first: int
    """The number of the first of them in the request."""
    lengths: Integers


@dataclass(slots=True)
class _OpenFile:
    """A file that is open, and how it is read."""

    fd: int
    engine: Engine
    key: _Key
    clients: int = 0
    requested: list[tuple[_Client, int, Extents]] = field(default_factory=list)
    """Requests that were not begun: the client, the number of its request, and the values."""

    def begin_requested(self) -> None:
        """Begin what clients have requested, as one fetch."""
        requested, self.requested = [one for one in self.requested if one[1] in one[0].pieces], []
        if not requested:
            return
        spans = [spans_of(extents.lengths, client.slot_nbytes) for client, _, extents in requested]
        order = interleaved(spans)
        extents = Extents(
            _joined(requested[number][2].offsets[span.first : span.first + span.values] for number, span in order),
            _joined(requested[number][2].lengths[span.first : span.first + span.values] for number, span in order),
        )
        reading = _SharedFetch()
        try:
            reading.fetch = self.engine.fetch(extents)
        except Exception as error:  # noqa: BLE001  # the clients raise it
            reading.failure = sent_error(error)
        begin = 0
        for number, span in order:
            client, request, _ = requested[number]
            lengths = extents.lengths[begin : begin + span.values]
            client.pieces[request].append(_Piece(reading, begin, span.first, lengths))
            begin += span.values


class _Client(LocalClient):
    """A client that reads one file; or none, and only keeps the node reader alive."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self.source: _OpenFile | None = None
        self.ring: SlotWriter | None = None
        self.slot_nbytes = 0
        self.pieces: dict[int, deque[_Piece]] = {}
        """Pieces of each request that were not sent yet; the oldest request comes first."""
        self.wanted: Wait | None = None
        """Request that the client waits for."""

    def send_next(self) -> bool:
        """Send the next slot of values, or the error of a request, if there is one and there is room. Waits for the
        disk.

        Returns:
            Whether there may be more to send.
        """
        if self.connection.unsent_nbytes > _SLOT_NBYTES:
            return False
        request = self._next_request()
        if request is None or self.ring is None:
            return False
        piece = self.pieces[request][0]
        if piece.reading.failure is not None:
            del self.pieces[request]
            self.connection.send(Failed(request, piece.reading.failure))
            return True
        places = layout(piece.lengths)
        placed = self.ring.place(int(places[-1]))
        if placed is None and not self._waits_for(request, piece):
            return False
        slot, room = placed or (Slot(NO_SLOT, 0, int(places[-1])), memoryview(bytearray(int(places[-1]))))
        try:
            _fill(room, piece, places)
        except Exception as error:  # noqa: BLE001  # the clients raise it
            if placed is not None:
                self.ring.release(slot.sequence)
            piece.reading.failure = sent_error(error)
            return True
        self._next_is_sent(request)
        values = Values(request, piece.first, len(piece.lengths), slot)
        self.connection.send(values, b"" if placed is not None else room)
        return True

    def _next_request(self) -> int | None:
        """Request that the client waits for, or else its oldest one."""
        if self.wanted is not None:
            request, end = self.wanted
            if (pieces := self.pieces.get(request)) and pieces[0].first < end:
                return request
            if pieces is None or pieces:  # all that was wanted is sent; without pieces, the request has not begun
                self.wanted = None
        return next((request for request, pieces in self.pieces.items() if pieces), None)

    def _waits_for(self, request: int, piece: _Piece) -> bool:
        return self.wanted is not None and self.wanted[0] == request and piece.first < self.wanted[1]

    def _next_is_sent(self, request: int) -> None:
        pieces = self.pieces[request]
        pieces.popleft()
        if not pieces:
            del self.pieces[request]

    def close(self) -> None:
        super().close()
        if self.ring is not None:
            self.ring.close()
        self.pieces.clear()


class NodeServer(LocalServer[_Client]):
    """The node reader."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener, _Client, greeting=os.getpid())
        self._sources: dict[_Key, _OpenFile] = {}

    def work(self) -> bool:
        for source in self._sources.values():
            source.begin_requested()
        has_more = [self.do_for(client, client.send_next) for client in list(self.clients.values())]
        return any(has_more)

    def obey(self, client: _Client, message: Message) -> None:
        match message.content:
            case Opening() as opening:
                assert message.fd is not None
                self._open(client, message.fd, opening)
            case Request(number, extents):
                if client.source is None or type(number) is not int or not are_extents(extents):
                    raise ConnectionLost(f"it requested {extents!r}")
                client.source.requested.append((client, number, extents))
                client.pieces[number] = deque()
            case Wait() as wanted:
                client.wanted = wanted
            case Cancel(number):
                client.pieces.pop(number, None)
            case Release(sequences):
                assert client.ring is not None
                for sequence in sequences:
                    client.ring.release(sequence)
            case other:
                raise ConnectionLost(f"it sent {other!r}")

    def _open(self, client: _Client, fd: int, opening: Opening) -> None:
        """Open a file for a client, and give it a ring."""
        if client.ring is not None:
            raise ConnectionLost("it opened a second file")
        try:
            client.ring = SlotWriter(opening.ring_nbytes)
            client.slot_nbytes = min(_SLOT_NBYTES, opening.ring_nbytes // 4)
            client.source = self._source(fd, opening)
        except Exception as error:  # noqa: BLE001  # the client raises it
            client.connection.send(Failed(-1, sent_error(error)))
            return
        client.source.clients += 1
        client.connection.send(Ready(client.source.engine.name), fd=client.ring.fd)

    def _source(self, fd: int, opening: Opening) -> _OpenFile:
        """The file of a descriptor: opened before, if other clients read the same file in the same way."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, opening.strategy)
        if (source := self._sources.get(key)) is not None:
            return source
        own = os.dup(fd)
        try:
            source = _OpenFile(own, opening.strategy.open(own, opening.mean_nbytes), key)
        except BaseException:
            os.close(own)
            raise
        return self._sources.setdefault(key, source)

    def dropped(self, client: _Client) -> None:
        source = client.source
        if source is not None:
            source.clients -= 1
            if not source.clients:
                del self._sources[source.key]
                source.engine.close()
                os.close(source.fd)


def _fill(room: memoryview, piece: _Piece, places: Integers) -> None:
    assert piece.reading.fetch is not None
    values = piece.reading.fetch.take(piece.begin, piece.begin + len(piece.lengths))
    for place, value in zip(places.tolist(), values, strict=False):
        assert isinstance(value, memoryview)  # no engine of a node reader reads to a GPU
        room[place : place + len(value)] = value


def _joined(parts: Iterable[Integers]) -> Integers:
    return np.concatenate(list(parts))


def main(fd: int) -> None:
    """Run in a process of its own.

    Args:
        fd: the socket that listens.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client needs some descriptors
    NodeServer(socket.socket(fileno=fd)).run()
