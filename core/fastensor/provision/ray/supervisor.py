"""The supervisor of a service on Ray: an actor that knows who uses it, and whether its servers are well.

It takes part in nothing that is quick: batches go from servers to clients. When nobody uses the service any more, it
ends the servers, and itself. Ray starts it again if it is killed, and its clients then tell it again that they are
there. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastensor.provision.ray import names
from fastensor.provision.ray.calls import Service
from fastensor.provision.ray.server import RayServer

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
MOST_RETRIES = 3
"""Number of times that a server is started again, before its end is an error."""
_ANSWERED_SECONDS = 0.1
"""Seconds within which whoever has had the service end gets an answer."""


class Supervisor:
    """See the module. All methods are called by Ray, in the event loop of the actor.

    Args:
        service: whose servers are started, unless they run.
    """

    # Ray awaits it, so that there is an event loop
    async def __init__(self, service: Service) -> None:  # type: ignore[misc]
        self._service = service
        self._servers = _servers_of(service)
        self._clients: dict[str, asyncio.Event] = {}
        """By name those that use the service; the event says that they do not any more."""
        self._is_ending = False
        self._killed = 0
        """Number of servers that hung and were killed."""
        self._running = [asyncio.create_task(self._look_after(number)) for number in range(len(self._servers))]
        self._running.append(asyncio.create_task(self._await_clients()))

    async def join(self, client: str) -> Service | None:
        """A process wants to use the service. None if that is about to end: ask again."""
        if self._is_ending:
            return None
        self._clients.setdefault(client, asyncio.Event())
        return self._service

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
            self.leave(client)

    async def check(self) -> None:
        """Ask all servers whether they are well. One that has ended for good ends the service, which can then be
        started again."""
        await self._statuses()

    async def status(self) -> dict[str, Any]:
        """State of the service, for people and monitors."""
        found = await self._statuses()
        counts = Counter[str]()
        for one in found:
            counts.update(one["counts"] if one is not None else {})
        counts["is_filled"] = counts["is_filled"] == len(self._servers)
        servers = [
            {"number": number, "pid": one and one["pid"], "node": one and one["node"]}
            for number, one in enumerate(found)
        ]
        return {
            "pid": os.getpid(),
            "clients": len(self._clients),
            "servers": servers,
            "servers_killed": self._killed,
            **counts,
        }

    def leave(self, client: str) -> None:
        """A client uses the service no more."""
        left = self._clients.pop(client, None)
        if left is None:
            return
        left.set()
        if not self._clients:
            self.end()

    def end(self) -> None:
        """End the service, whoever uses it. A client that goes on starts it again, and says again what is served."""
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
                ending.callback(names.drop, self._service.contents_key)
                for server in self._servers:
                    ending.callback(ray.kill, server, no_restart=True)
                await self._stop_servers()  # now none of them asks another one any more
                await self._stop_servers()  # and none has been asked something that it has not answered
        except Exception:  # noqa: BLE001  # Ray's, or asyncio's; nobody else would tell of it
            _log.exception("Not all of the data service has ended as it should")

    def _end_itself(self) -> None:
        itself = names.supervisor_of(self._service.name)
        asyncio.get_running_loop().call_later(_ANSWERED_SECONDS, lambda: ray.kill(itself, no_restart=True))

    async def _stop_servers(self) -> None:
        """Have the servers answer all that they were asked, as far as they do so in time."""
        stops = [asyncio.wait_for(names.once(server.stop).remote(), _STOP_SECONDS) for server in self._servers]
        await asyncio.gather(*stops, return_exceptions=True)  # one that has ended has nothing to answer

    async def _await_clients(self) -> None:
        """End if the first client does not come."""
        await asyncio.sleep(_FIRST_CLIENT_SECONDS)
        if not self._clients:
            self.end()

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
            answer: dict[str, Any] = await asyncio.wait_for(self._servers[number].status.remote(), seconds)
            return answer
        except ActorDiedError as error:
            _log.warning("Server %d of the data service has ended for good: %s", number, error)
            self.end()
            return None


def _servers_of(service: Service) -> list[Any]:
    """The servers of a service, in turn on all nodes, so that each machine keeps some of the samples."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    return [
        names.actor(
            RayServer,
            names.name_of_server(service.name, number),
            max_task_retries=MOST_RETRIES,
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True),
            memory=1,  # what needs nothing at all, Ray puts anywhere
        ).remote(service, number)
        for number in range(service.facts.workers)
    ]
