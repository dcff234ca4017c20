"""Failures are raised once, by the first call that can raise them, and saves work again when their cause is gone."""

from __future__ import annotations

import ctypes
import errno
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disks import FullDisk, assert_only

import fastensor
from fastensor import AsyncWriter, CheckpointWriteError, SaveDroppedError
from fastensor.backends import buffers, snapshot
from fastensor.checkpoint import ordering
from fastensor.checkpoint.asynchronous import exits, work
from fastensor.checkpoint.asynchronous import writer as writer_module
from fastensor.checkpoint.writing import outputs, save_transaction, target
from fastensor.errors import LayoutError
from fastensor.files import afterwards, posix
from fastensor.stitch import torch_zip

OLD, NEW = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fastensor.save(OLD, tmp_path / "x")
    return tmp_path / "x"


@pytest.fixture
def writer(path: Path, disk: FullDisk) -> AsyncWriter:
    """One whose save to the path has just failed."""
    writer = AsyncWriter()
    disk.full = True
    handle = writer.save(NEW, path)
    assert writer._drain(60)
    assert handle.stage == "failed"
    disk.full = False
    return writer


def assert_is_of_save(error: BaseException, path: Path) -> None:
    assert isinstance(error, CheckpointWriteError)
    assert (error.errno, error.filename) == (errno.ENOSPC, str(path))
    assert "what was there before is kept" in str(error)
    assert error.__notes__ == [f"in an asynchronous save to {path}, stage 'sync'"]


CALLS = {
    "save": lambda writer, path: writer.save(NEW, path),
    "remove": lambda writer, path: writer.remove(path),
    "wait": lambda writer, path: writer.wait(),
    "close": lambda writer, path: writer.close(),
    "load": lambda writer, path: fastensor.load(path),
    "open": lambda writer, path: fastensor.open(path).__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_raises_and_does_nothing(writer: AsyncWriter, path: Path, call: str) -> None:
    with pytest.raises(CheckpointWriteError) as caught:
        CALLS[call](writer, path)
    assert_is_of_save(caught.value, path)
    assert_only(path, OLD)
    writer.wait()
    writer.close()
    assert not ordering._pending


def test_it_works_again_afterwards(writer: AsyncWriter, path: Path) -> None:
    with pytest.raises(CheckpointWriteError):
        writer.save(NEW, path)
    assert writer.save(NEW, path).result().durable
    assert torch.equal(fastensor.load(path)["w"], NEW["w"])
    assert (writer.statistics().failed, writer.statistics().durable) == (1, 1)


def test_every_call_of_save_counts_as_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that wrote by themselves, and those that failed."""
    now = iter(range(1000))
    with AsyncWriter() as writer:
        monkeypatch.setattr(writer_module.time, "perf_counter", lambda: next(now))
        with pytest.raises(CheckpointWriteError):
            writer.save(OLD, tmp_path / "no" / "x")
        first = writer.statistics().stall_seconds
        assert first >= 1
        monkeypatch.setattr(exits, "_exiting", True)
        writer.save(OLD, tmp_path / "x")
        assert writer.statistics().stall_seconds >= first + 1


def test_what_a_handle_has_raised_is_not_raised_again(path: Path, disk: FullDisk) -> None:
    with AsyncWriter() as writer:
        disk.full = True
        handle = writer.save(NEW, path)
        with pytest.raises(CheckpointWriteError) as caught:
            handle.result()
        assert_is_of_save(caught.value, path)
        assert handle.exception() is caught.value
        disk.full = False
        assert_only(path, OLD)
        writer.wait()


def test_several_failures_are_raised_together_at_the_end(path: Path, gate: Any) -> None:
    writer = AsyncWriter()
    gate.close()
    for _ in range(3):
        writer.save(NEW, path)
    path.unlink()
    path.mkdir()
    gate.open()
    with pytest.raises(CheckpointWriteError, match="Is a directory") as caught:
        writer.close()
    assert [note.split("(")[0] for note in caught.value.__notes__[1:]] == ["and then: CheckpointWriteError"] * 2
    writer.close()


def test_a_failure_does_not_hide_an_exception(path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture) -> None:
    disk.full = True

    def program() -> None:
        with AsyncWriter() as writer:
            writer.save(NEW, path)
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        program()
    assert "No space left" in caplog.text
    assert_only(path, OLD)


def test_a_writer_that_goes_away_logs_failures_that_were_not_raised(
    writer: AsyncWriter, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(path)
    finalizer = writer._finalizer
    del writer
    gc.collect()
    finalizer()  # pytest still holds the fixture
    assert "an asynchronous save had failed: [Errno 28] the save failed" in caplog.text
    assert name in caplog.text


def test_a_writer_with_a_failure_that_was_not_raised_is_not_kept_alive(
    path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AsyncWriter()
    disk.full = True
    handle = writer.save(NEW, path)
    assert writer._drain(60)
    alive = weakref.ref(writer)
    del writer
    gc.collect()
    assert alive() is None
    assert "an asynchronous save had failed" in caplog.text
    assert isinstance(handle.exception(), CheckpointWriteError)


def test_a_failure_is_raised_when_closing_takes_too_long(path: Path, gate: Any) -> None:
    writer = AsyncWriter()
    gate.close()
    handle = writer.save(NEW, path)
    gate.wait_until_reached()
    _fail_a_step(writer, path)
    with pytest.raises(TimeoutError, match="given up after 0 s") as caught:
        writer.close(timeout=0)
    assert caught.value.__notes__ == ["and before: OSError(28, 'full')"]
    gate.open()
    assert isinstance(handle.exception(60), SaveDroppedError)


def _fail_a_step(writer: AsyncWriter, path: Path) -> None:
    """One that fails while the writer is being closed."""
    step = work.Step(str(path), lambda: None, "x", leaves_file=False, after=None, queue=writer._worker, keeps=None)
    step.accept()
    assert step.claim()
    step.end(OSError(errno.ENOSPC, "full"))
    assert not step.drop("cancelled", "it is over")


@pytest.mark.parametrize("planned", [True, False], ids=["pickling fails", "torch writes it"])
def test_a_save_that_is_over_keeps_no_state_alive(path: Path, monkeypatch: pytest.MonkeyPatch, planned: bool) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    writer = AsyncWriter()
    gc.collect()
    gc.disable()
    try:
        if planned:
            with pytest.raises(ValueError, match="no"):
                writer.save([tensor, Unpicklable()], path)
        else:
            monkeypatch.setattr(torch_zip, "small_records_of_torch", mock.Mock(side_effect=LayoutError))
            handle = writer.save([tensor], path)
            assert handle.result().backend == "torch"
        del tensor
        if planned:
            gc.collect()  # the traceback of pytest.raises
        assert alive() is None
    finally:
        gc.enable()
        writer.close()


def test_closing_in_a_signal_handler_leaves_the_save_that_it_interrupts(path: Path) -> None:
    writer = AsyncWriter()
    refusals: list[Exception] = []
    stage = snapshot.Snapshot.stage

    def stage_and_be_interrupted(self: Any) -> None:
        try:
            writer.close()
        except RuntimeError as error:
            refusals.append(error)
        stage(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot.Snapshot, "stage", stage_and_be_interrupted)
        handle = writer.save(NEW, path)
    assert "a signal handler cannot wait" in str(refusals)
    assert handle.result().durable
    writer.close()
    assert torch.equal(fastensor.load(path)["w"], NEW["w"])


def test_the_rate_does_not_count_while_a_save_waits_for_memory(path: Path) -> None:
    state = {"w": torch.zeros(3 << 20)}  # three blocks, and there is one
    with AsyncWriter(staging_bytes=4 << 20, max_bytes_per_second=1.0) as writer:
        assert writer.save(state, path).result(60).durable


def test_a_failure_in_a_streaming_save_is_raised_by_that_save(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with AsyncWriter(staging_bytes=4 << 20) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(posix, "write_fully", refuse)
            with pytest.raises(CheckpointWriteError, match="the disk is gone"):
                writer.save({"w": torch.zeros(5 << 20)}, path)
        writer.wait()
        assert writer.save(NEW, path).result().durable


def test_the_thread_is_killed(path: Path, gate: Any) -> None:
    """By an exception that comes from outside, at any line of it."""
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(NEW, path)
        other = writer.save(NEW, path)
        gate.wait_until_reached()
        thread = writer._worker._thread
        assert thread is not None
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        gate.open()
        with pytest.raises(CheckpointWriteError, match=r"stopped in stage 'sync' \(SystemExit") as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, SystemExit)
        assert other.result().durable
        assert writer.save(OLD, path).result().durable
    assert_only(path, OLD)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_dies_between_two_saves(path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        first = writer.save(NEW, path)
        gate.wait_until_reached()

        def die(report: Any) -> None:
            raise SystemExit

        first.add_done_callback(die)
        second = writer.save(OLD, path)
        gate.open()
        assert first.result().durable
        assert second.result().durable
        writer.wait(60)


def test_cancelling(path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        running = writer.save(NEW, path)
        queued = writer.save(NEW, path)
        gate.wait_until_reached()
        assert queued.cancel()
        assert queued.done()
        assert (queued.stage, running.stage) == ("cancelled", "writing")
        with pytest.raises(TimeoutError, match=r"not done after 0\.01 s, but writing; it goes on"):
            running.result(0.01)
        assert running.cancel()
        gate.open()
        for handle in (running, queued):
            with pytest.raises(SaveDroppedError, match="cancelled; what was there before is kept"):
                handle.result()
        writer.wait()
        assert_only(path, OLD)
        done = writer.save(NEW, path)
        done.result()
        assert not done.cancel()
        assert writer.statistics().cancelled == 2
    assert done.stage == "durable"
    assert list(done.stages) == ["staging", "queued", "writing", "durable"]
    assert sorted(done.stages.values()) == list(done.stages.values())


def test_cancelling_while_it_is_staged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It streams, and the disk does not answer."""
    reached, go = threading.Event(), threading.Event()
    write = posix.write_fully

    def write_later(*arguments: Any) -> None:
        reached.set()
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(posix, "write_fully", write_later)
    handles: list[Any] = []
    with AsyncWriter(staging_bytes=4 << 20) as writer:
        thread = threading.Thread(target=lambda: handles.append(writer.save({"w": torch.zeros(5 << 20)}, path)))
        thread.start()
        assert reached.wait(60)
        (save,) = writer._pending_saves()
        assert save.stage == "writing"
        assert save.drop("cancelled", "the save was cancelled")
        go.set()
        thread.join(60)
        assert handles[0].exception() is not None
    assert_only(path, OLD)


def test_waiting_takes_too_long(path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(NEW, path)
        with pytest.raises(TimeoutError, match=rf"not done after 0.01 s: 1 checkpoint .*{path}.*; it goes on"):
            writer.wait(0.01)
        gate.open()
        assert handle.result().durable


def test_closing_takes_too_long(path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_GRACE_SECONDS", 0.0)
    writer = AsyncWriter()
    gate.close()
    running, queued = writer.save(NEW, path), writer.save(NEW, path)
    gate.wait_until_reached()
    with pytest.raises(TimeoutError, match=r"given up after 0\.01 s: 2 checkpoints"):
        writer.close(0.01)
    gate.open()
    for handle in (running, queued):
        with pytest.raises(SaveDroppedError, match="after the writer was closed"):
            handle.result()
    assert_only(path, OLD)
    with pytest.raises(RuntimeError, match="closed"):
        writer.save(NEW, path)
    writer.close()


def test_long_waits_say_so(
    path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "_QUIET_SECONDS", 0.01)
    with AsyncWriter() as writer:
        gate.close()
        writer.save(NEW, path)
        with pytest.raises(TimeoutError):
            writer.wait(0.1)
        gate.open()
    assert "waiting for 1 checkpoint of which 0 B are to be written" in caplog.text
    assert "s so far" in caplog.text


def test_callbacks(path: Path, gate: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(handle: Any) -> None:
        raise ValueError("a callback's own trouble")

    called: list[Any] = []
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(NEW, path)
        for callback in (fail, called.append):
            handle.add_done_callback(callback)
        assert not called
        gate.open()
    handle.add_done_callback(called.append)
    assert called == [handle, handle]
    assert "a callback's own trouble" in caplog.text


def test_a_save_that_fails_while_the_old_file_is_to_be_removed(
    path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure was not known when the removal asked for it, and it is not pending any more a moment later."""
    raise_failure = AsyncWriter._raise_failure

    def look_early(self: AsyncWriter) -> None:
        raise_failure(self)
        gate.open()
        assert handle._save.future.exception(60) is not None

    other = path.with_name("y")
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(NEW, other)
        gate.wait_until_reached()
        other.mkdir()
        monkeypatch.setattr(AsyncWriter, "_raise_failure", look_early)
        writer.remove(path)
        monkeypatch.undo()
        assert isinstance(handle.exception(), CheckpointWriteError)
        writer.wait()
    other.rmdir()
    assert_only(path, OLD)


def test_a_callback_may_use_the_writer(path: Path) -> None:
    seen: list[Any] = []
    used = threading.Event()

    def use(handle: Any) -> None:
        seen.append(fastensor.verify(handle.path).complete)
        seen.append(handle.result().durable)
        writer.wait()
        seen.append(writer.save(OLD, path).done())
        used.set()

    with AsyncWriter(staging_bytes=4 << 20) as writer:
        handle = writer.save(NEW, path)
        handle.add_done_callback(use)
        assert used.wait(60)
    assert seen == [True, True, True]
    assert_only(path, OLD)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_kills_the_thread_turns_no_failure_into_success(path: Path, gate: Any) -> None:
    def give_up(handle: Any) -> None:
        raise SystemExit

    other = path.with_name("y")
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(NEW, other)
        handle.add_done_callback(give_up)
        writer.remove(path)
        gate.wait_until_reached()
        other.mkdir()
        gate.open()
        assert isinstance(handle.exception(), CheckpointWriteError)
        writer.wait()
    other.rmdir()
    assert_only(path, OLD)


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_nothing_refers_to_what_was_saved(tmp_path: Path, gate: Any, name: str) -> None:
    tensor = torch.zeros(1000)
    alive = weakref.ref(tensor)
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save({"w": tensor}, tmp_path / name)
        del tensor
        gc.collect()
        assert alive() is None
        gate.open()
        assert handle.result().durable


OWN_FILES = {
    module.__file__
    for module in (afterwards, buffers, ordering, outputs, save_transaction, snapshot, target, work, writer_module)
}
OF_THREADS = ("start", "wait", "__init__", "_set_ident")


def interrupt_after_call(number: int) -> Any:
    """For ``sys.setprofile``: where Python looks for signals, in the functions that a save consists of."""
    calls = 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        own = file in OWN_FILES or (file == threading.__file__ and name in OF_THREADS)
        if own and event in ("c_return", "call") and not _is_of_others(frame):
            calls += 1
            if calls == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("action", ["save", "remove"])
def test_after_an_interrupt_no_caller_waits_for_ever(tmp_path: Path, gate: Any, action: str) -> None:
    for number in range(1, 400):
        folder = tmp_path / str(number)
        folder.mkdir()
        fastensor.save(OLD, folder / "old")
        with AsyncWriter() as writer:
            if action == "remove":
                gate.close()  # it is still pending when the other file is removed
                writer.save(NEW, folder / "new")
            interrupted = False
            gc.disable()  # what it calls is no part of this
            sys.setprofile(interrupt_after_call(number))
            try:
                if action == "save":
                    writer.save(NEW, folder / "new")
                else:
                    writer.remove(folder / "old")
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
                gc.enable()
                gate.open()
            writer.wait(60)
            assert not ordering._pending
        if not interrupted:
            break
    assert number > 20
    assert not interrupted


def _is_of_others(frame: Any) -> bool:
    """Whether a call is inside of a finalizer, where an interrupt would be ignored, or of what other saves need."""
    while frame is not None:
        if frame.f_code.co_name in ("_let_go", "_release_all", "places_behind"):
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("staging_bytes", [None, 4 << 20])
def test_an_interrupt_at_any_moment_of_a_save(path: Path, staging_bytes: int | None) -> None:
    for number in range(1, 400):
        writer = AsyncWriter(staging_bytes=staging_bytes)
        interrupted = False
        gc.disable()  # what it calls is no part of this
        sys.setprofile(interrupt_after_call(number))
        try:
            writer.save(NEW, path)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
            gc.enable()
        assert writer.save(OLD, path).result(60).durable
        writer.close(60)
        assert_only(path, OLD)
        if not interrupted:
            break
    assert number > 50
    assert not interrupted
