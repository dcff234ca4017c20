"""Processes that serve the others of a machine. They are found by a name; the first one that needs one starts it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from fastensor.data.connection import Connection

_RETRY_SECONDS = 0.01
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What all ranks of a job have in common, and no other job on the machine has."""
_START = """
import importlib, json, os, sys
if os.fork():
    os._exit(0)
sys.path[:] = json.loads(sys.argv[3])
importlib.import_module(sys.argv[2]).main(int(sys.argv[1]))
"""
"""The process is nobody's child: it may outlive the one that has started it, and nobody has to wait for it."""


def name_of_service(kind: str, job: str | None, *more: str) -> str:
    """A name that processes of one user and one job have in common.

    Args:
        kind: what the service is for.
        job: names the job. By default its launcher does; without one, the name is like no other.
        more: what else services of one job may differ in.
    """
    if not job and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        job = " ".join(os.environ.get(name, "") for name in _JOB_VARIABLES)
    digest = hashlib.blake2b("\n".join([job or secrets.token_hex(), *more]).encode(), digest_size=12)
    return f"fastensor-{kind}-{os.geteuid()}-{digest.hexdigest()}"


def reach(name: str) -> Connection:
    """Connect to the service of this name.

    Raises:
        PermissionError: it belongs to somebody else.
        OSError: there is none.
    """
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def start(name: str, module: str) -> bool:
    """Start the service of this name, unless another process has.

    Args:
        module: its function ``main`` gets the number of a Unix socket that listens, in a process of its own. That is in
            a session of its own, so Ctrl-C in a terminal does not reach it.

    Returns:
        whether this call has started it.

    Raises:
        OSError, subprocess.SubprocessError: Python cannot be started.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(name))
        except OSError:  # the name is taken
            return False
        listener.listen(1024)
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        subprocess.run(
            [sys.executable, "-c", _START, str(listener.fileno()), module, paths],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    return True


def joined(
    connect: Callable[[], Connection], start: Callable[[], bool], *, none_runs: type[Exception], seconds: float
) -> Connection:
    """A connection to a service, which is started if there is none.

    Args:
        connect: raises ``none_runs`` without a service; also if it is about to end.
        start: returns whether it has started one; if not, another process has.
        seconds: for how long to try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect()
        except none_runs:  # none runs; or one is about to end, or was started just now
            if time.monotonic() > deadline:
                raise
        if start():
            return connect()
        time.sleep(_RETRY_SECONDS)


def _address(name: str) -> str:
    return f"\0{name}"  # in the abstract namespace of Linux: no file
