"""How long training stands still for a checkpoint, and how it goes while the checkpoint is written.

Run by ``make bench``. Three measurements, each in fresh processes, with contenders in turns:

- *Stalls*: a state of GPT-2 with Adam, or a part of it, is saved again and again, each save once the one before is
  durable. Beside each, the same bytes are copied into memory that has been touched before: what a snapshot costs at
  least. The first save of a process, which touches its staging memory, stands apart.
- *Throughput*: a small network is trained on all cores, in spells with and without saves in turns.
- *Streamed*: a state that is larger than the staging memory is saved asynchronously, and as ``fastensor.save`` does.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from contenders import Shape, State, filled, publish, shapes_of
from measuring import describe_machine, peak_memory, preload, settle
from torch import nn

import fastensor
from fastensor.checkpoint.writing.freeing import wait_for_space

OURS, SYNC, ASYNC, DCP, COPY = "fastensor", "lightning", "lightning async", "dcp async", "copy"
CONTENDERS = (OURS, SYNC, ASYNC, DCP)
ALLOWED_NBYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Stall:
    """One save."""

    mib: int
    tensors: int
    contender: str
    first: bool
    """Whether the save is the first one of its process."""
    stall_seconds: float
    durable_seconds: float
    copy_seconds: float
    """A plain copy of the same bytes, right before."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The most that saves have taken, beyond the state."""

    mib: int
    contender: str
    state_nbytes: int
    extra_nbytes: int


@dataclass(frozen=True, slots=True)
class Spell:
    """Some seconds of training."""

    loop: str
    contender: str
    """``nobody`` if nothing was saved."""
    steps_per_second: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """Two saves of a state that is larger than the staging memory, each from the call until it is durable."""

    mib: int
    staging_mib: int
    tensors: int
    stall_seconds: float
    durable_seconds: float
    synchronous_seconds: float


Saver = Callable[[State, Path], Callable[[], None]]
"""Saves; what it returns waits until the file is durable."""


@contextmanager
def saver_of(contender: str) -> Iterator[Saver]:
    """A way of saving, with whatever it keeps between saves."""
    if contender == OURS:
        with fastensor.AsyncWriter() as writer:

            def by_fastensor(state: State, path: Path) -> Callable[[], None]:
                handle = writer.save(state, path)
                return lambda: void(handle.result())

            yield by_fastensor
    elif contender == DCP:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(False, False, False, False))

        def by_dcp(state: State, path: Path) -> Callable[[], None]:
            temporary = path.with_name(path.name + ".tmp")
            writer = dcp.FileSystemWriter(temporary, thread_count=2)
            response: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)

            def finish() -> None:
                response.result()
                publish(temporary, path)

            return finish

        yield by_dcp
        stager.close()
    else:
        from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

        plugin = AsyncCheckpointIO(TorchCheckpointIO()) if contender == ASYNC else TorchCheckpointIO()

        def by_lightning(state: State, path: Path) -> Callable[[], None]:
            temporary = path.with_name(path.name + ".tmp")
            plugin.save_checkpoint(state, temporary)
            if contender == SYNC:
                publish(temporary, path)
                return lambda: None

            def finish() -> None:
                plugin._executor.submit(lambda: None).result()  # its one thread does things in turn
                publish(temporary, path)

            return finish

        yield by_lightning
        plugin.teardown()


def void(value: object) -> None:
    """Waits have no results."""


def state_of(mib: int) -> State:
    """GPT-2 small with Adam if it fits, else as many of its layers, with Adam, as do, or of its smallest tensors."""
    whole = shapes_of("gpt2_adam")
    for layers in (*range(12, 0, -1), 0):
        parts = tuple(f".h.{number}." for number in range(layers))
        chosen = [shape for shape in whole if any(part in shape[0] for part in parts)]
        for found in (whole, chosen):
            if 0 < sum(map(_nbytes, found)) <= mib << 20:
                return filled(found, "cpu")
    return filled([shape for shape in whole if _nbytes(shape) <= mib << 10], "cpu")


def _nbytes(shape: Shape) -> int:
    return math.prod(shape[1]) * getattr(torch, shape[2]).itemsize


def path_of(contender: str, folder: Path) -> Path:
    return folder / f"{CONTENDERS.index(contender)}.ckpt"


def measure_stalls(contender: str, mib: int, saves: int, folder: Path, results: Any) -> None:
    """In a fresh process: send the stalls of its saves, then the most memory that they took."""
    state = state_of(mib)
    copy = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    path = path_of(contender, folder)
    with saver_of(contender) as save, peak_memory() as extra:
        for number in range(saves):
            settle()
            started = time.perf_counter()
            for name, tensor in state.items():
                copy[name].copy_(tensor)
            copied = time.perf_counter()
            wait = save(state, path)
            stalled = time.perf_counter()
            wait()
            done = time.perf_counter()
            results.send(
                Stall(mib, len(state), contender, number == 0, stalled - copied, done - copied, copied - started)
            )
    results.send(Memory(mib, contender, sum(tensor.nbytes for tensor in state.values()), extra()))


def measure_streamed(mib: int, tensors: int, staging_mib: int, saves: int, folder: Path, results: Any) -> None:
    """In a fresh process: save a state in turns with both ways."""
    state = {str(number): torch.randn((mib << 18) // tensors) for number in range(tensors)}
    with fastensor.AsyncWriter(staging_bytes=staging_mib << 20) as writer:
        for _ in range(saves):
            settle()
            started = time.perf_counter()
            fastensor.save(state, folder / "streamed.ckpt")
            synchronous = time.perf_counter() - started
            wait_for_space()
            settle()
            started = time.perf_counter()
            handle = writer.save(state, folder / "streamed.ckpt")
            stall = time.perf_counter() - started
            handle.result()
            durable = time.perf_counter() - started
            wait_for_space()
            results.send(Streamed(mib, staging_mib, tensors, stall, durable, synchronous))


class Torch:
    """A training step whose work is done by torch, on all cores."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._batch = torch.randn(64, 512)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()


class Python:
    """A step that holds the GIL all the time: the worst that a loop can do to a thread, and a thread to a loop."""

    def step(self) -> None:
        sum(number * number for number in range(20_000))


LOOPS: dict[str, Callable[[], Any]] = {"torch": Torch, "pure Python": Python}


def measure_throughput(
    loop: str, contender: str, mib: int, spells: int, seconds: float, folder: Path, results: Any
) -> None:
    """In a fresh process: train in spells, each second one of which begins with a save."""
    state, steps, path = state_of(mib), LOOPS[loop](), path_of(contender, folder)
    with saver_of(contender) as save:
        save(state, path)()  # touches memory
        for number in range(2 * spells):
            settle()
            started, count = time.perf_counter(), 0
            wait = save(state, path) if number % 2 else None
            while time.perf_counter() - started < seconds:
                steps.step()
                count += 1
            speed = count / (time.perf_counter() - started)
            results.send(Spell(loop, contender if wait else "nobody", speed))
            if wait:
                wait()


def collect(work: Callable[..., None], *arguments: Any) -> list[Any]:
    """What a process sends in which nothing but imports has happened before."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*arguments, theirs))
    process.start()
    theirs.close()
    found = []
    try:
        while True:
            found.append(ours.recv())
    except EOFError:
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__}{arguments} has failed with exit code {process.exitcode}")
    return found


def median_stalls(stalls: list[Stall]) -> list[dict[str, Any]]:
    rows = []
    for key in dict.fromkeys((one.mib, one.contender, one.first) for one in stalls):
        group = [one for one in stalls if (one.mib, one.contender, one.first) == key]
        row: dict[str, Any] = dict(zip(("mib", "contender", "first"), key, strict=True), tensors=group[0].tensors)
        for name in ("stall_seconds", "durable_seconds", "copy_seconds"):
            row[name] = statistics.median(getattr(one, name) for one in group)
        row["stall_to_copy"] = statistics.median(one.stall_seconds / one.copy_seconds for one in group)
        rows.append(row)
    return rows


def median_speeds(spells: list[Spell]) -> list[dict[str, Any]]:
    """For each contender's process, the ratio of neighbouring spells with and without a save."""
    rows = []
    for loop in dict.fromkeys(one.loop for one in spells):
        own = [one for one in spells if one.loop == loop]
        pairs = [(own[i], own[i + 1]) for i in range(0, len(own), 2)]
        for contender in dict.fromkeys(saved.contender for _, saved in pairs):
            mine = [(free, saved) for free, saved in pairs if saved.contender == contender]
            ratios = [saved.steps_per_second / free.steps_per_second for free, saved in mine]
            rows.append({"loop": loop, "contender": contender, "throughput": statistics.median(ratios)})
    return rows


def judge(
    stalls: list[dict[str, Any]], memory: list[Memory], streamed: list[Streamed], speeds: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""
    verdicts: list[dict[str, Any]] = []

    def promise(what: str, measured: float, bound: float, *, at_least: bool = False) -> None:
        holds = measured >= bound if at_least else measured <= bound
        sign = "≥" if at_least else "≤"
        verdicts.append({"promise": f"{what} {sign} {bound:g}", "measured": round(measured, 3), "holds": holds})

    for mib in dict.fromkeys(row["mib"] for row in stalls):
        later = {row["contender"]: row for row in stalls if row["mib"] == mib and not row["first"]}
        peer = min((SYNC, ASYNC, DCP), key=lambda name: later[name]["stall_seconds"])
        promise(f"{mib} MiB: stall / copy", later[OURS]["stall_to_copy"], 1.3)
        promise(f"{mib} MiB: stall / best peer ({peer})", _ratio(later, peer), 1.1)
        promise(f"{mib} MiB: stall / lightning async", _ratio(later, ASYNC), 0.333)
    for one in memory:
        if one.contender == OURS:
            over = (one.extra_nbytes - one.state_nbytes) / 2**20
            promise(f"{one.mib} MiB: extra MiB beyond the checkpoint's", over, ALLOWED_NBYTES >> 20)
    for found in by_size(streamed):
        ratio = statistics.median(one.durable_seconds / one.synchronous_seconds for one in found)
        promise(f"{found[0].mib} MiB through {found[0].staging_mib} MiB: durable / synchronous save", ratio, 1.2)
    for row in speeds:
        if row["contender"] == OURS and row["loop"] == "torch":
            promise("throughput with saves / without", row["throughput"], 0.95, at_least=True)
    return verdicts


def by_size(streamed: list[Streamed]) -> list[list[Streamed]]:
    """The pairs of saves of each size."""
    sizes = dict.fromkeys((one.mib, one.staging_mib) for one in streamed)
    return [[one for one in streamed if (one.mib, one.staging_mib) == size] for size in sizes]


def _ratio(rows: dict[str, dict[str, Any]], name: str) -> float:
    return float(rows[OURS]["stall_seconds"] / rows[name]["stall_seconds"])


def table(
    machine: dict[str, str],
    stalls: list[dict[str, Any]],
    memory: list[Memory],
    streamed: list[Streamed],
    speeds: list[dict[str, Any]],
    verdicts: list[dict[str, Any]],
) -> str:
    """Everything as Markdown."""
    lines = ["# Asynchronous checkpoints: stalls, and training meanwhile", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += ["", "## medians", ""]
    lines += ["| MiB | tensors | save | contender | stall | stall / copy | durable after | most extra memory |"]
    lines += ["|---:|---:|---|---|---:|---:|---:|---:|"]
    most = {(one.mib, one.contender): one.extra_nbytes / 2**20 for one in memory}
    lines += [
        f"| {row['mib']} | {row['tensors']} | {'first' if row['first'] else 'later'} | {row['contender']} "
        f"| {row['stall_seconds'] * 1e3:.1f} ms | {row['stall_to_copy']:.2f} | {row['durable_seconds']:.3f} s "
        f"| {most[row['mib'], row['contender']]:.0f} MiB |"
        for row in stalls
    ]
    lines += ["", "## a state that is larger than the staging memory (medians)", ""]
    lines += [
        "| MiB | tensors | staging | stall | durable after | synchronous save |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for found in by_size(streamed):
        stall, durable, synchronous = (
            statistics.median(getattr(one, name) for one in found)
            for name in ("stall_seconds", "durable_seconds", "synchronous_seconds")
        )
        lines.append(
            f"| {found[0].mib} | {found[0].tensors} | {found[0].staging_mib} MiB | {stall:.2f} s | {durable:.2f} s "
            f"| {synchronous:.2f} s |"
        )
    lines += ["", "## training while a checkpoint is saved, relative to training alone (median)", ""]
    lines += ["| loop | contender | throughput |", "|---|---|---:|"]
    lines += [f"| {row['loop']} | {row['contender']} | {row['throughput']:.3f} |" for row in speeds]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1425], help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each size and contender")
    parser.add_argument("--saves", type=int, default=6, help="in each of them")
    parser.add_argument("--streamed-size", type=int, default=8192, help="MiB, in 32 tensors; 0 for none")
    parser.add_argument("--streamed-staging", type=int, default=1024, help="MiB of the staging memory for these")
    parser.add_argument("--throughput-size", type=int, default=1024, help="MiB")
    parser.add_argument("--spells", type=int, default=7, help="of training with, and as many without a save")
    parser.add_argument("--spell-seconds", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/async_checkpoint"))
    options = parser.parse_args()
    preload()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    stalls: list[Stall] = []
    memory: list[Memory] = []
    streamed: list[Streamed] = []
    spells: list[Spell] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        machine = describe_machine(folder, "cpu")
        for mib in options.sizes:
            for number in range(options.rounds):
                for contender in random.Random(number).sample(CONTENDERS, len(CONTENDERS)):
                    print(f"{mib} MiB, round {number + 1}, {contender} ...", file=sys.stderr, flush=True)
                    *found, most = collect(measure_stalls, contender, mib, options.saves, folder)
                    stalls += found
                    memory.append(most)
        if options.streamed_size:
            print(f"{options.streamed_size} MiB, streamed ...", file=sys.stderr, flush=True)
            size, staging = options.streamed_size, options.streamed_staging
            streamed = collect(measure_streamed, size, 32, staging, options.rounds, folder)
        for loop in LOOPS:
            for contender in (OURS, ASYNC, DCP):
                print(f"training, {loop}, {contender} ...", file=sys.stderr, flush=True)
                size, seconds = options.throughput_size, options.spell_seconds
                spells += collect(measure_throughput, loop, contender, size, options.spells, seconds, folder)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    most_of_all = [
        max((one for one in memory if (one.mib, one.contender) == key), key=lambda one: one.extra_nbytes)
        for key in dict.fromkeys((one.mib, one.contender) for one in memory)
    ]
    rows, speeds = median_stalls(stalls), median_speeds(spells)
    verdicts = judge(rows, most_of_all, streamed, speeds)
    text = table(machine, rows, most_of_all, streamed, speeds, verdicts)
    options.output.with_suffix(".md").write_text(text)
    result = {
        "machine": machine,
        "verdicts": verdicts,
        "stalls": [asdict(one) for one in stalls],
        "memory": [asdict(one) for one in memory],
        "streamed": [asdict(one) for one in streamed],
        "spells": [asdict(one) for one in spells],
    }
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1))
    print(text)


if __name__ == "__main__":
    main()
