"""Coverage-guided fuzzing of our parsers and entry points; see ``fuzz.py``."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hostile.targets import FOUND, SEEDS, TARGETS

pytestmark = pytest.mark.hostile

with_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris, which has wheels for x86-64 only, is not installed"
)
HARNESS = Path(__file__).parents[2] / "hostile" / "fuzz.py"
LIMITS = ("-seed=1", "-timeout=10", "-rss_limit_mb=0", "-print_final_stats=1")
"""The fuzzer would take the memory that pytest has had, before it started the process, for its own."""
DATA_LIMIT_NBYTES = 4 << 30


def fuzz(target: str, folder: Path, *options: str) -> tuple[int, str]:
    """Run a target; returns how many inputs it has tried, and what it found."""
    command = [sys.executable, str(HARNESS), target, *LIMITS, *options, str(folder)]
    done = subprocess.run(
        ["prlimit", f"--data={DATA_LIMIT_NBYTES}", *command], capture_output=True, text=True, timeout=300, check=False
    )
    units = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    inputs = {path.name: path.read_bytes() for path in folder.glob("*-*")}
    finding = f"{done.stdout[-3000:]}{done.stderr[-3000:]}{inputs}" if done.returncode else ""
    assert units is not None, finding
    return int(units[1]), finding


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_what_was_found_once(target: str, tally: Counter[str]) -> None:
    for data in [*SEEDS[target](), *FOUND.get(target, [])]:
        TARGETS[target](data)
        tally["fuzzer seeds"] += 1


@with_atheris
@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_a_number_of_inputs(count: int, tmp_path: Path, tally: Counter[str]) -> None:
    runs, finding = fuzz("parsers", tmp_path, f"-runs={count}")
    assert not finding
    assert runs >= count
    tally["fuzzer runs"] += runs


@with_atheris
@pytest.mark.torture
@pytest.mark.parametrize(
    ("target", "seconds"),
    [("directory", 15), ("header", 15), ("structure", 15), ("container", 3), ("entry_points", 20), ("inspection", 10)],
)
def test_for_a_while(target: str, seconds: int, tmp_path: Path, tally: Counter[str]) -> None:
    runs, finding = fuzz(target, tmp_path, f"-max_total_time={seconds}")
    tally["fuzzer runs"] += runs
    assert not finding
    assert runs > 0
