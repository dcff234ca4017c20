"""A client, as the server sees it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastensor.data.connection import Connection, ConnectionLost
from fastensor.data.ring import NO_SLOT, Slot, SlotWriter
from fastensor.data.serving import LocalClient
from fastensor.errors import ProvisionError
from fastensor.files.arguments import check_whole
from fastensor.provision.embedded.protocol import BatchReady, Credit, Register, Registered
from fastensor.provision.engine import Cost
from fastensor.provision.feeding import BatchStream
from fastensor.provision.metrics import Served
from fastensor.provision.tasks import Task

_MOST_AHEAD = 1 << 20
"""A loader may ask for so many batches ahead. One message of it may have the server count up to as many."""


class Client(LocalClient):
    """A client with a loader; or without one: such a client keeps the server alive, and asks for its status."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self.stream: BatchStream | None = None
        """Its loader."""
        self.collate_fn = b""
        """A pickle."""
        self.served = Served()
        """Counts of what it was sent."""

    @property
    def registered(self) -> BatchStream:
        """Its loader.

        Raises:
            ConnectionLost: it has none.
        """
        if self.stream is None:
            raise ConnectionLost("a message came for a loader that is not registered")
        return self.stream

    def register(self, wanted: Register) -> None:
        """Serve a loader, if there is memory for its batches.

        Raises:
            ConnectionLost: it has one already.
            TypeError, ValueError: a number makes no sense.
        """
        if self.stream is not None:
            raise ConnectionLost("it has a loader already")
        check_whole(wanted.registration.buffer_nbytes, "buffer_nbytes", at_least=1)
        check_whole(wanted.registration.ahead, "ahead", at_least=1)
        if wanted.registration.ahead > _MOST_AHEAD:
            raise ValueError(f"ahead is at most {_MOST_AHEAD}, found {wanted.registration.ahead}")
        try:
            ring = SlotWriter(wanted.registration.buffer_nbytes)
        except (OSError, ValueError, MemoryError) as error:
            self.connection.send(ProvisionError(f"there is no memory for batches: {error}"))
            return
        self.stream, self.collate_fn = BatchStream(self.number, wanted.registration, ring=ring), wanted.collate_fn
        self.connection.send(Registered(), fd=ring.fd)

    def take_credit(self, credit: Credit) -> None:
        """The trainer was given batches, and has dropped others."""
        self.registered.credit(credit.generation, credit.taken, credit.waited_seconds, now=time.monotonic())
        self.served = replace(self.served, waits=self.served.waits.with_wait(credit.waited_seconds))
        for sequence in credit.dropped:
            self.registered.ring.release(sequence)

    def push(self, task: Task, nbytes: int, cost: Cost, fd: int | None) -> None:
        """Send a batch that was made, which is in its slot, or in memory of its own."""
        batch, seconds = task.batch, time.monotonic() - task.begun_seconds
        assert batch is not None
        slot = self.registered.made(task.slot, nbytes, is_in_slot=fd is None, seconds=seconds)
        self.served = self.served.with_batch(nbytes=nbytes, **cost._asdict())
        self.connection.send(BatchReady(batch.generation, batch.index, slot, cost), fd=fd)

    def fail(self, task: Task, text: str) -> None:
        """Say why a batch cannot be made."""
        assert task.batch is not None
        self.registered.free(task.slot)
        slot, cost = Slot(NO_SLOT, 0, 0), Cost(0, 0, 0)
        self.connection.send(BatchReady(task.batch.generation, task.batch.index, slot, cost, text))

    def status(self) -> dict[str, Any]:
        """State of its loader."""
        stream = self.registered
        ranks = (stream.plan.rank, stream.plan.world_size) if stream.plan is not None else None
        return {
            "ranks": ranks,
            "taken": stream.taken,
            "ahead": stream.ahead,
            "needed": stream.needed,
            "buffered_nbytes": stream.ring.used_nbytes,
            **self.served.summary(),
        }

    def close(self) -> None:
        """Forget it, and its batches."""
        super().close()
        if self.stream is not None:
            self.stream.is_gone = True
            self.stream.ring.close()
