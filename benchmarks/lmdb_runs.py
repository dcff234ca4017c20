"""Runs of those who read training data in LMDB, each in fresh processes, and what a run is found to take."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from lmdb_contenders import FIO, OURS, READAHEAD, STORE, Files, loading_of, paths_of
from lmdb_scenarios import Cell, Size, batches_of
from measuring import drop_caches, received
from torch.distributed import TCPStore

from fastensor.data import LmdbDataset, LmdbIndex, ReadAheadSampler
from fastensor.files import posix

OVERFLOW_HEADER_NBYTES = 16
PATIENCE_SECONDS = 120
"""No start takes longer, and no run takes longer beyond its time."""
EVICTION_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: of all its processes together, where nothing else is said."""

    cell: Cell
    samples: int
    seconds: float
    """From the common start until the slowest process is done."""
    cpu_seconds: float
    read_nbytes: int
    """What came from the disk (``/proc/self/io``)."""
    major_faults: int
    context_switches: int
    p99_wait_seconds: float
    """The 99th percentile of how long a process waits for a batch."""
    skew: float
    """The rate of the fastest process by that of the slowest one."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class Whole:
    """One pass over a whole file: an index that is built, or a scan."""

    operation: str
    size: str
    way: str
    seconds: float
    read_nbytes: int


def run(cell: Cell, size: Size, files: Files, seconds: float, group: Path | None = None) -> Sample:
    """One run of a cell.

    Raises:
        EOFError: a process has ended early.
        TimeoutError: a process stands still.
    """
    (fill_page_cache if cell.state == "warm" else evict)(paths_of(files, cell))
    context = multiprocessing.get_context("forkserver")
    start = context.Barrier(cell.world)
    store = TCPStore("127.0.0.1", 0, is_master=True)
    job = {"FASTENSOR_NODE_READER": f"benchmark-{store.port}", STORE: f"127.0.0.1:{store.port}"}
    pipes, processes = [], []
    for rank in range(cell.world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (cell, size, files, rank, seconds, group, job, start, theirs)
        processes.append(context.Process(target=work, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = [received(pipe, PATIENCE_SECONDS + seconds) for pipe in pipes]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(PATIENCE_SECONDS)
            process.kill()
            process.join()
    counts, times, spent, waits = zip(*found, strict=True)
    cpu, read, faults, switches = np.sum(spent, axis=0).tolist()
    rates = [count / seconds for count, seconds in zip(counts, times, strict=True)]
    p99 = float(np.percentile(np.concatenate(waits), 99))
    return Sample(
        cell, sum(counts), max(times), cpu, int(read), int(faults), int(switches), p99, max(rates) / min(rates)
    )


def work(
    cell: Cell,
    size: Size,
    files: Files,
    rank: int,
    seconds: float,
    group: Path | None,
    job: dict[str, str],
    start: Any,
    results: Any,
) -> None:
    """In a fresh process, one rank: read, and send what it took. What a node reader takes is not in it."""
    os.environ.update(job)
    loading = loading_of(cell)
    batches = batches_of(size, cell.order, rank, cell.world)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    loader = loading(files, cell.size, size, batches)
    if cell.state == "warm":
        for _ in loader:
            pass
    start.wait(PATIENCE_SECONDS)
    before = counters()
    began = last = time.perf_counter()
    waits, samples = [], 0
    for batch in loader:
        now = time.perf_counter()
        waits.append(now - last)
        last = now
        samples += len(batch)
        if len(batch[0]) != size.nbytes or now - began > seconds:
            break
    spent = counters() - before
    results.send((samples, last - began, spent.tolist(), waits))


def counters() -> np.ndarray[Any, np.dtype[np.float64]]:
    """CPU seconds, bytes read, major faults, context switches of this process, threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    switches = usage.ru_nvcsw + usage.ru_nivcsw
    return np.array([usage.ru_utime + usage.ru_stime, int(lines["read_bytes"]), usage.ru_majflt, switches])


def evict(paths: Sequence[Path]) -> None:
    """Drop the pages of files, and inodes, from memory. Reads that an earlier run has begun may still bring some."""
    for path in paths:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            deadline = time.monotonic() + EVICTION_SECONDS
            while True:
                posix.evict(file.fileno(), nbytes)
                resident = posix.resident_fraction(file.fileno(), nbytes)
                if not resident:
                    break
                if time.monotonic() > deadline:
                    raise SystemExit(f"{path}: {resident:.0%} of it stays in the page cache")
    drop_caches("inodes")


def fill_page_cache(paths: Sequence[Path]) -> None:
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_fio(name: str, size: Size, files: Files, seconds: float) -> list[Sample]:
    """Random direct reads of the pages of a record."""
    if shutil.which("fio") is None:
        say("fio is not installed: what the disk gives is not measured")
        return []
    path = files.lmdb(name)
    evict([path])
    block = -(-(size.nbytes + OVERFLOW_HEADER_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    command = [
        "fio", "--name=limit", f"--filename={path}", "--rw=randread", f"--bs={block}", "--direct=1",
        "--ioengine=io_uring", "--iodepth=64", "--readonly", f"--runtime={seconds}", "--time_based", "--thread",
        "--randrepeat=0", "--output-format=json",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]["read"]
    cell = Cell(name, "full", 1, "cold", FIO)
    return [Sample(cell, read["total_ios"], read["runtime"] / 1000, 0.0, read["io_bytes"], 0, 0, 0.0, 1.0)]


def run_whole(operation: str, name: str, way: str, files: Files) -> Whole:
    """One pass over a whole cold file, in a fresh process."""
    path = files.lmdb(name)
    evict([path])
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work_whole, args=(operation, way, path, theirs))
    process.start()
    theirs.close()
    seconds, read = received(ours, PATIENCE_SECONDS)
    process.join()
    return Whole(operation, name, way, seconds, read)


def work_whole(operation: str, way: str, path: Path, results: Any) -> None:
    before, began = counters(), time.perf_counter()
    if way == OURS:
        if operation == "index":
            LmdbIndex.open(path, sidecar=False).close()
        else:
            scan(path)
    else:
        with (
            lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=way == READAHEAD) as env,
            env.begin() as txn,
        ):
            for _ in txn.cursor().iternext(keys=operation == "index", values=operation == "scan"):
                pass
    results.send((time.perf_counter() - began, int((counters() - before)[1])))


def scan(path: Path) -> None:
    dataset = LmdbDataset(path)
    positions = np.arange(len(dataset))
    batches = np.array_split(positions, max(len(positions) * int(dataset.mean_nbytes) // (1 << 20), 1))
    for batch in ReadAheadSampler(batches, batches_ahead=32):
        dataset.__getitems__(batch)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
