"""The worker processes of a server."""

from __future__ import annotations

from fastensor.data.connection import Connection
from fastensor.provision.embedded.forkserver import killed
from fastensor.provision.tasks import Task


class WorkerProcess:
    """A worker, as the server sees it.

    Args:
        pid: of a child of this process.
        place: which of the workers it is.
        connection: to it. It belongs to this object.
    """

    def __init__(self, pid: int, place: int, connection: Connection) -> None:
        self.pid = pid
        self.place = place
        self.connection = connection
        self.tasks: dict[int, Task] = {}
        """By number what it does, or will do, in that order."""
        self.writing: dict[int, Task] = {}
        """By number the tasks whose samples it writes to the cache."""

    def end(self) -> int:
        """Kill it, unless it has ended. Returns the status with which it has ended, or minus a signal."""
        self.connection.close()
        return killed(self.pid)
