"""The embedded engine, as processes use it: they start the server, or find it, and take batches from their rings."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from fastensor.data import processes
from fastensor.data.connection import Bytes, Connection, ConnectionLost, Message
from fastensor.data.plan import EpochPlan
from fastensor.data.ring import RingReader, Slot
from fastensor.errors import ProvisionError
from fastensor.provision.embedded.protocol import (
    BATCH,
    CREDIT,
    BadMessage,
    Hello,
    Say,
    as_bytes,
    hello_of,
    joined,
    json_of,
    start_as_json,
    text_of,
)
from fastensor.provision.engine import Cost, EngineLost, Pushed, Registration, Start
from fastensor.provision.pickling import pickling

LOCAL = "local:"
SEVERAL = "the embedded engine serves one machine: for several, start the service with engine='ray'"
_ANSWER_SECONDS = 60
"""For how long the server may take to start, and to answer. It has to import torch."""
_HEALTH_SECONDS = 30
"""A server that does not answer for so long is taken to hang. It never waits for anything that is slow."""


class EmbeddedEngine:
    """See :class:`fastensor.provision.engine.Engine`.

    Args:
        address: ``local:NAME``.
        spec_fd: what is to be served, if nothing is yet; see :mod:`fastensor.provision.embedded.spec`. It belongs to
            the engine. None: somebody else starts the service.
        seconds: for how long to try, at the beginning and when the service was lost.

    Raises:
        ProvisionError: the service cannot be started, or reached, or refuses.
    """

    def __init__(
        self,
        address: str,
        *,
        spec_fd: int | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self.address = address
        self._name = checked_address(address).removeprefix(LOCAL)
        self._spec_fd: int | None = None
        if spec_fd is not None:
            self._keep(spec_fd)
        self._seconds = seconds
        self.has_started = False
        """True if this object has started the service."""
        self._lease: Connection | None = None
        self._process = os.getpid()
        """The process that has opened the lease."""
        try:
            self.recover()
        except BaseException:
            self.close()
            raise

    def register(self, registration: Registration) -> EmbeddedFeed:
        function = registration.collate_fn
        with pickling("collate_fn", "Define it at the top of a module"):
            pickled = b"" if function is None else pickle.dumps(function)
        self._talking()  # or who has left would start it again
        head = {name: getattr(registration, name) for name in ("buffer_nbytes", "ahead", "on_error")}
        return EmbeddedFeed(self._connected(), joined(head, pickled), pid=self._pid)

    def preload(self, plan: EpochPlan, epoch: int) -> None:
        with _Conversation():
            self._talking().send(Say.PRELOAD, start_as_json(Start(plan, epoch, 0)))

    def health(self) -> dict[str, Any]:
        with _Conversation():
            self._talking().send(Say.ASK)
            return json_of(_answer(self._talking(), _HEALTH_SECONDS, Say.STATUS).body)

    def recover(self) -> None:
        before, self._lease, self._process = self._lease, self.joined(), os.getpid()
        if before is not None:
            before.close()  # not sooner, or what still runs might end

    @property
    def is_left(self) -> bool:
        """True if :meth:`close` was called."""
        return self._lease is None

    def joined(self) -> Connection:
        """A new connection to the service, which is started if it does not run, and can be."""
        try:
            return processes.joined(self._connected, self._start, none_runs=EngineLost, seconds=self._seconds)
        except EngineLost as error:
            raise ProvisionError(f"there is no data service at {self.address}: {error}") from error

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _talking(self) -> Connection:
        if self._lease is None:
            raise ProvisionError(f"the data service {self.address} was left: stop() was called")
        if self._process != os.getpid():  # a forked child would take what the service answers its parent
            self.recover()
        assert self._lease is not None
        return self._lease

    def _start(self) -> bool:
        """Start the service, if this process can. Returns whether it has."""
        if self._spec_fd is None:
            return False
        try:
            started = processes.start(self._name, "fastensor.provision.embedded.server")
        except (OSError, subprocess.SubprocessError) as error:
            raise ProvisionError(f"the data service cannot be started: {error}") from error
        self.has_started = self.has_started or started
        return started

    def _connected(self) -> Connection:
        """A new connection to the service, which has said hello, and knows what it serves.

        Raises:
            EngineLost: there is none.
        """
        with _Conversation():
            connection = self._reached()
            try:
                hello = self._hello(_answer(connection, _ANSWER_SECONDS, Say.HELLO))
                if self._spec_fd is not None and hello.facts is None:
                    connection.send(Say.SPEC, fd=self._spec_fd)
                    hello = self._hello(_answer(connection, _ANSWER_SECONDS, Say.HELLO))
                if hello.facts is None:
                    raise EngineLost("it was not told yet what to serve")
            except BaseException:
                connection.close()
                raise
            self._pid, self.facts = hello.pid, hello.facts
            return connection

    def _reached(self) -> Connection:
        try:
            return processes.reach(self._name)
        except PermissionError as error:
            raise ProvisionError(f"the data service {error}") from error

    def _hello(self, message: Message) -> Hello:
        """What the service says of itself. Keeps what it serves, so that this process, too, can start it again."""
        if message.fd is not None and self._spec_fd is None:
            self._keep(message.fd)
        elif message.fd is not None:
            os.close(message.fd)
        return hello_of(message.body)

    def _keep(self, spec_fd: int) -> None:
        self._spec_fd = spec_fd
        weakref.finalize(self, os.close, spec_fd)


class EmbeddedFeed:
    """See :class:`fastensor.provision.engine.Feed`.

    Args:
        connection: to the server; it belongs to the feed.
        said: the registration.
        pid: of the server, which is killed if it hangs.
    """

    def __init__(self, connection: Connection, said: tuple[Bytes, ...], *, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        try:
            with _Conversation():
                connection.send(Say.REGISTER, *said)
                answer = _answer(connection, _ANSWER_SECONDS, Say.READY)
                assert answer.fd is not None
                self._ring = RingReader(answer.fd, writable=True)
                os.close(answer.fd)
        except BaseException:
            connection.close()
            raise

    def start(self, start: Start) -> None:
        with _Conversation(self._connection):
            self._connection.send(Say.START, start_as_json(start))

    def pushed(self, seconds: float) -> Pushed | None:
        with _Conversation(self._connection):
            while True:
                message = self._connection.receive()
                if message is not None:
                    if message.kind != Say.STATUS:
                        return self._pushed(message)
                elif not self._connection.wait(seconds):
                    self._check_health()
                    return None

    def credit(self, generation: int, taken: int, *, waited_seconds: float) -> None:
        with _Conversation(self._connection):
            dropped = np.array(self._ring.dropped(), np.int64)
            self._connection.send(Say.CREDIT, CREDIT.pack(generation, taken, waited_seconds), as_bytes(dropped))

    def close(self) -> None:
        self._connection.close()

    def _pushed(self, message: Message) -> Pushed:
        generation, index, *numbers = BATCH.unpack_from(message.body)
        slot, cost = Slot(*numbers[:3]), Cost(*numbers[3:])
        if message.kind == Say.FAILED:
            return Pushed(generation, index, memoryview(b""), cost, text_of(message, begin=BATCH.size))
        if message.kind != Say.BATCH:
            raise BadMessage(f"the server has sent a message of kind {message.kind}")
        if message.fd is not None:
            try:
                return Pushed(generation, index, memoryview(mmap.mmap(message.fd, slot.nbytes)), cost)
            finally:
                os.close(message.fd)
        return Pushed(generation, index, self._ring.view(slot), cost)

    def _check_health(self) -> None:
        """Ask the server for something that it answers at once. One that hangs is killed, or nobody could start
        another one."""
        self._connection.send(Say.ASK)
        if not self._connection.wait(_HEALTH_SECONDS):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            raise ConnectionLost(f"the server does not answer for {_HEALTH_SECONDS} s")


def checked_address(address: str) -> str:
    """The address of a service.

    Raises:
        ProvisionError: it is none.
    """
    if address.startswith((LOCAL, "ray:")):
        return address
    raise ProvisionError(
        f"expected the address of a data service, {LOCAL}NAME or ray:CLUSTER/NAME, found {address!r}; {SEVERAL}"
    )


def _answer(connection: Connection, seconds: float, *expected: Say) -> Message:
    """Wait for a message of a kind that is expected.

    Raises:
        ProvisionError: the service refuses.
        ConnectionLost: there is no answer.
    """
    deadline = time.monotonic() + seconds
    while (message := connection.receive()) is None:
        if not connection.wait(max(deadline - time.monotonic(), 0)):
            raise ConnectionLost(f"there was no answer for {seconds:g} s")
    if message.kind == Say.REFUSED:
        raise ProvisionError(text_of(message))
    if message.kind not in expected:
        raise BadMessage(f"expected {expected}, found a message of kind {message.kind}")
    return message


class _Conversation:
    """A block that talks to a server, and whose lost connections are raised as :class:`EngineLost`.

    No generator: since Python 3.12, an exception that a generator's context manager replaces is in a reference cycle
    with the frames of all callers. So what they hold would stay, until Python's garbage collector runs, whenever a
    service is started: the first attempt to reach it fails.

    Args:
        connection: closed by what interrupts the block: half a message may have come or gone.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._connection is not None:
            self._connection.close()
        if isinstance(error, ConnectionLost | BadMessage | OSError):
            raise EngineLost(str(error)) from error
