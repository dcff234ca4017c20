"""The supervisor of a service on Ray: an actor that knows who uses it, and whether its servers are well.

It takes part in nothing that is quick: batches go from servers to clients. When nobody uses the service any more, it
ends the servers, and itself. Ray starts it again if it is killed, and its clients then tell it again that they are
there. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, TaskCancelledError

from fastensor.provision.metrics import Served
from fastensor.provision.ray import names
from fastensor.provision.ray.calls import withdraw

_log = logging.getLogger(__name__)
_FIRST_CLIENT_SECONDS = 60
"""Seconds that the supervisor waits for its first client: whoever has started it may have died."""
_CHECK_SECONDS = 5
_HEALTH_SECONDS = 60
"""A server that does not answer for so long is taken to hang. It answers at once, unless it is starting, which takes
seconds, or the user's code keeps Python itself from going on."""
_ANSWER_SECONDS = 5
"""Seconds that a status waits for a server."""
_STOP_SECONDS = 5
"""The end of the service does not wait longer for a server."""
_ANSWERED_SECONDS = 0.1
"""Seconds within which whoever has had the service end gets an answer."""


class Supervisor:
    """See the module. All methods are called by Ray, in the event loop of the actor.

    Args:
        name: of the service.
        servers: how many there are.
    """

    # Ray awaits it, so that there is an event loop
    async def __init__(self, name: str, servers: int) -> None:  # type: ignore[misc]
        self._name = name
        self._servers = [names.server_of(name, number) for number in range(servers)]
        self._clients: dict[str, asyncio.Event] = {}
        """By name those that use the service; the event says that they do not any more."""
        self._is_ending = False
        self._killed = 0
        """Number of servers that hung and were killed."""
        self._running = [asyncio.create_task(self._look_after(number)) for number in range(servers)]
        self._running.append(asyncio.create_task(self._await_clients()))

    async def join(self, client: str) -> bool:
        """A process wants to use the service. False if that is about to end: ask again."""
        if not self._is_ending:
            self._clients.setdefault(client, asyncio.Event())
        return not self._is_ending

    async def stay(self, client: str) -> None:
        """Returns when a client has left. What this returns belongs to the client, and is lost when that ends."""
        await self._clients.setdefault(client, asyncio.Event()).wait()

    async def watch(self, client: str, stays: list[Any]) -> None:
        """Wait until a client leaves or ends, however it does.

        Args:
            client: its name.
            stays: what :meth:`stay` has not returned yet.
        """
        try:
            await stays[0]
        except TaskCancelledError:
            pass  # it leaves
        except RayError as error:
            _log.warning("A client of the data service has ended: %s", type(error).__name__)
        finally:
            self._leave(client)

    async def leave(self, client: str) -> None:
        """A client uses the service no more."""
        self._leave(client)

    async def check(self) -> None:
        """Ask all servers whether they are well. One that has ended for good ends the service, which can then be
        started again."""
        await self._statuses()

    async def status(self) -> dict[str, Any]:
        """State of the service, for people and monitors."""
        found = await self._statuses()
        answers = [one for one in found if one is not None]
        counts: dict[str, int] = {}
        for one in answers:
            for name, count in one["counts"].items():
                counts[name] = counts.get(name, 0) + count
        counts["is_filled"] = counts.get("is_filled") == len(self._servers)
        servers = [
            {"number": number, "pid": one and one["pid"], "node": one and one["node"]}
            for number, one in enumerate(found)
        ]
        return {
            "pid": os.getpid(),
            "clients": len(self._clients),
            "loaders": _loaders([one["loaders"] for one in answers]),
            "servers": servers,
            "servers_killed": self._killed,
            **counts,
        }

    async def end(self) -> None:
        """End the service, whoever uses it."""
        self._end()

    def _leave(self, client: str) -> None:
        left = self._clients.pop(client, None)
        if left is None:
            return
        left.set()
        if not self._clients:
            self._end()
            return
        for server in self._servers:
            names.once(server.forget_client).remote(client)

    def _end(self) -> None:
        """Have the service end. A client that goes on starts it again, and says again what is served."""
        if not self._is_ending:
            self._is_ending = True
            for task in self._running:
                task.cancel()
            self._running = [asyncio.create_task(self._end_all())]

    async def _end_all(self) -> None:
        """End the servers, forget what is served, then end this actor: its name is free only when all have gone.

        Whatever fails, the rest is done: a supervisor that stayed would send all clients away, and nobody could start
        the service again.
        """
        try:
            with ExitStack() as ending:
                ending.callback(self._end_itself)
                ending.callback(withdraw, self._name)
                for server in self._servers:
                    ending.callback(ray.kill, server, no_restart=True)
                await self._stop_servers()  # now none of them asks another one any more
                await self._stop_servers()  # and none has been asked something that it has not answered
        except Exception:  # noqa: BLE001  # Ray's, or asyncio's; nobody else would tell of it
            _log.exception("Not all of the data service has ended as it should")

    def _end_itself(self) -> None:
        itself = names.supervisor_of(self._name)
        asyncio.get_running_loop().call_later(_ANSWERED_SECONDS, lambda: ray.kill(itself, no_restart=True))

    async def _stop_servers(self) -> None:
        """Have the servers answer all that they were asked, as far as they do so in time."""
        stops = [asyncio.create_task(_answer(names.once(server.stop).remote())) for server in self._servers]
        _, late = await asyncio.wait(stops, timeout=_STOP_SECONDS)
        for one in late:
            one.cancel()
        await asyncio.gather(*stops, return_exceptions=True)  # one that has ended has nothing to answer

    async def _await_clients(self) -> None:
        """End if the first client does not come."""
        await asyncio.sleep(_FIRST_CLIENT_SECONDS)
        if not self._clients:
            self._end()

    async def _look_after(self, number: int) -> None:
        """Kill a server that hangs, so that Ray starts it again."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                await self._answer_of(number, _HEALTH_SECONDS)
            except ActorUnavailableError:
                continue  # it ends again and again
            except TimeoutError:
                _log.warning("Server %d has not answered for %d s, and is replaced", number, _HEALTH_SECONDS)
                self._killed += 1
                ray.kill(self._servers[number], no_restart=False)

    async def _statuses(self) -> list[dict[str, Any] | None]:
        return await asyncio.gather(*(self._status_of(number) for number in range(len(self._servers))))

    async def _status_of(self, number: int) -> dict[str, Any] | None:
        """Status of a server; None if it does not answer, because it starts, ends or hangs."""
        try:
            return await self._answer_of(number, _ANSWER_SECONDS)
        except (TimeoutError, ActorUnavailableError):
            return None

    async def _answer_of(self, number: int, seconds: float) -> dict[str, Any] | None:
        """Answer of a server; None if it has ended for good, and the service with it.

        Raises:
            TimeoutError: it has not answered within some time.
            ActorUnavailableError: it ends again and again.
        """
        try:
            return await asyncio.wait_for(_answer(self._servers[number].status.remote()), seconds)
        except ActorDiedError as error:
            _log.warning("Server %d of the data service has ended for good: %s", number, error)
            self._end()
            return None


async def _answer(ref: Any) -> dict[str, Any]:
    found: dict[str, Any] = await ref
    return found


def _loaders(of_servers: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Counts of each loader, of all servers together."""
    served: dict[str, Served] = {}
    found: dict[str, dict[str, Any]] = {}
    for loaders in of_servers:
        for name, one in loaders.items():
            served[name] = served.get(name, Served()) + one.pop("served")
            known = found.setdefault(name, one)
            known |= {count: max(known[count], one[count]) for count in ("taken", "needed")}
    return [{**one, **served[name].summary()} for name, one in found.items()]
