"""The space of replaced files: freed by one thread, after the save has returned, and said."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fastensor
from fastensor.checkpoint.writing import freeing
from fastensor.checkpoint.writing.freeing import freeing_afterwards, wait_for_space
from fastensor.files import afterwards, posix

STATE = {"w": torch.zeros(1 << 20)}
NBYTES = 4 << 20


@contextmanager
def closing_blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Descriptors are closed when the event is set, or the block is left; the list names the closing threads."""
    may_close, threads = threading.Event(), []
    close = posix.close_read_only

    def block(fd: int) -> None:
        threads.append(threading.current_thread().name)
        assert may_close.wait(30)
        close(fd)

    wait_for_space()
    with monkeypatch.context() as patch:
        patch.setattr(freeing.posix, "close_read_only", block)
        try:
            yield may_close, threads
        finally:
            may_close.set()
            wait_for_space()


def test_a_save_says_what_it_has_left_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_space()  # for what other tests have left
    first = fastensor.save(STATE, tmp_path / "x")
    assert (first.freeing.nbytes, first.wait_seconds) == (0, pytest.approx(0, abs=0.1))
    ours = posix.close_read_only
    may_close = threading.Event()

    def close(fd: int) -> None:
        if threading.current_thread().name == "fastensor-afterwards":
            assert may_close.wait(30)
        ours(fd)

    monkeypatch.setattr(posix, "close_read_only", close)
    monkeypatch.setattr(freeing, "_FEW_NBYTES", NBYTES // 2)
    second = fastensor.save(STATE, tmp_path / "x")
    assert second.freeing.seconds is None
    assert NBYTES <= second.freeing.nbytes < 1.1 * NBYTES
    may_close.set()
    third = fastensor.save(STATE, tmp_path / "x")
    assert second.freeing.seconds is not None
    assert third.wait_seconds <= third.write_seconds
    wait_for_space()


@pytest.mark.parametrize(
    ("disk", "most", "waits"),
    [
        ("has room", 3 * NBYTES, []),
        ("has room", NBYTES // 2, [1, 2]),
        ("is full until it is freed", 3 * NBYTES, [1, 2]),
        ("cannot reserve", 3 * NBYTES, [1, 2]),
    ],
)
def test_a_small_save_waits_for_space_only_if_there_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str, most: int, waits: list[int]
) -> None:
    """The first save leaves nothing to be freed, the next ones a file each."""
    preallocate, waited = posix.preallocate, list[int]()

    def wait() -> None:
        waited.append(len(freeing._pending))

    def reserve(fd: int, nbytes: int) -> bool:
        if disk == "is full until it is freed" and len(freeing._pending) > len(waited):
            raise OSError(errno.EDQUOT, "the quota is used up")
        return preallocate(fd, nbytes) and disk != "cannot reserve"

    fastensor.save(STATE, tmp_path / "x")
    monkeypatch.setattr(freeing, "_FEW_NBYTES", most)
    with closing_blocked(monkeypatch) as (may_close, _):
        monkeypatch.setattr(freeing, "wait_for_space", wait)
        monkeypatch.setattr(posix, "preallocate", reserve)
        for _ in range(3):
            report = fastensor.save(STATE, tmp_path / "x")
            assert report.freeing.seconds is None
        may_close.set()
    assert waited == waits
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])


def test_whoever_waits_for_space_frees_what_the_thread_has_not_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be blocked by a disk that does not answer."""
    stuck, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        stuck.set()
        assert goes_on.wait(30)

    afterwards.do_afterwards(wait)
    assert stuck.wait(30)
    for _ in range(3):
        report = fastensor.save(STATE, tmp_path / "x")
    assert report.freeing.seconds is None
    wait_for_space()
    assert report.freeing.seconds is not None
    goes_on.set()


def test_one_thread_frees_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with closing_blocked(monkeypatch) as (may_close, threads):
        for number in range(5):
            path = tmp_path / str(number)
            path.write_bytes(bytes(1000))
            with freeing_afterwards(str(path)):
                path.unlink()
        assert threading.active_count() <= before + 1
        may_close.set()
        wait_for_space()
    assert len(threads) == 5


def test_a_file_with_other_names_or_none_leaves_nothing_to_be_done(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    os.link(path, tmp_path / "other")
    with freeing_afterwards(str(path)) as other_names:
        path.unlink()
    with freeing_afterwards(str(path)) as absent:
        pass
    assert other_names.nbytes == absent.nbytes == 0


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    monkeypatch.setattr(afterwards, "_worker", afterwards.Worker("test-afterwards"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with freeing_afterwards(str(path)) as found:
            path.unlink()
    assert found.seconds is not None


def test_a_job_that_fails_is_logged_and_the_next_one_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    assert afterwards.do_afterwards(lambda: [][0])
    assert afterwards.do_afterwards(done.set)
    assert done.wait(30)
    assert "IndexError" in caplog.text


def test_no_caller_waits_for_what_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    close, failed = posix.close_read_only, threading.Event()

    def fail(fd: int) -> None:
        close(fd)
        failed.set()
        raise MemoryError

    wait_for_space()
    with monkeypatch.context() as patch:
        patch.setattr(freeing.posix, "close_read_only", fail)
        with freeing_afterwards(str(path)) as found:
            path.unlink()
        assert failed.wait(30)
    wait_for_space()
    assert found.seconds is not None


def test_a_forked_child_has_a_thread_of_its_own(tmp_path: Path) -> None:
    assert afterwards.do_afterwards(lambda: None)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fastensor.save(STATE, tmp_path / "x")
            report = fastensor.save(STATE, tmp_path / "x")
            wait_for_space()
            status = 0 if report.freeing.seconds is not None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_several_threads_wait_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    with closing_blocked(monkeypatch) as (may_close, threads):
        with freeing_afterwards(str(path)) as found:
            path.unlink()
        first, second = (threading.Thread(target=wait_for_space) for _ in range(2))
        first.start()
        second.start()
        second.join(0.05)
        assert first.is_alive()
        assert second.is_alive()
        assert found.seconds is None
        may_close.set()
        first.join(30)
        second.join(30)
        assert found.seconds is not None
    assert len(threads) == 1


def test_a_forked_child_does_not_keep_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    with closing_blocked(monkeypatch):
        with freeing_afterwards(str(path)):
            path.unlink()
        pid = os.fork()
        if pid == 0:
            open_files = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
            os._exit(any(str(path) in one for one in open_files))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_signal_handler_may_leave_something_to_be_done_while_the_thread_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, done = threading.Thread.start, [threading.Event(), threading.Event()]
    worker = afterwards.Worker("test-afterwards")

    def interrupted(thread: threading.Thread) -> None:
        assert worker.give(done[0].set)  # as a handler would that saves
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert worker.give(done[1].set)
    assert all(one.wait(30) for one in done)


def test_reports_are_values(tmp_path: Path) -> None:
    report = fastensor.save(STATE, tmp_path / "x")
    assert hash(report) == hash(report)
