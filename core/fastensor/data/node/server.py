"""The node reader: one thread of one process, which reads for all clients of a machine.

The reader goes round its clients, and gives each one the next slot of values, if its ring has room. What several
clients have requested since the last round is merged into one fetch, in the order in which they need it. So the engine
sees the order of the whole machine, and one process has reads in flight.

A client whose ring is full delays no other client. When a client ends, however it does, the kernel closes its
connection, and the reader drops what the client has requested. What goes wrong with one client ends its connection
only. The reader ends with its last client.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from fastensor.data.coalescing import Extents, Integers
from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.engines.base import Engine, Fetch
from fastensor.data.engines.choice import Strategy
from fastensor.data.node.protocol import NO_SLOT, PLACED, REQUEST, WANT, Opening, Say, error_as_json, extents_of, layout
from fastensor.data.ring import RingWriter, Slot

_SLOT_NBYTES = 256 << 10
"""A slot has values of at most this many bytes together, or a quarter of the ring if that is less; but one at least."""
_FIRST_CLIENT_SECONDS = 60
"""For how long the reader waits for its first client: whoever has started it may have died."""
_Key: TypeAlias = tuple[int, int, Strategy]
"""The device and the inode of a file, and how it is read."""
_logger = logging.getLogger("fastensor")


class Span(NamedTuple):
    """Consecutive values of a request that go into one slot."""

    first: int
    values: int


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
class _Reading:
    """A fetch, which several requests may share; or the error with which it has failed, as JSON."""

    fetch: Fetch | None = None
    failure: bytes = b""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values that go into one slot."""

    reading: _Reading
    begin: int
    """The number of the first of them in the fetch."""
    first: int
    """The number of the first of them in the request."""
    lengths: Integers


@dataclass(slots=True)
class _Source:
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
        reading = _Reading()
        try:
            reading.fetch = self.engine.fetch(extents)
        except Exception as error:  # noqa: BLE001  # the clients raise it
            reading.failure = error_as_json(error)
        begin = 0
        for number, span in order:
            client, request, _ = requested[number]
            lengths = extents.lengths[begin : begin + span.values]
            client.pieces[request].append(_Piece(reading, begin, span.first, lengths))
            begin += span.values


class _Client:
    """A process that is connected. It opens one file, or none: then it only keeps the reader alive."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.source: _Source | None = None
        self.ring: RingWriter | None = None
        self.slot_nbytes = 0
        self.pieces: dict[int, deque[_Piece]] = {}
        """What was not sent yet of each request; the oldest request comes first."""
        self.wanted: tuple[int, int] | None = None
        """The request that the client waits for, and how many of its values it waits for."""

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
        if piece.reading.failure:
            del self.pieces[request]
            self.connection.send(Say.FAILED, REQUEST.pack(request), piece.reading.failure)
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
            piece.reading.failure = error_as_json(error)
            return True
        self._next_is_sent(request)
        said = PLACED.pack(request, piece.first, len(piece.lengths), *slot)
        self.connection.send(Say.VALUES, said, *(() if placed is not None else (room,)))
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
        self.connection.close()
        if self.ring is not None:
            self.ring.close()
        self.pieces.clear()


class Server:
    """The node reader.

    Args:
        listener: a Unix socket that listens. It belongs to the server.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._clients: set[_Client] = set()
        self._sources: dict[_Key, _Source] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the last client has gone."""
        seconds: float | None = _FIRST_CLIENT_SECONDS
        had_clients = False  # a process of another user may knock first
        while self._await_events(seconds) and (self._clients or not had_clients):
            for source in self._sources.values():
                source.begin_requested()
            busy = [self._each(client, client.send_next) for client in list(self._clients)]
            had_clients = had_clients or bool(self._clients)
            if had_clients:
                seconds = 0 if any(busy) else None
        self._listener.close()
        self._selector.close()

    def _await_events(self, seconds: float | None) -> bool:
        """Receive what comes within ``seconds``. False if nothing does, and there is no client."""
        events = self._selector.select(seconds)
        for key, _ in events:
            client = key.data
            if client is None:
                self._accept()
            else:
                self._each(client, partial(self._receive, client))
        return bool(events or self._clients)

    def _accept(self) -> None:
        try:
            endpoint, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has gone
        except OSError:
            _logger.exception("the node reader takes no more clients: later ones start another node reader")
            self._selector.unregister(self._listener)
            self._listener.close()
            return
        client = _Client(Connection(endpoint))
        if client.connection.peer[1] != os.geteuid():
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        hello = json.dumps({"pid": os.getpid()}).encode()
        self._each(client, lambda: client.connection.send(Say.HELLO, hello))

    def _each(self, client: _Client, do: Callable[[], object]) -> bool:
        """Do something for a client; if that fails, or the client is lost, drop the client. Returns what was returned,
        as a truth value."""
        try:
            done = bool(do())
            sends = client.connection.unsent_nbytes > 0
        except ConnectionLost:
            self._drop(client)
            return False
        except Exception:
            _logger.exception("the node reader drops the client %d", client.connection.peer[0])
            self._drop(client)
            return False
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sends else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)
        return done

    def _receive(self, client: _Client) -> None:
        client.connection.flush()
        while (message := client.connection.receive()) is not None:
            self._obey(client, message)

    def _obey(self, client: _Client, message: Message) -> None:
        body = message.body
        match message.kind:
            case Say.OPEN:
                assert message.fd is not None
                self._open(client, message.fd, body)
            case Say.REQUEST:
                assert client.source is not None
                (request,), extents = REQUEST.unpack_from(body), extents_of(body)
                assert len(extents)
                client.source.requested.append((client, request, extents))
                client.pieces[request] = deque()
            case Say.WANT:
                client.wanted = WANT.unpack(body)
            case Say.CANCEL:
                client.pieces.pop(REQUEST.unpack(body)[0], None)
            case Say.RELEASE:
                assert client.ring is not None
                for sequence in np.frombuffer(body, np.int64).tolist():
                    client.ring.release(sequence)

    def _open(self, client: _Client, fd: int, body: memoryview) -> None:
        """Open a file for a client, and give it a ring.

        Args:
            fd: the file. It belongs to the server.
            body: an ``Opening``.
        """
        try:
            opening = Opening.of(body)
            client.ring = RingWriter(opening.ring_nbytes)
            client.slot_nbytes = min(_SLOT_NBYTES, opening.ring_nbytes // 4)
            client.source = self._source(fd, opening)
        except Exception as error:  # noqa: BLE001  # the client raises it
            os.close(fd)
            client.connection.send(Say.FAILED, REQUEST.pack(-1), error_as_json(error))
            return
        client.source.clients += 1
        ready = json.dumps({"engine": client.source.engine.name}).encode()
        client.connection.send(Say.READY, ready, fd=client.ring.fd)

    def _source(self, fd: int, opening: Opening) -> _Source:
        """The file of a descriptor: opened before, if other clients read the same file in the same way."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, opening.strategy)
        if (source := self._sources.get(key)) is not None:
            os.close(fd)
            return source
        engine = opening.strategy.open(fd, opening.mean_nbytes)
        return self._sources.setdefault(key, _Source(fd, engine, key))

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        self._clients.discard(client)
        client.close()
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
    Server(socket.socket(fileno=fd)).run()
