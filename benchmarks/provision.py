"""How long training waits for its data: by one data service for all ranks, and by what others offer.

Samples come from storage that is remote: a process on the loopback interface with a delay and a limit on its bandwidth
(``remote_storage.py``). They are bytes of several sizes, JPEG files that are decoded and resized before the cache, and
volumes of which each use takes a random part. Ranks are processes; each takes its part of every epoch. Computing is
simulated by sleeping, because a GPU takes no processor from those who read. The ways take turns.

- ``service``: with a cache that holds all samples
- ``service, half``: with a cache for half of them
- ``service, killed``: its server is killed in the middle of the second epoch
- ``DataLoader``: PyTorch's own, in each rank, with persistent workers
- ``litdata``: its own format in files of about 8 MB, which each rank keeps on its local disk once it has read them
- ``Ray Data``: a pipeline in each rank, on one local Ray

All have the same processors, those of the machine, and the same number of workers, of all ranks together: one for each
processor, and at least one for each rank. Ray Data, which has no such number, runs as many tasks at once. Workers wait
for the storage, so more of them may be quicker. A ``DataLoader`` is measured with several times as many, too
(``--times``), and the quickest counts; the others are not.

A wait is the time from asking for a batch until it is there. CPU seconds are of all processes together, without those
that stand for what is remote. Starting is counted apart: until the processes are there that read, and have imported
what they need. Nothing has been read then (workers of litdata and Ray start in the first epoch).

What is decoded once for E epochs cannot save more than a factor of E. So there are at least two epochs for each rank.

Results are written after each run. A way that fails is named there, and the others go on; the exit status is 1 then.

``--quick`` has few samples, and goes on in rounds until its time is over (``--minutes``). ``service`` and
``DataLoader`` take part in all rounds, ``service, killed`` in the first one, and the others there with the middle
number of ranks. Its epochs are short, which is better for the service: it makes batches of the next epoch before that
begins.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from math import inf
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch
from measuring import describe_machine, received
from provision_report import Failure, Found, Sample, Started, judge, table
from provision_ways import (
    HALF,
    KILLED,
    KINDS,
    LITDATA,
    OURS,
    PATIENCE_SECONDS,
    PEERS,
    QUICK,
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


class WrongRunError(Exception):
    """The ranks have not done what is to be measured."""


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
    times: Sequence[int]
    """A ``DataLoader`` is measured with so many times the workers that the others have."""
    peers: Sequence[str]
    is_quick: bool
    """Not all ways take part in all rounds."""
    rounds: int
    seconds: float
    """No run begins that would probably end later."""
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
        of_run = Path(name).absolute()
        first = Job(cell, kind, objects, names, of_run, 0, epochs, settings.compute_seconds)
        for rank in range(cell.world):
            ours, theirs = context.Pipe(duplex=False)
            job = replace(first, rank=rank)
            processes.append(context.Process(target=work, args=(job, barrier, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            starts = [received(pipe, PATIENCE_SECONDS) for pipe in pipes]
            check_service([service for _, _, service in starts])
            samples = []
            for epoch in range(epochs):
                barrier.wait(PATIENCE_SECONDS)
                sent = storage.sent_nbytes
                barrier.wait(PATIENCE_SECONDS)
                sent = storage.sent_nbytes - sent
                samples.append(
                    summarised(cell, kind, epoch, sent, [received(pipe, PATIENCE_SECONDS) for pipe in pipes])
                )
            barrier.wait(PATIENCE_SECONDS)
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.join(PATIENCE_SECONDS)
                process.kill()
    return Started(cell, max(one[0] for one in starts), sum(one[1] for one in starts)), samples


def check_service(services: Sequence[int | None]) -> None:
    """Refuse ranks that have several services.

    Args:
        services: for each rank the process of its service.
    """
    if len(set(services)) != 1:
        raise WrongRunError(f"expected one service of all ranks, found processes {services}")


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


def measure(settings: Settings, folder: Path, found: Found, write: Callable[[], object]) -> None:
    """Measure all cells, round by round.

    Args:
        found: what was measured is added to it.
        write: is called after each run.
    """
    end = time.monotonic() + settings.seconds
    took: dict[tuple[str, str, int], float] = {}
    with ExitStack() as opened:
        storages = {kind: storages_of(kind, settings, folder, opened) for kind in settings.kinds}
        for number, kind, world in product(range(settings.rounds), settings.kinds, settings.worlds):
            for cell in in_turn(cells_of(settings, kind.name, world, number), number):
                key = (cell.kind, cell.way, cell.world)
                if time.monotonic() + took.get(key, 0.0) > end:
                    say(f"there is no time for {cell} and what would follow")
                    return
                say(f"{cell}")
                began = time.monotonic()
                try:
                    started, epochs = run(cell, kind, folder, storages[kind][cell.way == LITDATA], settings)
                except (OSError, EOFError, BrokenBarrierError, WrongRunError) as error:
                    # a rank has ended and said why, or does not go on
                    say(f"{cell} has failed: {error!r}")
                    found.failures.append(Failure(cell, repr(error)))
                else:
                    found.starts.append(started)
                    found.samples.extend(epochs)
                took[key] = time.monotonic() - began
                write()


def storages_of(kind: Kind, settings: Settings, folder: Path, opened: ExitStack) -> tuple[Storage, Storage]:
    """Storages of samples, and of files of litdata."""
    objects, chunks = folder / f"objects-{kind.name}", folder / f"chunks-{kind.name}"
    objects.mkdir()
    chunks.mkdir()
    for number in range(kind.count):
        (objects / f"{number:06d}").write_bytes(kind.make(number))
    if LITDATA in settings.peers:
        write_chunks(chunks, kind)
    return (
        opened.enter_context(Storage(objects, settings.link)),
        opened.enter_context(Storage(chunks, settings.link)),
    )


def cells_of(settings: Settings, kind: str, world: int, number: int) -> list[Cell]:
    """What takes part in a round."""
    workers = workers_for(world, processors())
    return [
        *(Cell(kind, world, STOCK, times * workers) for times in settings.times),
        *(Cell(kind, world, way, workers) for way in ways_of(settings, world, number)),
    ]


def ways_of(settings: Settings, world: int, number: int) -> list[str]:
    """What takes part in a round beside the ``DataLoader``."""
    if not settings.is_quick:
        return [OURS, HALF, KILLED, *settings.peers]
    is_middle = world == sorted(settings.worlds)[len(settings.worlds) // 2]
    return [OURS, *[KILLED] * (number == 0), *(settings.peers if number == 0 and is_middle else ())]


def workers_for(world: int, processors: int) -> int:
    """One for each processor, and the same number, at least one, for each rank.

    >>> [workers_for(4, processors) for processors in (2, 4, 10)]
    [4, 4, 8]
    """
    return max(processors // world, 1) * world


def processors() -> int:
    return len(os.sched_getaffinity(0))


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
    parser.add_argument("--times", nargs="+", type=int, help="the workers of the others, for a DataLoader")
    parser.add_argument("--peers", nargs="*", choices=[*PEERS], default=[*PEERS])
    parser.add_argument("--rounds", type=int, help="at most")
    parser.add_argument("--minutes", type=float, help="no run begins that would end later (--quick: 7.5)")
    parser.add_argument("--epochs", type=int, default=3, help="at least; at least two for each rank")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="simulated, for each batch")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of the storage")
    parser.add_argument("--megabytes-per-second", type=float, default=200.0, help="of the storage")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/provision"), help="without suffix")
    options = parser.parse_args()
    short = options.quick or options.tiny
    kinds = TINY if options.tiny else QUICK if options.quick else KINDS
    absent = [way for way in missing() if way in options.peers]
    for way in absent:
        say(f"{way} is left out: the package {PEERS[way]} is not installed")
    settings = Settings(
        [kind for kind in kinds if kind.name in (options.kinds or [kind.name for kind in kinds])],
        options.worlds or ((1, 2) if options.tiny else (1, 2, 4)),
        options.times or ((1, 2) if short else (1, 2, 4)),
        [way for way in options.peers if way not in absent],
        options.quick,
        options.rounds or (1 if options.tiny else 9 if options.quick else 3),
        60 * (options.minutes or (7.5 if options.quick else inf)),
        options.epochs,
        options.compute_ms / 1e3,
        Link(options.delay_ms / 1e3, options.megabytes_per_second * 1e6),
    )
    # without a token, Ray would write one into the user's home, and the other ranks have to have the same
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fastensor.provision", "PIL.Image"])
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    found = Found()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = described(options, Path(folder), absent)
        measure(settings, Path(folder), found, lambda: write(options.output, machine, found))
    print(write(options.output, machine, found))
    sys.exit(bool(found.failures))


def described(options: argparse.Namespace, folder: Path, absent: list[str]) -> dict[str, str]:
    """What was measured, on what machine."""
    modules = ["torch", "pillow", *(PEERS[way] for way in options.peers if way not in absent)]
    machine = describe_machine(folder, "cpu")
    return {
        **machine,
        "python": platform.python_version(),
        **{module: version(module) for module in modules},
        "storage": f"{options.delay_ms:g} ms, {options.megabytes_per_second:g} MB/s for all",
        "computing": f"{options.compute_ms:g} ms a batch, simulated",
        "left out, because it is not installed": ", ".join(absent) or "nothing",
    }


def write(output: Path, machine: dict[str, str], found: Found) -> str:
    """Write what was measured so far. Returns the table."""
    verdicts = judge(found.samples)
    text = table(machine, found, verdicts)
    output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "verdicts": verdicts, **asdict(found)}
    output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    return text


if __name__ == "__main__":
    main()
