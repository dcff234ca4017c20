"""The server: one thread of one process, which has workers make batches, and pushes them to clients.

It touches no sample, and runs nothing of the user. It goes round: takes what has come; gives work to workers that have
none, first for the loader that has the fewest batches ahead; and reads ahead for the cache when no loader needs a
worker. A loader is given batches as far as its credit and its ring reach. One that has none left is always given one:
if it keeps old batches, and its ring has no room, the batch comes in memory of its own.

A client that ends, however it does, is seen by the end of its connection. A worker that ends is replaced, and what it
was doing is done again; a batch that has ended several workers is an error of its loader. The server ends with its last
client, and the workers with it.

Workers are forked from a process that has imported the user's script once for all of them
(:mod:`fastensor.provision.embedded.nursery`). They come when it has.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import socket
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from fastensor.data.connection import NO_ROOM, Connection, ConnectionLost, Message
from fastensor.data.plan import EpochPlan
from fastensor.data.skipping import reason_of
from fastensor.files.words import is_worth_a_line
from fastensor.provision.embedded import worker
from fastensor.provision.embedded.clients import Client
from fastensor.provision.embedded.nursery import NurseryProcess, adopt_orphans
from fastensor.provision.embedded.protocol import (
    BATCH,
    FORKED,
    LOADER,
    NUMBER,
    BadMessage,
    Say,
    as_bytes,
    done_of,
    start_of,
    text_of,
    work_as_bytes,
)
from fastensor.provision.embedded.spec import facts_of
from fastensor.provision.embedded.workers import WorkerProcess
from fastensor.provision.engine import cost_of_batch
from fastensor.provision.feeding import NO_SLOT, Stream, batches_from
from fastensor.provision.placement import Placement, placements, worker_cpus
from fastensor.provision.tasks import Task, Tasks
from fastensor.provision.work import Done

_log = logging.getLogger(__name__)
_FIRST_CLIENT_SECONDS = 60
"""For how long the server waits for its first client: whoever has started it may have died."""
_TASKS_PER_WORKER = 2
"""One is done, and one is waiting, so that the worker need not."""
_FULL_SECONDS = 0.2
"""How long to wait for room for who has connected, if nothing else comes."""


class Server:
    """See the module.

    Args:
        listener: a Unix socket that listens. It belongs to the server.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._clients: dict[int, Client] = {}
        """By number those that are connected."""
        self._numbers = 0
        self._dropped = 0
        """Clients that have sent nonsense."""
        self._workers: list[WorkerProcess] = []
        self._replaced = 0
        """Workers that have ended."""
        self._spec_fd: int | None = None
        listener.setblocking(False)
        self._listener = listener
        self._is_full = False
        """Whether clients wait for whom no descriptor is free. The socket is not listened to until the next round."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until the last client has gone."""
        seconds: float | None = _FIRST_CLIENT_SECONDS
        had_clients = False  # a process of another user may knock first
        while self._await_events(seconds) and (self._clients or not had_clients):
            self._give_work()
            had_clients = had_clients or bool(self._clients)
            if had_clients:
                seconds = None

    def _await_events(self, seconds: float | None) -> bool:
        """Do what has come. False if nothing has within ``seconds``, and there is no client."""
        was_full = self._is_full
        events = self._selector.select(_FULL_SECONDS if was_full else seconds)
        if was_full:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_full = False
        for key, _ in events:
            if key.fd in self._selector.get_map():  # what came before may have ended this one
                key.data()
        return bool(events or was_full or self._clients)

    # Clients

    def _accept(self) -> None:
        try:
            endpoint, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # who has connected stays there, and would be reported again at once
                self._selector.unregister(self._listener)
                self._is_full = True
            return  # or the client has gone
        self._numbers += 1
        client = Client(endpoint, self._numbers)
        if client.connection.peer[1] != os.geteuid():
            client.close()
            return
        self._clients[client.number] = client
        self._selector.register(client.connection, selectors.EVENT_READ, partial(self._receive, client))
        self._welcome(client)

    def _welcome(self, client: Client) -> None:
        """Tell a client what is served, if that is known."""
        facts = None if self._spec_fd is None else self._facts
        self._do_for(client, partial(client.say_hello, facts, self._spec_fd))

    def _receive(self, client: Client) -> None:
        try:
            client.connection.flush()
            while (message := client.connection.receive()) is not None:
                self._obey(client, message)
        except ConnectionLost:
            self._drop(client)
        except BadMessage as error:
            self._dropped += 1
            if is_worth_a_line(self._dropped):  # a program may send nonsense again and again
                _log.warning("The data service has dropped a client, number %d: %s", self._dropped, reason_of(error))
            self._drop(client)
        else:
            self._watch(client)

    def _obey(self, client: Client, message: Message) -> None:
        if (message.fd is None) == (message.kind == Say.SPEC):
            if message.fd is not None:
                os.close(message.fd)
            raise BadMessage(f"a message of kind {message.kind} came with a descriptor, or without one")
        match message.kind:
            case Say.SPEC:
                self._begin(client, message)
            case Say.ASK:
                self._do_for(client, partial(client.say_status, self._status()))
            case _ if self._spec_fd is None:
                raise BadMessage(f"a message of kind {message.kind} came before it was said what is served")
            case Say.REGISTER:
                self._do_for(client, partial(client.register, message.body))
                for one in self._workers:
                    self._introduce(client, one)
            case Say.START:
                start = start_of(message.body, self._facts.samples)
                client.registered.begin(start, batches_from(start, self._tasks.orders))
                self._tasks.start(start, self._plans)
            case Say.PRELOAD:
                self._tasks.start(start_of(message.body, self._facts.samples), self._plans)
            case Say.CREDIT:
                client.take_credit(message.body)
            case _:
                raise BadMessage(f"a message of kind {message.kind} came, which no client sends")

    def _do_for(self, client: Client, send: Callable[[], None]) -> None:
        """Send something to a client, which may be lost meanwhile."""
        try:
            send()
        except ConnectionLost:
            self._drop(client)
        else:
            self._watch(client)

    def _watch(self, end: Client | WorkerProcess) -> None:
        """Be told when the kernel takes more of what was not sent, if there is anything."""
        if end.connection.fileno() < 0:
            return  # it was closed meanwhile
        key = self._selector.get_map().get(end.connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.connection.unsent_nbytes else 0)
        if key is not None and key.events != events:
            self._selector.modify(end.connection, events, key.data)

    def _drop(self, client: Client) -> None:
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.connection)
        client.close()
        if client.stream is not None:
            self._tasks.left(self._streams)
        for one in self._workers:
            self._tell(one, Say.FORGET, NUMBER.pack(client.number))

    # What is served

    def _begin(self, client: Client, message: Message) -> None:
        """Serve what a client says, unless another one has come first."""
        assert message.fd is not None
        if self._spec_fd is not None:
            os.close(message.fd)
            self._welcome(client)
            return
        self._facts, self._spec_fd = facts_of(message.fd), message.fd
        self._tasks = Tasks(self._facts)
        self._slabs = _memory(self._facts.cache_nbytes)
        self._worker_cpus = worker_cpus(_placements(), self._facts.workers)
        self._start_nursery(range(self._facts.workers), prepares=True)
        self._welcome(client)

    def _status(self) -> dict[str, Any]:
        """What the service does, for people and monitors."""
        loaders = [client.status() for client in self._clients.values() if client.stream is not None]
        found: dict[str, Any] = {"pid": os.getpid(), "clients": len(self._clients), "loaders": loaders}
        if self._spec_fd is not None:
            workers = [{"pid": one.pid, "tasks": len(one.tasks)} for one in self._workers]
            found |= {"nursery": self._nursery.pid, "workers": workers, "workers_replaced": self._replaced}
            found |= self._tasks.status()
        return found

    # Workers

    @property
    def _streams(self) -> list[Stream]:
        """Of all loaders."""
        return [client.stream for client in self._clients.values() if client.stream is not None]

    @property
    def _plans(self) -> list[EpochPlan]:
        """Plans of all loaders that have begun."""
        return [stream.plan for stream in self._streams if stream.plan is not None]

    def _give_work(self) -> None:
        """Give work to workers, as long as there are both."""
        while self._workers:
            one = min(self._workers, key=lambda one: len(one.tasks))
            if len(one.tasks) >= _TASKS_PER_WORKER:
                return
            ready = (
                client.stream for client in self._clients.values() if client.stream is not None and not client.is_behind
            )
            task = self._tasks.next_batch(ready)
            if task is None and not one.tasks:
                task = self._tasks.next_preload()
            if task is None:
                return
            one.tasks[task.number] = task
            self._tell(one, Say.TASK, *work_as_bytes(self._tasks.work_of(task)))

    def _start_nursery(self, places: Collection[int], *, prepares: bool) -> None:
        """Start the process that makes workers, and ask it for those of some places."""
        assert self._spec_fd is not None
        main = partial(
            worker.main, spec_fd=self._spec_fd, slabs=self._slabs, seed=self._facts.seed, cpus=self._worker_cpus
        )
        self._nursery = NurseryProcess(main, self._spec_fd, prepares=prepares)
        self._selector.register(self._nursery.connection, selectors.EVENT_READ, self._hear_nursery)
        self._nursery.ask(places)

    def _hear_nursery(self) -> None:
        try:
            while (message := self._nursery.connection.receive()) is not None:
                assert message.fd is not None
                pid, place = FORKED.unpack(message.body)
                self._nursery.awaited.remove(place)
                self._nursery.has_forked = True
                self._start_worker(WorkerProcess(pid, place, Connection(socket.socket(fileno=message.fd))))
        except ConnectionLost:
            self._replace_nursery()

    def _replace_nursery(self) -> None:
        """The nursery has ended: start another one. It does not prepare itself if that may have ended this one.

        Raises:
            RuntimeError: this one has not prepared itself, was asked for workers, and has made none either.
        """
        gone = self._nursery
        self._selector.unregister(gone.connection)
        status = gone.end()
        has_failed = bool(gone.awaited) and not gone.has_forked
        if has_failed and not gone.prepares:
            raise RuntimeError(f"the process that makes workers has ended with {status} before it has made one")
        if not has_failed:
            _log.warning(
                "The process that makes workers of the data service has ended with %d, and is replaced", status
            )
        else:
            _log.warning(
                "The script that has started the data service ends the process that imports it for all workers (with "
                "%d), or starts threads: each worker imports it",
                status,
            )
        self._start_nursery(gone.awaited, prepares=gone.prepares and not has_failed)

    def _start_worker(self, one: WorkerProcess) -> None:
        self._workers.append(one)
        self._selector.register(one.connection, selectors.EVENT_READ, partial(self._hear, one))
        for client in self._clients.values():
            self._introduce(client, one)

    def _introduce(self, client: Client, one: WorkerProcess) -> None:
        """Tell a worker of a loader."""
        if client.stream is not None and not client.stream.is_gone:
            head = LOADER.pack(client.number, client.stream.registration.on_error == "skip")
            self._tell(one, Say.LOADER, head, client.pickled, fd=client.stream.ring.fd)

    def _tell(self, one: WorkerProcess, kind: Say, *parts: Any, fd: int | None = None) -> None:
        """Send something to a worker. One that has ended is found when it is listened to."""
        try:
            one.connection.send(kind, *parts, fd=fd)
        except ConnectionLost:
            return
        self._watch(one)

    def _hear(self, one: WorkerProcess) -> None:
        try:
            one.connection.flush()
            while (message := one.connection.receive()) is not None:
                self._note(one, message)
        except ConnectionLost:
            self._replace(one)
        else:
            self._watch(one)

    def _note(self, one: WorkerProcess, message: Message) -> None:
        match message.kind:
            case Say.DONE:
                self._done(one, done_of(message.body), message.fd)
            case Say.STORED:
                self._tasks.written(one.writing.pop(*NUMBER.unpack(message.body)))
            case Say.BROKEN:
                task = one.tasks.pop(*NUMBER.unpack_from(message.body))
                self._tasks.finished(task)
                self._fail(task, text_of(message, begin=NUMBER.size))

    def _done(self, one: WorkerProcess, done: Done, fd: int | None) -> None:
        task = one.tasks.pop(done.number)
        self._push(task, done, fd)
        if fd is not None:
            os.close(fd)
        offsets = self._tasks.done(task, done)
        if len(offsets):
            one.writing[task.number] = task
            self._tell(one, Say.STORE, NUMBER.pack(task.number), as_bytes(offsets))

    def _push(self, task: Task, done: Done, fd: int | None) -> None:
        """Send a batch to its client, if that is still there."""
        client = self._clients.get(task.stream.number) if task.stream is not None else None
        if task.batch is None or client is None:
            return
        seconds = time.monotonic() - task.begun_seconds
        slot = client.registered.made(task.slot, done.nbytes, is_in_slot=fd is None, seconds=seconds)
        hits = int((task.offsets >= 0).sum()) - len(done.lost)
        cost = cost_of_batch(len(task.positions), hits, int(done.lengths.sum()), done.skipped)
        self._do_for(client, partial(client.push, task.batch, slot, cost, fd))

    def _fail(self, task: Task, text: str) -> None:
        """Tell a loader why a batch cannot be made. If samples could not be read for the cache, they are not read ahead
        again, and the loader that needs them will be told."""
        if task.batch is None:
            self._tasks.stock.not_readable(task.positions)
        client = self._clients.get(task.stream.number) if task.stream is not None else None
        if task.batch is None or client is None:
            return
        client.registered.free(task.slot)
        said = BATCH.pack(task.batch.generation, task.batch.index, NO_SLOT, *[0] * 6)
        self._do_for(client, partial(client.connection.send, Say.FAILED, said, text.encode()))

    def _replace(self, one: WorkerProcess) -> None:
        """A worker has ended: start another one, and have done again what it was doing."""
        self._selector.unregister(one.connection)
        self._workers.remove(one)
        status = one.end()
        self._replaced += 1
        _log.warning("A worker of the data service has ended with %d, and is replaced", status)
        for task in one.writing.values():
            self._tasks.stock.not_written(task.writes)
        for number, task in enumerate(one.tasks.values()):
            if number:  # it was waiting
                self._tasks.postpone(task)
            elif not self._tasks.killed(task):
                self._fail(task, f"{task.attempts} workers have ended while they made it, the last one with {status}")
        self._nursery.ask([one.place])


def _memory(nbytes: int) -> memoryview:
    """Memory that forked processes share. The kernel provides it as it is first used."""
    fd = os.memfd_create("fastensor-cache", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(nbytes, 1))
        return memoryview(mmap.mmap(fd, max(nbytes, 1)))
    finally:
        os.close(fd)


def _placements() -> dict[str, Placement]:
    """Placement of GPUs; empty if the system's answers make no sense."""
    try:
        return placements()
    except (OSError, ValueError) as error:
        _log.warning("Workers of the data service are not bound to processors: %s", error)
        return {}


def main(fd: int) -> None:
    """Run in a process of its own, and end it.

    Args:
        fd: the socket that listens.
    """
    adopt_orphans()
    Server(socket.socket(fileno=fd)).run()
    os._exit(0)  # the interpreter would take longer to take torch apart than most services to end
