"""How long training waits for its data: by PyTorch's ``DataLoader`` in each rank, and by one data service for all.

Samples come from storage that is remote: a process on the loopback interface with a delay and a limit on its bandwidth
(``remote_storage.py``). They are bytes of several sizes, JPEG files that are decoded and resized before the cache, and
volumes of which each use takes a random part. Ranks are processes; each takes its part of two epochs or more. Computing
is simulated by sleeping, because a GPU takes no processor from those who read. The ways take turns.

- ``DataLoader``: in each rank, with persistent workers; with several numbers of them, of which the quickest counts
- ``service``: with as many workers as the machine has processors, and a cache that holds all samples
- ``service, half``: with a cache for half of them
- ``service, killed``: its server is killed in the middle of the second epoch

A wait is the time from asking for a batch until it is there. CPU seconds are of all processes together. The workers of
a ``DataLoader`` are forked before; those of the service start in the first epoch, and import torch then, which counts:
they fill the cache as soon as they are there, so a service that had been warmed would have done the work already.

``--quick`` takes fewer sizes and ranks.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine
from PIL import Image
from remote_storage import Link, RemoteObjects, Storage
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastensor.data import EpochPlan
from fastensor.provision import DataService

OURS, HALF, KILLED, STOCK = "service", "service, half", "service, killed", "DataLoader"
PATIENCE_SECONDS = 300
IMAGE_SIZE = 224
VOLUME, CROP = 96, 64
TICKS = os.sysconf("SC_CLK_TCK")


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
    photo = load_sample_images().images[number % 2]
    file = io.BytesIO()
    Image.fromarray(np.roll(photo, 7 * number, axis=1)).save(file, "JPEG", quality=95)
    return file.getvalue()


def decode(data: bytearray) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.array(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels).permute(2, 0, 1)


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
QUICK = ("256 KB", "JPEG")
TINY = [bytes_of("32 KB", 32 << 10, 48, 4), Kind("JPEG", 16, 2, jpeg, decode, as_it_is, 3 * IMAGE_SIZE**2)]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured."""

    kind: str
    world: int
    way: str
    workers: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One epoch of a run, of all its ranks together."""

    cell: Cell
    epoch: int
    samples: int
    seconds: float
    """Time that the slowest rank took for the epoch."""
    cpu_seconds: float
    storage_nbytes: int
    """What the storage has sent."""
    median_wait_seconds: float
    p99_wait_seconds: float
    longest_wait_seconds: float
    skew: float
    """The time that the rank which has waited longest has waited, by that of the one that has waited least."""
    waiting: float
    """The part of the time that ranks have waited."""
    exact: bool
    """Whether each sample was given out once."""


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
    """The same order for all ways: a batch sampler whose epoch is set."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan, self.epoch = plan, 0

    def __len__(self) -> int:
        return self.plan.steps()

    def __iter__(self) -> Iterator[Any]:
        return iter([batch.tolist() for batch in self.plan.batches(self.epoch)])


def service_of(cell: Cell, kind: Kind, objects: RemoteObjects) -> DataService:
    room = kind.count * (kind.cached_nbytes + 1024) * 9 // 8
    return DataService.start(
        Numbered(objects), cache_bytes=room // 2 if cell.way == HALF else room, workers=cell.workers,
        before_cache=partial(second, kind.before), after_cache=partial(second, kind.after), name=f"{os.getppid()}",
    )  # fmt: skip


def cpu_seconds(pids: Sequence[int]) -> dict[int, float]:
    """What each process, and the children that it has waited for, have taken of the processors."""
    found = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = sum(map(int, fields[11:15])) / TICKS
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is told."""

    cell: Cell
    kind: Kind
    objects: RemoteObjects
    rank: int
    epochs: int
    compute_seconds: float


def work(job: Job, barrier: Any, results: Any) -> None:
    """In a fresh process, one rank: take batches, and send what was measured of each epoch."""
    torch.set_num_threads(1)
    is_ours = job.cell.way.startswith(OURS)
    opened: AbstractContextManager[DataService | None]
    opened = service_of(job.cell, job.kind, job.objects) if is_ours else nullcontext()
    plan = EpochPlan(job.kind.count, batch_size=job.kind.batch, rank=job.rank, world_size=job.cell.world)
    with opened as service:
        if service is not None:
            ranks = (job.rank, job.cell.world)
            loader: Any = service.loader(job.kind.batch, ranks=ranks, ahead=16)
            set_epoch = loader.set_epoch
        else:
            sampler, workers = Epochs(plan), job.cell.workers
            dataset = Prepared(job.objects, job.kind)
            loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
            set_epoch = partial(setattr, sampler, "epoch")

        def pids() -> list[int]:
            own = [os.getpid(), *children_of(os.getpid())]
            if service is None or job.rank:
                return own
            status = service.status()
            return [*own, status["pid"], *(worker["pid"] for worker in status["workers"])]

        if service is None:
            next(iter(loader))  # its workers start, and stay
        for epoch in range(job.epochs):
            set_epoch(epoch)
            barrier.wait(PATIENCE_SECONDS)
            kill_at = len(loader) // 2 if (job.cell.way, job.rank, epoch) == (KILLED, 0, 1) else None
            before = cpu_seconds(pids())
            began = time.perf_counter()
            waits, numbers = take(loader, job.compute_seconds, service, kill_at)
            seconds = time.perf_counter() - began
            barrier.wait(PATIENCE_SECONDS)
            spent = sum(one - before.get(pid, 0.0) for pid, one in cpu_seconds(pids()).items())
            results.send((waits, numbers, seconds, spent))
        barrier.wait(PATIENCE_SECONDS)  # none leaves the service before all have asked it


def take(
    loader: Any, compute_seconds: float, service: DataService | None, kill_at: int | None
) -> tuple[list[float], list[int]]:
    """Take an epoch. Returns the waits, and the numbers of the samples."""
    waits: list[float] = []
    numbers: list[int] = []
    asked = time.perf_counter()
    for step, (batch_numbers, content) in enumerate(loader):
        waits.append(time.perf_counter() - asked)
        numbers += batch_numbers.tolist()
        del content
        time.sleep(compute_seconds)
        if step == kill_at and service is not None:
            os.kill(service.status()["pid"], signal.SIGKILL)
        asked = time.perf_counter()
    return waits, numbers


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    kinds: Sequence[Kind]
    worlds: Sequence[int]
    workers: Sequence[int]
    """Numbers of worker processes with which a ``DataLoader`` is measured."""
    rounds: int
    epochs: int
    compute_seconds: float
    link: Link


def run(cell: Cell, kind: Kind, storage: Storage, settings: Settings) -> list[Sample]:
    """One run of a cell."""
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(cell.world + 1)
    objects = RemoteObjects(storage.port, kind.count, f"{kind.name}-{storage.port}")
    pipes, processes = [], []
    for rank in range(cell.world):
        ours, theirs = context.Pipe(duplex=False)
        job = Job(cell, kind, objects, rank, settings.epochs, settings.compute_seconds)
        processes.append(context.Process(target=work, args=(job, barrier, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    samples = []
    for epoch in range(settings.epochs):
        barrier.wait(PATIENCE_SECONDS)
        sent = storage.sent_nbytes
        barrier.wait(PATIENCE_SECONDS)
        sent = storage.sent_nbytes - sent
        samples.append(summarised(cell, kind, epoch, sent, [pipe.recv() for pipe in pipes]))
    barrier.wait(PATIENCE_SECONDS)
    for process in processes:
        process.join()
    return samples


def summarised(cell: Cell, kind: Kind, epoch: int, sent: int, ranks: list[Any]) -> Sample:
    waits = np.concatenate([one[0] for one in ranks])
    waited = [sum(one[0]) for one in ranks]
    numbers = sorted(number for one in ranks for number in one[1])
    median, p99 = np.quantile(waits, [0.5, 0.99])
    seconds = [one[2] for one in ranks]
    return Sample(
        cell, epoch, len(numbers), max(seconds), sum(one[3] for one in ranks), sent, float(median), float(p99),
        float(waits.max()), max(waited) / max(min(waited), 1e-9), sum(waited) / sum(seconds),
        numbers == list(range(kind.count)),
    )  # fmt: skip


def measure(settings: Settings, folder: Path) -> list[Sample]:
    samples: list[Sample] = []
    for kind in settings.kinds:
        objects = folder / kind.name.replace(" ", "-")
        objects.mkdir()
        for number in range(kind.count):
            (objects / f"{number:06d}").write_bytes(kind.make(number))
        with Storage(objects, settings.link) as storage:
            for world, number in product(settings.worlds, range(settings.rounds)):
                for cell in in_turn(cells_of(settings, kind.name, world), number):
                    say(f"{cell}")
                    samples += run(cell, kind, storage, settings)
    return samples


def cells_of(settings: Settings, kind: str, world: int) -> list[Cell]:
    cells = [Cell(kind, world, STOCK, workers) for workers in settings.workers]
    processors = len(os.sched_getaffinity(0))
    return [*cells, *(Cell(kind, world, way, processors) for way in (OURS, HALF, *((KILLED,) if world > 1 else ())))]


def in_turn(cells: list[Cell], number: int) -> list[Cell]:
    return [*cells[number % len(cells) :], *cells[: number % len(cells)]]


def best_stock(samples: list[Sample], kind: str, world: int) -> list[Sample]:
    """The epochs from the second on of the ``DataLoader`` whose ranks have waited least."""
    later = later_of(samples, kind, world, STOCK)
    groups = [[one for one in later if one.cell.workers == workers] for workers in {one.cell.workers for one in later}]
    return min(groups, key=lambda group: statistics.median(one.seconds for one in group))


def later_of(samples: list[Sample], kind: str, world: int, way: str) -> list[Sample]:
    return [one for one in samples if (one.cell.kind, one.cell.world, one.cell.way) == (kind, world, way) and one.epoch]


def median_of(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(map(value, samples))


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """What was promised."""
    verdicts = []
    for kind, world in dict.fromkeys((one.cell.kind, one.cell.world) for one in samples):
        verdicts += judge_group(samples, kind, world)
    exact = all(one.exact for one in samples)
    return [*verdicts, verdict("each sample once in each epoch", float(exact), exact)]


def judge_group(samples: list[Sample], kind: str, world: int) -> list[dict[str, Any]]:
    where = f"{kind}, {world} {'rank' if world == 1 else 'ranks'}"
    ours, stock = later_of(samples, kind, world, OURS), best_stock(samples, kind, world)
    killed = later_of(samples, kind, world, KILLED)

    def ratio(value: Callable[[Sample], float]) -> float:
        return median_of(ours, value) / max(median_of(stock, value), 1e-9)

    waited = ratio(lambda one: one.waiting * one.seconds)
    p99 = ratio(lambda one: one.p99_wait_seconds)
    verdicts = [
        verdict(f"{where}: wait from epoch 2 on / DataLoader's ≤ 0.2", waited, waited <= 0.2),
        verdict(f"{where}: p99 of these waits / DataLoader's < 1", p99, p99 < 1),
    ]
    if kind == JPEG.name:
        most = 1 / (0.8 * world)
        stock_cpu = cpu_of(samples, kind, world, STOCK, stock[0].cell.workers)
        cpu = cpu_of(samples, kind, world, OURS) / max(stock_cpu, 1 / TICKS)
        verdicts.append(verdict(f"{where}: CPU seconds of all epochs / DataLoaders' ≤ {most:.2f}", cpu, cpu <= most))
    if killed:
        longest = max(one.longest_wait_seconds for one in killed)
        verdicts.append(verdict(f"{where}: longest wait, server killed ≤ 5 s", longest, longest <= 5))
    return verdicts


def cpu_of(samples: list[Sample], kind: str, world: int, way: str, workers: int | None = None) -> float:
    """CPU seconds of all epochs of all runs, the first epoch included."""
    found = [one for one in samples if (one.cell.kind, one.cell.world, one.cell.way) == (kind, world, way)]
    return sum(one.cpu_seconds for one in found if workers in (None, one.cell.workers))


def verdict(promise: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": round(measured, 3), "holds": holds}


def table(machine: dict[str, str], settings: Settings, samples: list[Sample], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    link = settings.link
    lines = ["# Batches from a data service", "", *(f"- {what}: {text}" for what, text in machine.items())]
    lines.append(f"- storage: {link.delay_seconds * 1e3:g} ms, {link.bytes_per_second / 1e6:g} MB/s for all")
    lines.append(f"- computing: {settings.compute_seconds * 1e3:g} ms a batch, simulated")
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.3f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    lines += [
        "", "## medians", "",
        "| samples | ranks | way | workers | epoch | samples/s | wait, ms: median | p99 | longest | waiting "
        "| skew of ranks | CPU ms a sample | MB from storage | runs |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for cell, first in dict.fromkeys((one.cell, one.epoch == 0) for one in samples):
        lines.append(row(cell, first, [one for one in samples if one.cell == cell and (one.epoch == 0) == first]))
    return "\n".join(lines) + "\n"


def row(cell: Cell, first: bool, group: list[Sample]) -> str:
    median = partial(median_of, group)
    return (
        f"| {cell.kind} | {cell.world} | {cell.way} | {cell.workers} | {'1' if first else 'later'} "
        f"| {median(lambda one: one.samples / one.seconds):.0f} "
        f"| {median(lambda one: one.median_wait_seconds) * 1e3:.2f} "
        f"| {median(lambda one: one.p99_wait_seconds) * 1e3:.1f} "
        f"| {median(lambda one: one.longest_wait_seconds) * 1e3:.1f} | {median(lambda one: one.waiting):.0%} "
        f"| {median(lambda one: one.skew):.2f} | {median(lambda one: one.cpu_seconds / one.samples) * 1e3:.2f} "
        f"| {median(lambda one: one.storage_nbytes) / 1e6:.1f} | {len(group)} |"
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="few samples: shows that it runs")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--worlds", nargs="+", type=int, help="numbers of ranks")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4], help="of a DataLoader, in each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=20.0, help="simulated, for each batch")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of the storage")
    parser.add_argument("--megabytes-per-second", type=float, default=200.0, help="of the storage")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/provision"), help="without suffix")
    options = parser.parse_args()
    names = options.kinds or (QUICK if options.quick else [kind.name for kind in KINDS])
    settings = Settings(
        TINY if options.tiny else [kind for kind in KINDS if kind.name in names],
        options.worlds or ((1, 2) if options.quick else (1, 2, 4)),
        options.workers,
        options.rounds,
        options.epochs,
        options.compute_ms / 1e3,
        Link(options.delay_ms / 1e3, options.megabytes_per_second * 1e6),
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["fastensor.provision", "PIL.Image", "sklearn.datasets"]
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(Path(folder), "cpu")
        samples = measure(settings, Path(folder))
    verdicts = judge(samples)
    text = table(machine, settings, samples, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "verdicts": verdicts, "samples": [asdict(one) for one in samples]}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


if __name__ == "__main__":
    main()
