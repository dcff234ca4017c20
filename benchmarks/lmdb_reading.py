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
- ``LMDB`` to ``LMM-DIO-COAL-STAG``: optimisations of the paper (``lmdbio.py``), cold, with the largest number of
  processes. Samples and waits are counted; what the reader process of the node takes (LMM) is not
- ``litdata``: its own format, and its own order; only where that is comparable, and if it is installed
- ``mosaicml-streaming``: its own format; in the order of the keys, and by its own shuffle of all records (``naive``),
  after the first batch of an epoch, by which the order is known; if it is installed. The extra ``bench`` lacks it:
  0.13 does not take the NumPy and the transformers of ``constraints.txt``. Beside ``.[bench,dev]`` it works by ``pip
  install --no-deps --target FOLDER mosaicml-streaming==0.13.0 brotli catalogue cramjam python-snappy zstd``, with the
  folder in ``PYTHONPATH``. It also imports torchvision, of which nothing is used here. That of PyPI cannot be imported
  beside a CPU-only build of torch; torchvision 0.15.2 can, from the same folder

``--quick`` takes two sizes, two orders, and 1 and 4 processes. Each run is added to the results when it ends. With
``--resume``, runs that are among the results are not made again, if they were made on this machine, with these files
and this code. Run by ``make bench``.

This file is not named ``lmdb.py``, because ``import lmdb`` would find it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from lmdb_contenders import (
    ABLATION,
    FIO,
    HELPED,
    NO_READAHEAD,
    OURS,
    PAPER,
    PEERS,
    STOCK,
    Files,
    installed,
    make_files,
    ways_of,
)
from lmdb_report import judge, table
from lmdb_runs import Sample, Whole, run, run_fio, run_whole, say
from lmdb_scenarios import IN_ORDER, ORDERS, SIZES, STATES, TINY, Cell, Order, Size
from measuring import describe_machine, memory_limit

import fastensor.data


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

    def rounds_of(self, cell: Cell) -> int:
        """Several if a promise is about the cell."""
        in_order = cell.order in IN_ORDER and cell.world in (1, 4) and cell.state == "cold"
        shuffled = cell.order == "full" and cell.size in ("3 KB", "110 KB")
        judged = in_order or (shuffled and (cell.world, cell.state) in ((1, "cold"), (4, "cold"), (1, "warm")))
        return self.rounds if judged else 1


PAPER_ORDERS: tuple[Order, ...] = ("strided", "full")
"""In which the optimisations of the paper are measured: Caffe's, and what PyTorch does."""
HERE = Path(__file__).parent
Key: TypeAlias = Cell | tuple[str, str, str]
"""What a run is of: a cell; or the operation, the size and the way of a pass over a whole file."""
Planned: TypeAlias = tuple[Key, Callable[[], Sequence[Sample | Whole]]]
"""A run, and what makes it: gives nothing where it is not possible."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured, kept in a file after each run."""

    path: Path
    machine: dict[str, str]
    """The machine, and whatever else the figures depend on."""
    samples: list[Sample]
    whole: list[Whole]
    nothing: list[Cell]
    """Runs that were not possible."""

    def add(self, key: Key, found: Sequence[Sample | Whole]) -> None:
        if not found and isinstance(key, Cell):
            self.nothing.append(key)
        self.samples.extend(one for one in found if isinstance(one, Sample))
        self.whole.extend(one for one in found if isinstance(one, Whole))
        document = {
            "machine": self.machine, "verdicts": judge(self.samples, self.whole),
            "samples": [asdict(one) for one in self.samples], "whole": [asdict(one) for one in self.whole],
            "nothing": [asdict(cell) for cell in self.nothing],
        }  # fmt: skip
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(document, indent=1))
        new.replace(self.path)

    def missing(self, planned: Iterable[Planned]) -> list[Planned]:
        """The runs that were not made yet."""
        made: Counter[Key] = Counter(one.cell for one in self.samples)
        made.update((one.operation, one.size, one.way) for one in self.whole)
        made.update(self.nothing)
        missing = []
        for key, make in planned:
            made[key] -= 1
            if made[key] < 0:
                missing.append((key, make))
        return missing


def found_before(path: Path, machine: dict[str, str]) -> Found:
    """What an earlier process has measured on this machine, in the same way. Its date stays."""
    if not path.exists():
        return Found(path, machine, [], [], [])
    document = json.loads(path.read_text())
    for what in sorted(machine.keys() - {"date", "command"}):
        if (before := document["machine"].get(what, "not known")) != machine[what]:
            raise SystemExit(
                f"--resume: {path} cannot be gone on with: its {what!r} is {before}, and now {machine[what]}; "
                "give the same options, another --output, or no --resume, which begins anew"
            )
    return Found(
        path,
        {**machine, "date": document["machine"]["date"]},
        [Sample(**{**one, "cell": Cell(**one["cell"])}) for one in document["samples"]],
        [Whole(**one) for one in document["whole"]],
        [Cell(**one) for one in document["nothing"]],
    )


def conditions(folder: Path, sizes: dict[str, Size], seconds: float) -> dict[str, str]:
    """What figures depend on besides the machine: the disk, all files that may be measured, the time, and the code."""
    return {
        "disk": f"{shutil.disk_usage(folder).total / 1e9:.0f} GB",
        "files": ", ".join(f"{size.count} × {name}" for name, size in sizes.items()),
        "longest run": f"{seconds:g} s",
        "code": hash_of_code([*Path(fastensor.data.__file__).parent.rglob("*.py"), *HERE.glob("lmdb*.py")]),
    }


def hash_of_code(paths: Iterable[Path]) -> str:
    texts = sorted((path.name, path.read_bytes()) for path in paths)
    return hashlib.blake2b(repr(texts).encode(), digest_size=6).hexdigest()


def measure(settings: Settings, folder: Path, found: Found) -> None:
    files = Files(folder)
    for name, size in settings.sizes.items():
        missing = found.missing(planned(settings, files, name))
        if not missing:
            continue
        say(f"{name}: writes files")
        make_files(files, name, size)
        for number, (key, make) in enumerate(missing, 1):
            what = astuple(key) if isinstance(key, Cell) else key
            say(f"{number} of {len(missing)}: {', '.join(map(str, what))}")
            found.add(key, make())
        for path in (files.lmdb(name), files.raw(name), files.litdata(name), files.mds(name)):
            remove(path)


def planned(settings: Settings, files: Files, name: str) -> Iterator[Planned]:
    """All runs with records of one size, in their order."""
    size, seconds = settings.sizes[name], settings.seconds

    def runs(rounds: int, ways: Sequence[str], cell: Cell, make: Callable[..., Sequence[Sample]]) -> Iterator[Planned]:
        for number in range(rounds):
            for way in in_turn(ways, number):
                one = replace(cell, way=way)
                yield one, partial(make, one, size, files, seconds)

    for order in settings.orders:
        for world in settings.worlds:
            for state in STATES:
                cell = Cell(name, order, world, state, "")
                yield from runs(settings.rounds_of(cell), ways_of(order, world, state), cell, run_cell)
    few = min(settings.rounds, 3)
    for order in [order for order in PAPER_ORDERS if {order, "full"} & {*settings.orders}]:
        yield from runs(few, PAPER, Cell(name, order, max(settings.worlds), "cold", ""), run_cell)
    if "full" in settings.orders:
        yield from runs(settings.rounds, [*ABLATION, FIO], Cell(name, "full", 1, "cold", ""), run_cell)
        ways = [*STOCK, *HELPED, OURS]
        yield from runs(few, ways, Cell(name, "full", 1, "epoch", ""), run_epoch)
        yield from runs(few, ways, Cell(name, "full", 1, "limited", ""), run_limited)
    for number in range(few):
        for operation in ("index", "scan"):
            for way in in_turn([*STOCK, OURS], number):
                if operation == "index" or way != NO_READAHEAD:
                    yield (operation, name, way), partial(run_pass, operation, name, way, files)


def run_cell(cell: Cell, size: Size, files: Files, seconds: float) -> list[Sample]:
    if cell.way == FIO:
        return run_fio(cell.size, size, files, seconds)
    try:
        return [run(cell, size, files, seconds)]
    except (EOFError, TimeoutError) as error:
        if cell.way not in PEERS:
            raise
        say(f"{cell} has failed: {error!r}")
        return []


def run_epoch(cell: Cell, size: Size, files: Files, seconds: float) -> list[Sample]:
    """A whole epoch of a cold file that fits into memory, which is there when it ends, by whatever way."""
    return [run(cell, replace(size, taken=size.count), files, 20 * seconds)]


def run_limited(cell: Cell, size: Size, files: Files, seconds: float) -> list[Sample]:
    """An epoch, or as much of it as time allows, of a file that is eight times larger than what memory may hold."""
    with memory_limit(max(size.count * size.nbytes // 8, 64 << 20)) as group:
        if group is None:
            say("no cgroup can be made here, so no file is larger than memory")
            return []
        return [run(cell, replace(size, taken=size.count), files, seconds, group)]


def run_pass(operation: str, name: str, way: str, files: Files) -> list[Whole]:
    return [run_whole(operation, name, way, files)]


def in_turn(ways: Sequence[str], number: int) -> list[str]:
    """The ways in another order each round, so that none always follows the same one."""
    return [*ways[number % len(ways) :], *ways[: number % len(ways)]]


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small files: shows that it runs")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="of the records")
    parser.add_argument(
        "--orders", nargs="+", choices=ORDERS, help="without full, what is measured only in that order is left out"
    )
    parser.add_argument("--worlds", nargs="+", type=int, help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=7, help="of what promises are about; of the rest 1")
    parser.add_argument("--seconds", type=float, default=1.0, help="the longest run")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/lmdb_reading"), help="without suffix")
    parser.add_argument("--resume", action="store_true", help="go on with what --output has")
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
    peers = [peer for peer in PEERS if installed(peer)]
    for peer in PEERS:
        if peer not in peers:
            say(f"{peer} is not measured: it is not installed")
    libraries = ["fastensor.data.dataset", "lmdb", *(PEERS[peer] for peer in peers)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(Path(folder), "cpu")
        machine |= {name: version(name) for name in ("lmdb", *peers)}
        machine |= conditions(Path(folder), sizes, options.seconds)
        results = options.output.with_suffix(".json")
        found = found_before(results, machine) if options.resume else Found(results, machine, [], [], [])
        measure(settings, Path(folder), found)
    text = table(found.machine, found.samples, found.whole, judge(found.samples, found.whole))
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
