"""The engine on Ray, as processes use it: they start the actors of a service, or find them, and take batches from the
object store."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from fastensor.data.plan import EpochPlan
from fastensor.errors import ProvisionError
from fastensor.provision.engine import Cost, EngineLost, Facts, Pushed, Registration, Start
from fastensor.provision.feeding import Flow
from fastensor.provision.making import UserObjects
from fastensor.provision.ray import cluster, names
from fastensor.provision.ray.calls import BatchRequest, Made, Service, pickled, pickled_contents
from fastensor.provision.ray.supervisor import MOST_RETRIES, Supervisor

PREFIX = "ray:"
"""Prefix of the addresses of services on Ray: ``ray:CLUSTER/NAME``; see
:func:`fastensor.provision.ray.cluster.join`."""
_ANSWER_SECONDS = 60
"""Seconds that actors may take to start, and to answer. They import torch."""
_HEALTH_SECONDS = 35
"""The supervisor answers within this time, even if a server hangs."""
_RETRY_SECONDS = 0.05
_live: weakref.WeakSet[RayEngine | RayFeed] = weakref.WeakSet()
_of_parent: list[Any] = []
"""In a forked child, what is Ray's of the parent. To drop it would take locks that the parent's threads may hold."""


class RayEngine:
    """See :class:`fastensor.provision.engine.ServiceEngine`.

    Args:
        name: of the service.
        address: of the cluster, see :func:`fastensor.provision.ray.cluster.join`.
        spec: facts and :func:`~fastensor.provision.ray.calls.pickled_contents` of what is to be served, if nothing is
            yet. None: somebody else has started the service.
        seconds: for how long to try, at the beginning and when the service was lost.

    Raises:
        ProvisionError: the service cannot be started, or reached.
    """

    def __init__(
        self, name: str, *, address: str, spec: tuple[Facts, bytes] | None = None, seconds: float = _ANSWER_SECONDS
    ) -> None:
        _live.add(self)
        self._name = name
        self._where = address
        self._spec = spec
        self._seconds = seconds
        self._client = secrets.token_hex(8)
        self._contents_key = ""
        """Key of what this process has kept for a service that it starts."""
        self._membership: cluster.Membership | None = None
        self._supervisor: Any = None
        self._stays: tuple[Any, ...] = ()
        """Reference to the call that the supervisor ends when this client leaves. It is lost when this process ends,
        which the supervisor notices."""
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
        return RayFeed(self, registration, said)

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

    def close(self) -> None:
        """Leave. The cluster, too, if this process is in it for the service only."""
        if self._membership is None:
            return
        if self._supervisor is not None and self._membership.is_alive:
            self.abandon(self._stays)
            with suppress(RayError):
                ray.get(names.once(self._supervisor.leave).remote(self._client), timeout=_HEALTH_SECONDS)
        self._supervisor, self._stays = None, ()
        if self._contents_key and self._membership.is_alive:
            with suppress(RayError):
                self._drop_contents()
        self._leave_cluster()

    def _drop_contents(self) -> None:
        """Keep no longer what a service was to serve that has not started."""
        try:
            names.supervisor_of(self._name)
        except ValueError:
            names.drop(self._contents_key)
        self._contents_key = ""

    def _leave_cluster(self) -> None:
        if self._membership is not None:
            self._membership.leave()
        self._membership = None

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
        found: Service | None = ray.get(self._supervisor.join.remote(self._client), timeout=self._seconds)
        if found is None:
            raise EngineLost("it is about to end")
        if self._contents_key not in ("", found.contents_key):  # another process has started it meanwhile
            names.drop(self._contents_key)
        self.facts, self._contents_key = found.facts, ""
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
        if self._contents_key:  # of a service that has ended before this process had joined it
            names.drop(self._contents_key)
        self._contents_key = f"{self._name}/{secrets.token_hex(8)}"
        facts, contents = self._spec
        names.keep(self._contents_key, contents)
        service = Service(self._name, facts, self._contents_key)
        return names.actor(Supervisor, self._name, max_task_retries=-1).remote(service)

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
        registration: of the loader.
        collate_fn: a pickle.
    """

    def __init__(self, engine: RayEngine, registration: Registration, collate_fn: bytes) -> None:
        _live.add(self)
        self._engine = engine
        self._collate_fn = collate_fn
        self._flow = Flow(0, registration)
        self._asked: dict[Any, Start] = {}
        """By the reference to the answer what was asked for."""
        self._waited: float | None = None
        """Seconds that the trainer has waited for the last batch, until servers were told."""

    def start(self, start: Start) -> None:
        with self._engine.talking():
            self.close()
            self._flow.begin(start)
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
            self._flow.take(generation, taken)
            self._ask()

    def close(self) -> None:
        self._engine.abandon(self._asked)
        self._asked.clear()

    def _ask(self) -> None:
        """Ask for batches as far as credit and the buffer reach; for one at least, if none is ahead."""
        flow = self._flow
        buffer_nbytes = flow.registration.buffer_nbytes
        while flow.has_credit and (not flow.ahead or (flow.ahead + 1) * flow.room_nbytes <= buffer_nbytes):
            batch = flow.issue()
            request = BatchRequest(batch, self._waited, self._collate_fn, flow.registration.on_error)
            self._waited = None
            self._asked[self._engine.server_for(batch.index).batch.remote(request)] = batch

    def _pushed(self, ref: Any) -> Pushed:
        batch = self._asked.pop(ref)
        try:
            made: Made | None = ray.get(ref)
        except ActorUnavailableError as error:
            failure = f"{MOST_RETRIES + 1} servers have ended while they made it: {error}"
            made = Made(None, Cost(0, 0, 0), failure)
        if made is None:
            raise EngineLost("the service has ended")
        if made.content is None:
            return Pushed(batch.generation, batch.index, memoryview(b""), made.cost, made.failure)
        self._flow.measured(len(made.content))
        content = np.require(made.content, requirements="W")  # what Ray's object store shows is read-only: a copy
        return Pushed(batch.generation, batch.index, content.data, made.cost)


def _keep_what_is_of_the_parent() -> None:
    for one in _live:
        _of_parent.append(dict(vars(one)))
        if isinstance(one, RayFeed):
            _of_parent.extend(one._asked)


os.register_at_fork(after_in_child=_keep_what_is_of_the_parent)


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
    spec = facts, pickled_contents(contents)
    where = address or os.environ.get("RAY_ADDRESS", "")
    return RayEngine(name, address=local_ray if where in ("", "local") else where, spec=spec)


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
