"""What was promised of training data in LMDB, what was measured, and the table of all of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from lmdb_contenders import FIO, HELPED, OURS, READAHEAD, STOCK
from lmdb_runs import Sample, Whole
from lmdb_scenarios import IN_ORDER, SIZES, TINY, Cell


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
        cell = Cell(name, "full", 1, "epoch", "")
        promise(f"{name}, full shuffle, a whole cold epoch: rate / best py-lmdb (no promise)", cell, STOCK, 0)
        promise(f"{name}, full shuffle, a whole cold epoch: rate / py-lmdb + WILLNEED (no promise)", cell, HELPED, 0)
        promise(f"{name}, full shuffle, cold: rate / fio (no promise)", Cell(name, "full", 1, "cold", ""), [FIO], 0)
        promise(f"{name}, 4 processes, cold: rate / best py-lmdb", Cell(name, "full", 4, "cold", ""), STOCK, 1.6)
        promise(f"{name}, warm: rate / py-lmdb", Cell(name, "full", 1, "warm", ""), [READAHEAD], round(1 / 1.1, 2))
    for name, order, world in product(SIZES, IN_ORDER, (1, 4)):
        cell = Cell(name, order, world, "cold", "")
        promise(f"{name}, {order}, processes: {world}, cold: rate / best py-lmdb", cell, STOCK, 1)
    for operation, least, names in (("scan", 1.2, [*SIZES]), ("index", 4, ["3 KB", "110 KB"])):
        for name in names:
            group = [one for one in whole if (one.operation, one.size) == (operation, name)]
            times = {way: statistics.median(one.seconds for one in group if one.way == way) for way in ways_in(group)}
            if OURS in times and len(times) > 1:
                ratio = min(seconds for way, seconds in times.items() if way != OURS) / times[OURS]
                verdicts.append(verdict(f"{name}, {operation}: best py-lmdb / time ≥ {least}", ratio, ratio >= least))
    return verdicts


def verdict(promise: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": round(measured, 3), "holds": holds}


def rates(samples: list[Sample], cell: Cell, ways: Sequence[str]) -> float:
    """The median rate of the best of some ways, 0 if none was measured."""
    found = [[one.rate for one in samples if one.cell == replace(cell, way=way)] for way in ways]
    return max((statistics.median(group) for group in found if group), default=0.0)


def ways_in(group: list[Whole]) -> list[str]:
    return list(dict.fromkeys(one.way for one in group))


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
