"""All that is worth doing on a GPU, in one table, whatever of it there was time for.

Run by ``make gpu``. Each part is a process of its own, which writes its rows as they come, and is ended when its time
is up: then what it was doing is shown as cut off. What says most comes first, and each part leaves the later ones the
time that they need at least. The table is written after each part, and shown at the end, also if this process is told
to end.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_results import Row, Rows

SCRIPTS = Path(__file__).parent
COMMAND = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
GRACE_SECONDS = 5.0
"""What a part has between being told to end and being killed."""
NOTHING_NEW = 0.85
"""The share of its time after which a part begins nothing new, so that it may end by itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """A program of this folder, and the time that it gets."""

    title: str
    script: str
    least_seconds: float
    """What earlier parts leave to it."""
    most_seconds: float
    tiny: tuple[str, ...] = ("--tiny",)
    """Arguments with which the program is tried where there is no GPU."""

    def file(self, output: Path) -> Path:
        """Where its rows are."""
        return output.with_name(f"{output.name}-{self.script.removeprefix('gpu_')}.json")

    def command(self, options: argparse.Namespace, folder: str, seconds: float) -> list[str]:
        where = ["--folder", folder, "--output", str(self.file(options.output))]
        size = ["--device", "cpu", *self.tiny] if options.tiny else []
        return [sys.executable, str(SCRIPTS / f"{self.script}.py"), "--seconds", f"{seconds:.0f}", *where, *size]


PARTS = (
    Part("tests", "gpu_tests", 40, 110, tiny=()),
    Part("users' programs", "gpu_use", 50, 110),
    Part("saves and loads", "gpu_saves", 60, 100, tiny=("--model", "tiny", "--gib", "0.002", "--rounds", "0")),
    Part("activation offload", "gpu_offload", 60, 150),
)


def seconds_for(parts: Sequence[Part], left: float) -> float:
    """How long the first of some parts may take.

    >>> parts = [Part("a", "a", 10, 40), Part("b", "b", 20, 50), Part("c", "c", 30, 60)]
    >>> [seconds_for(parts, left) for left in (200, 80, 55, 30)]
    [40, 30, 5, 0]
    """
    return max(min(parts[0].most_seconds, left - sum(part.least_seconds for part in parts[1:])), 0)


def run(command: Sequence[str], seconds: float) -> int | None:
    """The exit status of a program; None if it was ended because its time was up, and its processes with it."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, and kill it and what it has started if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def outcome(part: Part, found: Rows, status: int | None, seconds: float) -> list[Row]:
    """The rows of a part that has ended, or was ended.

    >>> part, found = Part("saves", "gpu_saves", 1, 9), Rows(Path("x"), [Row("a", "1 s")], doing="b")
    >>> outcome(part, found, 0, 9.0)
    [Row(what='a', found='1 s', holds=None)]
    >>> outcome(part, found, None, 9.0)[1]
    Row(what='saves', found='cut off after 9 s, in b', holds=False)
    >>> outcome(part, found, 1, 9.0)[1]
    Row(what='saves', found='ended after 9 s with status 1, in b', holds=False)
    """
    where = f", in {found.doing}" if found.doing else ""
    if status is None:
        return [*found.rows, Row(part.title, f"cut off after {seconds:.0f} s{where}", holds=False)]
    if status and (found.doing or not any(row.holds is False for row in found.rows)):
        return [*found.rows, Row(part.title, f"ended after {seconds:.0f} s with status {status}{where}", holds=False)]
    return found.rows


@dataclass(slots=True)
class Report:
    """What all parts have found so far."""

    output: Path
    rows: dict[str, list[Row]]
    seconds: dict[str, float]
    machine: dict[str, str]

    def write(self) -> None:
        self.output.with_name(f"{self.output.name}.md").write_text(self.table())

    def table(self) -> str:
        """All of it, as Markdown."""
        lines = ["# On a GPU", "", *(f"- {key}: {value}" for key, value in self.machine.items()), ""]
        lines += ["| part | seconds | what | found | as promised |", "|---|---:|---|---|---|"]
        for title, rows in self.rows.items():
            for number, row in enumerate(rows):
                seconds = f"{self.seconds[title]:.0f}" if title in self.seconds and not number else ""
                holds = {True: "yes", False: "**no**", None: ""}[row.holds]
                cells = [title if not number else "", seconds, row.what, row.found, holds]
                lines.append(f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |")
        return "\n".join(lines) + "\n"


def measure(options: argparse.Namespace, folder: str, report: Report, until: float) -> bool:
    """Run all parts, whose files go to a folder. Whether each of them has ended well."""
    well = True
    parts = [replace(part, most_seconds=math.inf) for part in PARTS] if options.tiny else PARTS
    for number, part in enumerate(parts):
        seconds = seconds_for(parts[number:], until - time.monotonic())
        if seconds <= 0:
            well = False
            continue
        report.rows[part.title] = [Row(part.title, "cut off: begun", holds=False)]
        report.write()
        print(f"=== {part.title}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
        part.file(options.output).unlink(missing_ok=True)
        begun, status = time.monotonic(), None
        try:
            status = run(part.command(options, folder, NOTHING_NEW * seconds), seconds)
        finally:
            found = Rows.read(part.file(options.output))
            report.seconds[part.title] = time.monotonic() - begun
            report.rows[part.title] = outcome(part, found, status, report.seconds[part.title])
            if found.machine:
                report.machine = {**found.machine, "command": COMMAND}
            report.write()
        well &= status == 0
    return well


def leave(number: int, _: object) -> None:
    """Let the table be shown, whoever says again meanwhile that this is to end."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=390.0, help="for all parts together")
    parser.add_argument("--tiny", action="store_true", help="try all parts on a CPU, however long one takes")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/gpu"), help="how the results' names begin"
    )
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    not_begun = {part.title: [Row(part.title, "cut off: not begun", holds=False)] for part in PARTS}
    report = Report(options.output, not_begun, {}, {})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
            return int(not measure(options, folder, report, until))
    finally:
        report.write()
        print(report.table(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
