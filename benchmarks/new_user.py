"""The first ten saves and the first ten cold loads of a new user: an empty dictionary, ``backend="auto"``.

Each run is a fresh process with a dictionary folder of its own. It saves the same state durably to the same file ten
times, as training does, or loads the file ten times from the disk; nothing is left out, the first use included. The
processes of all ways take turns. Ways are ours by default, ours by each backend's name, and the other tools that write
the same container. Between saves nothing is waited for: what a save leaves to be done is paid for by the next one, and
the total of a run ends when all of it is done. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pictures
import torch
from contenders import CONTENDERS, MAPPED, OURS, OURS_SAFETENSORS, REFERENCE, SAFETENSORS, State, build_state
from measuring import describe_machine, drop_caches

import fastensor
from fastensor.backends.registry import available_names
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.files import posix

USES = 10
NAMED = [name for name in available_names() if name != "torch"]


class Container(NamedTuple):
    """The ways to write and read one kind of file."""

    suffix: str
    ours: str
    """By default."""
    named: dict[str, str]
    """Ours by the names of backends."""
    peers: list[str]

    @property
    def ways(self) -> list[str]:
        return [self.ours, *self.named, *self.peers]


CONTAINERS = (
    Container(".ckpt", OURS, {name: name for name in NAMED}, [REFERENCE, MAPPED]),
    Container(".safetensors", OURS_SAFETENSORS, {f"{name}, safetensors": name for name in NAMED}, [SAFETENSORS]),
)
ONE_TOTAL = 1.10
"""Promised: the total of ours, over that by the best backend's name."""
EACH_USE = 1.3
"""Promised: the same of the medians of each use."""
HEAD = (
    "| model | way | total: median s (minimum–maximum) | 1st use | 2nd | others, median | others, largest | backends |",
    "|---|---|---:|---:|---:|---:|---:|---|",
)


class Run(NamedTuple):
    """Ten uses in one process."""

    model: str
    operation: str
    way: str
    seconds: list[float]
    """The time of each use."""
    total_seconds: float
    """The time of all uses, and of the work that they leave behind."""
    backends: list[str]


def use_often(model: str, operation: str, way: str, path: Path) -> Run:
    """Do one thing ten times, in this process."""
    container = next(one for one in CONTAINERS if way in one.ways)
    peer = next((one for one in CONTENDERS if one.name == way and way in container.peers), None)
    backend = container.named.get(way, "auto")
    backends: list[str] = []

    def save(state: State) -> None:
        if peer is not None:
            peer.save(state, path)
        else:
            backends.append(fastensor.save(state, path, backend=backend).backend)

    def load() -> State:
        if peer is not None:
            return peer.load(path, "cpu")
        loaded, report = fastensor.load_with_report(path, backend=backend)
        backends.append(report.backend)
        found: State = loaded
        return found

    state = build_state(model, "cpu")
    seconds = []
    begun = time.perf_counter()
    for _ in range(USES):
        if operation == "cold load":
            evict(path)
        started = time.perf_counter()
        if operation == "save":
            save(state)
        else:
            found = load()
        seconds.append(time.perf_counter() - started)
        if operation == "cold load" and set(found) != set(state):
            raise SystemExit(f"{way} has loaded something else than was saved")
    wait_for_space()
    total = time.perf_counter() - begun if operation == "save" else sum(seconds)
    return Run(model, operation, way, seconds, total, backends)


def evict(path: Path) -> None:
    """Make the next load of a file cold: none of its pages, and no inode, is in memory afterwards.

    The pages of programs stay. A process that has just begun has read its libraries, and a load that reads them again,
    because they were dropped behind its back, measures how much code it needs.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        os.fsync(file.fileno())
        posix.evict(file.fileno(), nbytes)
        if resident := posix.resident_fraction(file.fileno(), nbytes):
            raise SystemExit(f"{path}: {resident:.0%} of it stays in the page cache")
    drop_caches("inodes")


def in_fresh_process(model: str, operation: str, way: str, path: Path) -> Run:
    with tempfile.TemporaryDirectory() as dictionaries:
        process = subprocess.run(
            [sys.executable, __file__, "--one", model, operation, way, str(path)],
            env={**os.environ, "FASTENSOR_DICTIONARIES": dictionaries},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if process.returncode:
        raise SystemExit(f"{way}, {operation} of {model} failed:\n{process.stderr}")
    return Run(*json.loads(process.stdout.splitlines()[-1]))


def measure(models: Sequence[str], runs: int, folder: Path, say: Callable[[str], None]) -> list[Run]:
    found = []
    ways = [way for container in CONTAINERS for way in container.ways]
    for model in models:
        for number in range(runs):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                suffix = next(one.suffix for one in CONTAINERS if way in one.ways)
                path = folder / f"{ways.index(way)}{suffix}"
                for operation in ("save", "cold load"):
                    say(f"{model}, run {number + 1} of {runs}, {way}, {operation}")
                    found.append(in_fresh_process(model, operation, way, path))
        for path in folder.iterdir():
            path.unlink()
    return found


def summarize(found: list[Run]) -> tuple[list[str], list[dict[str, Any]]]:
    """Tables, and what was promised."""
    lines: list[str] = []
    verdicts: list[dict[str, Any]] = []
    for operation in ("save", "cold load"):
        lines += ["", f"## first {USES} uses: {operation}", "", *HEAD]
        for model in dict.fromkeys(run.model for run in found):
            own = [run for run in found if (run.model, run.operation) == (model, operation)]
            ways = list(dict.fromkeys(run.way for run in own))
            totals = {way: statistics.median(run.total_seconds for run in own if run.way == way) for way in ways}
            each = {way: use_medians([run for run in own if run.way == way]) for way in ways}
            for way in ways:
                mine = [run for run in own if run.way == way]
                spread = [run.total_seconds for run in mine]
                names = ", ".join(sorted({name for run in mine for name in run.backends}))
                later = each[way][2:]
                lines.append(
                    f"| {model} | {way} | {totals[way]:.3f} ({min(spread):.3f}–{max(spread):.3f}) | {each[way][0]:.3f} "
                    f"| {each[way][1]:.3f} | {statistics.median(later):.3f} | {max(later):.3f} | {names} |"
                )
            for container in CONTAINERS:
                for what, measured, bound in compare(container, totals, each):
                    verdicts.append(
                        {"model": model, "promise": f"{operation}, {container.suffix}: {what} ≤ {bound}",
                         "measured": round(measured, 3), "holds": measured <= bound}
                    )  # fmt: skip
    lines += ["", "## promises", "", "| model | promise | measured | holds |", "|---|---|---:|---|"]
    lines += [
        f"| {one['model']} | {one['promise']} | {one['measured']:.2f} | {'yes' if one['holds'] else '**no**'} |"
        for one in verdicts
    ]
    return lines, verdicts


def compare(
    container: Container, totals: dict[str, float], each: dict[str, list[float]]
) -> Iterator[tuple[str, float, float]]:
    """What was promised of one container, what was measured, and the bound."""
    ours, named, peer = (
        min(ways, key=totals.__getitem__) for ways in ([container.ours], container.named, container.peers)
    )
    yield f"total / by the best name ({named})", totals[ours] / totals[named], ONE_TOTAL
    yield f"total / the best other tool ({peer})", totals[ours] / totals[peer], 1.0
    worst = max(mine / theirs for mine, theirs in zip(each[ours], each[named], strict=True))
    yield f"largest ratio of one use / by the best name ({named})", worst, EACH_USE


def use_medians(runs: list[Run]) -> list[float]:
    """The median time of the first use, of the second, and so on."""
    return [statistics.median(seconds) for seconds in zip(*(run.seconds for run in runs), strict=True)]


def plot(found: Sequence[Run], path: Path) -> None:
    """Totals of saves and loads, a panel for each operation and model. Backends that are named are left out."""
    models = list(dict.fromkeys(run.model for run in found))
    ways = [way for container in CONTAINERS for way in (container.ours, *container.peers)]
    figure, axes = pictures.panels(len(models), 2, height=1.9)
    for axis, (model, operation) in zip(axes, product(models, ("save", "cold load")), strict=True):
        totals = {
            way: sorted(
                run.total_seconds for run in found if (run.model, run.operation, run.way) == (model, operation, way)
            )
            for way in ways
        }
        spreads = {way: [pictures.Spread(statistics.median(all_), all_[0], all_[-1])] for way, all_ in totals.items()}
        pictures.bars(axis, [""], spreads, upright=False)
        what = f"{USES} durable saves" if operation == "save" else f"{USES} cold loads"
        axis.set(title=f"{what}: {model.replace('_', ' ')}", xlabel="seconds: median, least and most")
    pictures.legend(figure, axes)
    pictures.write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2_adam", "BERT_base_chinese", "MobileNetV3_Small"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "new_user")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "OPERATION", "WAY", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, operation, way, path = options.one
        torch.zeros(1)
        print(json.dumps(use_often(model, operation, way, Path(path))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="fastensor-bench-") as name:
        machine = describe_machine(Path(name), "cpu")
        found = measure(options.models, options.runs, Path(name), lambda text: print(text, file=sys.stderr))
    lines, verdicts = summarize(found)
    head = ['# As a new user has it: empty dictionary, backend="auto", first use included', ""]
    head += [f"- {what}: {text}" for what, text in machine.items()]
    text = "\n".join([*head, *lines, ""])
    options.output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "verdicts": verdicts, "runs": [run._asdict() for run in found]}
    options.output.with_suffix(".json").write_text(json.dumps(document) + "\n")
    plot(found, options.output.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
