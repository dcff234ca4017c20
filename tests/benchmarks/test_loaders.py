"""The benchmark of loads and saves beside other tools. A tool that is not installed is skipped."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastensor

TOOLS = (
    "fastensor, safetensors", "fastensor, no checksums", "safetensors", "run:ai model streamer", "fastsafetensors",
    "fastensor", "torch", "torch_checkpointing",
)  # fmt: skip
"""The tools that need no GPU."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.delitem(sys.modules, "checkpoint", raising=False)  # to pytest, that is a folder of tests
    return importlib.import_module("loaders")


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    def row(contender: str, seconds: float, operation: str = "cold load", nbytes: int = 1 << 20) -> dict[str, Any]:
        found = {"model": "x", "nbytes": nbytes, "operation": operation, "contender": contender, "setting": "default"}
        times = dict.fromkeys(("seconds", "seconds_min", "seconds_max"), seconds)
        return {**found, **times, "cpu_seconds": seconds / 2, "extra_nbytes": 2 << 20}

    return row


@pytest.mark.parametrize("kib", [64, 1 << 10, 10 << 10, 100 << 10, 1424 << 10, 8 << 20])
def test_a_state_has_that_size(benchmark: Any, kib: int) -> None:
    shapes = benchmark.shapes_of_size(kib << 10)
    assert benchmark.values_of(shape for _, shape, _ in shapes) * 4 == kib << 10
    assert len({name for name, _, _ in shapes}) == len(shapes) > 12


def test_a_fingerprint_is_of_names_dtypes_shapes_and_bytes(benchmark: Any) -> None:
    state = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor(1.5)}
    same = {"b": torch.tensor(1.5), "a": state["a"].t().contiguous().t()}
    assert benchmark.fingerprint(same) == benchmark.fingerprint(state)
    others: list[dict[str, torch.Tensor]] = [
        {"a": state["a"]},
        {"c": state["a"], "b": state["b"]},
        {"a": state["a"].reshape(3, 2), "b": state["b"]},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"a": state["a"] + torch.tensor([0, 0, 1e-6]), "b": state["b"]},
        {"a": state["b"], "b": state["a"]},
    ]
    assert benchmark.fingerprint(state) not in {benchmark.fingerprint(other) for other in others}


@pytest.mark.parametrize("checksums", [False, True])
def test_files_are_read_by_their_format(benchmark: Any, tmp_path: Path, checksums: bool) -> None:
    state = {"a": torch.randn(300, 400), "b": torch.randn(7)}
    fastensor.save(state, tmp_path / "x.safetensors", checksums=checksums)
    assert benchmark.fingerprint(benchmark.read_plainly(tmp_path / "x.safetensors")) == benchmark.fingerprint(state)


def test_a_file_that_ends_too_early_is_noticed(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(benchmark.WrongBytesError, match="not all there"):
        benchmark.read_plainly(path)


def test_pages_of_the_file_are_told_from_memory(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    fastensor.save({"a": torch.randn(300, 400)}, path)
    mapped = fastensor.load(path, mmap=True)
    assert benchmark.is_mapped(mapped, path)
    assert benchmark.is_mapped(mapped, tmp_path), "that has the file"
    assert not benchmark.is_mapped(fastensor.load(path), path)


def installed(name: str) -> Any:
    tool = importlib.import_module("loader_contenders").tool_named(name)
    if tool.version is None:
        pytest.skip(f"{tool.distribution} is not installed")
    return tool


def done(benchmark: Any, job: Any) -> tuple[tuple[float, float, int], str]:
    """What the process would send, of this one."""
    ours, theirs = multiprocessing.Pipe()
    ours.send("go")
    with pytest.MonkeyPatch.context() as environment:
        for name, text in job.setting.variables.items():
            environment.setenv(name, text)
        benchmark.do(job, {}, theirs)
    assert ours.recv() == "ready"
    found: tuple[tuple[float, float, int], str] = ours.recv()
    return found


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_loads_what_was_saved(benchmark: Any, tmp_path: Path, name: str) -> None:
    tool = installed(name)
    files = benchmark.save_files(1 << 20, "cpu", tmp_path, [tool])
    for setting in tool.load.settings:
        job = benchmark.Job(name, setting, benchmark.WARM, files.of(tool), "cpu", tmp_path)
        (seconds, _, _), found = done(benchmark, job)
        assert found == files.expected, setting
        assert seconds > 0


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_saves_what_is_read_by_the_format(benchmark: Any, tmp_path: Path, name: str) -> None:
    tool = installed(name)
    if tool.save is None:
        pytest.skip("it only loads")
    files = benchmark.save_files(1 << 20, "cpu", tmp_path, [])
    source = files.of(benchmark.tool_named("safetensors"))
    for number, setting in enumerate(tool.save.settings):
        path = tmp_path / f"saved{number}{tool.suffix}"
        done(benchmark, benchmark.Job(name, setting, benchmark.SAVE, path, "cpu", source))
        assert benchmark.fingerprint(benchmark.read_back(path)) == files.expected, setting


def test_a_tool_runs_by_default_and_by_its_quickest_setting(benchmark: Any) -> None:
    def names(seconds: dict[str, list[float]], name: str = "torch") -> list[tuple[str, str]]:
        tool = benchmark.tool_named(name)
        return [(run.name, run.setting.name) for run in benchmark.runs_of(tool, benchmark.COLD, seconds)]

    mapped = "mmap=True, cloned"
    both = [("torch", "default"), ("torch, tuned", mapped)]
    assert names({"default": [3.0, 1.0], mapped: [0.9, 9.0]}) == both
    assert names({"default": [3.0, 1.0], mapped: [1.1, 1.1]}) == both[:1]
    assert names({mapped: [1.0]}) == both[1:], "by default it does not work here"
    assert names({}) == []


def test_ours_is_compared_with_the_quickest_of_the_same_kind(benchmark: Any, row: Callable[..., Any]) -> None:
    rows = [
        row("fastensor, safetensors", 1.0), row("safetensors", 2.0), row("fastsafetensors", 1.5),
        row("fastsafetensors, tuned", 0.8), row("fastensor", 1.0), row("torch", 4.0), row("fio", 0.1),
    ]  # fmt: skip
    found = [(one["ours"], one["quickest other"], one["measured"], one["holds"]) for one in benchmark.judge(rows)]
    assert found == [
        ("fastensor, safetensors", "fastsafetensors, tuned", 1.25, False), ("fastensor", "torch", 0.25, True)
    ]  # fmt: skip


def test_the_table_has_each_tool_and_size(benchmark: Any, row: Callable[..., Any]) -> None:
    rows = [row("fastensor, safetensors", 1.0), row("fastsafetensors", 3.0), row("fastsafetensors, tuned", 2.0)]
    rows += [row("fastensor, safetensors", 8.0, nbytes=8 << 20), {**row("fio", 0.5), "extra_nbytes": None}]
    text = benchmark.table(rows, {"machine": "this", "fastensor": "1.2.3"}, benchmark.judge(rows))
    for line in (
        "| fastensor, safetensors | 1.2.3 | CRC32s of the header and of each tensor | each has its own |",
        "| | 1 MiB | 8 MiB |",
        "| fastensor, safetensors | 1.00 (1.00–1.00) | 8.00 (8.00–8.00) |",
        "| fastsafetensors, tuned | 2.00 (2.00–2.00) | – |",
        "| fio | 0.500 (0.500–0.500) | – |",
        "| fastensor, safetensors | cold load | 0.50 (fastsafetensors, tuned) | – |",
        "| fastsafetensors | 2; 1.50 | – |",
    ):
        assert line in text.splitlines()


def test_a_picture_shows_each_tool_once(benchmark: Any, row: Callable[..., Any], tmp_path: Path) -> None:
    rows = [row("fastsafetensors", 3.0), row("fastsafetensors, tuned", 2.0), row("fastensor, no checksums", 1.0)]
    rows += [row("fio", 1.0, "durable save", nbytes=8 << 20), row("fio", 1.0, "durable save", nbytes=64 << 10)]
    found = [(one["contender"], one["seconds"], one["nbytes"]) for one in benchmark.drawn(rows)]
    assert found == [("fastsafetensors", 2.0, 1 << 20), ("fio", 1.0, 8 << 20), ("fio", 1.0, 64 << 10)]
    benchmark.plot(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["run:ai model streamer", "fastsafetensors"])
def test_other_tools_read_files_that_have_checksums(benchmark: Any, tmp_path: Path, name: str) -> None:
    tool = installed(name)
    state = {f"{n}": torch.randn(n, 4096) for n in range(1, 60)}
    fastensor.save(state, tmp_path / "x.safetensors")
    found = tool.load.call(tmp_path / "x.safetensors", "cpu")
    assert benchmark.fingerprint(found) == benchmark.fingerprint(state)
