"""Finding the node reader of a job, or starting it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time

from fastensor.data.connection import Connection, ConnectionLost
from fastensor.data.node.protocol import Say, json_of
from fastensor.errors import NodeReaderError
from fastensor.files import launchers

_RETRY_SECONDS = 0.01
_START = """
import json, os, sys
if os.fork():
    os._exit(0)
sys.path[:] = json.loads(sys.argv[2])
from fastensor.data.node.server import main
main(int(sys.argv[1]))
"""
"""The program of the reader. It forks and leaves its parent: the reader may outlive the process that has started it,
which would otherwise have to wait for it."""


def name_of_job() -> str:
    """The name of this job's node reader: processes with the same name share it. Outside of a job, a new name."""
    job = launchers.job() or secrets.token_hex()
    return f"fastensor-data-{os.geteuid()}-{hashlib.blake2b(job.encode(), digest_size=12).hexdigest()}"


class NodeReader:
    """The node reader of a job. This object keeps it running.

    The first process that makes such an object starts the reader. The reader ends when all processes of the job have
    ended, however they end, or have dropped their objects: it holds a connection to each, and the kernel says when one
    is closed. It leaves nothing behind: its socket has a name, but no file. It is in a session of its own, so Ctrl-C in
    a terminal does not reach it.

    A pickled copy can :meth:`connect`, but does not keep the reader running, and neither does a forked child. But if a
    process is killed, its forked children still have copies of its connection: the reader then outlives them, too.

    Args:
        name: of the job, see :func:`name_of_job`.
        timeout: for how many seconds to wait for the reader, which has to import torch first.

    Raises:
        NodeReaderError: the reader cannot be started, does not answer, or belongs to somebody else.
    """

    def __init__(self, name: str | None = None, *, timeout: float = 60) -> None:
        self.name = name or name_of_job()
        self._timeout = timeout
        self._lease: Connection | None = self._joined()

    def _joined(self) -> Connection:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self.connect()
            except NodeReaderError:  # none runs; or one is about to end, or was started just now
                if time.monotonic() > deadline:
                    raise
            if self._start():
                return self.connect()
            time.sleep(_RETRY_SECONDS)

    def connect(self) -> Connection:
        """A new connection to the reader.

        Raises:
            NodeReaderError: there is no reader, it does not answer, or belongs to somebody else.
        """
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            endpoint.connect(self._address)
        except OSError as error:
            endpoint.close()
            raise NodeReaderError(
                f"the process that reads for this machine ({self.name}) does not run: {error}. If it was killed, make "
                f"the dataset anew; the state of an LmdbLoader says where to go on"
            ) from error
        connection = Connection(endpoint)
        try:
            self.pid = self._greeted(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greeted(self, connection: Connection) -> int:
        """Wait for the reader's greeting. Returns the reader's process id."""
        _, uid = connection.peer
        if uid != os.geteuid():
            raise NodeReaderError(f"the node reader {self.name} belongs to user {uid}, not to user {os.geteuid()}")
        deadline = time.monotonic() + self._timeout
        try:
            while (message := connection.receive()) is None:
                if not connection.wait(max(deadline - time.monotonic(), 0)):
                    raise NodeReaderError(f"the node reader {self.name} has not answered for {self._timeout:g} s")
        except ConnectionLost as error:
            raise NodeReaderError(
                f"the node reader {self.name} has ended before it answered; if it failed, its messages say why"
            ) from error
        assert message.kind == Say.HELLO
        return int(json_of(message.body)["pid"])

    def _start(self) -> bool:
        """Start the reader, unless another process has. Returns whether it did."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(self._address)
            except OSError:  # the name is taken
                return False
            listener.listen(1024)
            paths = json.dumps([path or os.getcwd() for path in sys.path])
            try:
                subprocess.run(
                    [sys.executable, "-c", _START, str(listener.fileno()), paths],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise NodeReaderError(f"the process that reads for this machine cannot be started: {error}") from error
        return True

    @property
    def _address(self) -> str:
        return f"\0{self.name}"  # in the abstract namespace of Linux: no file

    def close(self) -> None:
        """Stop keeping the reader alive."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lease": None}
