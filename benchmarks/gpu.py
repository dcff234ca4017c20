"""Saving from a GPU and loading to it, beside what its bus and the disk allow, and beside what others do.

Run by ``make gpu``, in less than eight minutes, on a machine that may have no network. Every save is durable; loads are
cold, if the page cache can be emptied, and to the device; every load is compared with what was saved. Contenders take
turns in one process, since CUDA takes long to begin; figures are medians. What a contender cannot do here is told.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch
from contenders import State, build_state
from isal import isal_zlib
from measuring import describe_machine, settle

import fastensor
from fastensor.backends import posix, registry
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.memory import BUFFER_NBYTES, borrowed_ring

ALIGNMENT = 4096
COPY_TO_HOST, COPY_TO_DEVICE, DISK = "pinned copy to the host", "pinned copy to the device", "the disk alone"
OURS = "fastensor"
SAVE, LOAD, STALL = "durable save", "cold load", "asynchronous save: stall"
ENOUGH_OF_LIMIT, MOST_OF_PEER, MOST_OF_COPY = 0.85, 1.05, 1.2
"""What is promised."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    state: str
    nbytes: int
    operation: str
    contender: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to save, and to load. Both get a path that is its own."""

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, torch.device, State], State]
    """Gets the state as well, for the names, shapes and dtypes that its file does not hold."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    def save(state: State, path: Path) -> None:
        report = fastensor.save(state, path, backend=backend)
        if report.fallbacks:
            raise RuntimeError(report.fallbacks[0].reason)

    def load(path: Path, device: torch.device, state: State) -> State:
        found, report = fastensor.load_with_report(path, device, backend=backend)
        if report.fallbacks:
            raise RuntimeError(report.fallbacks[0].reason)
        return found

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


def save_with_torch_gds(state: State, path: Path) -> None:
    gds: Any = importlib.import_module("torch.cuda.gds")
    synchronize(next(iter(state.values())).device)
    file = gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    for name, at in offsets(state):
        file.save_storage(state[name].untyped_storage(), offset=at)
    del file
    sync(path)


def load_with_torch_gds(path: Path, device: torch.device, state: State) -> State:
    gds: Any = importlib.import_module("torch.cuda.gds")
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    synchronize(device)
    file = gds.GdsFile(str(path), os.O_RDONLY)
    for name, at in offsets(state):
        file.load_storage(found[name].untyped_storage(), offset=at)
    return found


def contenders() -> list[Contender]:
    return [
        *(by_fastensor(name) for name in registry.names()),
        Contender("torch", save_with_torch, lambda path, device, state: torch.load(path, device)),
        Contender(
            "safetensors", save_safetensors, lambda path, device, _: safetensors.torch.load_file(path, str(device))
        ),
        Contender("kvikio alone", save_with_kvikio, load_with_kvikio),
        Contender("torch.cuda.gds", save_with_torch_gds, load_with_torch_gds),
    ]


# --- what is physically possible


def copy_seconds(nbytes: int, device: torch.device) -> dict[str, float]:
    """Copies of so many bytes between the device and pinned memory, in pieces that are used again."""
    piece = min(256 << 20, nbytes)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(piece, dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for at in range(0, nbytes, piece):
            count = min(piece, nbytes - at)
            target[:count].copy_(source[:count], non_blocking=True)

    found = {}
    for name, target, source in ((COPY_TO_HOST, host, there), (COPY_TO_DEVICE, there, host)):
        copy(target, source)
        found[name] = timed(lambda: copy(target, source), device)[1]  # noqa: B023
    return found


def disk_seconds(path: Path, nbytes: int, *, write: bool) -> float:
    """Direct transfers of whole buffers, several in flight, and a sync; as fio has them, which may not be there."""
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    try:
        with borrowed_ring() as ring, ThreadPoolExecutor(4) as pool:
            views = [ring.buffer(number).view for number in range(4)]

            def work(number: int) -> None:
                for at in range(number * BUFFER_NBYTES, rounded, 4 * BUFFER_NBYTES):
                    view = views[number][: min(BUFFER_NBYTES, rounded - at)]
                    if write:
                        posix.write_fully(fd, view, at)
                    else:
                        posix.read_fully(fd, view, at, alignment=ALIGNMENT)

            started = time.perf_counter()
            list(pool.map(work, range(4)))
            if write:
                os.fsync(fd)
            return time.perf_counter() - started
    finally:
        os.close(fd)


def checksum_rates(device: torch.device, nbytes: int = 256 << 20) -> dict[str, float]:
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
        raise SystemExit("the device computes another CRC32 than the host")
    ways = {"on the device": on_device, "on the host, copied there": on_host}
    return {name: nbytes / median(timed(way, device)[1] for _ in range(5)) / 1e9 for name, way in ways.items()}


# --- measuring


def evict(path: Path) -> None:
    with path.open("rb") as file:
        posix.evict(file.fileno(), path.stat().st_size)


def check_equal(found: State, state: State, who: str) -> None:
    if not all(torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state):
        raise SystemExit(f"{who} has brought back other values than were saved")


@contextmanager
def told(name: str, impossible: dict[str, str]) -> Iterator[None]:
    """What a contender cannot do is no reason to stop."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # of any library: it is shown
        impossible[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def measure(
    label: str, state: State, folder: Path, device: torch.device, rounds: int, end: float
) -> tuple[list[Sample], dict[str, str]]:
    """Saves and loads of one state, and who could not do it. After ``end``, of time.monotonic(), no round begins."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    samples: list[Sample] = []
    impossible: dict[str, str] = {}
    all_of_them = contenders()

    def add(operation: str, contender: str, seconds: float) -> None:
        samples.append(Sample(label, nbytes, operation, contender, seconds))

    for number in range(rounds + 1):
        if time.monotonic() > end and number > 1:
            print(f"{label}: the time is up after {number - 1} rounds", file=sys.stderr)
            break
        order = list(range(len(all_of_them)))
        random.Random(number).shuffle(order)
        for index in order:
            one, path = all_of_them[index], folder / str(index)
            if one.name in impossible:
                continue
            print(f"{label}, round {number}, {one.name} ...", file=sys.stderr, flush=True)
            with told(one.name, impossible):
                settle()
                _, seconds = timed(lambda: one.save(state, path), device)  # noqa: B023
                if number:  # the first round pays for what is done once
                    add(SAVE, one.name, seconds)
                evict(path)
                found, seconds = timed(lambda: one.load(path, device, state), device)  # noqa: B023
                check_equal(found, state, one.name)
                del found
                if number:
                    add(LOAD, one.name, seconds)
        settle()
        limit = folder / "limit"
        for operation, write in ((SAVE, True), (LOAD, False)):
            seconds = disk_seconds(limit, nbytes, write=write)
            if number:
                add(operation, DISK, seconds)
        copies = copy_seconds(nbytes, device)
        if number:
            add(SAVE, COPY_TO_HOST, copies[COPY_TO_HOST])
            add(LOAD, COPY_TO_DEVICE, copies[COPY_TO_DEVICE])
    for path in folder.iterdir():
        path.unlink()
    return samples, impossible


def measure_stalls(label: str, state: State, folder: Path, device: torch.device, rounds: int) -> list[Sample]:
    """Asynchronous saves from the second one on, each when the one before is durable, and a copy beside each."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    samples = []
    with fastensor.AsyncWriter(staging_bytes=nbytes + (256 << 20)) as writer:
        for number in range(rounds + 1):
            copy = copy_seconds(nbytes, device)[COPY_TO_HOST]
            synchronize(device)
            started = time.perf_counter()
            handle = writer.save(state, folder / "async")
            stall = time.perf_counter() - started
            handle.result()
            if number:
                samples.append(Sample(label, nbytes, STALL, OURS, stall))
                samples.append(Sample(label, nbytes, STALL, COPY_TO_HOST, copy))
    (folder / "async").unlink()
    return samples


# --- what it amounts to


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise, and whether it holds."""

    promise: str
    measured: float
    holds: bool


def medians(samples: list[Sample]) -> dict[tuple[str, str, str], float]:
    """By state, operation and contender."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.state, sample.operation, sample.contender), []).append(sample.seconds)
    return {key: median(group) for key, group in groups.items()}


def judge(samples: list[Sample]) -> list[Verdict]:
    """The promises, for each state."""
    found = medians(samples)
    verdicts = []
    for state in dict.fromkeys(sample.state for sample in samples):

        def of(operation: str, ours: bool | None = None, *names: str, state: str = state) -> dict[str, float]:
            return {
                name: seconds
                for (of_state, of_operation, name), seconds in found.items()
                if (of_state, of_operation) == (state, operation)
                and (name in names or (ours is not None and name.startswith(OURS) == ours))
            }

        limits = (DISK, COPY_TO_HOST, COPY_TO_DEVICE)
        saves = of(SAVE, True)
        best = min(saves, key=saves.__getitem__)
        share = max(of(SAVE, None, DISK, COPY_TO_HOST).values()) / saves[best]
        what = f"{state}: speed of a save ({best}) / the slower of disk and pinned copy ≥ {ENOUGH_OF_LIMIT}"
        verdicts.append(Verdict(what, round(share, 3), share >= ENOUGH_OF_LIMIT))
        loads = of(LOAD, True)
        best = min(loads, key=loads.__getitem__)
        peers = {name: seconds for name, seconds in of(LOAD, False).items() if name not in limits}
        peer = min(peers, key=peers.__getitem__)
        ratio = loads[best] / peers[peer]
        what = f"{state}: a load ({best}) / the fastest peer ({peer}) ≤ {MOST_OF_PEER}"
        verdicts.append(Verdict(what, round(ratio, 3), ratio <= MOST_OF_PEER))
        stalls = of(STALL, True, COPY_TO_HOST)
        ratio = stalls[OURS] / stalls[COPY_TO_HOST]
        what = f"{state}: stall of an asynchronous save / a pinned copy ≤ {MOST_OF_COPY}"
        verdicts.append(Verdict(what, round(ratio, 3), ratio <= MOST_OF_COPY))
    return verdicts


def table(
    machine: dict[str, str], samples: list[Sample], impossible: dict[str, str], rates: dict[str, float],
    verdicts: list[Verdict],
) -> str:  # fmt: skip
    """Everything as Markdown."""
    lines = ["# A GPU's tensors to the disk and back", "", *(f"- {key}: {value}" for key, value in machine.items())]
    lines += [f"- CRC32s: {', '.join(f'{rate:.1f} GB/s {way}' for way, rate in rates.items())}"]
    found = medians(samples)
    for state, operation in dict.fromkeys((sample.state, sample.operation) for sample in samples):
        nbytes = next(sample.nbytes for sample in samples if sample.state == state)
        lines += ["", f"## {state}, {nbytes / 2**20:.0f} MiB, {operation}", ""]
        lines += ["| way | median seconds | GB/s |", "|---|---:|---:|"]
        rows = {key[2]: seconds for key, seconds in found.items() if key[:2] == (state, operation)}
        for name, seconds in sorted(rows.items(), key=lambda row: row[1]):
            lines.append(f"| {name} | {seconds:.4f} | {nbytes / seconds / 1e9:.2f} |")
    if impossible:
        lines += ["", "## not possible here", "", *(f"- {name}: {reason}" for name, reason in impossible.items())]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {one.promise} | {one.measured:.3f} | {'yes' if one.holds else '**no**'} |" for one in verdicts]
    return "\n".join(lines) + "\n"


def state_of(gib: float, device: torch.device) -> State:
    """Large tensors of random values."""
    count = max(round(gib * 8), 1)
    sizes = [number * round(gib * 2**30) // count // 4 for number in range(count + 1)]
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"layers.{number}.weight": torch.randn(end - begin, generator=generator, device=device)
        for number, (begin, end) in enumerate(pairwise(sizes))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="gpt2_adam", help="a state of many tensors")
    parser.add_argument("--gib", type=float, default=5.0, help="a state of large tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="no round but the first begins after that")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu"))
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    states = {
        options.model: lambda: build_state(options.model, str(device)),
        f"{options.gib} GiB": lambda: state_of(options.gib, device),
    }
    samples: list[Sample] = []
    impossible: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        begin = time.monotonic()
        for number, (label, build) in enumerate(states.items(), start=1):
            state, end = build(), begin + 60 * options.minutes * number / len(states)
            found, not_possible = measure(label, state, Path(folder), device, options.rounds, end)
            samples += found + measure_stalls(label, state, Path(folder), device, options.rounds)
            impossible |= not_possible
            del state
    machine = describe_machine(options.folder, device.type)
    rates, verdicts = checksum_rates(device), judge(samples)
    text = table(machine, samples, impossible, rates, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {
        "machine": machine, "checksums": rates, "impossible": impossible, "verdicts": [asdict(one) for one in verdicts],
        "samples": [asdict(one) for one in samples],
    }  # fmt: skip
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
