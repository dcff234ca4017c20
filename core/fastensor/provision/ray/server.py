"""A server on Ray: an actor that keeps its share of the samples, and makes its share of the batches.

A batch is asked for by the credit of its loader. The server that is asked knows the order of the epoch, and nothing of
the loader. It has each server find the samples that it keeps, and makes the batch of them. Ray moves both through its
object store.

Each server runs the user's code in one thread, one piece after the other, in the order in which it was asked. If nobody
waits for an answer, the server reads ahead for its cache, in the order of the epoch. All else happens in the event loop
of the actor, which goes on meanwhile.

Nothing but the cache is lost with a server. Ray starts it again, and calls again what had been called.

Whoever calls an actor of Ray imports its class, and the supervisor calls servers. So this module imports torch only
when a server begins.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from fastensor.data.coalescing import Integers
from fastensor.data.skipping import OnError, Skipped
from fastensor.errors import ProvisionError
from fastensor.provision.engine import Cost, EngineLost, Start, cost_of_batch
from fastensor.provision.metrics import Served
from fastensor.provision.ray import names
from fastensor.provision.ray.calls import BatchRequest, EncodedSamples, Made, Service, contents_of
from fastensor.provision.ray.exporting import Exported
from fastensor.provision.tasks import Task, Tasks, owners
from fastensor.provision.work import Done

if TYPE_CHECKING:
    from fastensor.provision.making import Found, Sample, UserObjects

T = TypeVar("T")

_NO_COST = Cost(0, 0, 0)


class RayServer:
    """See the module. All methods are called by Ray, in the event loop of the actor.

    Args:
        service: that it is a server of.
        number: of the server.
    """

    def __init__(self, service: Service, number: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._service, self._number = service, number
        self._facts = service.facts
        self._tasks = Tasks(self._facts, server=number, servers=self._facts.workers)
        self._slabs = memoryview(mmap.mmap(-1, max(self._tasks.cache.nbytes, 1)))
        self._contents: UserObjects | None = None
        self._peers: dict[int, Any] = {}
        self._user = ThreadPoolExecutor(1, thread_name_prefix="fastensor-user")
        self._reads = asyncio.Lock()
        """Held by the one that reads samples, and changes the cache."""
        self._filling: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        """Set if there may be something to read ahead."""
        self._exported = Exported(service.name, number)
        self._under_way: set[asyncio.Task[Any]] = set()
        """The tasks of calls that have not been answered yet."""
        self._is_ending = False

    async def batch(self, request: BatchRequest) -> Made | None:
        """Make the batch that somebody has credit for. None if the service ends.

        Raises:
            ActorDiedError: a server that is needed for it has ended for good, and the service with it.
        """
        return await self._unless_it_ends(lambda: self._batch_of(request))

    async def samples(self, request: BatchRequest) -> EncodedSamples | None:
        """The samples of a batch that this server keeps. None if the service ends."""
        return await self._unless_it_ends(lambda: self._part(request, self._tasks.orders.positions_of(request.batch)))

    async def stop(self) -> None:
        """The service ends: answer at once what was asked, and whatever will be. When this returns, nobody waits for an
        answer. Ray would say on the terminals of trainers which calls the end of this process has interrupted."""
        self._is_ending = True
        for one in self._under_way:
            one.cancel()
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def preload(self, start: Start) -> None:
        """Fill the cache in the order of an epoch."""
        self._tasks.start(start)
        self._read_ahead()

    async def status(self) -> dict[str, Any]:
        """State of this server."""
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "counts": self._tasks.status()}

    async def _unless_it_ends(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Do something for who waits for it. None if the service ends meanwhile, or has before."""
        if self._is_ending:
            return None
        task = asyncio.create_task(begin())
        self._under_way.add(task)
        task.add_done_callback(self._answered)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            return None

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """There may be something to read ahead."""
        self._has_changed.set()
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill())

    # Batches

    async def _batch_of(self, request: BatchRequest) -> Made | None:
        try:
            return await self._made(request, self._tasks.orders.positions_of(request.batch))
        except ActorDiedError:
            raise
        except EngineLost:
            return None
        except Exception:  # noqa: BLE001  # whatever it is, the trainer is told
            return Made(None, _NO_COST, traceback.format_exc())

    async def _made(self, request: BatchRequest, positions: Integers) -> Made:
        parts = await self._parts(request, positions)
        samples = _in_order(positions, self._facts.workers, parts)
        content, skipped = await self._by_user(partial(self._batch, request, positions, samples))
        read = Cost(*map(sum, zip(*(part.cost for part in parts.values()), strict=True)))
        cost = cost_of_batch(len(positions), read.hits, read.read_nbytes, skipped)
        made = Served().with_batch(nbytes=len(content), **cost._asdict())
        self._exported.add(request.batch.plan.rank, made, request.waited_seconds, self._tasks.cache)
        return Made(content, cost)

    async def _parts(self, request: BatchRequest, positions: Integers) -> dict[int, EncodedSamples]:
        """By server the samples of a batch.

        Raises:
            EngineLost: the service ends.
        """
        wanted = sorted(set(owners(positions, self._facts.workers).tolist()))
        others = {number: self._peer(number).samples.remote(request) for number in wanted if number != self._number}
        parts = {self._number: await self._part(request, positions)} if self._number in wanted else {}
        found = await asyncio.gather(*others.values())
        if None in found:
            raise EngineLost("a server has been told to end")
        return parts | dict(zip(others, found, strict=True))

    async def _part(self, request: BatchRequest, positions: Integers) -> EncodedSamples:
        async with self._reads:
            return await self._read(self._tasks.task_of(request.batch, positions), request.on_error)

    async def _read(self, task: Task, on_error: OnError) -> EncodedSamples:
        """Find samples, read those that the cache lacks, and keep them. Nobody else does so meanwhile."""
        work = self._tasks.work_of(task)
        try:
            find = partial(self._find, work.positions, work.offsets, work.lengths, on_error)
            found, part = await self._by_user(find)
        except BaseException:
            self._tasks.finished(task)
            raise
        lengths = np.array([len(found.encoded(place)) for place in found.read], np.int64)
        done = Done(task.number, 0, work.positions[found.read], lengths, work.positions[found.lost])
        for place, offset in zip(found.read, self._tasks.done(task, done).tolist(), strict=True):
            if offset >= 0:
                sample = found.encoded(place)
                self._slabs[offset : offset + len(sample)] = sample
        self._tasks.written(task)
        return part

    async def _fill(self) -> None:
        """Read ahead whenever nobody waits for an answer."""
        while True:
            async with self._reads:
                if task := None if self._under_way else self._tasks.next_preload():
                    try:
                        await self._read(task, "skip")  # what can be read is kept
                    except Exception:  # noqa: BLE001  # the loader that needs them will be told
                        self._tasks.cache.not_readable(task.positions)
            if task is None:
                self._has_changed.clear()
                await self._has_changed.wait()

    def _peer(self, number: int) -> Any:
        if number not in self._peers:
            self._peers[number] = names.server_of(self._service.name, number)
        return self._peers[number]

    # In the user's thread

    async def _by_user(self, function: Callable[[], T]) -> T:
        """Call what runs the user's code, and wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._user, function)

    def _find(
        self, positions: Integers, offsets: Integers, lengths: Integers, on_error: OnError
    ) -> tuple[Found, EncodedSamples]:
        from fastensor.provision.making import found_samples, read_samples

        read = partial(read_samples, self._loaded, seed=self._facts.seed, on_error=on_error)
        found = found_samples(positions, offsets, lengths, slabs=self._slabs, read=read)
        nbytes = sum(len(found.encoded(place)) for place in found.read)
        hits = int((offsets >= 0).sum()) - len(found.lost)
        copies = [
            one if isinstance(one, Skipped) else np.array(found.encoded(place), np.uint8)
            for place, one in enumerate(found.samples)
        ]
        return found, EncodedSamples(copies, Cost(len(positions), hits, nbytes))

    def _batch(self, request: BatchRequest, positions: Integers, samples: list[Sample]) -> tuple[Any, int]:
        """Returns the bytes of the batch, and how many samples it lacks."""
        from fastensor.provision.making import made_batch

        made = made_batch(
            samples,
            positions,
            contents=self._loaded,
            collate_fn=_unpickled(request.collate_fn) if request.collate_fn else None,
            seed=request.batch.plan.seed,
            epoch=request.batch.epoch,
            source_seed=self._facts.seed,
            on_error=request.on_error,
        )
        content = np.empty(made.encoded.nbytes, np.uint8)
        made.encoded.write_into(content.data)
        return content, made.skipped

    def _loaded(self) -> UserObjects:
        if self._contents is None:
            self._contents = contents_of(self._service)
        return self._contents


def _in_order(positions: Integers, servers: int, parts: dict[int, EncodedSamples]) -> list[Sample]:
    """The samples of a batch, of the parts that servers have found in the same order.

    Raises:
        ProvisionError: a server has found other samples than it keeps.
    """
    of_samples = owners(positions, servers)
    expected = np.bincount(of_samples, minlength=servers).tolist()
    for number, part in parts.items():
        if len(part.samples) != expected[number]:
            raise ProvisionError(
                f"server {number} keeps {expected[number]} samples of the batch, and has sent {len(part.samples)}"
            )
    rest = {number: iter(part.samples) for number, part in parts.items()}
    in_order = (next(rest[number]) for number in of_samples.tolist())
    return [one if isinstance(one, Skipped) else np.require(one, requirements="W").data for one in in_order]


@lru_cache(maxsize=256)
def _unpickled(pickled: bytes) -> Any:
    return cloudpickle.loads(pickled)
