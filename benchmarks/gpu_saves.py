"""Saving from a GPU and loading to it, beside what its bus and the disk allow, and beside what others do.

A part of ``make gpu``, on a machine that may have no network. Every save is durable; loads are cold, as far as the page
cache can be emptied (what stayed in it is shown), and to the device; every load is compared with what was saved.
Contenders take turns in one process, since CUDA takes long to begin; figures are medians. The first round begins with
what says most, in case that there is no second one. What a contender cannot do here is shown. Nothing begins after the
time that is given; what there is by then is written after each turn, and shown at the end, also of a process that is
terminated by a signal.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import safetensors.torch
import torch
from contenders import State, build_state
from gpu_results import Row, Rows
from isal import isal_zlib
from measuring import describe_gpu_machine, settle, synchronize

import fastensor
from fastensor import LoadReport, SaveReport
from fastensor.backends import registry
from fastensor.backends.buffers import BUFFER_NBYTES, transfer_buffers
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.files import posix

ALIGNMENT = 4096
COPY_TO_HOST, COPY_TO_DEVICE, DISK = "pinned copy to the host", "pinned copy to the device", "the disk alone"
LIMITS = (COPY_TO_HOST, COPY_TO_DEVICE, DISK)
OURS = "fastensor"
AUTO, ASYNC, CHECKSUMS = f"{OURS}, {registry.AUTO}", f"{OURS}, asynchronous", f"{OURS}, checksums"
TORCH_GDS = "torch.cuda.gds"
SAVE, LOAD, STALL = "durable save", "cold load", "asynchronous save: stall"
ENOUGH_OF_LIMIT, MOST_OF_PEER, MOST_OF_COPY = 0.85, 1.05, 1.2
"""What is promised."""
ROOM = 2.5
"""How many files of a state the disk has to have space for: an asynchronous save replaces one by another."""
DISK_TIMES = 16
"""How much longer a round takes than the disk alone for writing a state and reading it: there are as many contenders,
and some are slower."""
PROBE_NBYTES = 1 << 30
STALLS = 4
"""How many asynchronous saves of a round are timed, behind the first one."""
FIRST_SHARE = 1 / 3
"""The share of the time that the state of many tensors gets; the large state gets the rest."""


class WrongBytesError(RuntimeError):
    """What has come back is not what was saved."""


class Timing(NamedTuple):
    """What a step has measured."""

    operation: str
    contender: str
    seconds: float
    resident: float | None = None
    """How much of the file was in the page cache before it was loaded."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    state: str
    nbytes: int
    round: int
    """The first one, 0, pays for what is done once."""
    operation: str
    contender: str
    seconds: float
    resident: float | None


@dataclass(frozen=True, slots=True)
class Task:
    """A state, and where its files go."""

    label: str
    state: State
    folder: Path
    device: torch.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a round. It leaves no file behind, and its timings count only if all of it went well."""

    name: str
    run: Callable[[Task], list[Timing]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to save, and to load. Both get the path of a file that no other contender uses."""

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, torch.device, State], State]
    """Gets the state as well, for the names, shapes and dtypes that its file does not hold."""


def timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    synchronize(device)
    started = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - started


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- the contenders


def by_fastensor(backend: str) -> Contender:
    def check(report: SaveReport | LoadReport) -> None:
        if report.fallbacks and backend != registry.AUTO:
            raise RuntimeError(report.fallbacks[0].reason)

    def save(state: State, path: Path) -> None:
        check(fastensor.save(state, path, backend=backend))

    def load(path: Path, device: torch.device, state: State) -> State:
        found: tuple[State, LoadReport] = fastensor.load_with_report(path, device, backend=backend)
        check(found[1])
        return found[0]

    return Contender(f"{OURS}, {backend}", save, load)


def save_with_torch(state: State, path: Path) -> None:
    torch.save(state, path)
    sync(path)


def save_safetensors(state: State, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    sync(path)


def offsets(state: State) -> Iterator[tuple[str, int]]:
    """Where each tensor begins in a file that holds nothing else."""
    at = 0
    for name, tensor in state.items():
        yield name, at
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: torch.Tensor) -> Any:
    values = tensor.view(-1).view(torch.uint8)
    return values if values.is_cuda else values.numpy()


def save_with_kvikio(state: State, path: Path) -> None:
    kvikio = importlib.import_module("kvikio")
    with kvikio.CuFile(path, "w") as file:
        futures = [file.pwrite(as_bytes(state[name]), file_offset=at) for name, at in offsets(state)]
        for future in futures:
            future.get()
    sync(path)


def load_with_kvikio(path: Path, device: torch.device, state: State) -> State:
    kvikio = importlib.import_module("kvikio")
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    synchronize(device)
    with kvikio.CuFile(path, "r") as file:
        futures = [file.pread(as_bytes(found[name]), file_offset=at) for name, at in offsets(state)]
        for future in futures:
            future.get()
    return found


def torch_gds() -> Any:
    """The module.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():  # registering a file may never return then: cuFile 1.17 reads a file for ever
        raise RuntimeError(f"{TORCH_GDS} needs a GPU")
    return importlib.import_module(TORCH_GDS)


def save_with_torch_gds(state: State, path: Path) -> None:
    gds = torch_gds()
    synchronize(next(iter(state.values())).device)
    file = gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    for name, at in offsets(state):
        file.save_storage(state[name].untyped_storage(), offset=at)
    del file
    sync(path)


def load_with_torch_gds(path: Path, device: torch.device, state: State) -> State:
    gds = torch_gds()
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    synchronize(device)
    file = gds.GdsFile(str(path), os.O_RDONLY)
    for name, at in offsets(state):
        file.load_storage(found[name].untyped_storage(), offset=at)
    return found


def contenders() -> list[Contender]:
    return [
        by_fastensor(registry.AUTO),
        Contender(
            "safetensors", save_safetensors, lambda path, device, _: safetensors.torch.load_file(path, str(device))
        ),
        Contender("torch", save_with_torch, lambda path, device, state: torch.load(path, device)),
        *(by_fastensor(name) for name in registry.names()),
        Contender("kvikio alone", save_with_kvikio, load_with_kvikio),
        Contender(TORCH_GDS, save_with_torch_gds, load_with_torch_gds),
    ]


# --- what is physically possible


def copy_seconds(task: Task, *, to_host: bool) -> float:
    """A copy of so many bytes between the device and pinned memory, in pieces that are used again."""
    piece = min(256 << 20, task.nbytes)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=task.device.type == "cuda")
    there = torch.empty(piece, dtype=torch.uint8, device=task.device)
    target, source = (host, there) if to_host else (there, host)

    def copy() -> None:
        for at in range(0, task.nbytes, piece):
            count = min(piece, task.nbytes - at)
            target[:count].copy_(source[:count], non_blocking=True)

    copy()
    return timed(copy, task.device)[1]


def disk_seconds(path: Path, nbytes: int, *, write: bool) -> float:
    """Direct transfers of whole buffers, several in flight, to a new file whose space is reserved first, and a sync; or
    from it. As fio has them, which may not be there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if write else os.O_RDONLY
    fd = os.open(path, flags | os.O_DIRECT)
    rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    try:
        with transfer_buffers.lending() as lent, ThreadPoolExecutor(4) as pool:
            views = [transfer_buffers.take(lent).view for _ in range(4)]
            for view in views:
                view[:] = random.randbytes(BUFFER_NBYTES)

            def work(number: int) -> None:
                for at in range(number * BUFFER_NBYTES, rounded, 4 * BUFFER_NBYTES):
                    view = views[number][: min(BUFFER_NBYTES, rounded - at)]
                    if write:
                        posix.write_fully(fd, view, at)
                    else:
                        posix.read_fully(fd, view, at, alignment=ALIGNMENT)

            started = time.perf_counter()
            if write:
                posix.preallocate(fd, rounded)
            list(pool.map(work, range(4)))
            if write:
                os.fsync(fd)
            return time.perf_counter() - started
    finally:
        os.close(fd)


def checksum_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s of both ways to a CRC32 of a device's memory."""
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def on_device() -> int:
        pending = PendingCrc32s([values])
        synchronize(device)
        return pending.values()[0]

    def on_host() -> int:
        host.copy_(values)
        return int(isal_zlib.crc32(host.numpy().data))

    if on_device() != on_host():
        raise WrongBytesError("the device computes another CRC32 than the host")
    ways = {"on the device": on_device, "on the host, copied there": on_host}
    return {name: nbytes / median(timed(way, device)[1] for _ in range(5)) / 1e9 for name, way in ways.items()}


# --- the steps of a round


def evict(path: Path) -> float:
    """Empty the page cache of a file; how much of it is there all the same."""
    with path.open("rb") as file:
        return posix.evict(file.fileno(), path.stat().st_size)


def check_equal(found: State, state: State) -> None:
    """
    Raises:
        WrongBytesError: they are not.
    """
    if found.keys() != state.keys() or not all(
        torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state
    ):
        raise WrongBytesError("other values were brought back than were saved")


def save_and_load(one: Contender, task: Task) -> list[Timing]:
    path = task.folder / "file"
    try:
        _, saving = timed(lambda: one.save(task.state, path), task.device)
        settle()
        resident = evict(path)
        found, loading = timed(lambda: one.load(path, task.device, task.state), task.device)
        check_equal(found, task.state)
    finally:
        path.unlink(missing_ok=True)
    return [Timing(SAVE, one.name, saving), Timing(LOAD, one.name, loading, resident)]


def use_disk(task: Task) -> list[Timing]:
    path = task.folder / "limit"
    try:
        writing = disk_seconds(path, task.nbytes, write=True)
        settle()
        reading = disk_seconds(path, task.nbytes, write=False)
    finally:
        path.unlink(missing_ok=True)
    return [Timing(SAVE, DISK, writing), Timing(LOAD, DISK, reading)]


def save_asynchronously(task: Task) -> list[Timing]:
    """The saves of a writer, each when the one before is durable, behind the first one, for which its memory is pinned;
    and a copy."""
    path = task.folder / "async"
    copy = copy_seconds(task, to_host=True)
    stalls = []
    try:
        with fastensor.AsyncWriter(staging_bytes=task.nbytes + (256 << 20)) as writer:
            writer.save(task.state, path).result()
            for _ in range(STALLS):
                synchronize(task.device)
                started = time.perf_counter()
                handle = writer.save(task.state, path)
                stalls.append(time.perf_counter() - started)
                handle.result()
    finally:
        path.unlink(missing_ok=True)
    return [*(Timing(STALL, ASYNC, stall) for stall in stalls), Timing(STALL, COPY_TO_HOST, copy)]


def all_steps() -> list[Step]:
    """The steps in the order in which they run: what is cut off at the end is worth least."""
    first, *others = (Step(one.name, partial(save_and_load, one)) for one in contenders())
    return [
        Step(ASYNC, save_asynchronously),
        first,
        Step(DISK, use_disk),
        Step(COPY_TO_HOST, lambda task: [Timing(SAVE, COPY_TO_HOST, copy_seconds(task, to_host=True))]),
        Step(COPY_TO_DEVICE, lambda task: [Timing(LOAD, COPY_TO_DEVICE, copy_seconds(task, to_host=False))]),
        *others,
    ]


def in_order(steps: list[Step], number: int) -> list[Step]:
    """Shuffled for each round but the first; torch's GDS, which may leave the driver in disorder, comes last."""
    shuffled = random.Random(number).sample(steps, len(steps)) if number else steps
    return sorted(shuffled, key=lambda step: step.name == TORCH_GDS)


# --- what it amounts to


@dataclass(frozen=True, slots=True)
class Median:
    """All samples of one contender."""

    state: str
    nbytes: int
    operation: str
    contender: str
    rounds: int
    """0 if the first one is all there was."""
    seconds: float
    """The median."""
    resident: float | None
    """The largest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise, and whether it holds."""

    promise: str
    measured: float | None
    """None if it, or what it is compared with, could not be measured."""
    holds: bool
    best: str
    """The fastest backend, and what would have been measured for it. It is picked for what it was in this run."""


def summarize(samples: list[Sample], impossible: dict[tuple[str, str], str]) -> list[Median]:
    """One by state, operation and contender, of those who could do it every time."""
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        if (sample.state, sample.contender) not in impossible:
            groups.setdefault((sample.state, sample.operation, sample.contender), []).append(sample)
    return [summary(group) for group in groups.values()]


def summary(group: list[Sample]) -> Median:
    one, later = group[0], [sample for sample in group if sample.round]
    seconds = median(sample.seconds for sample in later or group)
    resident = max((sample.resident for sample in group if sample.resident is not None), default=None)
    rounds = len({sample.round for sample in later})
    return Median(one.state, one.nbytes, one.operation, one.contender, rounds, seconds, resident)


def judge(rows: list[Median]) -> list[Verdict]:
    """The promises, for each state: those of the backend that is chosen automatically."""
    verdicts = []
    for state in dict.fromkeys(row.state for row in rows):
        saves, loads, stalls = (
            {row.contender: row.seconds for row in rows if (row.state, row.operation) == (state, operation)}
            for operation in (SAVE, LOAD, STALL)
        )
        limit = max(saves[DISK], saves[COPY_TO_HOST]) if {DISK, COPY_TO_HOST} <= saves.keys() else 0.0
        peers = {name: one for name, one in loads.items() if not name.startswith(OURS) and name not in LIMITS}
        peer = min(peers, key=peers.__getitem__, default="")
        copy = stalls.get(COPY_TO_HOST, 0.0)
        what = f"{state}: speed of a save / the slower of disk and pinned copy ≥ {ENOUGH_OF_LIMIT}"
        ratios = {name: limit / seconds for name, seconds in saves.items() if limit}
        verdicts.append(verdict(what, ratios, AUTO, least=ENOUGH_OF_LIMIT))
        what = f"{state}: a load / the fastest peer ({peer or 'none'}) ≤ {MOST_OF_PEER}"
        ratios = {name: seconds / peers[peer] for name, seconds in loads.items() if peer}
        verdicts.append(verdict(what, ratios, AUTO, most=MOST_OF_PEER))
        what = f"{state}: stall of an asynchronous save / a pinned copy ≤ {MOST_OF_COPY}"
        ratios = {name: seconds / copy for name, seconds in stalls.items() if copy}
        verdicts.append(verdict(what, ratios, ASYNC, most=MOST_OF_COPY))
    return verdicts


def verdict(
    promise: str, ratios: dict[str, float], judged: str, *, least: float = 0.0, most: float = math.inf
) -> Verdict:
    """What follows from ratios by contender, which are empty if there is nothing to compare with."""
    measured = ratios.get(judged)
    holds = measured is not None and least <= measured <= most
    backends = [name for name in ratios if name.startswith(OURS) and name not in (AUTO, ASYNC)]
    best = (max if least else min)(backends, key=ratios.__getitem__, default="")
    return Verdict(promise, measured, holds, f"{best}: {ratios[best]:.3f}" if best else "")


@dataclass(slots=True)
class Results:
    """What has been found so far, and the files that it is written to."""

    output: Path
    """Ends with ``.json``; the tables go beside it."""
    machine: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    checksums: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    impossible: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why, by state and by who or what it was."""
    notes: list[str] = field(default_factory=list)
    wrong: bool = False
    """Whether our own bytes were."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.notes.append(text)

    @contextmanager
    def failures_noted(self, state: str, what: str) -> Iterator[None]:
        """Show what fails in the block, note it in :attr:`impossible`, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # of any library: it is shown
            print(f"{state}: {what} is not possible", file=sys.stderr)
            traceback.print_exc()
            self.impossible[state, what] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.wrong |= isinstance(error, WrongBytesError) and what.startswith(OURS)

    def write(self) -> None:
        """Write both files."""
        self.output.with_suffix(".md").write_text(table(self))
        rows = [*map(row_of, judge(summarize(self.samples, self.impossible)))]
        Rows(self.output, rows, self.doing, self.machine, document(self)).write()


def row_of(verdict: Verdict) -> Row:
    """A line of the table of ``make gpu``."""
    if verdict.measured is None:
        return Row(verdict.promise, "not measured")
    best = f" (the best backend, {verdict.best})" if verdict.best else ""
    return Row(verdict.promise, f"{verdict.measured:.3f}{best}", verdict.holds)


def document(results: Results) -> dict[str, Any]:
    """Everything as JSON."""
    rows = summarize(results.samples, results.impossible)
    return {
        "checksums": results.checksums,
        "notes": results.notes,
        "impossible": [{"state": where, "what": what, "why": why} for (where, what), why in results.impossible.items()],
        "verdicts": [asdict(one) for one in judge(rows)],
        "medians": [asdict(one) for one in rows],
        "samples": [asdict(one) for one in results.samples],
    }


def table(results: Results) -> str:
    """What follows from it, as Markdown."""
    rows = summarize(results.samples, results.impossible)
    lines = ["# A GPU's tensors to the disk and back", ""]
    lines += [f"- {key}: {value}" for key, value in results.machine.items()]
    lines += [f"- CRC32s: {', '.join(f'{rate:.1f} GB/s {way}' for way, rate in results.checksums.items())}"]
    lines += [f"- {note}" for note in results.notes]
    for state, nbytes, operation in dict.fromkeys((row.state, row.nbytes, row.operation) for row in rows):
        lines += ["", f"## {state}, {nbytes / 2**20:.0f} MiB, {operation}", ""]
        lines += ["| way | rounds | median seconds | GB/s | in the page cache |", "|---|---:|---:|---:|---:|"]
        here = [row for row in rows if (row.state, row.operation) == (state, operation)]
        for row in sorted(here, key=lambda row: row.seconds):
            speed, resident = nbytes / row.seconds / 1e9, "" if row.resident is None else f"{row.resident:.0%}"
            lines.append(f"| {row.contender} | {row.rounds} | {row.seconds:.4f} | {speed:.2f} | {resident} |")
    if results.impossible:
        lines += ["", "## not possible here", ""]
        lines += [f"- {state}: {what}: {why}" for (state, what), why in results.impossible.items()]
    lines += ["", "## promises", "", "| promise | measured | holds | the best backend |", "|---|---:|---|---|"]
    for one in judge(rows):
        measured = "not measured" if one.measured is None else f"{one.measured:.3f}"
        lines.append(f"| {one.promise} | {measured} | {'yes' if one.holds else '**no**'} | {one.best} |")
    return "\n".join(lines) + "\n"


# --- measuring


def measure(
    label: str, build: Callable[[], State], folder: Path, device: torch.device, results: Results, *,
    rounds: int, end: float,
) -> None:  # fmt: skip
    """Rounds with one state. No step begins after ``end``, of ``time.monotonic()``."""
    task, steps = Task(label, build(), folder, device), all_steps()
    turns = [(number, step) for number in range(rounds + 1) for step in in_order(steps, number)]
    for number, step in turns:
        if time.monotonic() > end:
            results.note(f"{label}: the time was up in round {number} of {rounds}, before {step.name}")
            break
        if (label, step.name) in results.impossible:
            continue
        results.doing = f"{label}, round {number}, {step.name}"
        print(f"{results.doing} ...", file=sys.stderr, flush=True)
        settle()
        synchronize(device)  # an error that stays with CUDA ends all of this, and is not this step's
        with results.failures_noted(label, step.name):
            timings = step.run(task)
            results.samples += [Sample(label, task.nbytes, number, *timing) for timing in timings]
        results.write()


def disk_seconds_for_gib(folder: Path, nbytes: int) -> float:
    """How long the disk takes to write and to read a GiB."""
    path = folder / "probe"
    try:
        seconds = sum(disk_seconds(path, nbytes, write=write) for write in (True, False))
    finally:
        path.unlink(missing_ok=True)
    return seconds / nbytes * 2**30


def fitting(gib: float, *, free_nbytes: int, seconds: float, seconds_for_gib: float) -> tuple[float, str]:
    """How large a state can be, in GiB, so that the disk holds it and a round is done in time; and why not larger.

    >>> fitting(5.0, free_nbytes=20 << 30, seconds=160, seconds_for_gib=1)
    (5.0, '')
    >>> fitting(5.0, free_nbytes=20 << 30, seconds=40, seconds_for_gib=1)
    (2.5, 'a round with 5 GiB would take about 80 s here, and there are 40 s')
    """
    needed = gib * DISK_TIMES * seconds_for_gib
    by_disk, by_time = free_nbytes / (gib * 2**30 * ROOM), seconds / needed if needed else math.inf
    if min(by_disk, by_time) >= 1:
        return gib, ""
    reason = f"a round with {gib:g} GiB would take about {needed:.0f} s here, and there are {seconds:.0f} s"
    if by_disk < by_time:
        reason = f"{free_nbytes / 2**30:.1f} GiB of the disk are free, and {ROOM:g} files of a state have to fit"
    return max(math.floor(10 * gib * min(by_disk, by_time)) / 10, 0.0), reason


def state_of(gib: float, device: torch.device) -> State:
    """Large tensors of random values."""
    count = max(round(gib * 8), 1)
    sizes = [number * round(gib * 2**30) // count // 4 for number in range(count + 1)]
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"layers.{number}.weight": torch.randn(end - begin, generator=generator, device=device)
        for number, (begin, end) in enumerate(pairwise(sizes))
    }


def measure_all(options: argparse.Namespace, folder: Path, results: Results, end: float) -> None:
    device, begin = torch.device(options.device), time.monotonic()
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    with results.failures_noted("this machine", "its description"):
        results.machine = describe_gpu_machine(folder, device.type)
    with results.failures_noted("this machine", CHECKSUMS):
        results.checksums = checksum_rates(device, min(256 << 20, int(options.gib * 2**30)))
    gib, large_seconds = options.gib, (1 - FIRST_SHARE) * (end - begin)
    with results.failures_noted("this machine", "the speed of its disk"):
        seconds_for_gib = disk_seconds_for_gib(folder, min(PROBE_NBYTES, int(gib * 2**30)))
        free = shutil.disk_usage(folder).free
        gib, reason = fitting(gib, free_nbytes=free, seconds=large_seconds, seconds_for_gib=seconds_for_gib)
        if reason:
            results.note(f"the state of {options.gib:g} GiB is one of {gib:g} GiB: {reason}")
    large = f"{gib:g} GiB"
    measured = partial(measure, folder=folder, device=device, results=results, rounds=options.rounds)
    with results.failures_noted(options.model, "all of it"):
        measured(options.model, lambda: build_state(options.model, str(device)), end=end - large_seconds)
    with results.failures_noted(large, "all of it"):
        if gib:
            measured(large, lambda: state_of(gib, device), end=end)


def end_in_order(number: int, _: object) -> None:
    """Let what was measured be shown, whoever says again meanwhile that this is to end."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="gpt2_adam", help="a state of many tensors")
    parser.add_argument("--gib", type=float, default=5.0, help="a state of large tensors; smaller if it cannot be")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="nothing begins after that")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu-saves.json"))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = Results(options.output)
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure_all(options, Path(folder), results, end)
            results.doing = ""
    finally:
        print(table(results))
        results.write()
    return int(results.wrong)


if __name__ == "__main__":
    sys.exit(main())
