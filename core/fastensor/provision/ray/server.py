"""A server on Ray: an actor that keeps its share of the samples, and makes its share of the batches.

A batch is asked for by the credit of its loader. The server that is asked knows the order of the epoch. It has each
server find the samples that it keeps, and makes the batch of them. Ray moves both through its object store.

Each server runs the user's code in one thread, one piece after the other. Whose turn it is, the loaders' needs decide
(:mod:`fastensor.provision.credits`). If nobody needs the thread, the server reads ahead for its cache, in the order of
the epoch. All else happens in the event loop of the actor, which goes on meanwhile.

Nothing but the cache is lost with a server. Ray starts it again, and calls again what had been called.

Whoever calls an actor of Ray imports its class, and the supervisor calls servers. So this module imports torch only
when a server begins.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from fastensor.data.coalescing import Integers
from fastensor.data.plan import EpochPlan
from fastensor.data.ring import aligned
from fastensor.data.skipping import OnError, Skipped
from fastensor.errors import ProvisionError
from fastensor.provision.credits import FIRST, turn
from fastensor.provision.engine import Cost, EngineLost, Facts, Start, cost_of_batch
from fastensor.provision.feeding import Batch, batch_at
from fastensor.provision.metrics import Served
from fastensor.provision.ray import names
from fastensor.provision.ray.calls import BatchRequest, EncodedSamples, Made, client_of, contents_of
from fastensor.provision.ray.exporting import Exported
from fastensor.provision.ray.memory import owned
from fastensor.provision.ray.priority_lock import Key, PriorityLock
from fastensor.provision.tasks import Share, Task, Tasks, owners
from fastensor.provision.work import Done

if TYPE_CHECKING:
    from fastensor.provision.making import Found, Sample, UserObjects

T = TypeVar("T")

_AT_LAST: Key = (2, 0, 0)
"""The turn of what is read ahead: after all loaders."""
_NO_COST = Cost(0, 0, 0)


@dataclass(slots=True)
class ServedLoader:
    """A loader, as a server knows it from what it was asked."""

    plan: EpochPlan
    generation: int
    taken: int = 0
    needed: int = FIRST
    turns: int = -1
    """The number of its latest turn."""
    served: Served = field(default_factory=Served)
    """The batches that this server has made for it."""


class Latest:
    """The names that were added last, as many as may still be of use."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Add a name, and forget the oldest one if there are too many."""
        self._names[name] = None
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def __contains__(self, name: str) -> bool:
        return name in self._names


class RayServer:
    """See the module. All methods are called by Ray, in the event loop of the actor.

    Args:
        name: of the service.
        number: of the server.
        facts: of the service.
    """

    def __init__(self, name: str, number: int, facts: Facts) -> None:
        import torch

        torch.set_num_threads(1)
        self._name, self._number = name, number
        self._facts = facts
        nbytes = self._facts.cache_nbytes // self._facts.workers
        self._tasks = Tasks(replace(self._facts, cache_nbytes=nbytes), share=Share(number, self._facts.workers))
        self._slabs = memoryview(mmap.mmap(-1, max(nbytes, 1)))
        self._contents: UserObjects | None = None
        self._loaders: dict[str, ServedLoader] = {}
        self._left = Latest()
        """Names of loaders that were closed: what was asked for them before may come later."""
        self._gone = Latest()
        """Names of the clients that have gone."""
        self._peers: dict[int, Any] = {}
        self._lock = PriorityLock()
        self._count = 0
        """Number of turns so far."""
        self._user = ThreadPoolExecutor(1, thread_name_prefix="fastensor-user")
        self._filling: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        """Set if there may be something to read ahead."""
        self._exported = Exported(name, number)
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
        return await self._unless_it_ends(lambda: self._part_of(request))

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
        self._begin(start)

    async def forget(self, loader: str) -> None:
        """A loader has gone."""
        self._loaders.pop(loader, None)
        self._left.add(loader)

    async def forget_client(self, client: str) -> None:
        """A process has gone, and its loaders with it."""
        self._gone.add(client)
        self._loaders = {name: one for name, one in self._loaders.items() if client_of(name) != client}

    async def status(self) -> dict[str, Any]:
        """State of this server. The loaders' counts are of the batches that it has made."""
        loaders = {
            loader: {
                "ranks": (one.plan.rank, one.plan.world_size),
                "taken": one.taken,
                "needed": one.needed,
                "served": one.served,
            }
            for loader, one in self._loaders.items()
        }
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": node, "loaders": loaders, "counts": self._tasks.status()}

    async def _unless_it_ends(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Do something for who waits for it. None if the service ends meanwhile, or has before."""
        if self._is_ending:
            return None
        task = asyncio.create_task(begin())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            return None

    # Loaders

    def _heard(self, request: BatchRequest) -> Batch | None:
        """Learn from what was asked how far a loader is. Returns its batch; None if the loader does not need it any
        more.

        Raises:
            ProvisionError: the service has another number of servers than whoever asks expects.
        """
        if request.servers != self._facts.workers:
            raise ProvisionError(f"expected one of {request.servers} servers, found one of {self._facts.workers}")
        loader = self._loaders.get(request.loader)
        if request.loader in self._left or client_of(request.loader) in self._gone:
            return None
        if loader is not None and request.place.generation < loader.generation:
            return None
        if loader is None or request.place.generation > loader.generation:
            before = Served() if loader is None else loader.served
            loader = self._loaders[request.loader] = ServedLoader(request.plan, request.place.generation, served=before)
            self._begin(Start(request.plan, request.place.epoch, request.place.consumed))
        loader.taken, loader.needed = max(loader.taken, request.taken), request.needed
        return batch_at(request.plan, request.place, self._tasks.orders)

    def _begin(self, start: Start) -> None:
        """Let the cache follow an order, unless loaders have the one that it follows."""
        self._tasks.start(start, [loader.plan for loader in self._loaders.values()])
        self._has_changed.set()
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill())

    def _key(self, request: BatchRequest) -> Key:
        """Smaller for what is needed sooner."""
        loader = self._loaders.get(request.loader)
        if loader is None:
            return _AT_LAST
        return turn(request.place.index - loader.taken, loader.needed, loader.turns)

    # Batches

    async def _batch_of(self, request: BatchRequest) -> Made | None:
        try:
            batch = self._heard(request)
            if batch is None:
                return Made(None, _NO_COST, 0.0, "the loader has gone on elsewhere")
            return await self._made(request, batch)
        except ActorDiedError:
            raise
        except EngineLost:
            return None
        except Exception:  # noqa: BLE001  # whatever it is, the trainer is told
            return Made(None, _NO_COST, 0.0, traceback.format_exc())

    async def _part_of(self, request: BatchRequest) -> EncodedSamples:
        batch = self._heard(request)
        return await self._part(
            request, batch_at(request.plan, request.place, self._tasks.orders) if batch is None else batch
        )

    async def _made(self, request: BatchRequest, batch: Batch) -> Made:
        parts = await self._parts(request, batch)
        samples = _in_order(batch.positions, self._facts.workers, parts)
        cost = Cost(*map(sum, zip(*(part.cost for part in parts.values()), strict=True)))
        async with self._lock.held(partial(self._key, request)):
            self._took_turn(request)
            began = time.perf_counter()
            content, skipped = await self._by_user(partial(self._batch, request, batch, samples))
            seconds = time.perf_counter() - began + max((part.seconds for part in parts.values()), default=0.0)
        cost = cost_of_batch(len(batch.positions), cost.hits, cost.read_nbytes, skipped)
        self._count_batch(request, cost, len(content))
        return Made(content, cost, seconds)

    async def _parts(self, request: BatchRequest, batch: Batch) -> dict[int, EncodedSamples]:
        """By server the samples of a batch.

        Raises:
            EngineLost: the service ends.
        """
        wanted = sorted(set(owners(batch.positions, self._facts.workers).tolist()))
        others = {number: self._peer(number).samples.remote(request) for number in wanted if number != self._number}
        parts = {self._number: await self._part(request, batch)} if self._number in wanted else {}
        found = await asyncio.gather(*others.values())
        if None in found:
            raise EngineLost("a server has been told to end")
        return parts | dict(zip(others, found, strict=True))

    async def _part(self, request: BatchRequest, batch: Batch) -> EncodedSamples:
        async with self._lock.held(partial(self._key, request)):
            self._took_turn(request)
            return await self._read(self._tasks.task_of(request.plan, batch), request.on_error)

    async def _read(self, task: Task, on_error: OnError) -> EncodedSamples:
        """Find samples, read those that the cache lacks, and keep them. It is this server's turn."""
        began = time.perf_counter()
        work = self._tasks.work_of(task)
        try:
            find = partial(self._find, work.positions, work.offsets, work.lengths, on_error)
            found, part = await self._by_user(find)
        except BaseException:
            self._tasks.finished(task)
            raise
        lengths = np.array([part.lengths[place] for place in found.read], np.int64)
        done = Done(task.number, 0, work.positions[found.read], lengths, work.positions[found.lost])
        for place, offset in zip(found.read, self._tasks.done(task, done).tolist(), strict=True):
            if offset >= 0:
                sample = found.encoded(place)
                self._slabs[offset : offset + len(sample)] = sample
        self._tasks.written(task)
        if task.batch is not None:
            self._has_changed.set()  # there may be room again
        return part._replace(seconds=time.perf_counter() - began)

    async def _fill(self) -> None:
        """Read ahead whenever it is nobody's turn."""
        while True:
            async with self._lock.held(lambda: _AT_LAST):
                if (task := self._tasks.next_preload()) is not None:
                    try:
                        await self._read(task, "skip")  # what can be read is kept
                    except Exception:  # noqa: BLE001  # the loader that needs them will be told
                        self._tasks.cache.not_readable(task.positions)
            if task is None:
                self._has_changed.clear()
                await self._has_changed.wait()

    def _took_turn(self, request: BatchRequest) -> None:
        self._count += 1
        if (loader := self._loaders.get(request.loader)) is not None:
            loader.turns = self._count

    def _count_batch(self, request: BatchRequest, cost: Cost, nbytes: int) -> None:
        if (loader := self._loaders.get(request.loader)) is None:
            return
        made = Served().with_batch(nbytes=nbytes, **cost._asdict())
        loader.served += made
        if request.waited_seconds is not None:
            loader.served = replace(loader.served, waits=loader.served.waits.with_wait(request.waited_seconds))
        self._exported.add(request.plan.rank, made, request.waited_seconds, self._tasks.cache)

    def _peer(self, number: int) -> Any:
        if number not in self._peers:
            self._peers[number] = names.server_of(self._name, number)
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
        return found, _packed(found.samples, Cost(len(positions), hits, nbytes))

    def _batch(self, request: BatchRequest, batch: Batch, samples: list[Sample]) -> tuple[Any, int]:
        """Returns the bytes of the batch, and how many samples it lacks."""
        from fastensor.provision.making import made_batch

        made = made_batch(
            samples,
            batch.positions,
            contents=self._loaded,
            collate_fn=_unpickled(request.collate_fn) if request.collate_fn else None,
            seed=request.plan.seed,
            epoch=batch.epoch,
            source_seed=self._facts.seed,
            on_error=request.on_error,
        )
        content = np.empty(made.encoded.nbytes, np.uint8)
        made.encoded.write_into(content.data)
        return content, made.skipped

    def _loaded(self) -> UserObjects:
        if self._contents is None:
            self._contents = contents_of(self._name)
        return self._contents


def _packed(samples: list[Sample], cost: Cost) -> EncodedSamples:
    """Copies of samples, in one piece of memory."""
    encoded = [memoryview(b"") if isinstance(sample, Skipped) else sample for sample in samples]
    skipped = {place: sample for place, sample in enumerate(samples) if isinstance(sample, Skipped)}
    lengths = [len(sample) for sample in encoded]
    ends = np.cumsum([aligned(nbytes) for nbytes in lengths], dtype=np.int64).tolist()
    begins = [0, *ends][: len(lengths)]
    memory = np.zeros(ends[-1] if ends else 0, np.uint8)
    view = memory.data
    for begin, sample in zip(begins, encoded, strict=True):
        view[begin : begin + len(sample)] = sample
    return EncodedSamples(memory, begins, lengths, cost, 0.0, skipped)


def _in_order(positions: Integers, servers: int, parts: dict[int, EncodedSamples]) -> list[Sample]:
    """The samples of a batch, of the parts that servers have found in the same order.

    Raises:
        ProvisionError: a server has found other samples than it keeps.
    """
    of_samples = owners(positions, servers)
    expected = np.bincount(of_samples, minlength=servers).tolist()
    for number, part in parts.items():
        if len(part.lengths) != expected[number]:
            raise ProvisionError(
                f"server {number} keeps {expected[number]} samples of the batch, and has sent {len(part.lengths)}"
            )
    rest = {number: iter(_samples_of(part)) for number, part in parts.items()}
    return [next(rest[number]) for number in of_samples.tolist()]


def _samples_of(part: EncodedSamples) -> list[Sample]:
    """The samples of a part, in its order."""
    memory = owned(part.memory)
    places = enumerate(zip(part.begins, part.lengths, strict=True))
    return [
        part.skipped[place] if place in part.skipped else memory[begin : begin + nbytes]
        for place, (begin, nbytes) in places
    ]


@lru_cache(maxsize=256)
def _unpickled(pickled: bytes) -> Any:
    return cloudpickle.loads(pickled)
