"""Finding the node reader of a job, or starting it."""

from __future__ import annotations

import os
import subprocess
import time

from fastensor.data import processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.data.node.protocol import Say, json_of
from fastensor.errors import NodeReaderError

NAME_VARIABLE = "FASTENSOR_NODE_READER"
"""The environment variable by which processes name the node reader that they share."""


def name_of_job() -> str:
    """The name of this job's node reader: processes with the same name share it."""
    return processes.name_of_service("data", os.environ.get(NAME_VARIABLE))


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
        self._lease: Connection | None = processes.joined(
            self.connect, self._start, none_runs=NodeReaderError, seconds=timeout
        )

    def connect(self) -> Connection:
        """A new connection to the reader.

        Raises:
            NodeReaderError: there is no reader, it does not answer, or belongs to somebody else.
        """
        try:
            connection = processes.reach(self.name)
        except PermissionError as error:
            raise NodeReaderError(f"the node reader {error}") from error
        except OSError as error:
            raise NodeReaderError(
                f"the process that reads for this machine ({self.name}) does not run: {error}. If it was killed, make "
                f"the dataset anew; the state of an LmdbLoader says where to go on"
            ) from error
        try:
            self.pid = self._greeted(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greeted(self, connection: Connection) -> int:
        """The process id of the reader, from its greeting."""
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
        try:
            return processes.start(self.name, "fastensor.data.node.server")
        except (OSError, subprocess.SubprocessError) as error:
            raise NodeReaderError(f"the process that reads for this machine cannot be started: {error}") from error

    def close(self) -> None:
        """Stop keeping the reader alive."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lease": None}
