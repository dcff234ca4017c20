"""The benchmarks of a new user's first uses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """Import a benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def benchmark(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("new_user")


@pytest.mark.parametrize("operation", ["durable save", "cold load", "warm load", "inspect"])
@pytest.mark.parametrize("way", ["fastensor", "fastensor, safetensors"])
def test_one_use(tmp_path: Path, load: Callable[[str], ModuleType], operation: str, way: str) -> None:
    first_use = load("first_use")
    first_use.use_once("tiny", "durable save", way, tmp_path / "x")
    assert 0 < first_use.use_once("tiny", operation, way, tmp_path / "x") < 60


@pytest.mark.parametrize("way", ["fastensor, safetensors", "safetensors"])
def test_loads_with_imports(tmp_path: Path, load: Callable[[str], ModuleType], way: str) -> None:
    first_use = load("first_use")
    first_use.use_once("tiny", "durable save", way, tmp_path / "x")
    row = first_use.Row("tiny", "import and warm load", way, "", 1.0)
    assert 0 < first_use.in_fresh_process(row, way, tmp_path / "x") < 60


def test_lines_of_one_use(load: Callable[[str], ModuleType]) -> None:
    first_use = load("first_use")
    saved, *_ = first_use.ROWS
    *_, inspected = (row for row in first_use.ROWS if row.operation == "inspect")
    line, measured = first_use.line_of(saved, {"fastensor": [1.0, 3.0, 2.0], "torch": [1.0, 1.0, 1.0]})
    assert (measured, line.endswith("| 2.00 | 1 | **no** |")) == (2.0, True)
    line, measured = first_use.line_of(inspected, {inspected.ours: [0.5]})
    assert (measured, line.endswith("| – | – | 0.50 s | 1 | yes |")) == (0.5, True)


def test_ten_uses_in_a_process(tmp_path: Path) -> None:
    for operation in ("save", "cold load"):
        arguments = ("--one", "tiny", operation, "fastensor", tmp_path / "x")
        variables = {"FASTENSOR_DICTIONARIES": str(tmp_path / operation), "FASTENSOR_EXPLORE": "1"}
        model, what, way, seconds, total, backends = json.loads(
            run(BENCHMARKS / "new_user.py", *arguments, **variables).stdout
        )
        assert (model, what, way) == ("tiny", operation, "fastensor")
        assert len(seconds) == 10
        assert total >= sum(seconds) * 0.999
        assert len(backends) == 10
        assert backends[0] == "numpy", "by the rule"


def runs_of(benchmark: ModuleType) -> list[Any]:
    return [
        benchmark.Run("x", operation, way, [seconds] * 9 + [2 * seconds], 11 * seconds, ["direct"])
        for operation in ("save", "cold load")
        for container in benchmark.CONTAINERS
        for way, seconds in zip(container.ways, [1.2, 1.0, 3.0, *[1.1] * len(container.peers)], strict=True)
    ]


def test_a_picture_is_drawn(tmp_path: Path, benchmark: ModuleType) -> None:
    benchmark.plot(runs_of(benchmark), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_promises(benchmark: ModuleType) -> None:
    found = runs_of(benchmark)
    lines, verdicts = benchmark.summarize(found)
    assert [(one["measured"], one["holds"]) for one in verdicts[3:6]] == [(1.2, False), (1.091, False), (1.2, True)]
    assert [one["promise"].split(":")[0] for one in verdicts[::3]] == [
        f"{operation}, {container}" for operation in ("save", "cold load") for container in (".ckpt", ".safetensors")
    ]
    assert "| x | fastensor | 13.200 (13.200–13.200) | 1.200 | 1.200 | 1.200 | 2.400 | direct |" in lines
