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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias, TypeVar

import numpy as np

from fastensor.data.coalescing import Extents, Integers
from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.engines.base import Engine, Fetch
from fastensor.data.engines.choice import Strategy
from fastensor.data.node.protocol import Failed, Needs, Opening, Request, Values, layout, sent_error, spans_of
from fastensor.data.ring import SlotWriter
from fastensor.data.serving import LocalClient, LocalServer

T = TypeVar("T")

_SLOT_NBYTES = 256 << 10
"""A slot has values of at most this many bytes together, or a quarter of the ring if that is less; but one at least."""
_LONGEST_VALUE_NBYTES = 4 << 30
"""A value of LMDB has less."""
_LARGEST_FILE_NBYTES = 1 << 62
_Key: TypeAlias = tuple[int, int, Strategy]
"""The device and the inode of a file, and how it is read."""


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


@dataclass(slots=True)
class _SharedFetch:
    """A fetch, which several requests may share; or the error with which it has failed."""

    fetch: Fetch | None = None
    failure: Exception | None = None


@dataclass(slots=True)
class _Piece:
    """Values that go into one slot."""

    number: int
    """In its request."""
    extents: Extents
    reading: _SharedFetch = field(default_factory=_SharedFetch)
    begin: int = 0
    """The number of the first of them in the fetch."""


def in_turns(requests: Iterable[Iterable[T]]) -> list[T]:
    """The pieces of several requests: the first piece of each, then the second one of each, and so on.

    >>> in_turns(["abc", "d", "ef"])
    ['a', 'd', 'e', 'b', 'f', 'c']
    """
    return [piece for turn in zip_longest(*requests) for piece in turn if piece is not None]


@dataclass(slots=True)
class _OpenFile:
    """A file that is open, and how it is read."""

    fd: int
    engine: Engine
    key: _Key
    requested: list[deque[_Piece]] = field(default_factory=list)
    """Requests that were not begun. Those that are not wanted any more have no pieces."""

    def begin_requested(self) -> None:
        """Begin what clients have requested, as one fetch."""
        pieces, self.requested = in_turns(self.requested), []
        if not pieces:
            return
        reading, begin = _SharedFetch(), 0
        for piece in pieces:
            piece.reading, piece.begin = reading, begin
            begin += len(piece.extents)
        offsets = np.concatenate([piece.extents.offsets for piece in pieces])
        lengths = np.concatenate([piece.extents.lengths for piece in pieces])
        try:
            reading.fetch = self.engine.fetch(Extents(offsets, lengths))
        except Exception as error:  # noqa: BLE001  # the clients raise it
            reading.failure = sent_error(error)


class _Client(LocalClient):
    """A client that reads one file; or none, and only keeps the node reader alive."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self.source: _OpenFile | None = None
        self.ring: SlotWriter
        self.slot_nbytes = 0
        self.pieces: dict[int, deque[_Piece]] = {}
        """Pieces of each request that were not sent yet, at least one; the oldest request comes first."""
        self.needs = Needs(-1, -1, [], [])

    def send_next(self) -> bool:
        """Send the next slot of values, or the error of a request, if there is one and there is room. Waits for the
        disk.

        Returns:
            Whether there may be more to send.
        """
        request = None if self.connection.has_unsent else self._next_request()
        if request is None:
            return False
        piece = self.pieces[request][0]
        if piece.reading.failure is not None:
            del self.pieces[request]
            self.connection.send(Failed(request, piece.reading.failure))
            return True
        places = layout(piece.extents.lengths)
        nbytes = int(places[-1])
        placed = self.ring.place(nbytes)
        if placed is None and not self._waits_for(request, piece):
            return False
        place, room = placed or (alone := bytearray(nbytes), memoryview(alone))
        try:
            _fill(room, piece, places)
        except Exception as error:  # noqa: BLE001  # the clients raise it
            if placed is not None:
                self.ring.release(placed[0].sequence)
            piece.reading.failure = sent_error(error)
            return True
        self._next_is_sent(request)
        self.connection.send(Values(request, piece.number, place))
        return True

    def _next_request(self) -> int | None:
        """Request that the client waits for, or else its oldest one."""
        waiting = self.pieces.get(self.needs.request)
        if waiting and self._waits_for(self.needs.request, waiting[0]):
            return self.needs.request
        return next(iter(self.pieces), None)

    def _waits_for(self, request: int, piece: _Piece) -> bool:
        return request == self.needs.request and piece.number <= self.needs.span

    def _next_is_sent(self, request: int) -> None:
        pieces = self.pieces[request]
        pieces.popleft()
        if not pieces:
            del self.pieces[request]

    def close(self) -> None:
        super().close()
        for pieces in self.pieces.values():
            pieces.clear()
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
                spans = spans_of(extents.lengths, client.slot_nbytes)
                pieces = deque(_Piece(place, extents.at(span)) for place, span in enumerate(spans))
                client.source.requested.append(pieces)
                client.pieces[number] = pieces
            case Needs() as needs:
                client.needs = needs
                for number in needs.cancelled:
                    client.pieces.pop(number, deque[_Piece]()).clear()
                for sequence in needs.dropped:
                    client.ring.release(sequence)
            case other:
                raise ConnectionLost(f"it sent {other!r}")

    def _open(self, client: _Client, fd: int, opening: Opening) -> None:
        """Open a file for a client, and give it a ring."""
        if client.source is not None:
            raise ConnectionLost("it opened a second file")
        try:
            client.ring = SlotWriter(opening.ring_nbytes)
            client.slot_nbytes = min(_SLOT_NBYTES, opening.ring_nbytes // 4)
            client.source = self._source(fd, opening)
        except Exception as error:  # noqa: BLE001  # the client raises it
            client.connection.send(Failed(-1, sent_error(error)))
            return
        client.connection.send((client.source.engine.name, client.slot_nbytes), fd=client.ring.fd)

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
        if source is not None and all(one.source is not source for one in self.clients.values()):
            del self._sources[source.key]
            source.engine.close()
            os.close(source.fd)


def _fill(room: memoryview, piece: _Piece, places: Integers) -> None:
    assert piece.reading.fetch is not None
    values = piece.reading.fetch.take(piece.begin, piece.begin + len(piece.extents))
    for place, value in zip(places.tolist(), values, strict=False):
        assert isinstance(value, memoryview)  # no engine of a node reader reads to a GPU
        room[place : place + len(value)] = value


def main(fd: int) -> None:
    """Run in a process of its own.

    Args:
        fd: the socket that listens.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client needs some descriptors
    NodeServer(socket.socket(fileno=fd)).run()
