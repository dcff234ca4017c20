"""The engine that has the node reader read, and takes the values from its ring."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from functools import partial
from weakref import WeakValueDictionary

from fastensor.data.coalescing import Extents
from fastensor.data.connection import Conversation
from fastensor.data.engines.base import Fetch, ReadsFetch
from fastensor.data.node.lease import NodeReader
from fastensor.data.node.protocol import Failed, Needs, Opening, Request, Values, as_reads
from fastensor.data.ring import Slot, SlotReader
from fastensor.errors import NodeReaderError

_SILENT_SECONDS = 1800.0
"""A node reader that sends nothing for so long, although something is wanted, is taken to hang."""
_FAILURE = -1


class _Arrived(dict[int, memoryview | Exception]):
    """By number the spans of a request that have arrived and are not used yet; and what it has failed with."""


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
        OSError: the node reader has no memory for the ring.
        ValueError: there is no such engine.
    """

    reads_ahead = True

    def __init__(self, node: NodeReader, fd: int, opening: Opening) -> None:
        self._connection = node.connect()
        self._reader_pid = node.pid
        self._numbers = itertools.count()
        self._arrived: WeakValueDictionary[int, _Arrived] = WeakValueDictionary()
        """By request what has arrived, as long as somebody may take it."""
        self._cancelled: deque[int] = deque()
        """Requests whose fetches were dropped, and of which the node reader was not told yet."""
        with self._talking():
            self._connection.send(opening, fd=fd)
            answer = self._connection.awaited(_SILENT_SECONDS)
            if answer.fd is not None:
                self._ring = SlotReader(answer.fd)
        if isinstance(answer.content, Failed):
            self.close()
            raise answer.content.error
        engine, self._slot_nbytes = answer.content
        self.name = f"node/{engine}"

    def fetch(self, extents: Extents) -> Fetch:
        number, arrived = next(self._numbers), _Arrived()
        self._arrived[number] = arrived
        weakref.finalize(arrived, self._cancelled.append, number).atexit = False
        with self._talking():
            self._connection.send(Request(number, extents))
        reads = as_reads(extents.lengths, self._slot_nbytes)
        return ReadsFetch(extents, reads, lambda read: None, partial(self._awaited, number, arrived))

    def _awaited(self, number: int, arrived: _Arrived, span: int) -> memoryview:
        """Wait for the values of a span. Says which slots are free, and what the node reader need not read.

        Raises:
            NodeReaderError: the node reader has ended.
            Exception: the request has failed.
        """
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        with self._talking():
            for message in self._connection.arrived():
                self._dispatch(message.content)
            needs = Needs(number, span, cancelled, self._ring.dropped())
            if span not in arrived or needs.cancelled or needs.dropped:
                self._connection.send(needs)
            while span not in arrived and _FAILURE not in arrived:
                self._dispatch(self._connection.awaited(_SILENT_SECONDS).content)
        found = arrived.pop(span) if span in arrived else arrived[_FAILURE]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._connection.close()

    def _dispatch(self, content: Values | Failed) -> None:
        arrived = self._arrived.get(content.request, _Arrived())  # of a fetch that was dropped all is dropped
        if isinstance(content, Failed):
            arrived[_FAILURE] = content.error
        elif isinstance(content.place, Slot):
            arrived[content.span] = self._ring.view(content.place)
        else:
            arrived[content.span] = memoryview(content.place).toreadonly()

    def _talking(self) -> Conversation:
        return Conversation(self._lost, self._connection)

    def _lost(self, error: Exception) -> NodeReaderError:
        return NodeReaderError(
            f"the process {self._reader_pid}, which reads for this machine, cannot be reached any more ({error}). It "
            f"was killed, perhaps for want of memory, or has failed: see its messages. Make the dataset anew; the "
            f"state of an LmdbLoader says where to go on"
        )
