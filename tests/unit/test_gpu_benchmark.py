"""What ``benchmarks/gpu.py`` does when something fails or time is up, and what it makes of its measurements."""

from __future__ import annotations

import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
STATE = {"w": torch.arange(100.0)}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("gpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the files go, beside the results."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def samples(benchmark: Any, operation: str, **seconds: float) -> list[Any]:
    """One of each contender, in the second round."""
    return [benchmark.Sample("x", 100, 1, operation, name, one, None) for name, one in seconds.items()]


def measured(benchmark: Any) -> list[Any]:
    limits = {benchmark.DISK: 9.0, benchmark.COPY_TO_HOST: 1.0}
    saves = {benchmark.AUTO: 10.0, "fastensor, direct": 12.0, "fastensor, gds": 9.5, "torch": 30.0}
    loads = {benchmark.AUTO: 11.0, "fastensor, direct": 9.0, "fastensor, gds": 12.0, "torch": 10.0, "kvikio alone": 8.0}
    return [
        *samples(benchmark, benchmark.SAVE, **saves, **limits),
        *samples(benchmark, benchmark.LOAD, **loads),
        *samples(benchmark, benchmark.STALL, **{benchmark.ASYNC: 1.5, benchmark.COPY_TO_HOST: 1.0}),
    ]


def test_what_is_chosen_automatically_is_judged_and_the_best_backend_shown(benchmark: Any) -> None:
    save, load, stall = benchmark.judge(benchmark.summarize(measured(benchmark), {}))
    assert (save.measured, save.holds, save.best) == (0.9, True, "fastensor, gds: 0.947")
    assert (load.measured, load.holds, load.best) == (1.375, False, "fastensor, direct: 1.125")
    assert "kvikio alone" in load.promise
    assert (stall.measured, stall.holds, stall.best) == (1.5, False, "")


def test_who_could_not_do_it_every_time_is_left_out(benchmark: Any) -> None:
    rows = benchmark.summarize(measured(benchmark), {("x", "kvikio alone"): "", ("y", "torch"): ""})
    assert benchmark.judge(rows)[1].measured == 1.1  # torch is the fastest peer now
    rows = benchmark.summarize(measured(benchmark), {("x", benchmark.DISK): "", ("x", benchmark.ASYNC): ""})
    assert [one.measured for one in benchmark.judge(rows)] == [None, 1.375, None]
    assert not any(one.holds for one in benchmark.judge(rows))


def test_there_may_be_nothing_to_judge(benchmark: Any) -> None:
    assert benchmark.judge([]) == []
    (_, load, _) = benchmark.judge(benchmark.summarize(samples(benchmark, benchmark.LOAD, **{benchmark.AUTO: 1.0}), {}))
    assert (load.measured, load.holds) == (None, False)
    assert "none" in load.promise


def test_the_first_round_counts_only_where_it_is_all_there_is(benchmark: Any) -> None:
    seconds = [50.0, 3.0, 1.0, 2.0]
    found = [
        benchmark.Sample("x", 100, number, benchmark.LOAD, "torch", one, number / 10)
        for number, one in enumerate(seconds)
    ]
    (row,) = benchmark.summarize(found, {})
    assert (row.rounds, row.seconds, row.resident) == (3, 2.0, 0.3)
    (row,) = benchmark.summarize(found[:1], {})
    assert (row.rounds, row.seconds) == (0, 50.0)


@pytest.mark.parametrize(("who", "wrong"), [("torch", False), ("fastensor, direct", True)])
def test_wrong_bytes_make_a_peer_impossible_and_us_wrong(
    benchmark: Any, folder: Path, capsys: pytest.CaptureFixture[str], who: str, wrong: bool
) -> None:
    contender = benchmark.Contender(who, torch.save, lambda path, device, state: {"w": state["w"] + 1})
    results = benchmark.Results(folder.parent / "out")
    with results.failures_noted("x", who):
        benchmark.save_and_load(contender, benchmark.Task("x", STATE, folder, CPU))
    assert results.impossible["x", who].startswith("WrongBytesError: ")
    assert results.wrong == wrong
    assert not list(folder.iterdir())
    assert "in check_equal" in capsys.readouterr().err  # the traceback


def test_a_failure_leaves_no_file_and_no_half_of_a_measurement(
    benchmark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path, device: torch.device, state: Any) -> Any:
        raise ValueError("cannot")

    bad = benchmark.Contender("bad", torch.save, load)
    good = benchmark.Contender("good", torch.save, lambda path, device, state: torch.load(path))
    monkeypatch.setattr(benchmark, "contenders", lambda: [bad, good])
    results = benchmark.Results(folder.parent / "out")
    benchmark.measure("x", lambda: STATE, folder, CPU, results, rounds=1, end=math.inf)
    assert results.impossible == {("x", "bad"): "ValueError: cannot"}
    names = [sample.contender for sample in results.samples]
    assert "bad" not in names
    assert names.count("good") == names.count(benchmark.DISK) == 4  # twice a save and a load
    assert not list(folder.iterdir())
    written = json.loads((folder.parent / "out.json").read_text())
    assert len(written["samples"]) == len(names)
    assert written["impossible"] == [{"state": "x", "what": "bad", "why": "ValueError: cannot"}]


def test_nothing_begins_when_the_time_is_up(benchmark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: Any) -> list[Any]:
        end[0] = 0.0
        return [benchmark.Timing(benchmark.SAVE, "a", 1.0)]

    end = [math.inf]
    monkeypatch.setattr(benchmark, "all_steps", lambda: [benchmark.Step("a", run), benchmark.Step("b", run)])
    monkeypatch.setattr(time, "monotonic", lambda: 1 - end[0])
    results = benchmark.Results(folder.parent / "out")
    benchmark.measure("x", lambda: STATE, folder, CPU, results, rounds=5, end=0.5)
    assert len(results.samples) == 1
    assert "the time was up in round 0 of 5" in results.notes[0]


def test_the_gds_of_torch_comes_last_in_every_order(benchmark: Any) -> None:
    steps = benchmark.all_steps()
    orders = [[step.name for step in benchmark.in_order(steps, number)] for number in range(5)]
    assert {order[-1] for order in orders} == {benchmark.TORCH_GDS}
    assert len(set(map(tuple, orders))) == 5
    assert all(sorted(order) == sorted(step.name for step in steps) for order in orders)


def test_a_state_that_the_disk_has_no_space_for_is_smaller(benchmark: Any) -> None:
    gib, reason = benchmark.fitting(5.0, free_nbytes=9 << 30, seconds=100, seconds_for_gib=0.1)
    assert gib == 3.6
    assert reason.startswith("9.0 GiB of the disk are free")
    assert benchmark.fitting(5.0, free_nbytes=9 << 30, seconds=-1, seconds_for_gib=0.1)[0] == 0
