"""How fast training data is read from LMDB, by py-lmdb, by its strongest form, and by ``fastensor.data``.

The records are random bytes, under keys that count up. Every way is a map-style dataset whose samples are ``bytes``,
read through a ``DataLoader`` with the same batch sampler, in the process that trains. Each run is a group of fresh
processes that begin together: the ranks of a job on one machine. It takes the first samples of an epoch from a file
that is many times larger, as at any time in an epoch of a database that does not fit into memory. Files are opened, and
the index is built, before. A cold run finds no page of the records in the page cache, a warm one all, and is the second
pass of its processes. The ways take turns.

- ``py-lmdb``: as users open it, and with ``readahead=False``
- ``py-lmdb + WILLNEED``: without read-ahead, but the pages of records that come next are known, by our index, and the
  kernel is told (``posix_fadvise``); with two distances. The better one counts.
- ``raw files``: a file for each record
- ``fio``: random direct reads of as many pages as a record has, 64 in flight: what the disk gives at most
- ``litdata``: its own format, and its own order; only where that is comparable, and if it is installed

``--quick`` takes two sizes, two orders, and 1 and 4 processes. Run by ``make bench``.

This file is not named ``lmdb.py``, because ``import lmdb`` would find it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lmdb
import numpy as np
from measuring import describe_machine, drop_caches
from torch.utils.data import DataLoader, Dataset

from fastensor.data import EpochPlan, LmdbDataset, LmdbIndex, ReadAheadSampler
from fastensor.data.plan import Positions
from fastensor.data.samplers import AnnouncedBatch
from fastensor.files import posix

Order: TypeAlias = Literal["sequential", "strided", "full", "block"]
State: TypeAlias = Literal["cold", "warm", "limited"]
ORDERS: tuple[Order, ...] = ("sequential", "strided", "full", "block")
"""Batches in the order of the keys; Caffe's sharding, rank r reads records r, r + N, r + 2 N …; all records shuffled;
blocks of 256 KiB shuffled, and mixed among 64."""
READAHEAD, NO_READAHEAD = "py-lmdb", "py-lmdb, readahead=False"
HELPED = ("py-lmdb + WILLNEED, near", "py-lmdb + WILLNEED, far")
OURS, RAW, LITDATA, FIO = "fastensor", "raw files", "litdata", "fio"
STOCK = (READAHEAD, NO_READAHEAD)
READ_AHEAD_NBYTES = 32 << 20
BLOCK_NBYTES, BLOCKS_PER_GROUP = 256 << 10, 64
OVERFLOW_HEADER_NBYTES = 16
PATIENCE_SECONDS = 300
EVICTION_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Size:
    """Records of one size, and how they are read."""

    nbytes: int
    count: int
    """Records of the file."""
    taken: int
    """Samples of a run, by all ranks."""
    batch: int
    near: int
    far: int
    """How many records ahead the kernel is told by ``HELPED``."""


SIZES = {
    "300 B": Size(300, 1_000_000, 12_800, 256, 128, 512),
    "3 KB": Size(3000, 250_000, 12_800, 64, 64, 256),
    "110 KB": Size(110_000, 9_000, 640, 16, 32, 128),
    "1 MB": Size(1_000_000, 1_000, 64, 4, 8, 32),
}
TINY = {
    "300 B": Size(300, 3000, 512, 32, 32, 64),
    "110 KB": Size(110_000, 100, 24, 4, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured."""

    size: str
    order: Order
    world: int
    state: State
    way: str


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


class PyLmdb(Dataset[bytes]):
    """Samples by py-lmdb; with ``ahead``, it announces the pages of so many samples that come next."""

    def __init__(self, path: Path, *, readahead: bool, ahead: int = 0) -> None:
        self._transaction = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=readahead).begin()
        self._index = LmdbIndex.open(path) if ahead else None
        self._ahead = ahead

    def __getitems__(self, positions: Sequence[int]) -> list[bytes]:
        if self._index is not None and isinstance(positions, AnnouncedBatch):
            fd = self._index.fileno()
            for batch in positions.upcoming:
                offsets, lengths = self._index.offsets[batch].tolist(), self._index.lengths[batch].tolist()
                for offset, length in zip(offsets, lengths, strict=True):
                    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        get = self._transaction.get
        return [get(b"%08d" % position) for position in positions]

    def batches_ahead(self, size: Size) -> int:
        return max(self._ahead // size.batch, 1)


class RawFiles(Dataset[bytes]):
    """Samples that have files of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitems__(self, positions: Sequence[int]) -> list[bytes]:
        return [raw_file(self._folder, position).read_bytes() for position in positions]


def raw_file(folder: Path, position: int) -> Path:
    return folder / f"{position // 1000}" / f"{position}"


@dataclass(frozen=True, slots=True)
class Files:
    """The same records in every form."""

    folder: Path

    def lmdb(self, size: str) -> Path:
        return self.folder / f"{size}.lmdb"

    def raw(self, size: str) -> Path:
        return self.folder / f"{size}.raw"

    def litdata(self, size: str) -> Path:
        return self.folder / f"{size}.litdata"


Loading: TypeAlias = Callable[[Files, str, Size, list[Positions]], Any]
"""Makes an iterable of batches, of one rank."""


def stock(files: Files, name: str, size: Size, batches: list[Positions], *, readahead: bool) -> Any:
    return DataLoader(PyLmdb(files.lmdb(name), readahead=readahead), batch_sampler=batches, collate_fn=list)


def helped(files: Files, name: str, size: Size, batches: list[Positions], *, far: bool) -> Any:
    dataset = PyLmdb(files.lmdb(name), readahead=False, ahead=size.far if far else size.near)
    sampler = ReadAheadSampler(batches, batches_ahead=dataset.batches_ahead(size))
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=list)


def ours(
    files: Files, name: str, size: Size, batches: list[Positions], *, engine: Any = "auto", announced: bool = True
) -> Any:
    """What ``LmdbLoader`` does, in an order that it may not have."""
    dataset = LmdbDataset(files.lmdb(name), engine=engine, read_ahead_nbytes=READ_AHEAD_NBYTES)
    ahead = min(max(READ_AHEAD_NBYTES // (size.batch * size.nbytes), 2), 1024)
    sampler = ReadAheadSampler(batches, batches_ahead=ahead) if announced else batches
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=list)


def raw(files: Files, name: str, size: Size, batches: list[Positions]) -> Any:
    return DataLoader(RawFiles(files.raw(name)), batch_sampler=batches, collate_fn=list)


def by_litdata(files: Files, name: str, size: Size, batches: list[Positions], *, shuffle: bool) -> Any:
    """As many batches as the others have, but of other samples."""
    import litdata

    dataset = litdata.StreamingDataset(str(files.litdata(name)), shuffle=shuffle, drop_last=False)
    loader = DataLoader(dataset, batch_size=size.batch, collate_fn=lambda batch: [bytes(value) for value in batch])
    return First(loader, len(batches))


@dataclass(frozen=True, slots=True)
class First:
    """The first batches of each pass over a loader."""

    loader: Any
    count: int

    def __iter__(self) -> Iterator[list[bytes]]:
        return islice(self.loader, self.count)


LOADING: dict[str, Loading] = {
    READAHEAD: partial(stock, readahead=True),
    NO_READAHEAD: partial(stock, readahead=False),
    HELPED[0]: partial(helped, far=False),
    HELPED[1]: partial(helped, far=True),
    OURS: ours,
    RAW: raw,
}
ABLATION: dict[str, Loading] = {
    "explicit reads, order unknown (pread)": partial(ours, engine="pread", announced=False),
    "+ order known within a batch (willneed)": partial(ours, engine="willneed", announced=False),
    "+ order known ahead, merged, not begun ahead (pread)": partial(ours, engine="pread"),
    "+ order known ahead, begun ahead (willneed)": partial(ours, engine="willneed"),
    "+ past the page cache (direct)": partial(ours, engine="direct"),
}
"""Parts of what ``OURS`` does; a reader process for each node, and turns of readers, are further ones."""


def loading_of(cell: Cell) -> Loading:
    if cell.way == LITDATA:
        return partial(by_litdata, shuffle=cell.order == "block")
    return (LOADING | ABLATION)[cell.way]


def batches_of(size: Size, order: Order, rank: int, world: int) -> list[Positions]:
    """The batches of one rank, for its part of the samples of a run."""
    count = max(size.taken // (world * size.batch), 1)
    if order == "strided":
        positions = np.arange(rank, size.count, world)[: count * size.batch]
        return np.split(positions, count)
    plan = EpochPlan(
        size.count, seed=1, shuffle="none" if order == "sequential" else order, batch_size=size.batch,
        rank=rank, world_size=world, block_size=max(BLOCK_NBYTES // size.nbytes, 1), blocks_per_group=BLOCKS_PER_GROUP,
    )  # fmt: skip
    return [batch for _, batch in zip(range(count), plan.batches(0), strict=False)]


def make_files(files: Files, name: str, size: Size, *, with_litdata: bool) -> None:
    """Write the records, and build the index."""
    chance = random.Random(1)
    pool = chance.randbytes(max(4 * size.nbytes, 8 << 20))
    begins = [chance.randrange(len(pool) - size.nbytes) for _ in range(size.count)]

    def value(position: int) -> bytes:
        return pool[begins[position] : begins[position] + size.nbytes]

    with lmdb.open(str(files.lmdb(name)), map_size=1 << 36, subdir=False, sync=False) as env:
        with env.begin(write=True) as txn:
            for position in range(size.count):
                txn.put(b"%08d" % position, value(position), append=True)
        env.sync(True)
    LmdbIndex.open(files.lmdb(name)).close()
    read = {
        int(position)
        for order in ORDERS
        for batches in (batches_of(size, order, rank, 4) for rank in range(4))
        for batch in [*batches, *batches_of(size, order, 0, 1)]
        for position in batch
    }
    for position in sorted(read):
        path = raw_file(files.raw(name), position)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value(position))
    if with_litdata:
        from litdata.streaming.writer import BinaryWriter

        files.litdata(name).mkdir()
        writer = BinaryWriter(str(files.litdata(name)), chunk_bytes=64 << 20)
        for position in range(min(2 * size.taken, size.count)):
            writer[position] = value(position)
        writer.done()
        writer.merge()
    os.sync()


def paths_of(files: Files, cell: Cell) -> list[Path]:
    if cell.way == RAW:
        return [path for path in files.raw(cell.size).rglob("*") if path.is_file()]
    if cell.way == LITDATA:
        return [path for path in files.litdata(cell.size).iterdir() if path.is_file()]
    return [files.lmdb(cell.size)]


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


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes may bring so many bytes into memory, page cache included; None if none can be made."""
    folder = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not (folder / limit).exists():
        folder, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = folder / f"fastensor-benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError as error:
        say(f"no cgroup can be made here, so no file is larger than memory: {error}")
        with_group = None
    else:
        with_group = group
    try:
        yield with_group
    finally:
        if group.exists():
            group.rmdir()


def counters() -> np.ndarray[Any, np.dtype[np.float64]]:
    """CPU seconds, bytes read, major faults, context switches of this process, threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    switches = usage.ru_nvcsw + usage.ru_nivcsw
    return np.array([usage.ru_utime + usage.ru_stime, int(lines["read_bytes"]), usage.ru_majflt, switches])


def work(
    cell: Cell, size: Size, files: Files, rank: int, seconds: float, group: Path | None, start: Any, results: Any
) -> None:
    """In a fresh process, one rank: read, and send what it took."""
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


def run(cell: Cell, size: Size, files: Files, seconds: float, group: Path | None = None) -> Sample:
    """One run of a cell."""
    (fill_page_cache if cell.state == "warm" else evict)(paths_of(files, cell))
    context = multiprocessing.get_context("forkserver")
    start = context.Barrier(cell.world)
    pipes, processes = [], []
    for rank in range(cell.world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (cell, size, files, rank, seconds, group, start, theirs)
        processes.append(context.Process(target=work, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit(f"{cell}: a process has ended early") from None
    for process in processes:
        process.join()
    counts, times, spent, waits = zip(*found, strict=True)
    cpu, read, faults, switches = np.sum(spent, axis=0).tolist()
    rates = [count / seconds for count, seconds in zip(counts, times, strict=True)]
    p99 = float(np.percentile(np.concatenate(waits), 99))
    return Sample(
        cell, sum(counts), max(times), cpu, int(read), int(faults), int(switches), p99, max(rates) / min(rates)
    )


def run_fio(name: str, size: Size, files: Files, seconds: float) -> list[Sample]:
    """Random direct reads of the pages of a record."""
    if shutil.which("fio") is None:
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
    seconds, read = ours.recv()
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


def in_turn(ways: Sequence[str], number: int) -> list[str]:
    """The ways in another order each round, so that none always follows the same one."""
    return [*ways[number % len(ways) :], *ways[: number % len(ways)]]


def ways_of(order: Order, world: int, state: State) -> list[str]:
    ways = [READAHEAD, OURS, RAW] if state == "warm" else [*STOCK, *HELPED, OURS, RAW]
    if world == 1 and order in ("sequential", "block") and find_spec("litdata") is not None:
        ways.append(LITDATA)
    return ways


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    sizes: dict[str, Size]
    orders: Sequence[Order]
    worlds: Sequence[int]
    rounds: int
    """Runs of the cells that promises are about; others have one."""
    seconds: float
    """A run ends at the first batch after so long."""

    @property
    def judged(self) -> list[tuple[str, int, State]]:
        """Fully shuffled cells that promises are about."""
        sizes = [name for name in self.sizes if name in ("3 KB", "110 KB")]
        return [(name, *rest) for name in sizes for rest in ((1, "cold"), (4, "cold"), (1, "warm"))]


def measure(settings: Settings, folder: Path) -> tuple[list[Sample], list[Whole]]:
    samples: list[Sample] = []
    whole: list[Whole] = []
    files = Files(folder)
    for name, size in settings.sizes.items():
        say(f"{name}: writes files")
        make_files(files, name, size, with_litdata=find_spec("litdata") is not None)
        for order in settings.orders:
            for world in settings.worlds:
                for state in ("cold", "warm"):
                    samples += measure_cell(settings, files, Cell(name, order, world, state, ""))
        for number in range(settings.rounds):
            for way in in_turn(list(ABLATION), number):
                samples.append(run(Cell(name, "full", 1, "cold", way), size, files, settings.seconds))
            samples += run_fio(name, size, files, settings.seconds)
        samples += measure_limited(settings, files, name)
        for number in range(min(settings.rounds, 3)):
            for operation in ("index", "scan"):
                for way in in_turn([*STOCK, OURS], number):
                    if operation == "index" or way != NO_READAHEAD:
                        whole.append(run_whole(operation, name, way, files))
        for path in (files.lmdb(name), files.raw(name), files.litdata(name)):
            remove(path)
    return samples, whole


def measure_cell(settings: Settings, files: Files, cell: Cell) -> list[Sample]:
    judged = cell.order == "full" and (cell.size, cell.world, cell.state) in settings.judged
    rounds = settings.rounds if judged else 1
    say(f"{cell.size}, {cell.order}, {cell.world} processes, {cell.state}, {rounds} ×")
    return [
        run(replace(cell, way=way), settings.sizes[cell.size], files, settings.seconds)
        for number in range(rounds)
        for way in in_turn(ways_of(cell.order, cell.world, cell.state), number)
    ]


def measure_limited(settings: Settings, files: Files, name: str) -> list[Sample]:
    """An epoch, or as much of it as time allows, of a file that is eight times larger than what memory may hold."""
    size = settings.sizes[name]
    with memory_limit(max(size.count * size.nbytes // 8, 64 << 20)) as group:
        if group is None:
            return []
        whole = replace(size, taken=size.count)
        say(f"{name}, memory limited")
        return [
            run(Cell(name, "full", 1, "limited", way), whole, files, settings.seconds, group)
            for number in range(min(settings.rounds, 3))
            for way in in_turn([*STOCK, *HELPED, OURS], number)
        ]


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rates(samples: list[Sample], cell: Cell, ways: Sequence[str]) -> float:
    """The median rate of the best of some ways, 0 if none was measured."""
    found = [[one.rate for one in samples if one.cell == replace(cell, way=way)] for way in ways]
    return max((statistics.median(group) for group in found if group), default=0.0)


def judge(samples: list[Sample], whole: list[Whole]) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""
    verdicts = []

    def promise(text: str, cell: Cell, ways: Sequence[str], least: float) -> None:
        ours, other = rates(samples, cell, [OURS]), rates(samples, cell, ways)
        if ours and other:
            verdicts.append(verdict(f"{text} ≥ {least}" if least else text, ours / other, ours / other >= least))

    for state, what in (("cold", "full shuffle, cold"), ("limited", "full shuffle, file 8 × memory")):
        for name, of_stock, of_helped in (("3 KB", 5, 2.2), ("110 KB", 3, 1)):
            cell = Cell(name, "full", 1, state, "")  # type: ignore[arg-type]  # one of State
            promise(f"{name}, {what}: rate / best py-lmdb", cell, STOCK, of_stock)
            promise(f"{name}, {what}: rate / py-lmdb + WILLNEED", cell, HELPED, of_helped)
    for name in ("3 KB", "110 KB"):
        promise(f"{name}, full shuffle, cold: rate / fio (no promise)", Cell(name, "full", 1, "cold", ""), [FIO], 0)
        promise(f"{name}, 4 processes, cold: rate / best py-lmdb", Cell(name, "full", 4, "cold", ""), STOCK, 1.6)
        promise(f"{name}, warm: rate / py-lmdb", Cell(name, "full", 1, "warm", ""), [READAHEAD], round(1 / 1.1, 2))
    for operation, least in (("scan", 1.1), ("index", 4)):
        for name in ("3 KB", "110 KB"):
            group = [one for one in whole if (one.operation, one.size) == (operation, name)]
            if group:
                times = {
                    way: statistics.median(one.seconds for one in group if one.way == way) for way in ways_in(group)
                }
                ratio = min(seconds for way, seconds in times.items() if way != OURS) / times[OURS]
                verdicts.append(verdict(f"{name}, {operation}: best py-lmdb / time ≥ {least}", ratio, ratio >= least))
    return verdicts


def ways_in(group: list[Whole]) -> list[str]:
    return list(dict.fromkeys(one.way for one in group))


def verdict(promise: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": round(measured, 3), "holds": holds}


def table(machine: dict[str, str], samples: list[Sample], whole: list[Whole], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# Training data from LMDB", "", *(f"- {what}: {text}" for what, text in machine.items())]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    lines += ["", "## medians", ""]
    lines += [
        "| records | order | processes | file | way | samples/s (minimum–maximum) | MB/s | CPU µs a sample "
        "| bytes read / wanted | major faults a sample | context switches a sample | p99 wait, ms | skew | runs |"
    ]
    lines += ["|---|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for cell in dict.fromkeys(one.cell for one in samples):
        lines.append(row(cell, [one for one in samples if one.cell == cell]))
    lines += ["", "## whole files, cold", "", "| what | records | way | median s | MB read | runs |"]
    lines += ["|---|---|---|---:|---:|---:|"]
    for key in dict.fromkeys((one.operation, one.size, one.way) for one in whole):
        group = [one for one in whole if (one.operation, one.size, one.way) == key]
        seconds = statistics.median(one.seconds for one in group)
        read = statistics.median(one.read_nbytes for one in group) / 1e6
        lines.append(f"| {' | '.join(key)} | {seconds:.3f} | {read:.1f} | {len(group)} |")
    return "\n".join(lines) + "\n"


def row(cell: Cell, group: list[Sample]) -> str:
    def median(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, group))

    nbytes = (SIZES | TINY)[cell.size].nbytes
    found = [one.rate for one in group]
    rate = statistics.median(found)
    return (
        f"| {cell.size} | {cell.order} | {cell.world} | {cell.state} | {cell.way} "
        f"| {rate:.0f} ({min(found):.0f}–{max(found):.0f}) | {rate * nbytes / 1e6:.0f} "
        f"| {median(lambda one: one.cpu_seconds / one.samples) * 1e6:.1f} "
        f"| {median(lambda one: one.read_nbytes / one.samples) / nbytes:.2f} "
        f"| {median(lambda one: one.major_faults / one.samples):.2f} "
        f"| {median(lambda one: one.context_switches / one.samples):.2f} "
        f"| {median(lambda one: one.p99_wait_seconds) * 1e3:.2f} | {median(lambda one: one.skew):.2f} | {len(group)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small files: shows that it runs")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="of the records")
    parser.add_argument("--orders", nargs="+", choices=ORDERS)
    parser.add_argument("--worlds", nargs="+", type=int, help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=7, help="of what promises are about; of the rest 1")
    parser.add_argument("--seconds", type=float, default=1.0, help="the longest run")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/lmdb_reading"), help="without suffix")
    options = parser.parse_args()
    sizes = TINY if options.tiny else SIZES
    chosen = options.sizes or (["3 KB", "110 KB"] if options.quick else list(sizes))
    settings = Settings(
        {name: sizes[name] for name in chosen},
        options.orders or (("sequential", "full") if options.quick else ORDERS),
        options.worlds or ((1, 4) if options.quick else (1, 2, 4)),
        options.rounds,
        options.seconds,
    )
    libraries = ["fastensor.data.dataset", "lmdb", *(["litdata"] if find_spec("litdata") else [])]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(Path(folder), "cpu")
        peers = ["lmdb", *(["litdata"] if find_spec("litdata") else [])]
        machine |= {name: version(name) for name in peers}
        samples, whole = measure(settings, Path(folder))
    verdicts = judge(samples, whole)
    text = table(machine, samples, whole, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {
        "machine": machine, "verdicts": verdicts,
        "samples": [asdict(one) for one in samples], "whole": [asdict(one) for one in whole],
    }  # fmt: skip
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


if __name__ == "__main__":
    main()
