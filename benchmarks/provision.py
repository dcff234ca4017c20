"""How long training waits for its data: by one data service for all ranks, and by what others offer.

Samples come from storage that is remote: a process on the loopback interface with a delay and a limit on its bandwidth
(``remote_storage.py``). They are bytes of several sizes, JPEG files that are decoded and resized before the cache, and
volumes of which each use takes a random part. Ranks are processes; each takes its part of every epoch. Computing is
simulated by sleeping, because a GPU takes no processor from those who read. The ways take turns.

- ``DataLoader``: in each rank, with persistent workers; with several numbers of them, of which the quickest counts
- ``service``: with as many workers as the machine has processors, and a cache that holds all samples
- ``service, half``: with a cache for half of them
- ``service, killed``: its server is killed in the middle of the second epoch
- ``litdata``: its own format in files of about 8 MB, which each rank keeps on its local disk once it has read them
- ``Ray Data``: a pipeline in each rank on one local Ray, whose object store has room for a few blocks

A wait is the time from asking for a batch until it is there. CPU seconds are of all processes together. Starting is
counted apart: until the processes are there that read, and have imported what they need. Nothing has been read then
(workers of litdata and Ray start in the first epoch).

What is decoded once for E epochs cannot save more than a factor of E. So there are at least two epochs for each rank.

``--quick`` takes about five minutes: fewer sizes and ranks, and one round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine
from provision_report import Sample, Started, judge, table
from provision_ways import (
    HALF,
    KILLED,
    KINDS,
    LITDATA,
    OURS,
    PATIENCE_SECONDS,
    PEERS,
    STOCK,
    TINY,
    Cell,
    Job,
    Kind,
    Opened,
    missing,
    open_way,
    write_chunks,
)
from remote_storage import Link, RemoteObjects, Storage

TICKS = os.sysconf("SC_CLK_TCK")
QUICK = ("256 KB", "JPEG")


def cpu_seconds(pids: Sequence[int]) -> dict[int, float]:
    """What each process, and the children that it has waited for, have taken of the processors."""
    found = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # it has ended just now
        found[pid] = sum(map(int, fields[11:15])) / TICKS
    return found


def work(job: Job, barrier: Any, results: Any) -> None:
    """In a fresh process, one rank: take batches, and send what was measured of the start, and of each epoch. If it
    fails, nobody waits for it."""
    try:
        measured(job, barrier, results)
    except BaseException:
        barrier.abort()
        raise


def measured(job: Job, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    began, own = time.perf_counter(), sum(cpu_seconds([os.getpid()]).values())
    with open_way(job) as opened:
        seconds, spent = time.perf_counter() - began, sum(cpu_seconds(opened.pids()).values()) - own
        results.send((seconds, spent, opened.service()))
        for epoch in range(job.epochs):
            opened.set_epoch(epoch)
            barrier.wait(PATIENCE_SECONDS)
            kill_at = job.plan.steps() // 2 if (job.cell.way, job.rank, epoch) == (KILLED, 0, 1) else None
            before = cpu_seconds(opened.pids())
            began = time.perf_counter()
            waits, numbers = take(opened, job.compute_seconds, kill_at)
            seconds = time.perf_counter() - began
            barrier.wait(PATIENCE_SECONDS)
            spent = sum(one - before.get(pid, 0.0) for pid, one in cpu_seconds(opened.pids()).items())
            results.send((waits, numbers, seconds, spent))
        barrier.wait(PATIENCE_SECONDS)  # none leaves before all have asked


def take(opened: Opened, compute_seconds: float, kill_at: int | None) -> tuple[list[float], list[int]]:
    """Take an epoch. Returns the waits, and the numbers of the samples."""
    waits: list[float] = []
    numbers: list[int] = []
    asked = time.perf_counter()
    for step, (batch_numbers, content) in enumerate(opened.loader):
        waits.append(time.perf_counter() - asked)
        numbers += batch_numbers.tolist()
        del content
        time.sleep(compute_seconds)
        if step == kill_at:
            opened.kill()
        asked = time.perf_counter()
    return waits, numbers


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    kinds: Sequence[Kind]
    worlds: Sequence[int]
    workers: Sequence[int]
    """Numbers of worker processes with which a ``DataLoader`` is measured."""
    peers: Sequence[str]
    rounds: int
    epochs: int
    compute_seconds: float
    link: Link


def run(cell: Cell, kind: Kind, folder: Path, storage: Storage, settings: Settings) -> tuple[Started, list[Sample]]:
    """One run of a cell."""
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(cell.world + 1)
    objects = RemoteObjects(storage.port, storage.count, f"{kind.name}-{storage.port}")
    names = tuple(sorted(path.name for path in storage.folder.iterdir()))
    epochs = max(settings.epochs, 2 * cell.world)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for rank in range(cell.world):
            ours, theirs = context.Pipe(duplex=False)
            job = Job(cell, kind, objects, names, Path(name).absolute(), rank, epochs, settings.compute_seconds)
            processes.append(context.Process(target=work, args=(job, barrier, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            starts = [pipe.recv() for pipe in pipes]
            services = {service for _, _, service in starts}
            assert len(services) == 1, f"expected one service of all ranks, found processes {services}"
            samples = []
            for epoch in range(epochs):
                barrier.wait(PATIENCE_SECONDS)
                sent = storage.sent_nbytes
                barrier.wait(PATIENCE_SECONDS)
                sent = storage.sent_nbytes - sent
                samples.append(summarised(cell, kind, epoch, sent, [pipe.recv() for pipe in pipes]))
            barrier.wait(PATIENCE_SECONDS)
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.join()
    return Started(cell, max(one[0] for one in starts), sum(one[1] for one in starts)), samples


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


def measure(settings: Settings, folder: Path) -> tuple[list[Started], list[Sample]]:
    starts: list[Started] = []
    samples: list[Sample] = []
    for kind in settings.kinds:
        objects, chunks = folder / f"objects-{kind.name}", folder / f"chunks-{kind.name}"
        objects.mkdir()
        chunks.mkdir()
        for number in range(kind.count):
            (objects / f"{number:06d}").write_bytes(kind.make(number))
        if LITDATA in settings.peers:
            write_chunks(chunks, kind)
        with Storage(objects, settings.link) as storage, Storage(chunks, settings.link) as of_chunks:
            for world, number in product(settings.worlds, range(settings.rounds)):
                for cell in in_turn(cells_of(settings, kind.name, world), number):
                    say(f"{cell}")
                    of_cell = of_chunks if cell.way == LITDATA else storage
                    started, epochs = run(cell, kind, folder, of_cell, settings)
                    starts.append(started)
                    samples += epochs
    return starts, samples


def cells_of(settings: Settings, kind: str, world: int) -> list[Cell]:
    stock = [Cell(kind, world, STOCK, workers) for workers in settings.workers]
    processors = len(os.sched_getaffinity(0))
    return [*stock, *(Cell(kind, world, way, processors) for way in (OURS, HALF, KILLED, *settings.peers))]


def in_turn(cells: list[Cell], number: int) -> list[Cell]:
    return [*cells[number % len(cells) :], *cells[: number % len(cells)]]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="few samples: shows that it runs")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--worlds", nargs="+", type=int, help="numbers of ranks")
    parser.add_argument("--workers", nargs="+", type=int, help="of a DataLoader, in each rank")
    parser.add_argument("--peers", nargs="*", choices=[*PEERS], default=[*PEERS])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, default=3, help="at least; at least two for each rank")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="simulated, for each batch")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of the storage")
    parser.add_argument("--megabytes-per-second", type=float, default=200.0, help="of the storage")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/provision"), help="without suffix")
    options = parser.parse_args()
    short = options.quick or options.tiny
    names = options.kinds or (QUICK if options.quick else [kind.name for kind in KINDS])
    absent = [way for way in missing() if way in options.peers]
    for way in absent:
        say(f"{way} is left out: it is not installed")
    settings = Settings(
        TINY if options.tiny else [kind for kind in KINDS if kind.name in names],
        options.worlds or ((1, 2) if short else (1, 2, 4)),
        options.workers or ((2,) if short else (1, 2, 4)),
        [way for way in options.peers if way not in absent],
        options.rounds or (1 if short else 3),
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
        starts, samples = measure(settings, Path(folder))
    machine["storage"] = f"{options.delay_ms:g} ms, {options.megabytes_per_second:g} MB/s for all"
    machine["computing"] = f"{options.compute_ms:g} ms a batch, simulated"
    machine["left out, because it is not installed"] = ", ".join(absent) or "nothing"
    verdicts = judge(samples)
    text = table(machine, starts, samples, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {
        "machine": machine, "verdicts": verdicts, "starts": [asdict(one) for one in starts],
        "samples": [asdict(one) for one in samples],
    }  # fmt: skip
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


if __name__ == "__main__":
    main()
