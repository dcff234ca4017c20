"""The engine that has the node reader read, and takes the values from its ring."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from weakref import WeakValueDictionary

from fastensor.data.coalescing import Extents
from fastensor.data.connection import ConnectionLost, Conversation, Message
from fastensor.data.engines.base import Value
from fastensor.data.node.lease import NodeReader
from fastensor.data.node.protocol import Cancel, Failed, Opening, Release, Request, Wait, layout
from fastensor.data.ring import NO_SLOT, SlotReader
from fastensor.errors import NodeReaderError

_SILENT_SECONDS = 1800.0
"""A node reader that sends nothing for so long, although something is wanted, is taken to hang."""


class NodeEngine:
    """Reads by way of a node reader. See :class:`fastensor.data.engines.base.Engine`.

    Values are views of the ring of this process. While a value is kept, the node reader cannot reuse the slot that it
    came in. Other processes have rings of their own.

    Args:
        node: the node reader.
        fd: the file, open for reading. The node reader gets a descriptor of its own.
        opening: how the node reader reads, and the size of the ring. Requests of several processes that come at the
            same time are merged, too. The node reader chooses the engine ``"auto"`` when it opens the file for the
            first of the processes that read it.

    Raises:
        BackendUnavailableError: the engine cannot read this file.
        NodeReaderError: the node reader does not run, or has ended.
        OSError: there is no memory for the ring.
        ValueError: there is no such engine.
    """

    reads_ahead = True

    def __init__(self, node: NodeReader, fd: int, opening: Opening) -> None:
        self._connection = node.connect()
        self._reader_pid = node.pid
        self._numbers = itertools.count()
        self._fetches: WeakValueDictionary[int, NodeFetch] = WeakValueDictionary()
        self._cancelled: deque[int] = deque()
        """Requests whose fetches were dropped, and of which the node reader was not told yet."""
        with self._talking():
            self._connection.send(opening, fd=fd)
            answer = self._connection.awaited(_SILENT_SECONDS)
            if isinstance(answer.content, Failed):
                raise answer.content.error
            assert answer.fd is not None
            try:
                self._ring = SlotReader(answer.fd)
            finally:
                os.close(answer.fd)
        self.name = f"node/{answer.content.engine}"

    def fetch(self, extents: Extents) -> NodeFetch:
        number = next(self._numbers)
        fetch = NodeFetch(self, number, extents)
        self._fetches[number] = fetch
        weakref.finalize(fetch, self._cancelled.append, number).atexit = False
        with self._talking():
            self._send_credits()
            self._connection.send(Request(number, extents))
        return fetch

    def bring(self, fetch: NodeFetch, end: int) -> None:
        """Wait until the values of a fetch before number ``end`` have arrived, or the fetch has failed.

        Raises:
            NodeReaderError: the node reader has ended.
        """
        waits = False
        with self._talking():
            self._send_credits()
            while fetch.arrived < end and fetch.failure is None:
                message = self._connection.awaited(_SILENT_SECONDS) if waits else self._connection.receive()
                if message is not None:
                    self._dispatch(message)
                else:
                    self._connection.send(Wait(fetch.number, end))
                    waits = True

    def close(self) -> None:
        self._connection.close()

    def _send_credits(self) -> None:
        """Say what the node reader need not read, and which slots are free; and send what was left of requests."""
        while self._cancelled:
            self._connection.send(Cancel(self._cancelled.popleft()))
        if dropped := self._ring.dropped():
            self._connection.send(Release(dropped))
        self._connection.flush()

    def _dispatch(self, message: Message) -> None:
        content = message.content
        fetch = self._fetches.get(content.request)
        if isinstance(content, Failed):
            if fetch is not None:
                fetch.failure = content.error
            return
        has_slot = content.slot.sequence != NO_SLOT
        body = self._ring.view(content.slot) if has_slot else message.body.toreadonly()
        if fetch is not None:
            fetch.put(content.first, content.values, body)

    def _talking(self) -> Conversation:
        return Conversation(self._lost, self._connection)

    def _lost(self, error: ConnectionLost) -> NodeReaderError:
        return NodeReaderError(
            f"the process {self._reader_pid}, which reads for this machine, cannot be reached any more ({error}). It "
            f"was killed, perhaps for want of memory, or has failed: see its messages. Make the dataset anew; the "
            f"state of an LmdbLoader says where to go on"
        )


class NodeFetch:
    """See :class:`fastensor.data.engines.base.Fetch`."""

    def __init__(self, engine: NodeEngine, number: int, extents: Extents) -> None:
        self.number = number
        self.arrived = 0
        """Values before this number have arrived."""
        self.failure: Exception | None = None
        self._engine = engine
        self._lengths = extents.lengths
        self._values: deque[Value] = deque()
        """Values that have arrived, and were not taken. The last one is number ``arrived - 1``."""

    def put(self, first: int, count: int, body: memoryview) -> None:
        """Add the next values, which have arrived.

        Raises:
            ConnectionLost: these are not the next values.
        """
        lengths = self._lengths[first : first + count]
        places = layout(lengths)
        if (first, count, len(body)) != (self.arrived, len(lengths), places[-1]):
            raise ConnectionLost("it sent other values than were requested")
        begins = places[:-1]
        self._values.extend(
            body[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
        )
        self.arrived = first + count

    def take(self, begin: int, end: int) -> list[Value]:
        self._engine.bring(self, end)
        if self.arrived < end:
            assert self.failure is not None
            raise self.failure
        for _ in range(begin - (self.arrived - len(self._values))):
            self._values.popleft()
        return [self._values.popleft() for _ in range(begin, end)]
