"""One save or load in a fresh process, as a new user has it, where other tools are hard to beat.

Rows: a state of 50,000 small tensors (a mixture of experts) saved, loaded and inspected; verified loads of files in the
page cache beside mapping and cloning; and loads of 10 MiB by a program that has imported nothing but torch. Each
measurement is the first use in a process of its own: an empty dictionary, ``backend="auto"``. Only that of such a
program counts what is imported before. Ours and the other tool take turns. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from contenders import CONTENDERS, MAPPED, OURS, OURS_SAFETENSORS, REFERENCE, SAFETENSORS, State, build_state, filled
from measuring import describe_machine
from new_user import evict

import fastensor

SMALL = "50,000 tensors"
EXPERTS = 12_500
"""Each with four tensors."""


class Row(NamedTuple):
    """What is measured, and what it is compared with."""

    state: str
    operation: str
    ours: str
    theirs: str
    bound: float
    """The most that our time may be: in times the other tool's time, or in seconds if there is no other tool."""

    @property
    def ways(self) -> list[str]:
        return [way for way in (self.ours, self.theirs) if way]


ROWS = (
    Row(SMALL, "durable save", OURS, REFERENCE, 1.0),
    Row(SMALL, "durable save", OURS_SAFETENSORS, SAFETENSORS, 1.0),
    Row(SMALL, "cold load", OURS, REFERENCE, 1.0),
    Row(SMALL, "warm load", OURS, REFERENCE, 1.0),
    Row(SMALL, "cold load", OURS_SAFETENSORS, SAFETENSORS, 1.1),
    Row(SMALL, "warm load", OURS_SAFETENSORS, SAFETENSORS, 1.1),
    Row(SMALL, "inspect", OURS, "", 1.0),
    Row(SMALL, "inspect", OURS_SAFETENSORS, "", 1.0),
    Row("MobileNetV3_Small", "warm load", OURS, MAPPED, 1.2),
    Row("MobileNetV3_Small", "import and cold load", OURS_SAFETENSORS, SAFETENSORS, 1.2),
    Row("MobileNetV3_Small", "import and warm load", OURS_SAFETENSORS, SAFETENSORS, 2.0),
    Row("BERT_base_chinese", "warm load", OURS, MAPPED, 1.0),
    Row("gpt2_adam", "warm load", OURS, MAPPED, 1.0),
)
PROGRAM = """import sys, time, torch
torch.zeros(1)
started = time.perf_counter()
%s
print(time.perf_counter() - started)"""
STATEMENTS = {
    OURS_SAFETENSORS: "import fastensor; found = fastensor.load(sys.argv[1])",
    SAFETENSORS: "from safetensors.torch import load_file\n"
    "found = {name: one.clone() for name, one in load_file(sys.argv[1]).items()}",
}
"""What a program says to import and load, for the rows that count imports."""


def state_of(name: str) -> State:
    return experts(EXPERTS) if name == SMALL else build_state(name, "cpu")


def experts(count: int) -> State:
    """A mixture-of-experts state: four small tensors for each expert, about 1,100 bytes each."""
    shapes = {"up.weight": [16, 32], "up.bias": [32], "down.weight": [32, 16], "down.bias": [16]}
    return filled(
        [(f"layers.{n // 64}.experts.{n % 64}.{key}", s, "float32") for n in range(count) for key, s in shapes.items()],
        "cpu",
    )


def use_once(state: str, operation: str, way: str, path: Path) -> float:
    """Seconds of one use in this process, which has done nothing else but make the file or state that it needs."""
    contender = next(one for one in CONTENDERS if one.name == way)
    given = state_of(state) if operation == "durable save" else {}
    uses: dict[str, Callable[[], object]] = {
        "durable save": lambda: contender.save(given, path),
        "cold load": lambda: contender.load(path, "cpu"),
        "warm load": lambda: contender.load(path, "cpu"),
        "inspect": lambda: fastensor.inspect(path),
    }
    prepare(operation, path)
    use = uses[operation]
    started = time.perf_counter()
    found = use()
    seconds = time.perf_counter() - started
    del found
    return seconds


def prepare(operation: str, path: Path) -> None:
    """Have a file out of the page cache, or in it, as a load wants it."""
    if operation.endswith(("cold load", "warm load")):
        evict(path)
    if operation.endswith("warm load"):
        path.read_bytes()


def command_of(row: Row, way: str, path: Path) -> list[str]:
    """The program of one measurement, which prints the seconds."""
    if row.operation.startswith("import"):
        prepare(row.operation, path)
        return ["-c", PROGRAM % STATEMENTS[way], str(path)]
    return [__file__, "--one", row.state, row.operation, way, str(path)]


def in_fresh_process(row: Row, way: str, path: Path) -> float:
    with tempfile.TemporaryDirectory() as dictionaries:
        process = subprocess.run(
            [sys.executable, *command_of(row, way, path)],
            env={**os.environ, "FASTENSOR_DICTIONARIES": dictionaries, "PYTHONDONTWRITEBYTECODE": ""},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if process.returncode:
        raise SystemExit(f"{way}, {row.operation} of {row.state} failed:\n{process.stderr}")
    return float(process.stdout.splitlines()[-1])


def measure(rows: Sequence[Row], rounds: int, folder: Path) -> Iterator[tuple[Row, dict[str, list[float]]]]:
    """The seconds of each way of each row."""
    for state, group in itertools.groupby(rows, lambda row: row.state):
        paths: dict[str, Path] = {}
        for row in group:
            for way in row.ways:
                if way not in paths:
                    paths[way] = folder / f"{len(paths)}.ckpt"
                    next(one for one in CONTENDERS if one.name == way).save(state_of(state), paths[way])
            if row.operation.startswith("import"):
                for way in row.ways:  # writes the byte code, which installed packages have
                    in_fresh_process(row, way, paths[way])
            seconds: dict[str, list[float]] = {way: [] for way in row.ways}
            for number in range(rounds):
                for way in row.ways[:: -1 if number % 2 else 1]:
                    seconds[way].append(in_fresh_process(row, way, paths[way]))
            yield row, seconds
        for path in paths.values():
            path.unlink()


def line_of(row: Row, seconds: dict[str, list[float]]) -> tuple[str, float]:
    """A line of the table, and what is compared with the bound."""
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    measured = medians[row.ours] / medians[row.theirs] if row.theirs else medians[row.ours]
    spreads = {way: f"{medians[way]:.4f} ({min(found):.4f}–{max(found):.4f})" for way, found in seconds.items()}
    cells = [
        row.state, row.operation, row.ours, spreads[row.ours], row.theirs or "–", spreads.get(row.theirs, "–"),
        f"{measured:.2f}" + ("" if row.theirs else " s"), f"{row.bound:g}",
        "yes" if measured <= row.bound else "**no**",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |", measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="states or operations to measure, such as 'cold load'")
    parser.add_argument("--folder", type=Path, help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "first_use")
    parser.add_argument("--one", nargs=4, metavar=("STATE", "OPERATION", "WAY", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        state, operation, way, path = options.one
        torch.zeros(1)
        print(use_once(state, operation, way, Path(path)))
        return
    rows = [row for row in ROWS if not options.only or {row.state, row.operation} & set(options.only)]
    lines = [
        "| state | operation | ours | median s (minimum–maximum) | other tool | median s (minimum–maximum) "
        "| ratio | bound | holds |",
        "|---|---|---|---:|---|---:|---:|---:|---|",
    ]
    runs = []
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="fastensor-bench-") as name:
        machine = describe_machine(Path(name), "cpu") | {"threads of torch": str(torch.get_num_threads())}
        for row, seconds in measure(rows, options.rounds, Path(name)):
            line, measured = line_of(row, seconds)
            print(line, file=sys.stderr)
            lines.append(line)
            runs.append({**row._asdict(), "seconds": seconds, "measured": measured, "holds": measured <= row.bound})
    head = ["# The first use in a fresh process", ""] + [f"- {what}: {text}" for what, text in machine.items()] + [""]
    text = "\n".join([*head, *lines, ""])
    options.output.with_suffix(".md").write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps({"machine": machine, "runs": runs}) + "\n")
    print(text)


if __name__ == "__main__":
    main()
