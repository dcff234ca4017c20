"""Starting a service again for clients that cannot: those of other machines.

Whoever has started a service finds out that it has ended when it needs the next batch. Ranks wait for each other, so it
may wait just then for a rank of another machine, which waits for the service. So a thread looks after a service that
listens for others.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from fastensor.data.connection import Connection, ConnectionLost
from fastensor.errors import ProvisionError

_CHECK_SECONDS = 0.2
"""How long the thread may go on after its engine has gone."""
_log = logging.getLogger(__name__)


class Restarting(Protocol):
    """What the thread needs of an engine. It uses both in its own time."""

    @property
    def is_left(self) -> bool:
        """Whether nobody uses the service by this engine any more."""

    def joined(self) -> Connection:
        """A new connection to the service, which is started if it does not run."""


def watch(engine: Restarting) -> None:
    """Start the service of an engine again whenever it ends, until the engine is left, or gone."""
    arguments = weakref.ref(engine), engine.joined()
    threading.Thread(target=_keep_running, args=arguments, name="fastensor-service-watch", daemon=True).start()


def _keep_running(found: Callable[[], Restarting | None], connection: Connection) -> None:
    while (engine := found()) is not None and not engine.is_left:
        del engine
        if _is_alive(connection):
            continue
        connection.close()
        if (engine := found()) is None or engine.is_left:
            return
        try:
            connection = engine.joined()
        except ProvisionError as error:
            _log.warning("The data service has ended, and cannot be started again: %s", error)
            return
    connection.close()


def _is_alive(connection: Connection) -> bool:
    """Whether the service runs. Waits for some time that it ends."""
    try:
        connection.wait(_CHECK_SECONDS)
        while connection.receive() is not None:
            pass
    except ConnectionLost:
        return False
    return True
