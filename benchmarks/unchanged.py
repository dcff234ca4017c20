"""What a save costs when most of its state has not changed, on a filesystem whose files share blocks.

Run by ``make bench``, as root: an XFS image is mounted, unless ``--folder`` names a folder that shares blocks already.
A state of linear layers, whose weights are frozen, and adapters of low rank with the moments of Adam, two percent of
all bytes, is saved again and again, durably, to new names. Each way has processes of its own, in turns:

- *share*: ``share_unchanged=True``, the default, which compares what is frozen with the last file's CRC32s.
- *trust*: ``share_unchanged="trust"``, which compares a sixteenth of it.
- *write*: ``share_unchanged=False``.
- *all trained*: the default, and every tensor changes. Saves without sharing stand beside these, in turns.
- *asynchronous*: how long ``AsyncWriter.save`` takes, by the three ways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from disk_images import mounted
from measuring import describe_machine, settle

import fastensor
from fastensor.files import posix

WAYS: tuple[str, ...] = ("share", "trust", "write")
_CHOICES: dict[str, bool | str] = {"share": True, "trust": "trust", "write": False}
_WIDTH = 2048
_SHARE_TRAINED = 0.02
_SECTOR_NBYTES = 512  # of /sys/block/*/stat


@dataclass(frozen=True, slots=True)
class Saved:
    """One save."""

    way: str
    number: int
    """0 is the first save of its process, of which everything is written."""
    is_asynchronous: bool
    nbytes: int
    seconds: float
    stall_seconds: float
    disk_nbytes: int
    """Bytes that went to the block device, as the kernel counts them."""
    shared_nbytes: int


State = dict[str, dict[str, torch.Tensor]]


def made(mib: int) -> State:
    """Layers, and adapters with their optimizer."""
    layer_nbytes = _WIDTH * _WIDTH * 4
    layers = max((mib << 20) // layer_nbytes, 1)
    rank = max(round(_SHARE_TRAINED * layer_nbytes / (6 * _WIDTH * 4)), 1)
    state: State = {"frozen": {}, "trained": {}}
    for number in range(layers):
        state["frozen"][f"{number}.weight"] = torch.empty(_WIDTH, _WIDTH).normal_()
        for name in ("a", "b"):
            for part in ("", ".exp_avg", ".exp_avg_sq"):
                state["trained"][f"{number}.{name}{part}"] = torch.randn(rank, _WIDTH)
    return state


def train(state: State, way: str) -> None:
    """Change what is trained, as an optimizer does."""
    for part in ("trained", "frozen") if way.startswith("all") else ("trained",):
        torch._foreach_add_([*state[part].values()], 1e-3)


def written_nbytes(folder: Path) -> int:
    """Bytes that were written to the block device of a folder since the machine was started."""
    device = os.stat(folder).st_dev
    posix.sync_directory(str(folder))
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(fields[6]) * _SECTOR_NBYTES


def measure(way: str, mib: int, saves: int, folder: Path, is_asynchronous: bool, results: Any) -> None:
    """In a fresh process: save again and again, and send what each save has cost."""
    fastensor.save({"warm": torch.zeros(1 << 20)}, folder / "warm.ckpt", share_unchanged=False)
    state = made(mib)
    with fastensor.AsyncWriter() as writer:
        for number in range(saves):
            train(state, way)
            results.send(measured(way, number, state, folder, writer if is_asynchronous else None))
            if number > 1:
                (folder / f"{number - 2}.ckpt").unlink()
    for path in folder.iterdir():
        path.unlink()
    results.close()


def measured(way: str, number: int, state: State, folder: Path, writer: fastensor.AsyncWriter | None) -> Saved:
    choice: Any = _CHOICES[way.rpartition(" ")[2]]
    settle()
    before = written_nbytes(folder)
    started = time.perf_counter()
    if writer is None:
        report = fastensor.save(state, folder / f"{number}.ckpt", share_unchanged=choice)
    else:
        report = writer.save(state, folder / f"{number}.ckpt", share_unchanged=choice).result()
    seconds = time.perf_counter() - started
    disk_nbytes = written_nbytes(folder) - before
    stall_seconds = seconds if writer is None else report.stall_seconds
    return Saved(
        way, number, writer is not None, report.nbytes, seconds, stall_seconds, disk_nbytes, report.shared_nbytes
    )


def collect(way: str, mib: int, saves: int, folder: Path, is_asynchronous: bool) -> list[Saved]:
    """What a process sends."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(way, mib, saves, folder, is_asynchronous, theirs))
    process.start()
    theirs.close()
    found: list[Saved] = []
    try:
        while True:
            found.append(ours.recv())
    except EOFError:
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{way} has failed with exit code {process.exitcode}")
    return found


def summary(found: Sequence[Saved]) -> list[dict[str, Any]]:
    """Medians by way: of first saves, and of all later ones."""
    rows = []
    for key in dict.fromkeys((one.way, one.is_asynchronous, one.number == 0) for one in found):
        group = [one for one in found if (one.way, one.is_asynchronous, one.number == 0) == key]
        row: dict[str, Any] = dict(zip(("way", "is_asynchronous", "is_first"), key, strict=True), saves=len(group))
        for name in ("nbytes", "seconds", "stall_seconds", "disk_nbytes", "shared_nbytes"):
            row[name] = statistics.median(getattr(one, name) for one in group)
        rows.append(row)
    return rows


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""
    verdicts: list[dict[str, Any]] = []

    def row(way: str, *, is_first: bool, is_asynchronous: bool = False) -> dict[str, Any]:
        wanted = (way, is_first, is_asynchronous)
        return next(one for one in rows if (one["way"], one["is_first"], one["is_asynchronous"]) == wanted)

    def promise(what: str, measured: float, bound: float, *, at_least: bool) -> None:
        holds = measured >= bound if at_least else measured <= bound
        sign = "≥" if at_least else "≤"
        verdicts.append({"promise": f"{what} {sign} {bound:g}", "measured": round(measured, 3), "holds": holds})

    for way in ("share", "trust"):
        first, later = row(way, is_first=True), row(way, is_first=False)
        promise(f"{way}: first save / later save, seconds", first["seconds"] / later["seconds"], 20, at_least=True)
        promise(f"{way}: first / later, bytes written", first["disk_nbytes"] / later["disk_nbytes"], 25, at_least=True)
    with_it, without = (row(f"all trained, {way}", is_first=False) for way in ("share", "write"))
    promise("all trained: with / without, seconds", with_it["seconds"] / without["seconds"], 1.02, at_least=False)
    whole = row("write", is_first=False, is_asynchronous=True)
    for way in ("share", "trust"):
        stall = row(way, is_first=False, is_asynchronous=True)
        ratio = stall["stall_seconds"] / whole["stall_seconds"]
        promise(f"asynchronous, {way}: stall / stall without sharing", ratio, 1, at_least=False)
    return verdicts


def table(machine: dict[str, str], rows: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# Saves of what has changed", "", *(f"- {key}: {value}" for key, value in machine.items()), ""]
    lines += [
        "| way | save | saves | seconds | stall | written to the disk | shared |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['way']}{', asynchronous' * row['is_asynchronous']} | {'first' if row['is_first'] else 'later'} "
        f"| {row['saves']} | {row['seconds']:.3f} | {row['stall_seconds']:.3f} | {row['disk_nbytes'] / 2**20:.1f} MiB "
        f"| {row['shared_nbytes'] / 2**20:.1f} MiB |"
        for row in rows
    ]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    return "\n".join(lines) + "\n"


@contextmanager
def folder_to_measure(given: Path | None, mib: int) -> Iterator[Path]:
    """A folder whose files share blocks, on the disk of this checkout."""
    with ExitStack() as stack:
        if given is None:
            place = Path(".bench")
            place.mkdir(exist_ok=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            given = stack.enter_context(mounted("xfs", (work / "image").absolute(), (4 * mib + 512) << 20))
        yield Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1536, help="of the state")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each way")
    parser.add_argument("--saves", type=int, default=5, help="in each of them")
    parser.add_argument("--folder", type=Path, help="on a filesystem that shares blocks; default: an XFS image")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/unchanged"))
    options = parser.parse_args()
    found: list[Saved] = []
    jobs = [(way, False) for way in (*WAYS, "all trained, share", "all trained, write")]
    jobs += [(way, True) for way in WAYS]
    with folder_to_measure(options.folder, options.mib) as folder:
        machine = describe_machine(folder, "cpu")
        for number in range(options.rounds):
            for way, is_asynchronous in jobs if number % 2 == 0 else reversed(jobs):
                print(f"round {number + 1}, {way}{', asynchronous' * is_asynchronous} ...", file=sys.stderr, flush=True)
                found += collect(way, options.mib, options.saves, folder, is_asynchronous)
    rows = summary(found)
    verdicts = judge(rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".md").write_text(table(machine, rows, verdicts))
    result = {"machine": machine, "verdicts": verdicts, "saves": [asdict(one) for one in found]}
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1))
    print(table(machine, rows, verdicts))


if __name__ == "__main__":
    main()
