"""What ``benchmarks/provision.py`` measures, and what it makes of its measurements."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytest.importorskip("sklearn", reason="the benchmark takes its pictures from there")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def benchmark(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, under another name: tests have a package of its name."""
    spec = importlib.util.spec_from_file_location("provision_benchmark", BENCHMARKS / "provision.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look for themselves there
    spec.loader.exec_module(module)
    return module


def sample(load: Any, way: str, *, world: int = 2, epoch: int = 1, wait: float, workers: int = 2) -> Any:
    """An epoch of 10 s, in which ranks have waited for a part of the time."""
    cell = load("provision_ways").Cell("JPEG", world, way, workers)
    return load("provision_report").Sample(
        cell, epoch, 100, 10.0, 100 * wait, 0, wait, 2 * wait, 3 * wait, 1.0, wait, exact=True
    )


def test_all_have_as_many_workers_and_a_data_loader_may_have_more(load: Any, benchmark: Any) -> None:
    ways = load("provision_ways")
    assert [benchmark.workers_for(4, processors) for processors in (2, 4, 10)] == [4, 4, 8]
    link = load("remote_storage").Link(0.0, 1.0)
    settings = benchmark.Settings(ways.TINY, (1, 2, 4), (1, 2), ("litdata",), True, 3, 9.0, 3, 0.0, link)
    for world in (1, 2, 4):
        workers = benchmark.workers_for(world, benchmark.processors())
        rounds = [
            [(one.way, one.workers) for one in benchmark.cells_of(settings, "JPEG", world, number)] for number in (0, 1)
        ]
        assert rounds[1] == [("DataLoader", workers), ("DataLoader", 2 * workers), ("service", workers)]
        more = ("service, killed", "litdata") if world == 2 else ("service, killed",)
        assert rounds[0] == [*rounds[1], *((way, workers) for way in more)]


def test_promises_are_judged_once_all_that_they_need_was_measured(load: Any) -> None:
    report = load("provision_report")
    found = [sample(load, way, wait=wait) for way, wait in (("DataLoader", 0.5), ("service", 0.05))]
    assert [one["promise"] for one in report.judge(found)] == ["service: each sample once in each epoch"]
    found.append(sample(load, "service, killed", wait=1.0))
    verdicts = {one["promise"]: one["measured"] for one in report.judge(found)}
    assert verdicts["JPEG, 2 ranks: wait from epoch 2 on / DataLoader's ≤ 0.2"] == 0.1
    assert verdicts["JPEG, 2 ranks: longest wait, server killed ≤ 5 s"] == 3.0
    assert verdicts["JPEG, 2 ranks: CPU seconds a sample, all epochs / DataLoaders' ≤ 0.62"] == 0.1


def test_a_rank_that_does_not_start_fails_its_run(benchmark: Any) -> None:
    ours, theirs = Pipe(duplex=False)
    with pytest.raises(TimeoutError, match="a process has sent nothing for 0 s"):
        benchmark.received(ours, 0)
    theirs.send("started")
    assert benchmark.received(ours, 0) == "started"
    theirs.close()
    with pytest.raises(EOFError):
        benchmark.received(ours, 0)


class Halting:
    """Stands for a service, whose workers do not come."""

    def status(self) -> dict[str, Any]:
        return {"workers": [None]}


def test_workers_that_do_not_come_fail_their_run(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = load("provision_ways")
    monkeypatch.setattr(ways, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(ways.DataService, "start", lambda source, **options: nullcontext(Halting()))
    objects = load("remote_storage").RemoteObjects(0, 48, "objects")
    job = ways.Job(ways.Cell("32 KB", 1, "service", 2), ways.TINY[0], objects, (), Path(), 0, 2, 0.0)
    with pytest.raises(TimeoutError, match="1 of 2 workers have come"), ways.started(job):
        pass


def test_a_run_in_which_ranks_have_several_services_is_a_failure(
    benchmark: Any, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*cell: Any) -> Any:
        benchmark.check_service([None, None])
        benchmark.check_service([7, 7])
        benchmark.check_service([7, 8])

    ways, report = load("provision_ways"), load("provision_report")
    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "storages_of", lambda *settings: (None, None))
    link = load("remote_storage").Link(0.0, 1.0)
    settings = benchmark.Settings(ways.TINY[:1], (2,), (1,), (), False, 1, 9.0, 2, 0.0, link)
    found = report.Found()
    benchmark.measure(settings, tmp_path, found, list)
    assert len(found.failures) == 4
    assert "expected one service of all ranks, found processes [7, 8]" in found.failures[0].reason
