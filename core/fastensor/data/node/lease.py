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

NAME_VARIABLE = "FASTENSOR_NODE_READER"
"""The environment variable by which processes name the node reader that they share."""
_RETRY_SECONDS = 0.01
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What all ranks of a job have in common, and no other job on the machine has."""
_START = """
import json, os, sys
if os.fork():
    os._exit(0)
sys.path[:] = json.loads(sys.argv[2])
from fastensor.data.node.server import main
main(int(sys.argv[1]))
"""
"""The reader is nobody's child: it may outlive the process that has started it, and nobody has to wait for it."""


def name_of_job() -> str:
    """The name of this job's node reader: processes with the same name share it."""
    if given := os.environ.get(NAME_VARIABLE):
        job = given
    elif "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        job = " ".join(os.environ.get(name, "") for name in _JOB_VARIABLES)
    else:
        job = secrets.token_hex()
    return f"fastensor-data-{os.geteuid()}-{hashlib.blake2b(job.encode(), digest_size=12).hexdigest()}"


class NodeReader:
    """The node reader of a job, kept alive by this object.

    The first process that joins starts it. It runs until all processes that have joined have ended, or have dropped
    this object: the kernel tells it. So it leaves nothing behind, however they end. Its socket has a name, but no file.
    It is in a session of its own, so Ctrl-C in a terminal does not reach it.

    A pickled copy, and a forked child, can :meth:`connect`, but do not keep the reader alive on their own.

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
        """The process id of the reader, from its greeting."""
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
