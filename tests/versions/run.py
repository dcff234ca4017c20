"""The tests with the lowest and with the newest versions that pyproject.toml allows, for each Python that is here.

    python tests/versions/run.py FOLDER             # all tests but the long ones, six environments
    python tests/versions/run.py FOLDER --quick     # a part of them, with the lowest versions on the lowest Python
    python tests/versions/run.py FOLDER --only newest-3.13 --tests tests/stitch

Each pair of a Python and an end of the range gets an environment of its own in FOLDER, made by uv, whose cache the
environments share by hard links. Only wheels are installed: so the lowest version is the lowest one that has a wheel
for that Python. A table in Markdown comes last. FOLDER keeps the versions (END-PYTHON.txt) and what the tests have
said (END-PYTHON.log).

uv takes torch from PyPI, which has builds for CUDA, of several gigabytes. ``UV_TORCH_BACKEND=cpu`` in the environment
takes the small builds, where pytorch.org can be reached.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick import QUICK

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
SHOWN = ("torch", "numpy", "lightning", "accelerate", "transformers")
"""Packages whose versions the table shows."""
SUITE = ("tests", "core", "fastensor_lightning", "fastensor_accelerate")
SCRIPTS = (
    "tests/project/test_docs.py::test_the_demo_kills_and_resumes",
    "tests/project/test_docs.py::test_the_example_of_accelerate_is_killed_and_resumes_as_without_the_flag",
)
"""Run in addition to :data:`quick.QUICK`: the scripts of a user of Lightning and of one of Accelerate."""
UV = Path(sys.executable).with_name("uv")


@dataclass(frozen=True)
class Pair:
    """An end of the range of versions, and a Python."""

    end: str
    python: str

    def __str__(self) -> str:
        return f"{self.end}-{self.python}"


PAIRS = {str(pair): pair for python in PYTHONS for end in RESOLUTIONS for pair in [Pair(end, python)]}


@dataclass(frozen=True)
class Outcome:
    """What the tests of a pair have come to."""

    versions: dict[str, str]
    counts: dict[str, int]
    seconds: float
    error: str = ""
    """Why there is no complete outcome; empty if all tests have run, or some have failed."""

    @property
    def is_good(self) -> bool:
        """Whether tests have run, and none has failed."""
        return not self.error and self.counts["passed"] > 0 and not self.counts["failed"]


def main() -> int:
    options = _options()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[Pair, Outcome] = {}
    for pair in options.pairs:
        print(f"== {pair}", flush=True)
        outcomes[pair] = _run(pair, folder, options.tests)
        print(_row(pair, outcomes[pair]), flush=True)
    print(f"\n{table(outcomes)}")
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the environments are made and kept")
    parser.add_argument("--quick", action="store_true", help="a part of the tests, with the lowest versions")
    parser.add_argument("--only", nargs="+", choices=PAIRS, metavar="END-PYTHON", help="such as newest-3.13")
    parser.add_argument("--tests", nargs="+", help="arguments for pytest instead of the suite")
    options = parser.parse_args()
    options.pairs = [PAIRS[name] for name in options.only or ([f"lowest-{PYTHONS[0]}"] if options.quick else PAIRS)]
    options.tests = options.tests or ((*QUICK, *SCRIPTS) if options.quick else SUITE)
    return options


def table(outcomes: dict[Pair, Outcome]) -> str:
    """The outcomes in Markdown."""
    head = ("Python", "versions", *SHOWN, "passed", "skipped", "failed", "minutes")
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *[_row(*one) for one in outcomes.items()]]
    )  # fmt: skip


def _row(pair: Pair, outcome: Outcome) -> str:
    versions = [outcome.versions.get(name, "") for name in SHOWN]
    kinds = ("passed", "skipped", "failed")
    ran = [outcome.error, "", ""] if outcome.error else [f"{outcome.counts[kind]:,}" for kind in kinds]
    cells = [pair.python, pair.end, *versions, *ran, f"{outcome.seconds / 60:.1f}"]
    return f"| {' | '.join(cells)} |"


def _run(pair: Pair, folder: Path, tests: tuple[str, ...]) -> Outcome:
    """Make the environment of a pair, or bring it up to date, and run the tests in it."""
    interpreter = _found(pair.python)
    if interpreter is None:
        return Outcome({}, {}, 0, f"no Python {pair.python} here")
    log, pins = folder / f"{pair}.log", folder / f"{pair}.txt"
    with open(log, "wb") as output:
        try:
            python = _install(pair, folder / str(pair), interpreter, pins, output.fileno())
        except subprocess.CalledProcessError as error:
            return Outcome(_versions(pins), {}, 0, f"cannot be installed, see {log.name}: {error.cmd[1:3]}")
        return _test(python, tests, folder / f"{pair}.xml", _versions(pins), output.fileno())


def _found(python: str) -> str | None:
    """A Python of a version on this machine. Those of pyenv are looked for where they are: its commands answer only for
    versions that the user has chosen."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    folders = os.pathsep.join([*map(str, sorted(pyenv.glob("versions/*/bin"))), os.environ["PATH"]])
    found = subprocess.run(
        [UV, "python", "find", "--no-python-downloads", "--no-project", "--system", python],
        env={**os.environ, "PATH": folders}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() if found.returncode == 0 else None


def _install(pair: Pair, environment: Path, interpreter: str, pins: Path, log: int) -> Path:
    """An environment that has the versions of a pair, and Fastensor as it is in this checkout."""
    python = environment / "bin" / "python"
    pins.unlink(missing_ok=True)  # uv would prefer the versions in it
    resolve = f"--no-build --extra dev --python-version {pair.python} --resolution {RESOLUTIONS[pair.end]}".split()
    commands: list[list[str | Path]] = [
        [UV, "pip", "compile", "--quiet", *resolve, "--output-file", pins, "pyproject.toml"],
        [UV, "venv", "--quiet", "--seed", "--allow-existing", "--python", interpreter, environment],
        [UV, "pip", "install", "--quiet", "--no-build", "--python", python, "--requirement", pins],
        [UV, "pip", "install", "--quiet", "--no-deps", "--python", python, "--editable", "."],
    ]
    for command in commands:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    return python


def _versions(pins: Path) -> dict[str, str]:
    """The versions that uv has chosen."""
    text = pins.read_text() if pins.exists() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def _test(python: Path, tests: tuple[str, ...], report: Path, versions: dict[str, str], log: int) -> Outcome:
    report.unlink(missing_ok=True)
    command: list[str | Path] = [python, "-m", "pytest", "-n", "3", "--dist", "worksteal", f"--junitxml={report}"]
    command += ["-m", "not gpu and not torture", "--ignore", "tests/gds", "-p", "no:cacheprovider", *tests]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    seconds = time.monotonic() - started
    if done.returncode not in (0, 1) or not report.exists():
        return Outcome(versions, {}, seconds, f"pytest ended with {done.returncode}")
    try:
        return Outcome(versions, _counts(report), seconds)
    except ElementTree.ParseError:  # such as on a full disk
        return Outcome(versions, {}, seconds, f"{report.name} is cut off")


def _counts(report: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {
        kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in ("tests", "errors", "failures", "skipped")
    }
    failed = total["errors"] + total["failures"]
    return {"passed": total["tests"] - total["skipped"] - failed, "skipped": total["skipped"], "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
