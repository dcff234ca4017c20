"""What ``make gpu`` does when something fails or time is up, and what it makes of its measurements."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import math
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
STATE = {"w": torch.arange(100.0)}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_saves")


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
    results = benchmark.Results(folder.parent / "out.json")
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
    results = benchmark.Results(folder.parent / "out.json")
    benchmark.measure("x", lambda: STATE, folder, CPU, results, rounds=1, end=math.inf)
    assert results.impossible == {("x", "bad"): "ValueError: cannot"}
    names = [sample.contender for sample in results.samples]
    assert "bad" not in names
    assert names.count("good") == names.count(benchmark.DISK) == 4  # twice a save and a load
    assert not list(folder.iterdir())
    written = json.loads((folder.parent / "out.json").read_text())
    assert len(written["details"]["samples"]) == len(names)
    assert written["details"]["impossible"] == [{"state": "x", "what": "bad", "why": "ValueError: cannot"}]


def test_nothing_begins_when_the_time_is_up(benchmark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: Any) -> list[Any]:
        end[0] = 0.0
        return [benchmark.Timing(benchmark.SAVE, "a", 1.0)]

    end = [math.inf]
    monkeypatch.setattr(benchmark, "all_steps", lambda: [benchmark.Step("a", run), benchmark.Step("b", run)])
    monkeypatch.setattr(time, "monotonic", lambda: 1 - end[0])
    results = benchmark.Results(folder.parent / "out.json")
    benchmark.measure("x", lambda: STATE, folder, CPU, results, rounds=5, end=0.5)
    assert len(results.samples) == 1
    assert "the time was up in round 0 of 5" in results.notes[0]


def test_what_says_most_comes_first_in_the_first_round(benchmark: Any) -> None:
    names = [step.name for step in benchmark.in_order(benchmark.all_steps(), 0)]
    assert names[:3] == [benchmark.ASYNC, benchmark.AUTO, benchmark.DISK]


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


def test_what_was_measured_becomes_rows_of_the_table(benchmark: Any, folder: Path) -> None:
    results = benchmark.Results(folder.parent / "out.json", doing="x, round 1, torch")
    results.samples += measured(benchmark)[:-2]  # no stall
    results.write()
    found = importlib.import_module("gpu_results").Rows.read(folder.parent / "out.json")
    assert found.doing == "x, round 1, torch"
    assert [row.holds for row in found.rows] == [True, False, None]
    assert [row.found for row in found.rows][2] == "not measured"


@pytest.mark.parametrize("module", ["gpu", "gpu_saves", "gpu_offload"])
def test_examples_in_docstrings(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


WELL = """
import sys
from pathlib import Path
from gpu_results import Row, Rows
rows = Rows.at(Path(sys.argv[sys.argv.index("--output") + 1]))
rows.machine = {"device": "a GPU"}
rows.add(Row("first", "1 s", holds=True))
rows.begin("second")
rows.add(Row("second", "2 s"))
rows.end()
"""
HANGS = WELL.replace(
    "rows.end()",
    """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
(Path(__file__).parent / "child.new").write_text(str(child.pid))
(Path(__file__).parent / "child.new").rename(Path(__file__).parent / "child")
signal.pause()
""",
)
FAILS = WELL.replace("rows.end()", "sys.exit(3)")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


@pytest.fixture
def table(gpu: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Runs parts by the sources of their programs, and gives the report. The time of a part that hangs is up as soon as
    it has written its rows."""

    def run(command: list[str], seconds: float) -> int | None:
        process = subprocess.Popen(command, start_new_session=True)
        try:
            while process.poll() is None and not (folder / "child").exists():
                time.sleep(0.01)
            return process.poll()
        finally:
            gpu.end(process)
            if (folder / "child").exists():
                (folder / "child").rename(folder / "killed")

    def measure(*programs: str, seconds: float = 120.0) -> tuple[bool, Any]:
        parts = []
        for number, source in enumerate(programs):
            (folder / f"part{number}.py").write_text(source)
            parts.append(gpu.Part(f"part {number}", f"part{number}", 0.0, 60.0))
        monkeypatch.setattr(gpu, "PARTS", tuple(parts))
        options = argparse.Namespace(folder=folder, output=folder.parent / "out", tiny=False)
        report = gpu.Report(options.output, {}, {}, {})
        return gpu.measure(options, str(folder), report, time.monotonic() + seconds), report

    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.setattr(gpu, "SCRIPTS", folder)
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(gpu, "run", run)
    return measure


def test_what_a_part_has_found_is_in_the_table_whatever_becomes_of_it(table: Any, folder: Path) -> None:
    well, report = table(HANGS, FAILS, WELL)
    assert not well
    written = (folder.parent / "out.md").read_text()
    assert written == report.table()
    assert "- device: a GPU" in written
    assert written.count("| first | 1 s | yes |") == written.count("| second | 2 s |  |") == 3
    assert re.search(r"\| part 0 \| cut off after \d+ s, in second \| \*\*no\*\* \|", written)
    assert re.search(r"\| part 1 \| ended after \d+ s with status 3, in second \| \*\*no\*\* \|", written)
    assert written.count("cut off") == 1


def test_nothing_that_a_part_has_started_is_left_when_its_time_is_up(table: Any, folder: Path) -> None:
    table(HANGS)
    with suppress(FileNotFoundError):  # it is gone
        stat = Path(f"/proc/{(folder / 'killed').read_text()}/stat")
        while " Z " not in stat.read_text():  # the next reader of its status removes it
            time.sleep(0.01)


def test_parts_that_have_all_ended_well(table: Any) -> None:
    well, report = table(WELL, WELL)
    assert well
    assert "cut off" not in report.table()


def test_a_program_gets_the_time_that_it_has(gpu: Any) -> None:
    assert gpu.run(["true"], 60.0) == 0
    assert gpu.run(["sleep", "600"], 0.01) is None


def test_a_part_that_has_no_time_is_not_begun(table: Any) -> None:
    well, report = table(WELL, seconds=0.0)
    assert not well
    assert report.seconds == {}
