"""What ``benchmarks/offload_trainers.py`` makes of its measurements."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    module = None
    for name in ("offload", "offload_trainers"):  # the folder of other tests is a package "offload", too
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


def found(benchmark: Any, **of_default: Any) -> dict[str, Any]:
    """Two rounds, in which checkpointing takes twice the time of everything else."""
    run = benchmark.Run(1.0, 3.0, 2.0, 1.5, 300 << 20, 0.5, 7, 40 << 20, 20 << 20, 8.0)
    runs = {way: [run, run] for way in benchmark.WAYS}
    runs[benchmark.CHECKPOINTING] = [replace(run, step_seconds=2.0, memory_nbytes=200 << 20)] * 2
    runs[benchmark.DEFAULT] = [run, replace(run, **of_default)]
    return {"room": 64 << 20, "runs": {way: [asdict(one) for one in some] for way, some in runs.items()}}


def test_a_table(benchmark: Any) -> None:
    lines = list(benchmark.report_one(found(benchmark)))
    assert "| checkpointing | 2.000 | 2.00 | 1.00 | 1.00 | 1.50 | 200 | – | – | – |" in lines
    assert "| auto, room of checkpointing | 1.000 | 1.00 | 1.00 | 1.00 | 1.50 | 300 | 40 | 20 | 8 |" in lines
    assert "- losses and trained weights of all ways are equal" in lines
    assert lines[-1].startswith("- in the room of checkpointing, 64 MiB, a step takes 0.50 of one by checkpointing")
    assert lines[-1].endswith("the process grows by 1.50 of what it grows by there")


@pytest.mark.parametrize("different", [{"loss": 0.25}, {"weights": 8}])
def test_one_run_that_differs_is_seen(benchmark: Any, different: dict[str, Any]) -> None:
    assert "- losses and trained weights of all ways **differ**" in benchmark.report_one(found(benchmark, **different))


def test_options_of_the_ways(benchmark: Any) -> None:
    given = benchmark.options_in(benchmark.EQUAL, 64 << 20, "/here")
    assert given == {"directories": ("/here",), "memory_bytes": 64 << 20, "recompute": "auto"}
    assert benchmark.options_in(benchmark.DEFAULT, 64 << 20, "/here") == {"directories": ("/here",)}
    assert benchmark.options_in(benchmark.CHECKPOINTING, 64 << 20, "/here") is None
