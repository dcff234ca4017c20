"""Finding the node reader of a job, or starting it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastensor.data import processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.errors import NodeReaderError

NAME_VARIABLE = "FASTENSOR_NODE_READER"
"""The environment variable by which processes name the node reader that they share."""


def name_of_job() -> str:
    """The name of this job's node reader: processes with the same name share it. Outside of a job, a new name."""
    return processes.name_of_service("data", os.environ.get(NAME_VARIABLE))


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
        timeout: for how many seconds to try.

    Raises:
        NodeReaderError: the reader cannot be started, does not answer, or belongs to somebody else.
    """

    def __init__(self, name: str | None = None, *, timeout: float = processes.ANSWER_SECONDS) -> None:
        self.name = name or name_of_job()
        with self._in_words():
            self._lease: Connection | None
            start = partial(processes.start, self.name, "fastensor.data.node.server")
            self._lease, greeting = processes.joined(self.name, start, timeout)
        self.pid = int(greeting.content)

    def connect(self) -> Connection:
        """A new connection to the reader.

        Raises:
            NodeReaderError: there is no reader, it does not answer, or belongs to somebody else.
        """
        with self._in_words():
            return processes.connected(self.name)[0]

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, OSError) as error:
            raise NodeReaderError(
                f"the process that reads for this machine ({self.name}) does not run: {error}. If it failed, its "
                f"messages say why; if it was killed, make the dataset anew; the state of an LmdbLoader says where to "
                f"go on"
            ) from error

    def close(self) -> None:
        """Stop keeping the reader alive."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lease": None}
