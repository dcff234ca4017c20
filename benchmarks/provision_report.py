"""What ``provision.py`` has measured: whether promises hold, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from provision_ways import CROPS, JPEG, KILLED, OURS, STOCK, Cell


@dataclass(frozen=True, slots=True)
class Started:
    """What it took to start what a run needs, before anything was read."""

    cell: Cell
    seconds: float
    """How long the slowest rank took."""
    cpu_seconds: float


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


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that has not come to its end."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured so far."""

    starts: list[Started] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def of_way(samples: Iterable[Sample], kind: str, world: int, way: str) -> list[Sample]:
    return [one for one in samples if (one.cell.kind, one.cell.world, one.cell.way) == (kind, world, way)]


def later(samples: Iterable[Sample]) -> list[Sample]:
    """Epochs from the second on."""
    return [one for one in samples if one.epoch]


def best_stock(samples: list[Sample], kind: str, world: int) -> list[Sample]:
    """All epochs of the ``DataLoader`` that is quickest from the second one on."""
    found = of_way(samples, kind, world, STOCK)
    groups = [[one for one in found if one.cell.workers == workers] for workers in {one.cell.workers for one in found}]
    return min(groups, key=lambda group: median_of(later(group), lambda one: one.seconds))


def median_of(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(map(value, samples))


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """What was promised, of those kinds and numbers of ranks for which everything that it takes has been measured."""
    verdicts = []
    for kind, world in dict.fromkeys((one.cell.kind, one.cell.world) for one in samples):
        if all(of_way(samples, kind, world, way) for way in (OURS, KILLED, STOCK)):
            verdicts += judge_group(samples, kind, world)
    exact = all(one.exact for one in samples if one.cell.way.startswith(OURS))
    return [*verdicts, verdict("service: each sample once in each epoch", float(exact), exact)]


def judge_group(samples: list[Sample], kind: str, world: int) -> list[dict[str, Any]]:
    where = f"{kind}, {world} {'rank' if world == 1 else 'ranks'}"
    ours, stock = of_way(samples, kind, world, OURS), best_stock(samples, kind, world)
    killed = later(of_way(samples, kind, world, KILLED))

    def ratio(value: Callable[[Sample], float]) -> float:
        return median_of(later(ours), value) / max(median_of(later(stock), value), 1e-9)

    waited = ratio(lambda one: one.waiting * one.seconds)
    p99 = ratio(lambda one: one.p99_wait_seconds)
    spread = ratio(lambda one: one.p99_wait_seconds / one.median_wait_seconds)
    longest = max(one.longest_wait_seconds for one in killed)
    verdicts = [
        verdict(f"{where}: wait from epoch 2 on / DataLoader's ≤ 0.2", waited, waited <= 0.2),
        verdict(f"{where}: p99/median of these waits / DataLoader's < 1", spread, spread < 1),
        verdict(f"{where}: p99 of these waits / DataLoader's < 1", p99, p99 < 1),
        verdict(f"{where}: longest wait, server killed ≤ 5 s", longest, longest <= 5),
    ]
    if kind in (JPEG.name, CROPS.name):
        most, cpu = 1 / (0.8 * world), cpu_of(ours) / max(cpu_of(stock), 1e-9)
        words = f"{where}: CPU seconds a sample, all epochs / DataLoaders' ≤ {most:.2f}"
        verdicts.append(verdict(words, cpu, cpu <= most))
    return verdicts


def cpu_of(samples: list[Sample]) -> float:
    """CPU seconds of a sample that was given out, in all epochs together."""
    return sum(one.cpu_seconds for one in samples) / max(sum(one.samples for one in samples), 1)


def verdict(promise: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": round(measured, 3), "holds": holds}


def table(machine: dict[str, str], found: Found, verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown. What was missed is bold."""
    starts, samples = found.starts, found.samples
    lines = ["# Batches from a data service", "", *(f"- {what}: {text}" for what, text in machine.items())]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.3f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    lines += [
        "", "## medians", "",
        "| samples | ranks | way | workers, of all ranks | epoch | samples/s | wait, ms: median | p99 | longest "
        "| waiting | skew of ranks | CPU ms a sample | MB from storage | runs |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for cell, first in dict.fromkeys((one.cell, one.epoch == 0) for one in samples):
        lines.append(row(cell, first, [one for one in samples if one.cell == cell and (one.epoch == 0) == first]))
    lines += [
        "",
        "## starting",
        "",
        "| samples | ranks | way | workers, of all ranks | s | CPU s |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for cell in dict.fromkeys(one.cell for one in starts):
        group = [one for one in starts if one.cell == cell]
        seconds, cpu = (statistics.median(getattr(one, name) for one in group) for name in ("seconds", "cpu_seconds"))
        lines.append(f"| {cell.kind} | {cell.world} | {cell.way} | {cell.workers} | {seconds:.2f} | {cpu:.2f} |")
    if found.failures:
        lines += ["", "## runs that have failed", ""]
        lines += [f"- {one.cell.kind}, {one.cell.world}, {one.cell.way}: {one.reason}" for one in found.failures]
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
