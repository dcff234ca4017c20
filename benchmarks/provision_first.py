"""Starting a data service, and the first epoch from it, beside a ``DataLoader`` with as many persistent workers.

Nothing is in the cache of the service yet, so it has to keep samples for later epochs, and saves nothing by that. The
dataset, which all ways get as it is, copies samples of several sizes out of a file in the page cache, or decodes JPEG
files. Training computes nothing, so all the time of an epoch is spent waiting, and all processors are the workers'.

A ``DataLoader`` forks its workers from the process that trains, which is quickest, and not safe beside its threads. So
another one takes them from a ``forkserver``, as is the default of Python 3.14, and as the service does. In Python 3.11,
each worker of that imports torch and the script; those of the service find them imported.

Each measurement is the first one of a fresh process, which has imported all ways before. The ways take turns. A start
takes until the call is over that starts the processes (``DataService.start``; ``iter(DataLoader)``, which also asks for
the first batches), and the first batch comes after that. CPU seconds are of all processes of a way, from before its
start to the end of the first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine
from provision import cpu_seconds
from provision_ways import OURS, STOCK, decode, descendants_of, jpeg
from torch.utils.data import DataLoader, Dataset

from fastensor.data import EpochPlan
from fastensor.provision import DataService

JPEG = "JPEG"
FORKSERVER = "DataLoader, forkserver"
WAYS = (OURS, STOCK, FORKSERVER)
JPEGS = 32
"""Different files. Each is in the dataset several times."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Samples of one kind."""

    name: str
    nbytes: int
    """Bytes of a sample; 0 for JPEG files, whose sizes differ."""
    count: int
    batch: int


KINDS = [
    Kind("2 KB", 2 << 10, 32768, 64), Kind("20 KB", 20 << 10, 16384, 64), Kind("200 KB", 200 << 10, 2048, 32),
    Kind("1 MB", 1 << 20, 512, 16), Kind(JPEG, 0, 1024, 16),
]  # fmt: skip


class Samples(Dataset[Any]):
    """Samples in a file, with their numbers. Each process maps the file for itself."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.path = kind, folder / kind.name
        self.fingerprint = f"{kind.name} of {kind.count}"
        self._data: Any = None

    def write(self) -> None:
        if self.kind.nbytes:
            self.path.write_bytes(np.random.default_rng(0).bytes(self.kind.nbytes * self.kind.count))
        else:
            np.save(self.path, np.array([jpeg(number) for number in range(JPEGS)], object), allow_pickle=True)

    def __len__(self) -> int:
        return self.kind.count

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        if self._data is None:
            self._data = self._read()
        if not self.kind.nbytes:
            return number, decode(self._data[number % JPEGS])
        return number, torch.from_numpy(self._data[number].copy())

    def _read(self) -> Any:
        if not self.kind.nbytes:
            return np.load(f"{self.path}.npy", allow_pickle=True)
        return np.memmap(self.path, np.uint8, "r", shape=(self.kind.count, self.kind.nbytes)).view(np.ndarray)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    kind: str
    way: str
    start_seconds: float
    first_batch_seconds: float
    """From the start to the first batch."""
    wait_seconds: float
    """For all batches of the first epoch, the first one included, from the end of the start on."""
    later_seconds: float
    """The second epoch."""
    cpu_seconds: float
    samples: int
    exact: bool
    """Whether each sample was given out once."""


def run(kind: Kind, way: str, workers: int, folder: Path) -> Measured:
    """In a fresh process."""
    torch.set_num_threads(1)
    dataset, plan = Samples(kind, folder), EpochPlan(kind.count, batch_size=kind.batch, seed=1)
    own = [os.getpid()]
    before, began = sum(cpu_seconds(own).values()), time.perf_counter()
    if way == OURS:
        room = (kind.nbytes or 3 * 224**2) + 1024
        service = DataService.start(dataset, cache_bytes=kind.count * room * 9 // 8, workers=workers, progress=False)
        own.append(service.status()["pid"])
        started = time.perf_counter() - began
        loader: Any = service.loader(kind.batch, seed=1)
        first, second = iter(loader), loader
    else:
        batches = [batch.tolist() for batch in plan.batches(0)]
        context = "forkserver" if way == FORKSERVER else "fork"
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context=context,
        )
        first, second = iter(loader), loader
        started = time.perf_counter() - began
    numbers: list[int] = []
    times = list(taken(first, numbers))
    spent = sum(sum(cpu_seconds(descendants_of(pid)).values()) for pid in own) - before
    exact = sorted(numbers) == list(range(kind.count))
    ended = time.perf_counter()
    for batch in second:
        del batch
    later = time.perf_counter() - ended
    if way == OURS:
        service.stop()
    return Measured(
        kind.name, way, started, times[0] - began, times[-1] - began - started, later, spent, len(numbers), exact
    )


def taken(batches: Iterator[Any], numbers: list[int]) -> Iterator[float]:
    """When each batch has come. The numbers of its samples are appended."""
    for batch in batches:
        yield time.perf_counter()
        numbers += batch[0].tolist()


def in_fresh_process(kind: Kind, way: str, workers: int, folder: Path) -> Measured:
    arguments = ["--run", kind.name, way, "--workers", workers, "--folder", folder, "--count", kind.count]
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout))


def table(machine: dict[str, str], found: list[Measured], workers: int) -> str:
    """Medians as Markdown, and the service's divided by those of each DataLoader."""
    lines = ["# Starting a data service, and its first epoch", "", *(f"- {k}: {v}" for k, v in machine.items())]
    lines.append(f"- workers: {workers}; training computes nothing")
    lines += [
        "", "| samples | way | start, s | first batch, s | wait of the first epoch, s | samples/s "
        "| CPU of start and first epoch, s | second epoch, s | each sample once | runs |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]  # fmt: skip
    for kind in dict.fromkeys(one.kind for one in found):
        medians = {}
        for way in WAYS:
            group = [one for one in found if (one.kind, one.way) == (kind, way)]
            names = ("start_seconds", "first_batch_seconds", "wait_seconds", "cpu_seconds", "later_seconds")
            start, first, wait, cpu, later = (statistics.median(getattr(one, name) for one in group) for name in names)
            medians[way] = (start, first, wait, cpu)
            lines.append(
                f"| {kind} | {way} | {start:.3f} | {first:.3f} | {wait:.3f} | {group[0].samples / wait:.0f} "
                f"| {cpu:.2f} | {later:.3f} | {'yes' if all(one.exact for one in group) else '**no**'} | {len(group)} |"
            )
        for way in (STOCK, FORKSERVER):
            ratios = [ours / other for ours, other in zip(medians[OURS], medians[way], strict=True)]
            cells = [*ratios[:3], 1 / ratios[2], ratios[3]]
            lines.append(f"| {kind} | service / {way} | {' | '.join(f'{cell:.2f}' for cell in cells)} | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tiny", action="store_true", help="few samples: shows that it runs")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/provision_first"), help="without suffix"
    )
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {kind.name: kind for kind in KINDS}
    if options.run:
        name, way = options.run
        kind = Kind(name, by_name[name].nbytes, options.count, by_name[name].batch)
        print(json.dumps(asdict(run(kind, way, options.workers, options.folder))))
        return
    kinds = [kind for kind in KINDS if options.kinds is None or kind.name in options.kinds]
    if options.tiny:
        kinds = [Kind(kind.name, kind.nbytes, 2 * kind.batch, kind.batch) for kind in kinds]
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine, found = describe_machine(options.folder, "cpu"), list[Measured]()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for kind in kinds:
            Samples(kind, folder).write()
        for number in range(options.rounds):
            for kind in kinds:
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    found.append(in_fresh_process(kind, way, options.workers, folder))
                    print(found[-1], file=sys.stderr, flush=True)
    text = table(machine, found, options.workers)
    options.output.with_suffix(".md").write_text(text)
    options.output.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "measured": [asdict(one) for one in found]}, indent=1)
    )
    print(text)


if __name__ == "__main__":
    main()
