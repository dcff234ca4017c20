"""The worker processes of a server."""

from __future__ import annotations

import os
import signal
import socket
from typing import NoReturn, Protocol

from fastensor.data.connection import Connection
from fastensor.provision.tasks import Task


class Main(Protocol):
    """What runs in a worker."""

    def __call__(self, connection: Connection, server_pid: int) -> NoReturn: ...


class WorkerProcess:
    """A worker, as the server sees it.

    Args:
        main: what runs in it, after a fork.
    """

    def __init__(self, main: Main) -> None:
        ours, theirs = socket.socketpair()
        server_pid = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            main(Connection(theirs), server_pid)
        theirs.close()
        self.connection = Connection(ours)
        self.tasks: dict[int, Task] = {}
        """By number what it does, or will do, in that order."""
        self.writing: dict[int, Task] = {}
        """By number the tasks whose samples it writes to the cache."""

    def end(self) -> int:
        """Kill it, unless it has ended. Returns the status with which it has ended, or minus a signal."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        return os.waitstatus_to_exitcode(status)
