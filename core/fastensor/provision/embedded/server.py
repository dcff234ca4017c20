"""The server: one thread of one process, which has workers make batches, and pushes them to clients.

It touches no sample, and runs nothing of the user. It goes round: takes what has come; gives work to workers that have
none, first for the loader that has the fewest batches ahead; and reads ahead for the cache when no loader needs a
worker. A loader is given batches as far as its credit and its ring reach. One that has none left is always given one:
if it keeps old batches, and its ring has no room, the batch comes in memory of its own.

A client that ends, however it does, is seen by the end of its connection. A worker that ends is replaced, and what it
was doing is done again; a batch that has ended several workers is an error of its loader. The server ends with its last
client, and the workers with it.

Workers are forked from a process that has imported the user's script once for all of them
(:mod:`fastensor.provision.embedded.forkserver`). They come when it has.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.ring import shared_memory
from fastensor.data.serving import LocalServer
from fastensor.files.arguments import check_whole
from fastensor.provision.embedded.clients import Client
from fastensor.provision.embedded.forkserver import ChildProcess, ForkServer, adopt_orphans
from fastensor.provision.embedded.protocol import (
    AddLoader,
    AskStatus,
    Broken,
    Credit,
    ForgetLoader,
    Hello,
    Register,
    SamplesStored,
    StoreSamples,
)
from fastensor.provision.embedded.spec import facts_of
from fastensor.provision.engine import Start, cost_of_batch
from fastensor.provision.placement import Placement, placements, worker_cpus
from fastensor.provision.tasks import Task, Tasks
from fastensor.provision.work import Done

_log = logging.getLogger(__name__)
_TASKS_PER_WORKER = 2
"""One is done, and one is waiting, so that the worker need not."""


class WorkerProcess(ChildProcess):
    """A worker, as the server sees it.

    Args:
        place: which of the workers it is.
    """

    def __init__(self, pid: int, connection: Connection, place: int) -> None:
        super().__init__(pid, connection)
        self.place = place
        self.tasks: dict[int, Task] = {}
        """By number what it does, or will do, in that order."""
        self.writing: dict[int, Task] = {}
        """By number the tasks whose samples it writes to the cache."""


class EmbeddedServer(LocalServer[Client]):
    """See the module.

    Args:
        listener: a Unix socket that listens. It belongs to the server.
        spec_fd: what is served, see :mod:`fastensor.provision.embedded.spec`.
    """

    def __init__(self, listener: socket.socket, spec_fd: int) -> None:
        self._facts = facts_of(spec_fd)
        super().__init__(listener, Client, greeting=Hello(os.getpid(), self._facts), given=spec_fd)
        self._workers: list[WorkerProcess] = []
        self._replaced = 0
        """Workers that have ended."""
        self._spec_fd = spec_fd
        self._tasks = Tasks(self._facts)
        self._slabs_fd, self._slabs = shared_memory("fastensor-cache", max(self._facts.cache_nbytes, 1))
        self._worker_cpus = worker_cpus(_placements(), self._facts.workers)
        self._start_forkserver(range(self._facts.workers), prepares=True)

    def work(self) -> bool:
        """Give work to workers, as long as there are both."""
        while self._workers:
            one = min(self._workers, key=lambda one: len(one.tasks))
            if len(one.tasks) >= _TASKS_PER_WORKER or not self._give_some(one):
                break
        return False

    # Clients

    def obey(self, client: Client, message: Message) -> None:
        match message.content:
            case AskStatus():
                client.connection.send(self._status())
            case Register() as wanted:
                client.register(wanted)
                for one in self._workers:
                    self._introduce(client, one)
            case Start() as start:
                self._check(start)
                if client.stream is not None:
                    client.stream.begin(start)
                else:
                    self._tasks.start(start)
            case Credit() as credit:
                client.take_credit(credit)
            case other:
                raise ConnectionLost(f"it sent {other!r}")

    def _check(self, start: Start) -> None:
        """
        Raises:
            ConnectionLost: the service has other samples than those of the plan.
            TypeError, ValueError: this is no place in a plan.
        """
        replace(start.plan)  # who unpickles a plan does not check it
        for name in ("epoch", "consumed", "index"):
            check_whole(getattr(start, name), name, at_least=0)
        if start.plan.n != self._facts.samples:
            raise ConnectionLost(f"its plan is of {start.plan.n} samples, and the service has {self._facts.samples}")

    def dropped(self, client: Client) -> None:
        for one in self._workers:
            self._tell(one, ForgetLoader(client.number))

    def _status(self) -> dict[str, Any]:
        """State of the service, for people and monitors."""
        return {
            "pid": os.getpid(),
            "clients": len(self.clients),
            "loaders": [client.status() for client in self.clients.values() if client.stream is not None],
            "forkserver": self._forkserver.pid,
            "workers": [{"pid": one.pid, "tasks": len(one.tasks)} for one in self._workers],
            "workers_replaced": self._replaced,
            **self._tasks.status(),
        }

    # Workers

    def _give_some(self, one: WorkerProcess) -> bool:
        """Give a worker the work that is needed most. Returns whether there is some."""
        if self._give(one, self._tasks.next_batch([])):  # what workers that have ended were to do
            return True
        waiting = [one for one in self.clients.values() if one.stream is not None and one.stream.has_credit]
        waiting.sort(key=lambda client: client.registered.turn)
        if any(self.do_for(client, partial(self._give_batch, one, client)) for client in waiting):
            return True
        return not one.tasks and self._give(one, self._tasks.next_preload())

    def _give_batch(self, one: WorkerProcess, client: Client) -> bool:
        return self._give(one, self._tasks.next_batch([client.registered]))

    def _give(self, one: WorkerProcess, task: Task | None) -> bool:
        if task is not None:
            one.tasks[task.number] = task
            self._tell(one, self._tasks.work_of(task))
        return task is not None

    def _start_forkserver(self, places: Collection[int], *, prepares: bool) -> None:
        """Start the process that makes workers, and ask it for those of some places."""

        def import_main() -> Callable[..., None]:
            import torch  # which the server has no use for

            from fastensor.provision.embedded import worker

            torch.set_num_threads(1)  # whatever the environment says: a fork would lack the others
            return partial(
                worker.main,
                spec_fd=self._spec_fd,
                slabs_fd=self._slabs_fd,
                slabs=self._slabs,
                seed=self._facts.seed,
                cpus=self._worker_cpus,
            )

        self._forkserver = ForkServer(import_main, self._spec_fd, prepares=prepares, kept=(self._slabs_fd,))
        self.listen(self._forkserver.connection, self._hear_forkserver)
        self._forkserver.ask(places)

    def _hear_forkserver(self) -> None:
        try:
            for message in self._forkserver.connection.arrived():
                assert message.fd is not None
                pid, place = message.content
                self._forkserver.awaited.remove(place)
                self._start_worker(WorkerProcess(pid, Connection(socket.socket(fileno=message.fd)), place))
        except ConnectionLost:
            self._replace_forkserver()

    def _replace_forkserver(self) -> None:
        """The forkserver has ended, perhaps by the user's script: start one that does not prepare itself.

        Raises:
            RuntimeError: this one has not prepared itself either, and has not made the workers that it was asked for.
        """
        gone = self._forkserver
        self.ignore(gone.connection)
        status = gone.end()
        if gone.awaited and not gone.prepares:
            raise RuntimeError(f"the process that makes workers has ended with {status} before it has made them")
        _log.warning(
            "The process that imports torch and the script of the data service for all workers has ended with %d: each "
            "further worker imports the script. This is so if the script ends it, starts threads, or leaves files open",
            status,
        )
        self._start_forkserver(gone.awaited, prepares=False)

    def _start_worker(self, one: WorkerProcess) -> None:
        self._workers.append(one)
        self.listen(one.connection, partial(self._hear, one))
        for client in self.clients.values():
            self._introduce(client, one)

    def _introduce(self, client: Client, one: WorkerProcess) -> None:
        """Tell a worker of a loader."""
        if client.stream is not None and not client.stream.is_gone:
            added = AddLoader(client.number, client.collate_fn, client.stream.registration.on_error)
            self._tell(one, added, fd=client.stream.ring.fd)

    def _tell(self, one: WorkerProcess, content: object, *, fd: int | None = None) -> None:
        """Send something to a worker. One that has ended is found when it is listened to."""
        with suppress(ConnectionLost):
            one.connection.send(content, fd=fd)
            self.watch(one.connection)

    def _hear(self, one: WorkerProcess) -> None:
        try:
            for message in one.connection.arrived():
                self._note(one, message)
            self.watch(one.connection)
        except ConnectionLost:
            self._replace(one)

    def _note(self, one: WorkerProcess, message: Message) -> None:
        match message.content:
            case Done() as done:
                self._done(one, done, message.fd)
            case SamplesStored(number):
                self._tasks.written(one.writing.pop(number))
            case Broken(number, text):
                task = one.tasks.pop(number)
                self._tasks.finished(task)
                self._fail(task, text)

    def _done(self, one: WorkerProcess, done: Done, fd: int | None) -> None:
        task = one.tasks.pop(done.number)
        self._push(task, done, fd)
        if fd is not None:
            os.close(fd)
        offsets = self._tasks.done(task, done)
        if len(offsets):
            one.writing[task.number] = task
            self._tell(one, StoreSamples(task.number, offsets))

    def _push(self, task: Task, done: Done, fd: int | None) -> None:
        """Send a batch to its client, if that is still there."""
        if (client := self._client_of(task)) is not None:
            hits = int((task.offsets >= 0).sum()) - len(done.lost)
            cost = cost_of_batch(len(task.positions), hits, int(done.lengths.sum()), done.skipped)
            self.do_for(client, partial(client.push, task, done.nbytes, cost, fd))

    def _fail(self, task: Task, text: str) -> None:
        """Tell a loader why a batch cannot be made. If samples could not be read for the cache, they are not read ahead
        again, and the loader that needs them will be told."""
        if task.batch is None:
            self._tasks.cache.not_readable(task.positions)
        elif (client := self._client_of(task)) is not None:
            self.do_for(client, partial(client.fail, task, text))

    def _client_of(self, task: Task) -> Client | None:
        """The client that a batch is for; None if it has gone, or samples are only read."""
        return None if task.stream is None else self.clients.get(task.stream.number)

    def _replace(self, one: WorkerProcess) -> None:
        """A worker has ended: start another one, and have done again what it was doing."""
        self.ignore(one.connection)
        self._workers.remove(one)
        status = one.end()
        self._replaced += 1
        _log.warning("A worker of the data service has ended with %d, and is replaced", status)
        for task in one.writing.values():
            self._tasks.cache.not_written(task.writes)
        for number, task in enumerate(one.tasks.values()):
            if number:  # it was waiting
                self._tasks.postpone(task)
            elif not self._tasks.killed(task):
                self._fail(task, f"{task.attempts} workers have ended while they made it, the last one with {status}")
        self._forkserver.ask([one.place])


def _placements() -> dict[str, Placement]:
    """Placement of GPUs; empty if the system's answers make no sense."""
    try:
        return placements()
    except (OSError, ValueError) as error:
        _log.warning("Workers of the data service are not bound to processors: %s", error)
        return {}


def main(fd: int, spec_fd: int) -> None:
    """Run in a process of its own, and end it.

    Args:
        fd: the socket that listens.
        spec_fd: what is served.
    """
    adopt_orphans()
    EmbeddedServer(socket.socket(fileno=fd), spec_fd).run()
