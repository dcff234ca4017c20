"""``benchmarks/lmdb_reading.py`` goes on with what it has measured before, if that can be compared."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("lmdb")
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("lmdb_reading")
    monkeypatch.setattr(multiprocessing, "get_context", mock.Mock())  # no process is started
    return module


@pytest.fixture
def start(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the program. A run takes no time: it gives one sample, or nothing where that is not possible."""

    def start(*options: str) -> list[Any]:
        made = []

        def run(cell: Any, *_: Any) -> list[Any]:
            made.append(cell)
            return [] if cell.way == "fio" else [benchmark.Sample(cell, 1, 1.0, 1.0, 1, 0, 0, 0.1, 1.0)]

        def run_pass(operation: str, name: str, way: str, files: Any) -> list[Any]:
            made.append((operation, name, way))
            return [benchmark.Whole(operation, name, way, 1.0, 1)]

        for name in ("run_cell", "run_epoch", "run_limited"):
            monkeypatch.setattr(benchmark, name, run)
        monkeypatch.setattr(benchmark, "run_pass", run_pass)
        monkeypatch.setattr(benchmark, "make_files", mock.Mock())
        fixed = ["--sizes", "110 KB", "--worlds", "1", "--folder", str(tmp_path)]
        fixed += [] if "--orders" in options else ["--orders", "full"]
        monkeypatch.setattr(sys, "argv", ["lmdb_reading.py", *fixed, "--output", str(tmp_path / "found"), *options])
        benchmark.main()
        return made

    return start


def test_runs_are_made_once_also_those_that_are_not_possible(start: Any, tmp_path: Path) -> None:
    made = start("--tiny", "--rounds", "2")
    assert len([one for one in made if getattr(one, "way", "") == "fio"]) == 2
    path = tmp_path / "found.json"
    document = json.loads(path.read_text())
    document["machine"]["date"] = "2001-02-03"
    path.write_text(json.dumps(document))
    assert not start("--tiny", "--rounds", "2", "--resume")
    more = start("--tiny", "--rounds", "3", "--resume")
    assert len([one for one in more if getattr(one, "way", "") == "fio"]) == 1
    assert json.loads(path.read_text())["machine"]["date"] == "2001-02-03"
    assert "- date: 2001-02-03" in path.with_suffix(".md").read_text()


def test_orders_of_the_file_are_measured_and_judged_without_the_rest(start: Any, tmp_path: Path) -> None:
    cells = [one for one in start("--tiny", "--rounds", "2", "--orders", "sequential") if hasattr(one, "way")]
    assert {one.order for one in cells} == {"sequential"}
    assert {one.state for one in cells} == {"cold", "warm"}
    counts = {state: [(one.way, one.state) for one in cells].count(("fastensor", state)) for state in ("cold", "warm")}
    assert counts == {"cold": 2, "warm": 1}
    verdicts = {one["promise"]: one["holds"] for one in json.loads((tmp_path / "found.json").read_text())["verdicts"]}
    assert verdicts["110 KB, sequential, processes: 1, cold: rate / best py-lmdb ≥ 1"] is True
    assert verdicts["110 KB, scan: best py-lmdb / time ≥ 1.2"] is False


@pytest.mark.parametrize(
    ("what", "options"), [("files", []), ("longest run", ["--tiny", "--seconds", "2"]), ("code", ["--tiny"])]
)
def test_what_cannot_be_compared_is_not_gone_on_with(
    start: Any, benchmark: Any, monkeypatch: pytest.MonkeyPatch, what: str, options: list[str]
) -> None:
    start("--tiny", "--rounds", "1")
    if what == "code":
        monkeypatch.setattr(benchmark, "hash_of_code", lambda paths: "other")
    with pytest.raises(SystemExit, match=f"--resume: .*its '{what}' is .*, and now "):
        start("--rounds", "1", *options, "--resume")


def test_the_code_is_of_the_package_and_of_the_benchmark(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_of_code = mock.Mock()
    monkeypatch.setattr(benchmark, "hash_of_code", hash_of_code)
    benchmark.conditions(BENCHMARKS, {}, 1.0)
    names = {path.name for path in hash_of_code.call_args.args[0]}
    assert {"reading.py", "buffered.py", "lmdb_reading.py", "lmdbio.py"} <= names


@pytest.mark.parametrize(
    ("order", "world", "peers"),
    [
        ("sequential", 1, ["litdata", "mosaicml-streaming"]),
        ("full", 1, ["mosaicml-streaming"]),
        ("block", 1, ["litdata"]),
        ("strided", 1, []),
        ("full", 4, []),
    ],
)
def test_other_formats_are_read_where_their_order_can_be_compared(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, order: str, world: int, peers: list[str]
) -> None:
    contenders = importlib.import_module("lmdb_contenders")
    monkeypatch.setattr(contenders, "installed", lambda peer: True)
    ways = contenders.ways_of(order, world, "cold")
    assert [way for way in ways if way in contenders.PEERS] == peers
    monkeypatch.setattr(contenders, "installed", lambda peer: False)
    assert contenders.ways_of(order, world, "cold") == [way for way in ways if way not in peers]


def test_a_format_that_is_not_installed_is_told(
    start: Any, benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "installed", lambda peer: False)
    start("--tiny", "--rounds", "1")
    assert "mosaicml-streaming is not measured: it is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("error", [EOFError(), TimeoutError()])
def test_only_another_library_may_fail(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(benchmark, "run", fail)
    size, files = benchmark.SIZES["3 KB"], benchmark.Files(Path())
    cell = benchmark.Cell("3 KB", "full", 1, "cold", "mosaicml-streaming")
    assert benchmark.run_cell(cell, size, files, 1.0) == []
    assert "mosaicml-streaming" in capsys.readouterr().err
    with pytest.raises(type(error)):
        benchmark.run_cell(replace(cell, way=benchmark.OURS), size, files, 1.0)
