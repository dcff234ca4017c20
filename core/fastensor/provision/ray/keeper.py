"""The process that keeps a Ray of one machine, for the processes of one job: as long as one of them is connected.

So it does not matter which of them has started it, or ends first. Nobody else can reach that Ray: it listens on the
loopback interface, and asks for Ray's token, unless the user has switched that off.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
from functools import partial

import ray

from fastensor.data.connection import Connection, ConnectionLost
from fastensor.provision.ray.cluster import as_named

_FIRST_CLIENT_SECONDS = 60
"""For how long to wait for the first client: whoever has started this process may have died."""


def main(fd: int) -> None:
    """Run in a process of its own.

    Args:
        fd: a Unix socket that listens.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="fastensor-ray-")
    try:
        with as_named("127.0.0.1"):
            ray.init(
                "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder
            )
        with socket.socket(fileno=fd) as listener:
            _serve(listener, str(ray.get_runtime_context().gcs_address).encode())
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket, address: bytes) -> None:
    """Tell clients the address of Ray, until the last one has gone."""
    clients: set[Connection] = set()
    selector = selectors.DefaultSelector()

    def accept() -> None:
        client = Connection(listener.accept()[0])
        try:
            if client.peer[1] != os.geteuid():
                raise ConnectionLost("it belongs to somebody else")
            client.send(0, address)
        except ConnectionLost:
            client.close()
            return
        clients.add(client)
        selector.register(client, selectors.EVENT_READ, partial(drop, client))

    def drop(client: Connection) -> None:
        """Clients say nothing: what can be read is that they have gone."""
        selector.unregister(client)
        clients.discard(client)
        client.close()

    selector.register(listener, selectors.EVENT_READ, accept)
    seconds: float | None = _FIRST_CLIENT_SECONDS
    had_clients = False  # a process of another user may knock first
    while events := selector.select(seconds):
        for key, _ in events:
            key.data()
        had_clients = had_clients or bool(clients)
        if had_clients and not clients:
            return
        if had_clients:
            seconds = None
