"""The benchmark of a new user's first uses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path))
    spec = importlib.util.spec_from_file_location("new_user", BENCHMARKS / "new_user.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("operation", ["save", "cold load"])
def test_ten_uses_in_a_process(tmp_path: Path, operation: str) -> None:
    def run(what: str) -> list[object]:
        process = subprocess.run(
            [sys.executable, BENCHMARKS / "new_user.py", "--one", "tiny", what, "fastensor", tmp_path / "x"],
            env={**os.environ, "FASTENSOR_DICTIONARIES": str(tmp_path / "d"), "FASTENSOR_EXPLORE": "1"},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found: list[object] = json.loads(process.stdout)
        return found

    run("save")
    model, what, way, seconds, total, backends = run(operation)
    assert (model, what, way) == ("tiny", operation, "fastensor")
    assert isinstance(seconds, list)
    assert isinstance(total, float)
    assert len(seconds) == 10
    assert total >= sum(seconds) * 0.999
    assert isinstance(backends, list)
    assert len(backends) == 10
    assert backends[0] == "numpy", "by the rule"


def test_promises(benchmark: ModuleType) -> None:
    ways = [benchmark.OURS, *benchmark.NAMED, *benchmark.PEERS]
    found = [
        benchmark.Run("x", operation, way, [seconds] * 9 + [2 * seconds], 11 * seconds, ["direct"])
        for operation in ("save", "cold load")
        for way, seconds in zip(ways, [1.2, 1.0, 3.0, *[1.1] * len(benchmark.PEERS)], strict=True)
    ]
    lines, verdicts = benchmark.summarize(found)
    assert [(one["measured"], one["holds"]) for one in verdicts[:3]] == [(1.2, False), (1.091, False), (1.2, True)]
    assert "| x | fastensor | 13.200 (13.200–13.200) | 1.200 | 1.200 | 1.200 | 2.400 | direct |" in lines
