"""What processes learn reaches the disk, however they end, and holds up nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastensor.select.context import Context
from fastensor.select.files import file_for, read

NBYTES = 1 << 20
WRITE = Context("write")


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program that learns about files in a folder, where its dictionaries are, too; returns what it prints."""
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "FASTENSOR_DICTIONARIES": str(folder), "FASTENSOR_EXPLORE": "1"}
    process = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert process.stderr == ""
    return process.stdout


def learned(folder: Path) -> dict[str, int]:
    """How often each backend was measured."""
    timings = read(file_for(folder, folder).path).dictionary.of(WRITE, NBYTES).timings
    return {name: timing.count for name, timing in timings.items()}


LEARN = """
import multiprocessing, sys
from fastensor.select import current
from fastensor.select.context import Context

def learn(name):
    current.current_selector(".").record(1 << 20, Context("write"), name, 1.0)
"""

WITH_CHILDREN = f"""{LEARN}
learn(__name__)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=learn, args=("child",))
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing(tmp_path: Path, method: str) -> None:
    run(tmp_path, WITH_CHILDREN, method)
    found = learned(tmp_path)
    imported = found.pop("__mp_main__", None)
    assert found == {"__main__": 1, "child": 1}
    assert imported == {"fork": None, "spawn": 1}.get(method, imported)  # the server ends later
