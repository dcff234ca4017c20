"""Saves and loads whose backends are learned: whatever is tried, the files and the values are the same."""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run

import fastensor
from fastensor import AsyncWriter, Context, Dictionary, Selector
from fastensor.backends.direct import DirectBackend
from fastensor.backends.numpy import BufferedReader, NumpyBackend
from fastensor.backends.torch import TorchBackend
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.select import current
from fastensor.select.context import bucket_of
from fastensor.select.files import Kind, file_for
from fastensor.testing.calls import Call, intercepted

STATE = {"w": torch.arange(200_000), "b": torch.ones(3)}
NBYTES = 1_603_000
WRITE = Context("write")


@pytest.fixture
def selector() -> Iterator[Selector]:
    selector = Selector()
    fastensor.use_selector(selector)
    yield selector
    fastensor.use_selector(None)


def measured(selector: Selector, context: Context, nbytes: int = NBYTES) -> set[str]:
    return set(selector.explain(nbytes, context, ("numpy",)).timings)


def failed(selector: Selector, context: Context) -> dict[str, str]:
    return dict(selector.explain(NBYTES, context, ("numpy",)).failed)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each backend's write takes, in seconds of an injected clock; nothing else takes time."""
    now = 0.0
    seconds = {"numpy": 1.0, "torch": 1.0, "direct": 1.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slowly(name: str, original: Any) -> Any:
        def writing(self: Any, source: Any, fd: int) -> Any:
            nonlocal now
            now += seconds[name]
            return original(self, source, fd)

        return writing

    for backend in (DirectBackend, NumpyBackend, TorchBackend):
        monkeypatch.setattr(backend, "write", slowly(backend.name, backend.write))
    return seconds


def test_ten_saves_of_a_new_user_are_written_by_the_rule(
    selector: Selector, taken: dict[str, float], tmp_path: Path
) -> None:
    for number in range(10):
        report = fastensor.save(STATE, tmp_path / "x")
        assert report.backend == "numpy"
        assert report.reason.startswith("the fastest: " if number else "by size: nothing was measured")
        assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])
    assert measured(selector, WRITE) == {"numpy"}
    assert selector.statistics().explored == 0


def test_what_is_faster_is_found_in_time(selector: Selector, taken: dict[str, float], tmp_path: Path) -> None:
    taken.update(numpy=1.0, direct=0.5)
    reports = [fastensor.save(STATE, tmp_path / "x") for _ in range(40)]
    tried = next(report for report in reports if report.reason.startswith("to measure it"))
    assert tried.backend == "direct"
    assert tried.reason.startswith("to measure it for up to 2 MiB: that may cost ")
    assert reports[-1].backend == "direct"
    assert measured(selector, WRITE) == {"numpy", "direct"}, "torch writes what no other backend can"


def test_what_is_slower_costs_no_more_than_its_share(
    selector: Selector, taken: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken.update(numpy=1.0, direct=3.0)
    used = [fastensor.save(STATE, tmp_path / "x").backend for _ in range(100)]
    assert 1 <= used.count("direct") <= 3
    spent = selector.statistics()
    assert spent.extra_seconds == pytest.approx(2.0 * used.count("direct"), rel=1e-3)
    assert spent.extra_seconds <= 0.05 * spent.seconds + 2.0
    assert "measuring direct with 1.56 MiB (write cpu durable) has cost 2 s: it took 3 s" in caplog.text
    assert "FASTENSOR_EXPLORE=0 measures nothing" in caplog.text


def test_loads_are_measured(selector: Selector, tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x", backend="numpy")
    assert fastensor.load_with_report(tmp_path / "x", backend="numpy")[1].reason == "asked for"
    for number in range(3):
        loaded, report = fastensor.load_with_report(tmp_path / "x")
        assert report.backend == "numpy"
        assert report.reason.startswith("the fastest: " if number else "by size: nothing was measured")
        assert torch.equal(loaded["w"], STATE["w"])
    assert measured(selector, Context("read", warm=True)) == {"numpy"}
    assert measured(selector, WRITE) == set()


@pytest.mark.parametrize("container", ["torch", "safetensors"])
def test_what_is_tried_can_write_the_container(selector: Selector, tmp_path: Path, container: Any) -> None:
    papers = Selector(paper=True)
    used = {fastensor.save(STATE, tmp_path / "x", container=container, backend=papers).backend for _ in range(9)}
    assert used == {"numpy", "direct"}
    assert not failed(selector, WRITE)


def test_asynchronous_saves_have_a_context_of_their_own(selector: Selector, tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        for _ in range(4):
            assert writer.save(STATE, tmp_path / "x").result().backend == "numpy"
    assert measured(selector, Context("write", "staged")) == {"numpy"}
    assert measured(selector, WRITE) == set()


def test_unsynced_saves_teach_nothing(selector: Selector, tmp_path: Path) -> None:
    """They take as long as the page cache, and what comes later is not seen."""
    assert fastensor.save(STATE, tmp_path / "x", durable=False).reason.startswith("by size")
    assert len(selector.dictionary) == 0


def test_what_waits_for_something_else_is_not_measured(selector: Selector, tmp_path: Path) -> None:
    large = {"w": torch.zeros(3 << 20)}
    with AsyncWriter(staging_bytes=4 << 20) as writer:
        for _ in range(3):  # nothing is tried: the size decides
            assert writer.save(large, tmp_path / "streams").result().backend == "direct"
    with AsyncWriter(max_bytes_per_second=1e12) as writer:
        for _ in range(3):
            assert writer.save(large, tmp_path / "paced").result().backend == "direct"
    fastensor.save(STATE, tmp_path / "x", backend="numpy")
    fastensor.convert(tmp_path / "x", tmp_path / "x.safetensors")
    fastensor.verify(tmp_path / "x")
    _, report = fastensor.load_with_report(tmp_path / "x", verify=False)
    assert report.reason.startswith("by size")
    with fastensor.open(tmp_path / "x") as opened:
        assert torch.equal(opened["w"], STATE["w"])
    assert selector.statistics().explored == 0


def test_a_load_is_learned_for_the_size_of_the_file_that_was_written(selector: Selector, tmp_path: Path) -> None:
    state = {"w": torch.zeros((1 << 18) - 8)}  # of the file, which is larger, not the bucket
    report = fastensor.save(state, tmp_path / "x", backend="numpy")
    assert bucket_of(report.nbytes) > bucket_of(state["w"].nbytes)
    fastensor.load(tmp_path / "x")
    assert measured(selector, Context("read", warm=True), report.nbytes)
    parts = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}
    nbytes = fastensor.save(parts, tmp_path / "x", backend="numpy").nbytes
    fastensor.load(tmp_path / "x", keys=["a"])
    assert not measured(selector, Context("read", warm=True), nbytes), "only a part was read"


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("container", ["torch", "safetensors"])
@pytest.mark.parametrize(
    "options",
    [{"map_location": "cuda"}, {"map_location": _fail}, {"into": {"w": torch.zeros(5)}}],
    ids=["no GPU", "map_location fails", "wrong target"],
)
def test_a_load_that_fails_at_its_end_is_not_measured(
    selector: Selector, tmp_path: Path, container: Any, options: dict[str, Any]
) -> None:
    """All its bytes may have been read before."""
    if callable(options.get("map_location")) and container == "safetensors":
        options = {"map_location": "cuda"}
    fastensor.save({"w": STATE["w"]}, tmp_path / "x", container=container)
    for _ in range(5):
        with pytest.raises((RuntimeError, ZeroDivisionError, fastensor.FastensorError)):
            fastensor.load(tmp_path / "x", **options)
    for warm in (True, False):
        assert not measured(selector, Context("read", warm=warm), os.path.getsize(tmp_path / "x"))
    fastensor.load(tmp_path / "x")
    assert measured(selector, Context("read", warm=True), os.path.getsize(tmp_path / "x"))


def test_a_load_whose_objects_fail_is_not_measured(selector: Selector, tmp_path: Path) -> None:
    """The objects are made of bytes that were read."""
    fastensor.save({**STATE, "z": _Refuses()}, tmp_path / "x")
    with pytest.raises((ZeroDivisionError, fastensor.FastensorError)):
        fastensor.load(tmp_path / "x", weights_only=False)
    assert not measured(selector, Context("read", warm=True), os.path.getsize(tmp_path / "x"))


class _Refuses:
    def __reduce__(self) -> Any:
        return _fail, ()


@pytest.mark.parametrize(
    ("call", "container"),
    [("preallocate", "torch"), ("sync_file", "torch"), ("write_fully", "torch"), ("head", "safetensors")],
)
def test_a_save_that_fails_is_not_measured(
    selector: Selector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, container: Any
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    def full_for_the_head(fd: int, data: memoryview, offset: int) -> None:
        full() if offset == 0 and data.nbytes < 1 << 16 else write_fully(fd, data, offset)

    write_fully = posix.write_fully
    with monkeypatch.context() as patch:
        patch.setattr(posix, "write_fully" if call == "head" else call, full_for_the_head if call == "head" else full)
        for _ in range(5):
            with pytest.raises(fastensor.CheckpointWriteError):
                fastensor.save(STATE, tmp_path / "x", container=container)
    assert len(selector.dictionary) == 0
    fastensor.save(STATE, tmp_path / "x", container=container)
    assert measured(selector, WRITE) == {"numpy"}


@pytest.mark.parametrize("more", [{}, {"a small one": torch.ones(3)}])
def test_a_load_that_fails_is_not_measured(selector: Selector, tmp_path: Path, more: dict[str, Any]) -> None:
    fastensor.save(more | STATE, tmp_path / "x", backend="numpy")

    def deny_values(call: Call) -> Any:
        if call.name == "preadv" and memoryview(call.arguments[1][0]).nbytes > 1 << 16:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call.perform()

    for _ in range(10):
        with intercepted(deny_values), pytest.raises(fastensor.CheckpointReadError):
            fastensor.load(tmp_path / "x")
    assert len(selector.dictionary) == 0
    fastensor.load(tmp_path / "x")
    assert len(selector.dictionary) == 1


def test_a_backend_that_cannot_is_excluded_and_the_file_is_written_all_the_same(
    selector: Selector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, source: Any, fd: int) -> Any:
        os.pwrite(fd, b"rubbish", 0)
        raise BackendUnavailableError("not on this disk")

    monkeypatch.setattr(NumpyBackend, "write", refuse)
    reports = [fastensor.save(STATE, tmp_path / "x") for _ in range(5)]
    assert {report.backend for report in reports} == {"direct"}
    assert failed(selector, WRITE) == {"numpy": "not on this disk"}
    assert [report.fallbacks for report in reports if report.fallbacks] == [reports[0].fallbacks]
    assert reports[0].reason == "numpy could not do it"
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])


def test_torch_writes_what_no_other_backend_can(
    selector: Selector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, source: Any, fd: int) -> Any:
        raise BackendUnavailableError("not on this disk")

    for backend in (NumpyBackend, DirectBackend):
        monkeypatch.setattr(backend, "write", refuse)
    report = fastensor.save(STATE, tmp_path / "x")
    assert report.backend == "torch"
    assert [one.backend for one in report.fallbacks] == ["numpy", "direct"]
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])


def test_a_dictionary_of_the_user_decides(tmp_path: Path) -> None:
    learned = Selector()
    for backend, seconds in (("torch", 0.5), ("numpy", 2.0), ("direct", 1.0)):
        learned.record(NBYTES, WRITE, backend, seconds)
    mine = Selector(learned.dictionary, explore=False)
    for _ in range(5):
        assert fastensor.save(STATE, tmp_path / "x", backend=mine).backend == "direct", (
            "torch is for what others cannot"
        )
    assert fastensor.save({"w": torch.zeros(1)}, tmp_path / "x", backend=mine).backend == "numpy"  # by the rule


class BrokenReader(BufferedReader):
    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        raise KeyError("of another package")


class Broken(NumpyBackend):
    """A backend of another package, in a bad state."""

    name = "broken"

    def __init__(self, raises_in: str, error: Exception) -> None:
        self._raises_in = raises_in
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_raises_in"):
            raise object.__getattribute__(self, "_error")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("error", [KeyError("of another package"), OSError(errno.EINVAL, "not so")])
@pytest.mark.parametrize("raises_in", ["why_unavailable", "can_write", "write", "open_reader"])
def test_a_backend_that_raises_loses_no_checkpoint(
    selector: Selector, tmp_path: Path, register: Any, raises_in: str, error: Exception
) -> None:
    register(Broken(raises_in, error))
    selector.paper = True  # so that it is tried
    writes = raises_in != "open_reader"
    for _ in range(15):
        assert not writes or fastensor.save(STATE, tmp_path / "x").backend != "broken"
        assert writes or fastensor.save(STATE, tmp_path / "x", backend="broken").backend == "broken"
        found, report = fastensor.load_with_report(tmp_path / "x")
        assert torch.equal(found["w"], STATE["w"])
        assert writes or report.backend != "broken"
    if raises_in in ("write", "open_reader"):
        assert selector.statistics().failed == 1
        asked = fastensor.save(STATE, tmp_path / "x", backend="broken")
        assert asked.backend == ("numpy" if writes else "broken")
        assert len(asked.fallbacks) == writes
    with AsyncWriter() as writer:
        for _ in range(9):
            assert writer.save(STATE, tmp_path / "x").result().backend != "broken" or not writes


def test_only_who_is_chosen_is_asked_and_left_out_without_a_word(
    selector: Selector, tmp_path: Path, register: Any, taken: dict[str, float]
) -> None:
    taken["direct"] = 2.0
    asked = []

    class Unavailable(NumpyBackend):
        name = "unavailable"

        def why_unavailable(self) -> str:
            asked.append(self.name)
            return "not today"

    register(Unavailable())
    assert {fastensor.save(STATE, tmp_path / "x").backend for _ in range(3)} == {"numpy"}
    assert not asked
    selector.paper = True  # so that all are tried
    reports = [fastensor.save(STATE, tmp_path / "x") for _ in range(4)]
    assert asked
    assert {report.backend for report in reports} == {"numpy", "direct"}
    assert not any(report.fallbacks for report in reports)
    assert selector.statistics().failed == 0


def test_a_backend_that_raises_while_it_reads_is_used_once(
    selector: Selector, tmp_path: Path, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken("", KeyError())
    monkeypatch.setattr(broken, "open_reader", lambda fd, nbytes, order: BrokenReader(fd))
    register(broken)
    selector.paper = True  # so that it is tried
    fastensor.save(STATE, tmp_path / "x", backend="numpy")
    failures = []
    for _ in range(15):
        try:
            fastensor.load(tmp_path / "x")
        except fastensor.CheckpointReadError as error:
            failures.append(str(error))
    (message,) = failures
    assert "the backend broken has raised KeyError('of another package')" in message
    assert str(tmp_path / "x") in message


def test_what_all_backends_raise_is_raised(selector: Selector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the state that is to blame, or the machine."""

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("in the device's driver")

    for backend in (DirectBackend, NumpyBackend, TorchBackend):
        monkeypatch.setattr(backend, "write", fail)
    for backend in ("auto", "numpy"):
        with pytest.raises(ZeroDivisionError, match="the device's driver"):
            fastensor.save(STATE, tmp_path / "x", backend=backend)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_small_files_are_moved_by_the_rule_and_nothing_is_learned(tmp_path: Path, name: str) -> None:
    """Unless a selector was given: it decides, and learns, whatever the size."""
    small = {"w": torch.arange(100)}
    code = (
        "import sys, torch, fastensor\n"
        "saved = fastensor.save({'w': torch.arange(100)}, sys.argv[1])\n"
        "found, loaded = fastensor.load_with_report(sys.argv[1])\n"
        "print(saved.backend, saved.reason, loaded.backend, loaded.reason, 'fastensor.select.selector' in sys.modules)"
    )
    variables = {"FASTENSOR_DICTIONARIES": str(tmp_path / "dictionaries")}
    shown = run("-c", code, tmp_path / name, cold=True, **variables).stdout
    assert shown.strip() == "numpy by size numpy by size False"
    assert not (tmp_path / "dictionaries").exists()
    for given in (True, False):
        selector = Selector()
        fastensor.use_selector(None if given else selector)
        try:
            for _ in range(2):
                fastensor.save(small, tmp_path / name, backend=selector if given else "auto")
                fastensor.load(tmp_path / name, backend=selector if given else "auto")
        finally:
            fastensor.use_selector(None)
        found = selector.statistics()
        assert found.explored + found.exploited == 4


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_loads_to_the_host_are_by_the_rule_as_long_as_it_has_one_answer(tmp_path: Path, name: str) -> None:
    fastensor.save({"w": torch.zeros(2 << 20)}, tmp_path / name, backend="numpy")
    code = (
        "import sys, fastensor\n"
        "loaded = fastensor.load_with_report(sys.argv[1])[1]\n"
        "print(loaded.backend, loaded.reason, 'fastensor.select.selector' in sys.modules)"
    )
    variables = {"FASTENSOR_DICTIONARIES": str(tmp_path / "dictionaries")}
    assert run("-c", code, tmp_path / name, cold=True, **variables).stdout.strip() == "numpy by size False"
    assert not (tmp_path / "dictionaries").exists()


def test_neither_a_name_nor_a_selector(tmp_path: Path) -> None:
    for call in (lambda: fastensor.save({}, tmp_path / "x", backend=3), lambda: fastensor.load("x", backend=None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"a name or a fastensor\.Selector"):
            call()


def test_selectors_are_copied_with_what_they_know() -> None:
    learned = Selector(explore=True, mode="read", paper=True)
    learned.record(NBYTES, WRITE, "torch", 1.0)
    copy = pickle.loads(pickle.dumps(learned))
    assert (copy.mode, copy.paper) == ("read", True)
    assert copy.dictionary.to_json() == learned.dictionary.to_json()
    copy.record(NBYTES, WRITE, "numpy", 1.0)
    assert copy.dictionary.to_json() != learned.dictionary.to_json()


PROGRAM = """
import itertools, sys, time, torch, fastensor
time.perf_counter = itertools.count().__next__  # every transfer takes equally long
path, uses, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state = {"w": torch.arange(600_000 if what == "tensors" else 4_200_000)}  # a smaller one the rule would save
store = fastensor.TensorStore(path + ".tensors")
for _ in range(uses):
    if what == "tensors":
        store.get(store.put(state["w"]))
    else:
        fastensor.save(state, path)
        fastensor.save(state, path)
statistics = fastensor.current_selector(path, of=what).statistics()
print(statistics.explored, statistics.exploited)
"""


def uses_of(folder: Path, uses: int, what: str, *, explore: str) -> list[int]:
    variables = {"FASTENSOR_DICTIONARIES": str(folder / "dictionaries"), "FASTENSOR_EXPLORE": explore}
    return [int(word) for word in run("-c", PROGRAM, folder / "x.ckpt", uses, what, **variables).stdout.split()]


@pytest.mark.parametrize("what", ["files", "tensors"])
def test_the_next_run_starts_with_what_the_last_one_has_learned(tmp_path: Path, what: Kind) -> None:
    explored, exploited = uses_of(tmp_path, 40, what, explore="1")
    assert explored >= 1
    assert explored + exploited == 80
    (file,) = (tmp_path / "dictionaries").glob("*.json")
    assert file.name == file_for(tmp_path, of=what).path.name
    Dictionary.from_json(file.read_text())
    counts = [timing.count for _, entry in Dictionary.from_json(file.read_text()) for timing in entry.timings.values()]
    assert sum(counts) == 80
    uses_of(tmp_path, 2, what, explore="1")
    counts = [timing.count for _, entry in Dictionary.from_json(file.read_text()) for timing in entry.timings.values()]
    assert sum(counts) == 84
    before = file.read_bytes()
    assert uses_of(tmp_path, 3, what, explore="0")[0] == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("value", "explores"),
    [
        *[(value, True) for value in ("", "1", "true", "YES", "On")],
        *[(value, False) for value in ("0", "false", "No", "OFF", "False")],
    ],
)
def test_yes_and_no_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, explores: bool
) -> None:
    monkeypatch.setenv("FASTENSOR_EXPLORE", value)
    monkeypatch.setattr(current, "_made", {})
    assert fastensor.current_selector(tmp_path).explore is explores


def test_neither_yes_nor_no_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTENSOR_EXPLORE", "junk")
    monkeypatch.setattr(current, "_made", {})
    for use in (fastensor.current_selector, lambda path: fastensor.save({"a": 1}, path / "x.ckpt")):
        with pytest.raises(ValueError, match="FASTENSOR_EXPLORE is 'junk'; expected one of 1, true, yes, on"):
            use(tmp_path)
    assert not list(tmp_path.iterdir())
