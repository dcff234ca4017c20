"""A client, as the server sees it."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np

from fastensor.data.connection import Connection
from fastensor.data.ring import RingWriter, Slot
from fastensor.data.skipping import OnError
from fastensor.provision.embedded.protocol import BATCH, CREDIT, BadMessage, Hello, Say, checked, parted
from fastensor.provision.engine import Cost, Facts, Registration
from fastensor.provision.feeding import Batch, Stream
from fastensor.provision.metrics import Served

_LONGEST_NBYTES = 256 << 20
"""Clients send no longer messages: pickles of functions, and numbers."""
_UNSENT_NBYTES = 64 << 20
_MOST = {"buffer_nbytes": 1 << 36, "ahead": 1 << 20}


class Client:
    """A process that is connected. It has a loader, or none: then it keeps the server alive, and asks.

    Args:
        endpoint: connected. It belongs to the client.
    """

    def __init__(self, endpoint: socket.socket, number: int) -> None:
        self.connection = Connection(endpoint)
        self.number = number
        self.connection.longest_nbytes = _LONGEST_NBYTES
        self.stream: Stream | None = None
        """Its loader."""
        self.pickled = b""
        """The collate function."""
        self.served = Served()
        """Counts of what it was sent."""

    @property
    def registered(self) -> Stream:
        """Its loader.

        Raises:
            BadMessage: it has none.
        """
        if self.stream is None:
            raise BadMessage("a message came for a loader that is not registered")
        return self.stream

    @property
    def is_behind(self) -> bool:
        """Whether it takes what is sent too slowly to be sent more."""
        return self.connection.unsent_nbytes > _UNSENT_NBYTES

    def say_hello(self, facts: Facts | None, spec_fd: int | None) -> None:
        """Tell it what the service is."""
        self.connection.send(Say.HELLO, Hello(os.getpid(), facts).as_json(), fd=spec_fd)

    def say_status(self, status: dict[str, Any]) -> None:
        """Answer an ``ASK``."""
        self.connection.send(Say.STATUS, json.dumps(status).encode())

    def refuse(self, text: str) -> None:
        """Say why something is not done."""
        self.connection.send(Say.REFUSED, text.encode())

    def register(self, body: memoryview) -> None:
        """Serve a loader, if there is memory for its batches.

        Raises:
            BadMessage: it makes no sense.
        """
        head, pickled = parted(body)
        registration = checked(lambda: Registration(**head))
        for name, most in _MOST.items():
            if type(number := getattr(registration, name)) is not int or not 1 <= number <= most:
                raise BadMessage(f"{name} is {number!r}")
        if registration.on_error not in get_args(OnError):
            raise BadMessage(f"on_error is {registration.on_error!r}")
        if self.stream is not None:
            raise BadMessage("it has a loader already")
        try:
            ring = RingWriter(registration.buffer_nbytes)
        except (OSError, ValueError, MemoryError) as error:
            self.refuse(f"there is no memory for batches: {error}")
            return
        self.stream, self.pickled = Stream(self.number, registration, ring=ring), bytes(pickled)
        self.connection.send(Say.READY, fd=ring.fd)

    def take_credit(self, body: memoryview) -> None:
        """The trainer was given batches, and has dropped others.

        Raises:
            BadMessage: it has not got these.
        """
        generation, taken, waited_seconds = checked(CREDIT.unpack_from, body)
        if not 0 <= waited_seconds < math.inf:
            raise BadMessage(f"it has waited {waited_seconds} s")
        self.registered.credit(generation, taken, waited_seconds, now=time.monotonic())
        self.served = replace(self.served, waits=self.served.waits.with_wait(waited_seconds))
        for sequence in checked(partial(np.frombuffer, dtype=np.int64), body[CREDIT.size :]).tolist():
            checked(self.registered.ring.release, sequence)

    def push(self, batch: Batch, slot: Slot, cost: Cost, fd: int | None) -> None:
        """Send a batch, which is in a slot, or in memory of its own."""
        self.served = self.served.with_batch(nbytes=slot.nbytes, **cost._asdict())
        self.connection.send(Say.BATCH, BATCH.pack(batch.generation, batch.index, *slot, *cost), fd=fd)

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
        self.connection.close()
        if self.stream is not None:
            self.stream.is_gone = True
            self.stream.ring.close()
