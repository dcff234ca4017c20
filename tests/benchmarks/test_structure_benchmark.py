"""The script that counts what there is to know."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "structure.py"


def _lines_of(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_a_walk_names_functions_of_all_threads() -> None:
    lines = _lines_of("--walk", "save_async")
    functions = [line.split()[1] for line in lines]
    assert "AsyncWriter.save" in functions
    assert "Save.run" in functions  # in the writer's thread
    assert len(lines) == len(set(lines))


def test_what_a_first_call_imports_begins_with_the_package() -> None:
    modules = _lines_of("--imported", "load .ckpt")
    assert modules[0] == "fastensor"
    assert "fastensor.checkpoint.reading.load" in modules
