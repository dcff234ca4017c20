"""Signal handlers that save while they interrupt a save: at once, whole, without waiting for what they interrupt."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run

import fastensor
from fastensor.backends.snapshot import Snapshot
from fastensor.checkpoint.asynchronous.for_adapters import in_turn
from fastensor.checkpoint.writing.outputs import Replacement
from fastensor.files import posix
from fastensor.files.new_directory import replace_link

PROGRAM = Path(__file__).with_name("interrupted.py")
TIMEOUT_SECONDS = 280
STATE = {"w": torch.ones(1000)}


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.torture)], ids=["some lines", "every line"])
@pytest.mark.parametrize("target", ["same", "other"])
@pytest.mark.parametrize("way", ["save", "writer"])
def test_a_handler_saves_at_any_line_of_a_save(tmp_path: Path, way: str, target: str, step: int) -> None:
    timeout = TIMEOUT_SECONDS if step > 1 else 3600
    done = run(PROGRAM, tmp_path, way, target, step, timeout=timeout)
    assert int(done.stdout.split()[-1]) > 10, "there was hardly anything to interrupt"


@pytest.fixture
def interrupted_sync(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The next sync of a file is interrupted by a signal whose handler is given."""
    sync, handlers = posix.sync_file, []

    def sync_interrupted(fd: int) -> None:
        if handlers:
            signal.signal(signal.SIGUSR1, handlers.pop())
            os.kill(os.getpid(), signal.SIGUSR1)
        sync(fd)

    monkeypatch.setattr(posix, "sync_file", sync_interrupted)
    previous = signal.getsignal(signal.SIGUSR1)
    yield handlers.append
    signal.signal(signal.SIGUSR1, previous)


def test_the_interrupted_save_goes_on(tmp_path: Path, interrupted_sync: Any) -> None:
    reports: list[fastensor.SaveReport] = []
    interrupted_sync(lambda number, frame: reports.append(fastensor.save({"of": "handler"}, tmp_path / "x")))
    assert fastensor.save(STATE, tmp_path / "x").durable
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])
    assert os.listdir(tmp_path) == ["x"]
    assert reports[0].durable
    assert "a signal handler" in reports[0].reason


IMPORTS_NOTHING = """
import sys, torch, fastensor

class Refuses:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith("fastensor"), name

fastensor.save
sys.meta_path.insert(0, Refuses())
assert fastensor.save({"w": torch.ones(3)}, sys.argv[1]).backend == "numpy"
"""


def test_a_save_of_a_handler_needs_no_import_that_it_may_have_interrupted(tmp_path: Path) -> None:
    """A load that is the first one imports the same backend."""
    subprocess.run([sys.executable, "-c", IMPORTS_NOTHING, str(tmp_path / "x.ckpt")], check=True, timeout=120)


def test_a_file_that_is_written_in_place_refuses_the_handler(tmp_path: Path, interrupted_sync: Any) -> None:
    refusals: list[str] = []

    def save(number: int, frame: Any) -> None:
        with pytest.raises(fastensor.CheckpointWriteError, match="or another save of this one") as refused:
            fastensor.save({"of": "handler"}, path)
        refusals.append(str(refused.value))

    interrupted_sync(save)
    with (tmp_path / "x").open("w+b") as file:
        path = f"/dev/fd/{file.fileno()}"
        fastensor.save(STATE, path)
    assert len(refusals) == 1
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])


def test_a_file_that_is_written_in_place_because_it_was_empty(tmp_path: Path) -> None:
    """The nested save replaces the file that the outer one is writing, which must not say that it has saved."""
    (tmp_path / "x").touch()

    def progress(done: int, total: int) -> None:
        if not reports:
            reports.append(fastensor.save({"of": "handler"}, tmp_path / "x"))

    reports: list[fastensor.SaveReport] = []
    with pytest.raises(fastensor.CheckpointWriteError, match=r"replaced or removed meanwhile.*taken its place"):
        fastensor.save(STATE, tmp_path / "x", progress=progress)
    assert fastensor.load(tmp_path / "x") == {"of": "handler"}


def test_a_file_that_is_written_in_place_and_removed(tmp_path: Path) -> None:
    """Nothing has taken its place, and the message does not say so."""
    (tmp_path / "x").touch()
    with pytest.raises(fastensor.CheckpointWriteError, match=r"what was written is gone; if anything has taken"):
        fastensor.save(STATE, tmp_path / "x", progress=lambda done, total: (tmp_path / "x").unlink(missing_ok=True))
    assert not (tmp_path / "x").exists()


def test_a_backend_that_was_asked_for_is_not_used_and_the_report_says_so(tmp_path: Path, interrupted_sync: Any) -> None:
    reports: list[fastensor.SaveReport] = []
    interrupted_sync(lambda number, frame: reports.append(fastensor.save(STATE, tmp_path / "y", backend="direct")))
    fastensor.save(STATE, tmp_path / "x")
    assert [fallback.backend for fallback in reports[0].fallbacks] == ["direct"]


def test_a_handler_that_interrupts_something_else_saves_as_usual(tmp_path: Path) -> None:
    reports: list[fastensor.SaveReport] = []
    previous = signal.signal(
        signal.SIGUSR1, lambda number, frame: reports.append(fastensor.save(STATE, tmp_path / "x"))
    )
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)
    assert "a signal handler" not in reports[0].reason


def test_a_nested_save_that_fails_replaces_nothing(
    tmp_path: Path, interrupted_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastensor.save({"before": "all"}, tmp_path / "x")
    failures: list[Exception] = []

    def save_and_fail(number: int, frame: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(posix, "sync_file", fail)
            try:
                fastensor.save({"of": "handler"}, tmp_path / "x")
            except fastensor.CheckpointWriteError as error:
                failures.append(error)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "injected")

    interrupted_sync(save_and_fail)
    assert fastensor.save(STATE, tmp_path / "x").durable
    assert len(failures) == 1
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])


def test_an_asynchronous_save_to_the_same_path_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler interrupts the copying of the state."""
    stage = Snapshot.stage

    def interrupted(snapshot: Snapshot) -> None:
        assert fastensor.save({"of": "handler"}, tmp_path / "x").durable
        stage(snapshot)

    monkeypatch.setattr(Snapshot, "stage", interrupted)
    with fastensor.AsyncWriter() as writer:
        handle = writer.save(STATE, tmp_path / "x")
        with pytest.raises(fastensor.SaveDroppedError, match="a callback has saved to the same path"):
            handle.result()
        assert handle.stage == "replaced"
    assert fastensor.load(tmp_path / "x") == {"of": "handler"}
    assert os.listdir(tmp_path) == ["x"]


def _save_nested(path: Path) -> None:
    """Save to the path while another save is written. Nothing is synced: the gate may be closed."""

    def progress(done: int, total: int) -> None:
        if not reports:
            reports.append(fastensor.save({"of": "handler"}, path, durable=False))

    reports: list[fastensor.SaveReport] = []
    fastensor.save(STATE, path.with_name("z"), durable=False, progress=progress)
    assert "a signal handler" in reports[0].reason


@pytest.mark.parametrize("step", ["removal", "link"])
def test_a_pending_step_leaves_what_a_handler_has_saved(
    tmp_path: Path, gate: Any, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    fastensor.save(STATE, tmp_path / "x")
    gate.close()
    with fastensor.AsyncWriter() as writer:
        writer.save(STATE, tmp_path / "y")
        if step == "removal":
            writer.remove(tmp_path / "x")
        else:
            link = partial(replace_link, str(tmp_path / "y"), str(tmp_path / "x"))
            in_turn(writer, link, str(tmp_path / "x"), "linking x to y", at_end=lambda: None)
        _save_nested(tmp_path / "x")
        gate.open()
    assert fastensor.load(tmp_path / "x") == {"of": "handler"}
    assert "has saved to the same path" in caplog.text


def test_pending_saves_are_dropped_before_a_nested_save_replaces_the_file(
    tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, ended = Replacement.replace, threading.Event()

    def replace_and_wait(output: Replacement, **options: Any) -> Any:
        """A thread that is slow from here on lets the writer's thread end the pending save."""
        freeing = replace(output, **options)
        if output.path == str(tmp_path / "x"):
            gate.open()
            assert ended.wait(60)
        return freeing

    gate.close()
    with fastensor.AsyncWriter() as writer:
        handle = writer.save(STATE, tmp_path / "x")
        handle.add_done_callback(lambda _: ended.set())
        monkeypatch.setattr(Replacement, "replace", replace_and_wait)
        _save_nested(tmp_path / "x")
        with pytest.raises(fastensor.SaveDroppedError):
            handle.result()
    assert fastensor.load(tmp_path / "x") == {"of": "handler"}


def test_a_writer_that_a_callback_closes_is_waited_for(tmp_path: Path, gate: Any) -> None:
    gate.close()
    with fastensor.AsyncWriter() as writer:
        first, second = (writer.save(STATE, tmp_path / name) for name in ("x", "y"))
        first.add_done_callback(lambda handle: writer.close())
        gate.open()
    assert first.done()
    assert second.done()
    assert second.result().durable


def test_a_callback_cannot_wait_for_another_writer(tmp_path: Path, gate: Any) -> None:
    refusals: list[str] = []

    def wait(handle: Any) -> None:
        try:
            other.wait()
        except RuntimeError as error:
            refusals.append(str(error))

    with fastensor.AsyncWriter() as writer, fastensor.AsyncWriter() as other:
        gate.close()
        first = writer.save(STATE, tmp_path / "x")
        other.save(STATE, tmp_path / "y")
        first.add_done_callback(wait)
        gate.open()
        writer.wait()
    assert "nor can a callback for another writer" in refusals[0]
