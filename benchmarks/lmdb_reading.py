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
import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lmdb_contenders import ABLATION, HELPED, NO_READAHEAD, OURS, STOCK, Files, make_files, ways_of
from lmdb_report import judge, table
from lmdb_runs import Sample, Whole, memory_limit, run, run_fio, run_whole, say
from lmdb_scenarios import ORDERS, SIZES, TINY, Cell, Order, Size, State
from measuring import describe_machine


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
        samples += measure_epoch(settings, files, name)
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


def measure_epoch(settings: Settings, files: Files, name: str) -> list[Sample]:
    """A whole epoch of a cold file that fits into memory, which is there when it ends, by whatever way."""
    whole = replace(settings.sizes[name], taken=settings.sizes[name].count)
    say(f"{name}, a whole epoch")
    return [
        run(Cell(name, "full", 1, "epoch", way), whole, files, 20 * settings.seconds)
        for number in range(min(settings.rounds, 3))
        for way in in_turn([*STOCK, *HELPED, OURS], number)
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
