"""The engine on Ray, as processes use it: they start the actors of a service, or find them, and take batches from the
object store."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastensor.data.plan import EpochPlan
from fastensor.errors import ProvisionError
from fastensor.provision.engine import Cost, EngineLost, Facts, Pushed, Registration, Start
from fastensor.provision.feeding import Flow, Place, places_from
from fastensor.provision.making import UserObjects
from fastensor.provision.ray import cluster, names
from fastensor.provision.ray.calls import BatchRequest, Made, facts_of, pickled, publish
from fastensor.provision.ray.memory import owned
from fastensor.provision.ray.server import RayServer
from fastensor.provision.ray.supervisor import Supervisor

PREFIX = "ray:"
"""Prefix of the addresses of services on Ray: ``ray:CLUSTER/NAME``; see
:func:`fastensor.provision.ray.cluster.join`."""
_ANSWER_SECONDS = 60
"""Seconds that actors may take to start, and to answer. They import torch."""
_HEALTH_SECONDS = 35
"""The supervisor answers within this time, even if a server hangs."""
_RETRY_SECONDS = 0.05
_MOST_CALLS = 1 << 14
"""At the same time, by an actor. Those that wait for other servers must leave room for these servers' calls."""
_MOST_RETRIES = 3
"""Number of times that a server is started again, before its end is an error."""
_live: weakref.WeakSet[RayEngine | RayFeed] = weakref.WeakSet()
_of_parent: list[Any] = []
"""In a forked child, what is Ray's of the parent. To drop it would take locks that the parent's threads may hold."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Source and options of a service, for whoever may have to start it."""

    facts: Facts
    contents: bytes
    """Pickled, see :func:`fastensor.provision.ray.calls.pickled`."""


class RayEngine:
    """See :class:`fastensor.provision.engine.ServiceEngine`.

    Args:
        name: of the service.
        address: of the cluster, see :func:`fastensor.provision.ray.cluster.join`.
        spec: what is to be served, if nothing is yet. None: somebody else has started the service.
        seconds: for how long to try, at the beginning and when the service was lost.

    Raises:
        ProvisionError: the service cannot be started, or reached.
    """

    def __init__(self, name: str, *, address: str, spec: Spec | None = None, seconds: float = _ANSWER_SECONDS) -> None:
        _live.add(self)
        self._name = name
        self._where = address
        self._spec = spec
        self._seconds = seconds
        self._client = secrets.token_hex(8)
        self._loaders = 0
        self._membership: cluster.Membership | None = None
        self._supervisor: Any = None
        self._stays: tuple[Any, ...] = ()
        """Reference to the call that the supervisor ends when this client leaves. It is lost when this process ends,
        which the supervisor notices."""
        self._dropped: weakref.finalize[..., RayEngine] | None = None
        """Leaves when this engine is forgotten, and :meth:`close` was not called."""
        try:
            self.recover()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{PREFIX}{self._joined().address}/{self._name}"

    def register(self, registration: Registration) -> RayFeed:
        function = registration.collate_fn
        said = b"" if function is None else pickled(function, "collate_fn")
        self._joined()
        self._loaders += 1
        return RayFeed(self, f"{self._client}/{self._loaders}", registration, said)

    def preload(self, plan: EpochPlan, epoch: int) -> None:
        with self.talking():
            for server in self._servers:
                server.preload.remote(Start(plan, epoch, 0))
            self.ask_supervisor("check")

    def health(self) -> dict[str, Any]:
        with self.talking():
            found: dict[str, Any] = self.ask_supervisor("status")
            return found

    def recover(self) -> None:
        membership = cluster.join(self._where)
        was_lost = self._membership is not None
        self._leave_cluster()
        self._membership = membership
        deadline = time.monotonic() + self._seconds
        while not self._has_joined(deadline, was_lost=was_lost):
            time.sleep(_RETRY_SECONDS)
        self._dropped = weakref.finalize(self, _leave, membership, self._supervisor, self._client)

    def close(self) -> None:
        """Leave. The cluster, too, if this process is in it for the service only."""
        if self._membership is None:
            return
        if self._supervisor is not None and self._membership.is_alive:
            self.abandon(self._stays)
            with suppress(RayError):
                ray.get(names.once(self._supervisor.leave).remote(self._client), timeout=_HEALTH_SECONDS)
        self._supervisor, self._stays = None, ()
        self._leave_cluster()

    def _leave_cluster(self) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        if self._membership is not None:
            self._membership.leave()
        self._dropped = self._membership = None

    def end(self) -> None:
        """End the service, whoever uses it."""
        with self.talking(), suppress(RayActorError):  # it answers no more
            ray.get(self._supervisor.end.remote(), timeout=_HEALTH_SECONDS)

    def ask_supervisor(self, what: str) -> Any:
        """Call a method of the supervisor.

        Raises:
            RayError: it does not answer.
        """
        return ray.get(getattr(self._supervisor, what).remote(), timeout=_HEALTH_SECONDS)

    def server_for(self, index: int) -> Any:
        """The server that makes the batch of this number."""
        return self._servers[index % len(self._servers)]

    def forget(self, loader: str, asked: Iterable[Any]) -> None:
        """Have the servers forget a loader, and what it has asked for."""
        self.abandon(asked)
        if self._membership is not None and self._membership.is_alive:
            with suppress(RayError):
                for server in self._servers:
                    names.once(server.forget).remote(loader)

    def abandon(self, calls: Iterable[Any]) -> None:
        """Wait for the answers to calls no more. If the service ends before it has answered them, Ray does not say on
        the terminal that it will call again."""
        if self._membership is not None and self._membership.is_alive:
            for call in calls:
                ray.cancel(call)

    def _joined(self) -> cluster.Membership:
        if self._membership is None:
            raise ProvisionError(f"the data service {self._name} was left: stop() was called")
        self._membership.check_process()
        return self._membership

    def _has_joined(self, deadline: float, *, was_lost: bool) -> bool:
        """Use the service. False if it is about to end: try again.

        Args:
            deadline: when to give up.
            was_lost: whether the supervisor has to find out first what has ended.

        Raises:
            ProvisionError: it cannot be used, and the deadline has passed.
        """
        try:
            self._supervisor = self._found()
            if was_lost:
                self.ask_supervisor("check")
            self._join()
        except (EngineLost, RayError, ValueError) as error:
            if time.monotonic() > deadline:
                raise ProvisionError(f"there is no data service {self._name}: {error}") from error
            return False
        return True

    def _join(self) -> None:
        """Use the service.

        Raises:
            EngineLost: it has ended, or is about to.
            RayError, ValueError: it ends just now.
        """
        if not ray.get(self._supervisor.join.remote(self._client), timeout=self._seconds):
            raise EngineLost("it is about to end")
        self.facts: Facts = facts_of(self._name)
        self._servers = [names.server_of(self._name, number) for number in range(self.facts.workers)]
        stays = self._supervisor.stay.remote(self._client)
        self._stays = (self._supervisor.watch.remote(self._client, [stays]), stays)

    def _found(self) -> Any:
        """The supervisor of the service, which is started if it does not run, and can be.

        Raises:
            EngineLost: it does not run.
        """
        try:
            return names.supervisor_of(self._name)
        except ValueError as error:
            if self._spec is None:
                raise EngineLost("it does not run") from error
        return start(self._name, self._spec)

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Say in the words of engines that the service is lost."""
        if not self._joined().is_alive:
            raise EngineLost("the cluster of Ray has ended")
        try:
            yield
        except (RayError, ConnectionError) as error:
            raise EngineLost(str(error)) from error


class RayFeed:
    """See :class:`fastensor.provision.engine.Feed`.

    Each batch is asked for as soon as the loader has credit for it, and the answer waited for when it is needed. So
    what is ahead of the trainer is in the making, or in the object store.

    Args:
        engine: of this process.
        name: of the loader.
        registration: of the loader.
        collate_fn: a pickle.
    """

    def __init__(self, engine: RayEngine, name: str, registration: Registration, collate_fn: bytes) -> None:
        _live.add(self)
        self._engine = engine
        self._name = name
        self._collate_fn = collate_fn
        self._flow: Flow[Place] = Flow(0, registration)
        self._asked: dict[Any, Place] = {}
        """By the reference to the answer what was asked for."""
        self._waited: float | None = None
        """Seconds that the trainer has waited for the last batch, until servers were told."""
        self._kept = _Kept()
        self._forget = weakref.finalize(self, engine.forget, name, self._asked)
        """Has the servers forget the loader, also when it is dropped without :meth:`close`."""
        self._forget.atexit = False

    def start(self, start: Start) -> None:
        with self._engine.talking():
            self._engine.abandon(self._asked)
            self._asked.clear()
            self._flow.begin(start, places_from(start))
            self._ask()

    def pushed(self, seconds: float) -> Pushed | None:
        with self._engine.talking():
            self._ask()
            if not self._asked:
                time.sleep(seconds)  # nothing can come
                return None
            came, _ = ray.wait([*self._asked], timeout=seconds)
            if not came:
                self._engine.ask_supervisor("check")
                return None
            return self._pushed(came[0])

    def credit(self, generation: int, taken: int, *, waited_seconds: float) -> None:
        with self._engine.talking():
            self._waited = waited_seconds
            self._flow.credit(generation, taken, waited_seconds, now=time.monotonic())
            self._ask()

    def close(self) -> None:
        self._forget()
        self._asked.clear()

    def _ask(self) -> None:
        """Ask for batches as far as credit and the buffer reach; for one at least, if none is ahead."""
        flow = self._flow
        while flow.has_credit and (not flow.ahead or self._has_room()):
            place = flow.issue()
            assert flow.plan is not None
            request = BatchRequest(
                self._name,
                flow.plan,
                place,
                flow.taken,
                flow.needed,
                self._waited,
                self._collate_fn,
                self._engine.facts.workers,
                flow.registration.on_error,
            )
            self._waited = None
            self._asked[self._engine.server_for(place.index).batch.remote(request)] = place

    def _has_room(self) -> bool:
        expected = (len(self._asked) + 1) * self._flow.room_nbytes
        return self._kept.nbytes + expected <= self._flow.registration.buffer_nbytes

    def _pushed(self, ref: Any) -> Pushed:
        place = self._asked.pop(ref)
        try:
            made: Made | None = ray.get(ref)
        except ActorUnavailableError as error:
            failure = f"{_MOST_RETRIES + 1} servers have ended while they made it: {error}"
            made = Made(None, Cost(0, 0, 0), 0.0, failure)
        if made is None:
            raise EngineLost("the service has ended")
        if made.content is None:
            return Pushed(place.generation, place.index, memoryview(b""), made.cost, made.failure)
        self._flow.measured(len(made.content), made.seconds)
        return Pushed(place.generation, place.index, self._kept.keep(made.content), made.cost)


class _Kept:
    """Counts the bytes of batches that something in this process still uses."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._dropped: deque[int] = deque()  # views are dropped in any thread, at any time

    @property
    def nbytes(self) -> int:
        """Bytes of all batches that are used now."""
        self._nbytes -= sum(self._dropped.popleft() for _ in range(len(self._dropped)))
        return self._nbytes

    def keep(self, content: npt.NDArray[np.uint8]) -> memoryview:
        """The bytes of a batch, which may be written to. They count while they or a view of them are kept."""
        memory = np.frombuffer(owned(content), np.uint8)
        self._nbytes += len(memory)
        weakref.finalize(memory, self._dropped.append, len(memory)).atexit = False
        return memory.data


def _keep_what_is_of_the_parent() -> None:
    for one in _live:
        _of_parent.append(dict(vars(one)))
        if isinstance(one, RayFeed):
            _of_parent.extend(one._asked)


os.register_at_fork(after_in_child=_keep_what_is_of_the_parent)


def _leave(membership: cluster.Membership, supervisor: Any, client: str) -> None:
    """A client has gone without saying so."""
    if membership.is_alive:
        with suppress(RayError):
            supervisor.leave.remote(client)
    membership.leave()


def joined(facts: Facts, contents: UserObjects, name: str, *, address: str, local_ray: str) -> RayEngine:
    """Join a service, which is started if it does not run.

    Args:
        facts: of the service.
        contents: the user's objects.
        name: of the service.
        address: of the cluster, see :class:`fastensor.provision.DataService`.
        local_ray: the name of the Ray of this machine that is used without an address.

    Raises:
        ProvisionError: something cannot be pickled; or see :class:`RayEngine`.
    """
    said = pickled(contents, "the source, or a transform,")
    where = address or os.environ.get("RAY_ADDRESS", "")
    return RayEngine(name, address=local_ray if where in ("", "local") else where, spec=Spec(facts, said))


def found(address: str, *, seconds: float) -> RayEngine:
    """Join a service that another process has started.

    Args:
        address: its own.
        seconds: for how long to try.

    Raises:
        ProvisionError: there is none.
    """
    where, _, name = address.removeprefix(PREFIX).rpartition("/")
    if not where or not name:
        raise ProvisionError(f"expected {PREFIX}CLUSTER/NAME, found {address!r}")
    return RayEngine(name, address=where, seconds=seconds)


def end(address: str, *, seconds: float) -> None:
    """End a service, whoever uses it.

    Args:
        address: its own.
        seconds: for how long to try.

    Raises:
        ProvisionError: there is none.
    """
    engine = found(address, seconds=seconds)
    try:
        engine.end()
    except EngineLost as error:
        raise ProvisionError(f"the data service {address} does not answer: {error}") from error
    finally:
        engine.close()


def start(name: str, spec: Spec) -> Any:
    """Start the actors of a service, unless another process has. Returns the supervisor.

    Raises:
        EngineLost: it ends just now.
    """
    facts = publish(name, spec.facts, spec.contents)
    options = {
        "namespace": names.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,  # what else the user does in the cluster is not held up
        "max_restarts": -1,
        "max_concurrency": _MOST_CALLS,
    }
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    for number in range(facts.workers):  # in turn, so that each machine keeps some of the samples
        of_server = {
            "name": names.name_of_server(name, number),
            "max_task_retries": _MOST_RETRIES,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True),
            "memory": 1,  # what needs nothing at all, Ray puts anywhere
        }
        ray.remote(RayServer).options(**options, **of_server).remote(name, number, facts)
    of_supervisor = {"name": name, "max_task_retries": -1}
    return ray.remote(Supervisor).options(**options, **of_supervisor).remote(name, facts.workers)
