"""Starting a data service, finding it, and taking batches from it."""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar
from weakref import WeakSet, ref

import torch

from fastensor.data import processes
from fastensor.data.plan import EpochPlan, Shuffle
from fastensor.data.skipping import OnError
from fastensor.errors import ProvisionError
from fastensor.files.arguments import as_nbytes, check_whole, checks_keywords
from fastensor.files.progress_bar import progress_bar
from fastensor.files.shown import shown
from fastensor.files.words import counted, human_size
from fastensor.provision.embedded.client import SEVERAL, EmbeddedEngine
from fastensor.provision.embedded.spec import packed
from fastensor.provision.engine import (
    DEFAULT_AHEAD,
    DEFAULT_BUFFER_NBYTES,
    EngineLost,
    Facts,
    Registration,
    ServiceEngine,
)
from fastensor.provision.loader import DEFAULT_TIMEOUT, ProvisionedLoader
from fastensor.provision.making import UserObjects
from fastensor.provision.sources import as_source, is_of_ray_data

T = TypeVar("T")

NAME_VARIABLE = "FASTENSOR_DATA_SERVICE"
"""The environment variable by which processes name the service that they share."""
_LEAST_CACHE_NBYTES = 1 << 12
_MOST_SEED = 1 << 63
_LOOK_SECONDS = 0.2
"""Between two looks at a cache that fills."""


@checks_keywords
class DataService:
    """Reads samples once for all ranks, keeps them in memory, and sends batches to the ranks before they ask.

    All ranks of a machine call :meth:`start` with the same arguments: the first one starts the service, the others join
    it. Or one of them starts it, and the others :meth:`connect` to its address. The service ends when the last process
    that uses it has ended, however it does, or has called :meth:`stop`; it leaves nothing behind. One that is killed is
    started again by whoever needs it next, and reads its samples again.

    Args:
        engine: what moves the data.
    """

    _gone: ClassVar = {
        "listen": SEVERAL,
        "token": SEVERAL,
        "metrics_port": "status() has the counts, and Ray exports those of engine='ray'",
    }

    def __init__(self, engine: ServiceEngine) -> None:
        self._engine = engine
        self._is_left = False
        self._loaders: WeakSet[ProvisionedLoader] = WeakSet()

    @shown
    def __repr__(self) -> str:
        facts, left = self._engine.facts, ", left" if self._is_left else ""
        cache = human_size(facts.cache_nbytes)
        return f" of {counted(facts.samples, 'samples')}: {counted(facts.workers, 'workers')}, a cache of {cache}{left}"

    @classmethod
    def start(
        cls,
        source: Any,
        *,
        engine: Literal["embedded", "ray"] = "embedded",
        address: str = "",
        cache_bytes: int | str,
        before_cache: Callable[[Any], Any] | None = None,
        after_cache: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        seed: int = 0,
        fingerprint: str = "",
        name: str = "",
        progress: bool = True,
    ) -> Self:
        """Start a service, or join the one that another process of the job has started.

        The source and the functions are pickled, and used in worker processes. As with ``multiprocessing``, a script
        needs ``if __name__ == "__main__":``.

        Args:
            source: a map-style dataset; a pattern of paths or URLs; or a :class:`~fastensor.provision.Source`.
            engine: ``"embedded"``: processes of this machine. ``"ray"``: actors of Ray, on one machine or several.
            address: of the cluster of Ray, ``"host:port"`` of its head node, or ``"auto"``. By default the one that
                this process is in, or that ``RAY_ADDRESS`` names; without these, a Ray of this machine is started,
                which ends with the last process of the job.
            cache_bytes: memory for samples, such as ``"4GiB"``. 0 keeps none. If it does not hold all of them, those
                stay that are used soonest, and the others are read again in each epoch, ahead of need.
            before_cache: makes of a sample what is kept, once: decoding, for instance. Random numbers of Python, NumPy
                and torch are seeded for each sample, so they are the same in all epochs, and after a restart.
            after_cache: is called for each use of a sample: augmentations, for instance. Random numbers are seeded for
                each sample and epoch, so they do not depend on which worker calls it.
            workers: processes that read and prepare; by default as many as this process may use processors. With Ray
                they are spread over the machines of the cluster, and each keeps its part of ``cache_bytes``.
            seed: of ``before_cache``.
            fingerprint: identifies the samples, if the source does not: see
                :func:`fastensor.provision.sources.fingerprint_of`.
            name: tells services of one job apart that have the same samples, such as one for training, which augments
                them, and one for validation.
            progress: whether the process that starts the service shows a progress bar while the cache fills, if its
                error output is a terminal. Not with Ray.

        Raises:
            ProvisionError: the source cannot be pickled, or the service cannot be started; or anybody could join the
                cluster of Ray.
            TypeError, ValueError, FileNotFoundError: the source is none, or an argument is out of its range.
        """
        if engine not in ("embedded", "ray"):
            raise ValueError(f"engine is 'embedded' or 'ray', found {engine!r}")
        if engine == "embedded" and address:
            raise ValueError(f"only engine='ray' has the address of a cluster, found {address!r}")
        if engine == "embedded" and is_of_ray_data(source):
            raise ValueError("expected engine='ray', whose actors can read a dataset of Ray Data, found 'embedded'")
        cache_bytes = as_nbytes(cache_bytes, "cache_bytes")
        if 0 < cache_bytes < _LEAST_CACHE_NBYTES:
            raise ValueError(f"cache_bytes is 0 or at least {_LEAST_CACHE_NBYTES}, found {cache_bytes}")
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        check_whole(workers, "workers", at_least=1)
        workers, seed = int(workers), operator.index(seed)
        found = as_source(source, fingerprint=fingerprint)
        facts = Facts(len(found), found.fingerprint(), cache_bytes, workers, seed)
        contents = UserObjects(found, before_cache, after_cache)
        job = os.environ.get(NAME_VARIABLE)
        of_job = processes.name_of_service("provision", job, facts.fingerprint, name)
        joined: ServiceEngine
        if engine == "ray":
            local_ray = processes.name_of_service("ray", job)
            joined = _ray().joined(facts, contents, of_job, address=address, local_ray=local_ray)
        else:
            joined = EmbeddedEngine(f"local:{of_job}", spec_fd=packed(facts, contents))
        if (has := (joined.facts.seed, joined.facts.cache_nbytes)) != (seed, cache_bytes):
            joined.close()
            raise ProvisionError(
                f"this job has a service of these samples with other arguments: expected seed and cache_bytes "
                f"{(seed, cache_bytes)}, found {has}; give the other service a name of its own by name="
            )
        if isinstance(joined, EmbeddedEngine) and progress and cache_bytes and joined.has_started:
            _show_filling_in_thread(joined)
        return cls(joined)

    @classmethod
    def connect(cls, address: str, *, timeout: float = 60) -> Self:
        """Use a service that another process has started.

        Args:
            address: its :attr:`address`.
            timeout: for how many seconds to wait for it, now and when it is lost.

        Raises:
            ProvisionError: there is none, or this is no address of one.
        """
        if address.startswith("ray:"):
            return cls(_ray().found(address, seconds=timeout))
        return cls(EmbeddedEngine(address, seconds=timeout))

    @property
    def address(self) -> str:
        """Address that other processes :meth:`connect` to."""
        return self._engine.address

    def __len__(self) -> int:
        """The number of samples."""
        return self._engine.facts.samples

    def loader(
        self,
        batch_size: int = 1,
        *,
        shuffle: Shuffle = "full",
        seed: int = 0,
        drop_last: bool = False,
        block_size: int = 256,
        blocks_per_group: int = 32,
        ranks: tuple[int, int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
        buffer_bytes: int | str = DEFAULT_BUFFER_NBYTES,
        ahead: int = DEFAULT_AHEAD,
        on_error: OnError = "raise",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> ProvisionedLoader:
        """Batches of this rank, in an order that can be resumed.

        Args:
            batch_size, shuffle, seed, drop_last, block_size, blocks_per_group: see :class:`fastensor.data.EpochPlan`.
            ranks: this rank, and the number of ranks that divide the samples. By default those of
                ``torch.distributed``, or those that ``torchrun`` has set.
            collate_fn: makes a batch of a list of samples, in a worker; by default as a ``DataLoader`` does it.
            device: where tensors are to be.
            buffer_bytes: memory for batches that have come and are not dropped yet. If one batch takes more, or they
                are kept, batches come one by one, in memory of their own.
            ahead: how many batches come ahead at most.
            on_error: ``"raise"``: if a sample cannot be read or prepared, :class:`~fastensor.errors.BatchError` is
                raised in place of its batch. ``"skip"``: the sample is left out, logged, and counted in the statistics.
                Its batch is smaller; one that has no sample left gets another one of the source, so that each rank has
                as many batches as ``len`` says. Errors of ``collate_fn`` are raised all the same. A sample that is left
                out is tried again in the next epoch.
            timeout: for how many seconds a batch is waited for, while the service answers, before
                :class:`~fastensor.errors.BatchError` is raised.

        Raises:
            ValueError: an argument is out of its range.
        """
        check_whole(seed, "seed", at_least=0)
        if seed >= _MOST_SEED:
            raise ValueError(f"seed is less than 2**63, found {seed}")
        check_whole(ahead, "ahead", at_least=1)
        plan = EpochPlan(
            len(self),
            seed=seed,
            shuffle=shuffle,
            batch_size=batch_size,
            drop_last=drop_last,
            block_size=block_size,
            blocks_per_group=blocks_per_group,
        )
        registration = Registration(
            collate_fn=collate_fn,
            buffer_nbytes=as_nbytes(buffer_bytes, "buffer_bytes", at_least=1),
            ahead=int(ahead),
            on_error=on_error,
        )
        loader = ProvisionedLoader(self._engine, registration, plan, ranks=ranks, device=device, timeout=timeout)
        self._loaders.add(loader)
        return loader

    def preload(self, *, shuffle: Shuffle = "full", seed: int = 0, epoch: int = 0) -> None:
        """Fill the cache in the order of an epoch, before a loader asks. Returns at once; see :meth:`status`."""
        check_whole(epoch, "epoch", at_least=0)
        self._reached(lambda: self._engine.preload(EpochPlan(len(self), seed=seed, shuffle=shuffle), int(epoch)))

    def status(self) -> dict[str, Any]:
        """State of the service: its processes, its loaders, and counts of what was cached and read."""
        return self._reached(self._engine.health)

    def _reached(self, action: Callable[[], T]) -> T:
        """Do something with the service, which may have to be found again."""
        try:
            return action()
        except EngineLost:
            self._engine.recover()
            return action()

    def stop(self) -> None:
        """Leave the service, which ends when all have left. Loaders of this object cannot be used any more."""
        self._is_left = True
        for loader in self._loaders:
            loader.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _ray() -> ModuleType:
    """The engine on Ray, which is imported when it is used."""
    try:
        return import_module("fastensor.provision.ray.client")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ProvisionError("engine='ray' needs Ray: install Fastensor with its extra ray") from error


def _show_filling_in_thread(engine: EmbeddedEngine) -> None:
    """Show a progress bar while the cache fills, if the error output is a terminal, until the engine is gone, or has
    left the service."""
    if sys.stderr.isatty():
        arguments = ref(engine), EmbeddedEngine(engine.address)
        threading.Thread(target=_show_while_used, args=arguments, name="fastensor-service-bar", daemon=True).start()


def _show_while_used(found: Callable[[], EmbeddedEngine | None], observer: ServiceEngine) -> None:
    try:
        show_filling(observer, lambda: (engine := found()) is None or engine.is_left)
    except EngineLost:
        pass  # whoever needs the service starts it again
    finally:
        observer.close()


def show_filling(observer: ServiceEngine, is_left: Callable[[], bool]) -> None:
    """Show a progress bar until the cache is filled.

    Args:
        is_left: whether to stop before.

    Raises:
        EngineLost: the service has ended.
    """
    with progress_bar("filling the cache") as tell:
        while not is_left():
            status = observer.health()
            if samples := status.get("cached_samples"):  # without a cache, or for no samples, nothing is said of it
                nbytes = status["cached_nbytes"]
                tell(nbytes, min(observer.facts.cache_nbytes, nbytes * observer.facts.samples // samples))
            if status["is_filled"]:
                return
            time.sleep(_LOOK_SECONDS)
