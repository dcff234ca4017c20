"""What ``benchmarks/tensor_io.py`` makes of its measurements."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

NAMES = ("direct", "numpy")
SECONDS = {("direct", 100): 3.0, ("numpy", 100): 1.0, ("direct", 900): 2.0, ("numpy", 900): 4.0}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("tensor_io")


def measured(benchmark: Any, chosen: dict[int, list[str]], exploring: tuple[int, ...] = ()) -> list[Any]:
    """One mix: what auto has chosen for each size in each round; rounds in which it tried that."""
    found = []
    for nbytes, names in chosen.items():
        for number, name in enumerate(names):
            for way in (*NAMES, "auto"):
                used = name if way == "auto" else way
                tries = way == "auto" and number in exploring
                seconds = SECONDS[used, nbytes]
                found.append(
                    benchmark.Transfer("x", "write and read", nbytes, way, used, number, seconds, 0.0, exploring=tries)
                )
    return found


def judged(benchmark: Any, found: list[Any]) -> dict[str, tuple[float, bool]]:
    mix = benchmark.evaluate_mix("x", found, NAMES)
    verdicts = benchmark.judge(found, [mix], {"x": {"explored in a second run": 0}}, {}, NAMES)
    return {one["promise"]: (one["measured"], one["holds"]) for one in verdicts}


def test_the_best_each_time(benchmark: Any) -> None:
    found = judged(benchmark, measured(benchmark, {100: ["numpy"] * 4, 900: ["direct"] * 4}))
    assert found == {
        "x: share of choices that were the best, or as good ≥ 0.938": (1.0, True),
        "x: time / hindsight ≤ 1.05": (1.0, True),
        "x: time / best fixed backend (direct) < 1": (0.6, True),
        "x: explored in a second run ≤ 0": (0.0, True),
    }


def test_one_bad_choice_in_four(benchmark: Any) -> None:
    """It moves no median, and counts all the same."""
    found = judged(benchmark, measured(benchmark, {100: ["numpy", "numpy", "numpy", "direct"], 900: ["direct"] * 4}))
    assert found["x: share of choices that were the best, or as good ≥ 0.938"] == (0.875, False)
    assert found["x: time / hindsight ≤ 1.05"] == (pytest.approx(14 / 12, abs=1e-3), False)


def test_what_is_tried_is_no_choice_but_takes_its_time(benchmark: Any) -> None:
    transfers = measured(benchmark, {100: ["numpy", "direct"], 900: ["direct"] * 2}, exploring=(1,))
    mix = benchmark.evaluate_mix("x", transfers, NAMES)
    assert mix.hits == {"auto": 1.0, "direct": 0.5, "numpy": 0.5}
    assert mix.seconds["auto"] == 4.0
    assert mix.seconds[benchmark.HINDSIGHT] == mix.seconds[benchmark.HINDSIGHT_BY_MEDIANS] == 3.0
    assert {nbytes: dict(names) for nbytes, names in mix.chosen.items()} == {100: {"numpy": 1}, 900: {"direct": 1}}


def test_ties(benchmark: Any) -> None:
    Figure = benchmark.Figure
    best = Figure(1.0, 0.1, 0.0)
    assert benchmark.is_as_fast(Figure(1.03, 0.0, 0.0), best)
    assert not benchmark.is_as_fast(Figure(1.04, 0.0, 0.0), best)
    assert benchmark.tied(Figure(1.2, 0.1, 0.0), best)
    assert not benchmark.tied(Figure(1.21, 0.1, 0.0), best)
