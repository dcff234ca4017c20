"""Processes that serve the others of a machine. They are found by a name; the first one that needs one starts it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.files import launchers

ANSWER_SECONDS = 60
"""Seconds that a service may take to start, and to answer: it may have to import torch."""
_RETRY_SECONDS = 0.01
_START = """
import importlib, json, os, sys
if os.fork():
    os._exit(0)
fds = json.loads(sys.argv[1])
for fd in fds:
    os.set_inheritable(fd, False)  # programs that the service starts get none
sys.path[:] = json.loads(sys.argv[3])
importlib.import_module(sys.argv[2]).main(*fds)
"""
"""The program of the process. It forks and leaves its parent: it may outlive the process that has started it, which
would otherwise have to wait for it."""


def name_of_service(kind: str, job: str | None, *more: str) -> str:
    """A name that processes of one user and one job have in common.

    Args:
        kind: what the service is for.
        job: names the job. By default its launcher does; without one, the name is like no other.
        more: what else services of one job may differ in.
    """
    job = job or launchers.job() or secrets.token_hex()
    digest = hashlib.blake2b("\n".join([job, *more]).encode(), digest_size=12)
    return f"fastensor-{kind}-{os.geteuid()}-{digest.hexdigest()}"


def reach(name: str) -> Connection:
    """Connect to the service of this name.

    Raises:
        PermissionError: it belongs to somebody else.
        OSError: there is none.
    """
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        endpoint.connect(_address(name))
    except OSError:
        endpoint.close()
        raise
    connection = Connection(endpoint)
    _, uid = connection.peer
    if uid != os.geteuid():
        connection.close()
        raise PermissionError(f"{name} belongs to user {uid}, not to user {os.geteuid()}")
    return connection


def start(name: str, module: str, *given: int) -> bool:
    """Start the service of this name, unless another process has.

    Args:
        module: its function ``main`` gets the number of a Unix socket that listens, in a process of its own. That is in
            a session of its own, so Ctrl-C in a terminal does not reach it.
        given: further descriptors for ``main``.

    Returns:
        whether this call has started it.

    Raises:
        OSError: Python cannot be started.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        listener.listen(1024)
        fds = [listener.fileno(), *given]
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        status = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(fds), module, paths],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        ).returncode
    if status:
        raise OSError(f"{name} cannot be started: Python has ended with {status}")
    return True


def connected(name: str) -> tuple[Connection, Message]:
    """A connection to the service of this name, and its greeting.

    Raises:
        ConnectionLost: there is none, it has ended before it greeted, or hangs.
        PermissionError: it belongs to somebody else.
    """
    try:
        connection = reach(name)
    except PermissionError:
        raise
    except OSError as error:
        raise ConnectionLost(str(error)) from error
    try:
        return connection, connection.awaited(ANSWER_SECONDS)
    except BaseException:
        connection.close()
        raise


def joined(name: str, start: Callable[[], bool], seconds: float) -> tuple[Connection, Message]:
    """As :func:`connected`, and the service is started if there is none.

    Args:
        start: returns whether it has started one; if not, another process has.
        seconds: for how long to try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connected(name)
        except ConnectionLost:  # none runs; or one is about to end, or was started just now
            if time.monotonic() > deadline:
                raise
        if start():
            return connected(name)
        time.sleep(_RETRY_SECONDS)


def _address(name: str) -> str:
    return f"\0{name}"  # in the abstract namespace of Linux: no file
