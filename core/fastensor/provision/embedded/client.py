"""The embedded engine, as processes use it: they start the server, or find it, and take batches from their rings."""

from __future__ import annotations

import os
import pickle
import signal
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastensor.data import processes
from fastensor.data.connection import Connection, ConnectionLost, Conversation, Message
from fastensor.data.plan import EpochPlan
from fastensor.data.ring import SlotReader, mapped
from fastensor.errors import ProvisionError
from fastensor.provision.embedded.protocol import AskStatus, BatchReady, Credit, Hello, Register, Registered
from fastensor.provision.engine import EngineLost, Pushed, Registration, Start
from fastensor.provision.pickling import pickling

LOCAL = "local:"
SEVERAL = "the embedded engine serves one machine: for several, start the service with engine='ray'"
_HEALTH_SECONDS = 30
"""A server that does not answer for so long is taken to hang. It never waits for anything that is slow."""


class EmbeddedEngine:
    """See :class:`fastensor.provision.engine.ServiceEngine`.

    Args:
        address: ``local:NAME``.
        spec_fd: what is to be served, if nothing is yet; see :mod:`fastensor.provision.embedded.spec`. It belongs to
            the engine. None: somebody else starts the service.
        seconds: for how long to try, at the beginning and when the service was lost.

    Raises:
        ProvisionError: the service cannot be started, or reached, or refuses.
    """

    def __init__(self, address: str, *, spec_fd: int | None = None, seconds: float = processes.ANSWER_SECONDS) -> None:
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
        with _conversation():
            connection = self._said_hello(*processes.connected(self._name))
        return EmbeddedFeed(connection, Register(replace(registration, collate_fn=None), pickled), pid=self._pid)

    def preload(self, plan: EpochPlan, epoch: int) -> None:
        with _conversation():
            self._talking().send(Start(plan, epoch, 0))

    def health(self) -> dict[str, Any]:
        with _conversation():
            self._talking().send(AskStatus())
            return dict(_answer(self._talking(), _HEALTH_SECONDS, dict).content)

    def recover(self) -> None:
        before = self._lease
        try:
            lease = self._said_hello(*processes.joined(self._name, self._start, self._seconds))
        except OSError as error:
            raise ProvisionError(f"the data service {error}") from error
        except ConnectionLost as error:
            raise ProvisionError(f"there is no data service at {self.address}: {error}") from error
        self._lease, self._process = lease, os.getpid()  # not sooner, or a forked child would talk with its parent's
        if before is not None:
            before.close()  # not sooner, or what still runs might end

    @property
    def is_left(self) -> bool:
        """True if :meth:`close` was called."""
        return self._lease is None

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
        started = processes.start(self._name, "fastensor.provision.embedded.server", self._spec_fd)
        self.has_started = self.has_started or started
        return started

    def _said_hello(self, connection: Connection, greeting: Message) -> Connection:
        """Note what the service says of itself. Keeps what it serves, so that this process, too, can start it again.

        Raises:
            ConnectionLost: it is no data service.
        """
        if greeting.fd is not None and self._spec_fd is None:
            self._keep(greeting.fd)
        elif greeting.fd is not None:
            os.close(greeting.fd)
        if not isinstance(greeting.content, Hello):
            connection.close()
            raise ConnectionLost(f"found a program that says {greeting.content!r}")
        self._pid, self.facts = greeting.content
        return connection

    def _keep(self, spec_fd: int) -> None:
        self._spec_fd = spec_fd
        weakref.finalize(self, os.close, spec_fd)


class EmbeddedFeed:
    """See :class:`fastensor.provision.engine.Feed`.

    Args:
        connection: to the server; it belongs to the feed.
        wanted: the loader.
        pid: of the server, which is killed if it hangs.
    """

    def __init__(self, connection: Connection, wanted: Register, *, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        with _conversation(connection):
            connection.send(wanted)
            answer = _answer(connection, processes.ANSWER_SECONDS, Registered)
            assert answer.fd is not None
            self._ring = SlotReader(answer.fd, writable=True)

    def start(self, start: Start) -> None:
        with _conversation(self._connection):
            self._connection.send(start)

    def pushed(self, seconds: float) -> Pushed | None:
        with _conversation(self._connection):
            while (message := self._connection.receive()) is None or isinstance(message.content, dict):
                if message is None and not self._connection.wait(seconds):
                    self._check_health()
                    return None
            return self._pushed(message)

    def credit(self, generation: int, taken: int, *, waited_seconds: float) -> None:
        with _conversation(self._connection):
            self._connection.send(Credit(generation, taken, waited_seconds, self._ring.dropped()))

    def close(self) -> None:
        self._connection.close()

    def _pushed(self, message: Message) -> Pushed:
        ready: BatchReady = message.content
        content = memoryview(b"")
        if message.fd is not None:
            content = mapped(message.fd, writable=True).data
        elif not ready.failure:
            content = self._ring.view(ready.slot)
        return Pushed(ready.generation, ready.number, content, ready.cost, ready.failure)

    def _check_health(self) -> None:
        """Ask the server for something that it answers at once. One that hangs is killed, or nobody could start
        another one."""
        self._connection.send(AskStatus())
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


def _answer(connection: Connection, seconds: float, expected: type[Any]) -> Message:
    """Wait for an answer of the type that is expected.

    Raises:
        ProvisionError: the service refuses.
        ConnectionLost: there is no answer.
    """
    message = connection.awaited(seconds)
    if isinstance(message.content, ProvisionError):
        raise message.content
    if not isinstance(message.content, expected):
        raise ConnectionLost(f"expected {expected.__name__}, found {message.content!r}")
    return message


def _conversation(closes: Connection | None = None) -> Conversation:
    return Conversation(lambda error: EngineLost(str(error)), closes)
