"""The trace of an offload: a file that viewers take, whose sums are those of the statistics; nothing if it is off."""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from models import CASES, gradients

from fastensor.offload import ActivationOffload, OffloadConfig, OffloadError, moving, trace
from fastensor.offload.trace import Trace

TRANSFORMER = CASES["transformer"]


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, after everything that the Trace Event Format asks for has been checked."""
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = found["traceEvents"]
    named = {one["tid"] for one in events if (one["ph"], one["name"]) == ("M", "thread_name")}
    for one in events:
        assert one["ph"] in ("M", "X", "C", "b", "e")
        assert one["pid"] == os.getpid()
        assert isinstance(one["tid"], int)
        assert one["ts"] >= 0
        if one["ph"] == "X":
            assert one["dur"] >= 0
            assert one["tid"] in named
        if one["ph"] == "C":
            assert all(isinstance(value, int) for value in one["args"].values())
    check_nesting([one for one in events if one["ph"] == "X"])
    check_pairs([one for one in events if one["ph"] in "be"])
    return events


def check_nesting(complete: list[dict[str, Any]]) -> None:
    """In a thread, an event is over before the next begins, or lies in it."""
    threads = defaultdict(list)
    for one in complete:
        threads[one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for intervals in threads.values():
        ends: list[float] = []
        for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while ends and ends[-1] <= begin + 0.002:  # each number is rounded to a nanosecond
                ends.pop()
            assert not ends or end <= ends[-1] + 0.002
            ends.append(end)


def check_pairs(pairs: list[dict[str, Any]]) -> None:
    begun: dict[Any, float] = {}
    for one in pairs:
        key = one["cat"], one["id"], one["name"]
        if one["ph"] == "b":
            assert key not in begun
            begun[key] = one["ts"]
        else:
            assert begun.pop(key) <= one["ts"]
    assert not begun


def total(events: list[dict[str, Any]], name: str) -> int:
    return sum(one["args"].get("bytes", 0) for one in events if one["name"] == name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codecs": ("csr", "fp16")},
        {"prefetch_bytes": 0, "staging_bytes": 1},
        {"backend": "numpy"},
        {"ssd_bytes": 8192},
    ],
    ids=str,
)
def test_sums_are_those_of_the_statistics(make: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    offload = make(trace=str(tmp_path / "trace.json"), **options)
    for _ in range(3):
        gradients(TRANSFORMER, offload)
    gc.collect()
    offload.settle()
    found = offload.statistics()
    offload.close()
    events = events_of(tmp_path / "trace.json")
    assert total(events, "write") == found.written_bytes > 0
    assert total(events, "read") == found.read_bytes > 0
    for name, seconds in (("wait to write", found.wait_to_write_seconds), ("wait to read", found.wait_to_read_seconds)):
        waited = sum(one["dur"] for one in events if one["name"] == name) / 1e6
        assert waited == pytest.approx(seconds, abs=0.02)
    failed = [one for one in events if one["name"] == "write" and "failed" in one["args"]]
    assert len(failed) == found.failed_writes
    assert all("ssd_bytes leave no room" in one["args"]["failed"] for one in failed)
    counters = [one["args"] for one in events if one["name"] == "bytes"]
    assert max(one["pending"] for one in counters) <= found.peak_pending_bytes
    assert max(one["on SSD"] for one in counters) <= found.peak_ssd_bytes
    assert max(one["loaded"] for one in counters) == found.peak_loaded_bytes
    codecs = {one["args"].get("codec") for one in events if one["name"] == "write"} - {None}
    assert codecs == set(found.encoded)


def test_passes_and_threads(make: Any, tmp_path: Path) -> None:
    offload = make(trace=str(tmp_path / "trace.json"), prefetch_bytes=0)
    for _ in range(2):
        gradients(TRANSFORMER, offload)
    offload.close()
    events = events_of(tmp_path / "trace.json")
    begun = [(one["name"], one["args"]["pass"], one["ts"]) for one in events if one["ph"] == "b"]
    in_order = sorted(begun, key=lambda one: one[2])
    assert [one[:2] for one in in_order] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    where = {one["name"]: names[one["tid"]] for one in events if one["ph"] == "X"}
    assert where["write"].startswith("fastensor-offload-write")
    assert where["read"].startswith("fastensor-offload-read")
    assert where["wait to read"] == "MainThread"
    backward = {one["ph"]: one["ts"] for one in events if one["name"] == "backward" and one["args"]["pass"] == 1}
    waits = [one["ts"] for one in events if one["name"] == "wait to read"]
    assert backward["b"] <= waits[-1] <= backward["e"]
    assert all(one["args"]["host"] > 0 for one in events if one["name"] == "memory")


def test_threads_that_help_to_read(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread of a range with several pieces begins when another one has come."""
    come, read, led = threading.Event(), moving.read, set[int]()

    def read_together(reading: moving.Reading, *arguments: Any, **options: Any) -> None:
        if not reading.is_one_piece:
            if id(reading) in led:
                come.set()
            led.add(id(reading))
            assert come.wait(60)
        read(reading, *arguments, **options)

    monkeypatch.setattr(moving, "PIECE_NBYTES", 8192)
    monkeypatch.setattr(moving, "read", read_together)
    offload = make(trace=str(tmp_path / "trace.json"))
    gradients(CASES["perceptron"], offload)
    offload.close()
    assert any(one["name"] == "help to read" for one in events_of(tmp_path / "trace.json"))


def test_staging_blocks_and_host_memory(make: Any, tmp_path: Path, staged: None) -> None:
    offload = make(trace=str(tmp_path / "trace.json"), dram_bytes=64 << 20)
    gradients(TRANSFORMER, offload)
    offload.close()
    events = events_of(tmp_path / "trace.json")
    assert {"copy out", "copy in"} <= {one["name"] for one in events}
    assert max(one["args"]["dram"] for one in events if one["name"] == "bytes") > 0
    assert max(one["args"]["staging"] for one in events if one["name"] == "bytes") > 0


def test_a_trace_ends_when_it_is_full(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 50)
    path = tmp_path / "trace.json"
    offload = make(trace=str(path))
    gradients(TRANSFORMER, offload)
    gradients(TRANSFORMER, offload)
    assert "the trace ends here, because it has 50 events" in caplog.text
    events = events_of(path)
    assert sum(one["ph"] in "XC" for one in events) == 50
    assert json.loads(path.read_text())["otherData"] == {"trace": "ended at 50 events"}
    before = path.stat()
    gradients(TRANSFORMER, offload)
    offload.close()
    assert path.stat().st_ino == before.st_ino, "it is written once"


def test_a_trace_is_written_if_nobody_closes_the_offload(tmp_path: Path) -> None:
    offload = ActivationOffload(
        OffloadConfig(schedule="all", min_bytes=1, directories=(str(tmp_path),), trace=str(tmp_path / "t.json"))
    )
    gradients(TRANSFORMER, offload)
    offload.settle()
    assert not (tmp_path / "t.json").exists()
    del offload
    gc.collect()
    assert total(events_of(tmp_path / "t.json"), "write") > 0


def test_a_folder_that_is_missing_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"the trace cannot be written to .*/no/t.json: .*/no is not a folder"):
        ActivationOffload(OffloadConfig(trace=str(tmp_path / "no" / "t.json")))


def test_a_folder_in_the_place_of_the_file_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        OffloadError, match=r"the trace cannot be written to '.*', which is a folder. Name a file in it"
    ):
        ActivationOffload(OffloadConfig(trace=f"{tmp_path}/"))


def test_a_copy_that_is_not_used_leaves_the_file_alone(make: Any, tmp_path: Path) -> None:
    offload = make(trace=str(tmp_path / "t.json"))
    copied = copy.deepcopy(offload)
    gradients(TRANSFORMER, offload)
    offload.close()
    copied.close()
    assert total(events_of(tmp_path / "t.json"), "write") > 0


def test_a_file_that_cannot_be_written_raises_when_the_offload_is_closed(make: Any, tmp_path: Path) -> None:
    offload = make(trace=str(tmp_path / "t.json"))
    gradients(TRANSFORMER, offload)
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OffloadError, match=r"the trace cannot be written to .*/t.json: Is a directory"):
        offload.close()
    assert [one.name for one in tmp_path.iterdir()] == ["t.json"], "nothing is left of the file"


def test_a_child_writes_no_trace(make: Any, tmp_path: Path) -> None:
    offload = make(trace=str(tmp_path / "t.json"))
    gradients(TRANSFORMER, offload)
    if (child := os.fork()) == 0:
        try:
            offload.close()
        finally:
            os._exit(int((tmp_path / "t.json").exists()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    offload.close()
    assert events_of(tmp_path / "t.json")


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    recorded = Trace(str(tmp_path / "t.json"))
    recorded.sample_memory()
    recorded.write()
    assert [one.name for one in tmp_path.iterdir()] == ["t-rank3.json"]


def test_memory_of_a_step_is_drawn(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(trace, "_SAMPLE_SECONDS", 0.0)
    import offload_memory

    offload = make(trace=str(tmp_path / "trace.json"))
    for _ in range(2):
        gradients(TRANSFORMER, offload)
    offload.close()
    step = offload_memory.memory_of_step(tmp_path / "trace.json", "host")
    assert len(step.seconds) == len(step.nbytes) > 0
    assert 0 <= step.seconds[0] <= step.backward <= step.seconds[-1]
    offload_memory.plot({"with offload": step}, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_wanted", [False, True])
def test_nothing_is_recorded_unless_that_is_wanted(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    path = tmp_path / "trace.json"
    samples: list[dict[str, int]] = []
    memory_in_use = trace.memory_in_use

    def recorded() -> dict[str, int]:
        samples.append(memory_in_use())
        return samples[-1]

    monkeypatch.setattr(trace, "memory_in_use", recorded)
    offload = make(trace=str(path)) if is_wanted else make()
    gradients(TRANSFORMER, offload)
    offload.close()
    assert bool(samples) == is_wanted
    assert path.exists() == is_wanted
