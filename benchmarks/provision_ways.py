"""What ``provision.py`` measures: kinds of samples, and ways by which ranks get their batches.

Each way reads the same objects from the same storage, and prepares them by the same functions.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from remote_storage import RemoteObjects
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastensor.data import EpochPlan
from fastensor.provision import DataService
from fastensor.provision.service import NAME_VARIABLE

OURS, HALF, KILLED = "service", "service, half", "service, killed"
STOCK = "DataLoader"
LITDATA, RAY = "litdata", "Ray Data"
PEERS = {LITDATA: "litdata", RAY: "ray"}
"""Others, and the modules that they need."""
IMAGE_SIZE = 224
VOLUME, CROP = 96, 64
CHUNK_NBYTES = 8 << 20
"""The size of each file that litdata writes."""
PATIENCE_SECONDS = 120
"""No epoch takes longer, and no start."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Samples of one kind, and what is done with them."""

    name: str
    count: int
    batch: int
    make: Callable[[int], bytes]
    """The bytes of a number."""
    before: Callable[[Any], Any]
    """Done once, if it is cached."""
    after: Callable[[Any], Any]
    """Done for each use."""
    cached_nbytes: int
    """Bytes of a sample that ``before`` has made, as the cache keeps it."""


def as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def as_it_is(sample: Any) -> Any:
    return sample


def random_bytes(nbytes: int, number: int) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


def jpeg(number: int) -> bytes:
    """A part of a photo, of about 150 KB."""
    from sklearn.datasets import load_sample_images  # only who writes samples need wait for it

    photo = load_sample_images().images[number % 2]
    file = io.BytesIO()
    Image.fromarray(np.roll(photo, 7 * number, axis=1)).save(file, "JPEG", quality=95)
    return file.getvalue()


def decode(data: bytearray) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.array(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def as_volume(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.float16).reshape(VOLUME, VOLUME, VOLUME)


def crop(volume: Tensor) -> Tensor:
    x, y, z = torch.randint(0, VOLUME - CROP, (3,)).tolist()
    part = volume[x : x + CROP, y : y + CROP, z : z + CROP]
    return part.flip(0) if torch.rand(()) < 0.5 else part.clone()


def bytes_of(name: str, nbytes: int, count: int, batch: int) -> Kind:
    return Kind(name, count, batch, partial(random_bytes, nbytes), as_tensor, as_it_is, nbytes)


JPEG = Kind("JPEG", 256, 16, jpeg, decode, as_it_is, 3 * IMAGE_SIZE**2)
CROPS = Kind("3-D crops", 64, 4, partial(random_bytes, 2 * VOLUME**3), as_volume, crop, 2 * VOLUME**3)
KINDS = [
    bytes_of("32 KB", 32 << 10, 2048, 64), bytes_of("256 KB", 256 << 10, 512, 32), bytes_of("1 MB", 1 << 20, 192, 16),
    bytes_of("4 MB", 4 << 20, 64, 8), bytes_of("16 MB", 16 << 20, 16, 2), JPEG, CROPS,
]  # fmt: skip
QUICK = [bytes_of("32 KB", 32 << 10, 128, 8), bytes_of("1 MB", 1 << 20, 64, 4), replace(JPEG, count=128, batch=8)]
TINY = [bytes_of("32 KB", 32 << 10, 48, 4), Kind("JPEG", 16, 2, jpeg, decode, as_it_is, 3 * IMAGE_SIZE**2)]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured."""

    kind: str
    world: int
    way: str
    workers: int
    """Processes that read and prepare, of all ranks together."""

    @property
    def workers_of_rank(self) -> int:
        """If each rank has its own."""
        return self.workers // self.world


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is told."""

    cell: Cell
    kind: Kind
    objects: RemoteObjects
    """What the storage has: for litdata its files, for the others a sample each."""
    names: tuple[str, ...]
    """The names of the objects."""
    folder: Path
    """An empty folder of this run."""
    rank: int
    epochs: int
    compute_seconds: float

    @property
    def plan(self) -> EpochPlan:
        """Which samples this rank takes."""
        return EpochPlan(self.kind.count, batch_size=self.kind.batch, rank=self.rank, world_size=self.cell.world)


@dataclass(frozen=True, slots=True)
class Opened:
    """A way, in a rank, ready to be measured."""

    loader: Any
    """Gives out the numbers of samples, and their content."""
    set_epoch: Callable[[int], None]
    pids: Callable[[], list[int]]
    """The processes whose time counts for this rank."""
    service: Callable[[], int | None] = lambda: None
    """The process that all ranks have in common, if there is one."""
    kill: Callable[[], None] = lambda: None


def missing() -> list[str]:
    """The ways that cannot be measured here, because a package is missing."""
    return [way for way, module in PEERS.items() if find_spec(module) is None]


def open_way(job: Job) -> AbstractContextManager[Opened]:
    """Start what a rank needs. It is ready when the context has been entered."""
    ways = {STOCK: by_data_loader, LITDATA: by_litdata, RAY: by_ray}
    return ways.get(job.cell.way, by_service)(job)


def descendants_of(pid: int) -> list[int]:
    """A process, and all that its threads have started and not lost.

    One that has ended since is missing. The process that has waited for it has its time, of its whole life: what it
    took before an epoch counts for the epoch in which it has ended.
    """
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended just now
            children += [int(child) for child in path.read_text().split()]
    return [pid, *(found for child in children for found in descendants_of(child))]


def own_processes() -> list[int]:
    return descendants_of(os.getpid())


class Prepared(Dataset[Any]):
    """What users write for a ``DataLoader``. Samples have their number."""

    def __init__(self, objects: RemoteObjects, kind: Kind) -> None:
        self.objects, self.before, self.after = objects, kind.before, kind.after

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.after(self.before(self.objects[number]))


@dataclass(slots=True)
class Numbered:
    """Objects with their numbers, as a source of the service."""

    objects: RemoteObjects

    @property
    def fingerprint(self) -> str:
        return self.objects.fingerprint

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.objects[number]


def second(function: Callable[[Any], Any], sample: tuple[int, Any]) -> tuple[int, Any]:
    return sample[0], function(sample[1])


class Epochs:
    """A batch sampler whose epoch is set. It has nothing before that."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan = plan
        self.epoch = -1

    def __len__(self) -> int:
        return self.plan.steps() if self.epoch >= 0 else 0

    def __iter__(self) -> Iterator[Any]:
        return iter([batch.tolist() for batch in self.plan.batches(self.epoch)] if self.epoch >= 0 else [])


def forked(workers: int) -> dict[str, Any]:
    """Options of a ``DataLoader``: its workers are children of the rank, or their time would not be found. Ranks come
    from a fork server, and what they start would come from there, too."""
    return {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "multiprocessing_context": "fork" if workers else None,
    }


@contextmanager
def by_data_loader(job: Job) -> Iterator[Opened]:
    """PyTorch's own, with workers that stay."""
    sampler = Epochs(job.plan)
    dataset = Prepared(job.objects, job.kind)
    loader = DataLoader(dataset, batch_sampler=sampler, **forked(job.cell.workers_of_rank))
    assert not list(loader)  # its workers start, and read nothing yet
    yield Opened(loader, partial(setattr, sampler, "epoch"), own_processes)


@contextmanager
def by_service(job: Job) -> Iterator[Opened]:
    """One service for all ranks: without a launcher, the folder of the run is what they have in common."""
    os.environ[NAME_VARIABLE] = str(job.folder)
    with started(job) as service:
        yield opened_by(job, service, own_processes if job.rank else partial(with_service, service))


@contextmanager
def started(job: Job) -> Iterator[DataService]:
    """The service, when its workers are there."""
    kind, cell = job.kind, job.cell
    room = kind.count * (kind.cached_nbytes + 1024) * 9 // 8
    before, after = (None if one is as_it_is else partial(second, one) for one in (kind.before, kind.after))
    with DataService.start(
        Numbered(job.objects), cache_bytes=room // 2 if cell.way == HALF else room, workers=cell.workers,
        before_cache=before, after_cache=after, progress=False,
    ) as service:  # fmt: skip
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (there := len(service.status()["workers"])) < cell.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{there} of {cell.workers} workers have come within {PATIENCE_SECONDS} s")
            time.sleep(0.01)
        yield service


def opened_by(job: Job, service: DataService, pids: Callable[[], list[int]]) -> Opened:
    loader = service.loader(job.kind.batch, ranks=(job.rank, job.cell.world), ahead=16)
    server = partial(pid_of, service)
    return Opened(loader, loader.set_epoch, pids, server, lambda: os.kill(server(), signal.SIGKILL))


def pid_of(service: DataService) -> int:
    """The process of its server."""
    pid: int = service.status()["pid"]
    return pid


def with_service(service: DataService) -> list[int]:
    """The processes of a rank that counts those of the service, too."""
    return [*own_processes(), *descendants_of(pid_of(service))]


def write_at_once(path: Path, text: str) -> None:
    """Have a file appear with all of its text."""
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(text)
    partial_path.replace(path)


def read_when_there(path: Path) -> str:
    """The text of a file that another rank writes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not written {path.name}")
        time.sleep(0.05)
    return path.read_text()


def write_chunks(folder: Path, kind: Kind) -> None:
    """The samples in litdata's format."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=max(CHUNK_NBYTES, 2 * len(kind.make(0))))
    for number in range(kind.count):
        writer[number] = {"number": number, "data": kind.make(number)}
    writer.done()
    writer.merge()


@contextmanager
def by_litdata(job: Job) -> Iterator[Opened]:
    """litdata, which keeps the files that it has read on the local disk, and decodes in each epoch. Its workers start
    in the first epoch."""
    import litdata
    from litdata.streaming import downloader, resolver

    class FromStorage(downloader.Downloader):  # type: ignore[misc]
        def download_file(self, remote_filepath: str, local_filepath: str) -> None:
            data = job.objects[job.names.index(Path(remote_filepath).name)]
            partial_path = Path(f"{local_filepath}.{os.getpid()}")
            partial_path.write_bytes(data)
            partial_path.replace(local_filepath)

    class Decoded(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[int, Any]:
            found = super().__getitem__(index)
            return found["number"], job.kind.after(job.kind.before(bytearray(found["data"])))

    downloader.register_downloader("storage://", FromStorage, overwrite=True)
    if job.cell.world > 1:
        store = f"file://{job.folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=job.rank, world_size=job.cell.world)
    cache = job.folder / f"rank-{job.rank}"
    cache.mkdir()
    where = resolver.Dir(path=str(cache), url="storage://objects")
    dataset = Decoded(where, shuffle=True, drop_last=False)
    loader = litdata.StreamingDataLoader(dataset, batch_size=job.kind.batch, **forked(job.cell.workers_of_rank))
    yield Opened(loader, lambda epoch: None, own_processes)
    if job.cell.world > 1:
        dist.destroy_process_group()
    shutil.rmtree(cache)


class RayEpochs:
    """The samples of a rank in the order of the plan, read and prepared by Ray Data anew in each epoch."""

    def __init__(self, job: Job) -> None:
        self.plan, self.batch, self.epoch = job.plan, job.kind.batch, 0
        self.prepare = partial(prepared_row, Prepared(job.objects, job.kind))

    def __len__(self) -> int:
        return self.plan.steps()

    def __iter__(self) -> Iterator[Any]:
        import ray

        numbers = np.concatenate([*self.plan.batches(self.epoch)]).tolist()
        items = [{"number": number} for number in numbers]
        rows = ray.data.from_items(items, override_num_blocks=len(self)).map(self.prepare)  # or each is a task
        for batch in rows.iter_torch_batches(batch_size=self.batch, prefetch_batches=4):
            yield batch["number"], batch["content"]


def prepared_row(dataset: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    number, content = dataset[row["number"]]
    return {"number": number, "content": content.numpy()}


@contextmanager
def by_ray(job: Job) -> Iterator[Opened]:
    """Ray Data on a local Ray, which rank 0 starts."""
    import ray

    from fastensor.provision.ray.cluster import as_named

    where = job.folder / "address"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    with as_named("127.0.0.1"):
        if job.rank == 0:
            workers = job.cell.workers
            more = {"num_workers_soft_limit": workers * job.cell.world}  # or ranks end each other's, which then start
            found = ray.init("local", num_cpus=workers, include_dashboard=False, _system_config=more, **options)
            write_at_once(where, found.address_info["gcs_address"])
        else:
            ray.init(read_when_there(where), **options)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    loader = RayEpochs(job)
    yield Opened(loader, partial(setattr, loader, "epoch"), own_processes)
    ray.shutdown()
