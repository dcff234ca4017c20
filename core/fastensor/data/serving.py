"""A server for the processes of one user on one machine: one thread of one process, which ends with its last client.

Clients are found and lost by the kernel alone: it names the user of who connects, and says when a client has ended,
however it did. What goes wrong with one client ends its connection only.

There are two such servers of training data, and they are no sources of one. The node reader waits for the disk between
messages, and reads any file of a job for processes that decode by themselves, so it has no workers, and nothing of the
user. The data service (:mod:`fastensor.provision.embedded`) is there for one set of samples, runs the user's functions,
and must never wait: a loader that hears nothing takes it for dead. What both need is here, in ``connection.py``,
``processes.py`` and ``ring.py``.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from fastensor.data.connection import NO_ROOM, Connection, ConnectionLost, Message

_FIRST_CLIENT_SECONDS = 60
"""Seconds that a server waits for its first client: whoever has started it may have died."""
_FULL_SECONDS = 0.02
"""Seconds between attempts to accept somebody for whom no descriptor is free. All others wait as long, too."""
_log = logging.getLogger("fastensor")


class LocalClient:
    """A process that is connected. It may have nothing to say: then it keeps the server alive.

    Args:
        connection: to it. It belongs to this object.
        number: no other client of the server has had it.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.pid, self.uid = connection.peer

    def close(self) -> None:
        """Forget it."""
        self.connection.close()


C = TypeVar("C", bound=LocalClient)


class LocalServer(Generic[C]):
    """See the module. What is served, subclasses say.

    Args:
        listener: a Unix socket that listens. It belongs to the server.
        client: makes what the server knows of a client.
        greeting: the first message to each client.
        given: a descriptor that goes along.
    """

    def __init__(
        self,
        listener: socket.socket,
        client: Callable[[Connection, int], C],
        *,
        greeting: object,
        given: int | None = None,
    ) -> None:
        listener.setblocking(False)
        self.clients: dict[int, C] = {}
        """By their numbers."""
        self._listener = listener
        self._client = client
        self._greeting = greeting, given
        self._numbers = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._is_full = False
        """True if nobody can be let in for lack of descriptors or memory. Who has connected waits."""

    def obey(self, client: C, message: Message) -> None:
        """Do what a client wants. The descriptor of the message is closed afterwards."""

    def dropped(self, client: C) -> None:
        """A client has gone."""

    def work(self) -> bool:
        """Go on with what clients want. Returns whether there is more to do at once."""
        return False

    def run(self) -> None:
        """Serve until the last client has gone, or the first one has not come."""
        seconds: float | None = _FIRST_CLIENT_SECONDS
        had_clients = False  # somebody may knock and be gone before the first client comes
        while self.await_events(seconds) and (self.clients or not had_clients):
            has_more = self.work()
            had_clients = had_clients or bool(self.clients)
            if had_clients:
                seconds = 0 if has_more else None
        self.close()

    def await_events(self, seconds: float | None) -> bool:
        """Do what comes within ``seconds``. False if nothing does, and there is no client."""
        was_full, self._is_full = self._is_full, False
        if was_full:
            seconds = _FULL_SECONDS if seconds is None else min(seconds, _FULL_SECONDS)
        events = self._selector.select(seconds)
        if was_full:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for key, _ in events:
            if key.fd in self._selector.get_map():  # what came before may have ended this one
                key.data()
        return bool(events or self.clients or was_full)

    def close(self) -> None:
        """Let all clients go."""
        self._listener.close()
        self._selector.close()
        for client in self.clients.values():
            client.close()

    def listen(self, end: Connection, heard: Callable[[], object]) -> None:
        """Call ``heard`` whenever something has arrived, or the kernel takes more of what was not sent."""
        self._selector.register(end, selectors.EVENT_READ, heard)

    def ignore(self, end: Connection) -> None:
        """Listen no more."""
        self._selector.unregister(end)

    def watch(self, end: Connection) -> None:
        """Notice when the kernel takes more of what was not sent, if there is anything."""
        if end.fileno() < 0:
            return  # it was closed meanwhile
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.has_unsent else 0)
        key = self._selector.get_key(end)
        if key.events != events:
            self._selector.modify(end, events, key.data)

    def do_for(self, client: C, action: Callable[[], object]) -> bool:
        """Do something for a client, and drop it if that fails. Returns what was returned, as a truth value."""
        try:
            done = bool(action())
        except ConnectionLost:
            self._drop(client)
        except Exception:  # noqa: BLE001  # what goes wrong with one client ends its connection only
            _log.exception("a server drops the client that is process %d", client.pid)
            self._drop(client)
        else:
            self.watch(client.connection)
            return done
        return False

    def _accept(self) -> None:
        try:
            endpoint, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # or the listener would be reported again at once, and again
                self._selector.unregister(self._listener)
                self._is_full = True
            return  # or the client has gone
        client = self._client(Connection(endpoint), self._numbers)
        if client.uid != os.geteuid():
            client.close()
            return
        self._numbers += 1
        self.clients[client.number] = client
        self.listen(client.connection, partial(self.do_for, client, partial(self._receive, client)))
        content, given = self._greeting
        self.do_for(client, partial(client.connection.send, content, fd=given))

    def _receive(self, client: C) -> None:
        for message in client.connection.arrived():
            try:
                self.obey(client, message)
            finally:
                if message.fd is not None:
                    os.close(message.fd)

    def _drop(self, client: C) -> None:
        if self.clients.pop(client.number, None) is not None:
            self.ignore(client.connection)
            client.close()
            self.dropped(client)
