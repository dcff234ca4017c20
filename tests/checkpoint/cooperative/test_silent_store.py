"""The store of a job does not answer any more, as when a cable is cut: whoever asks it raises in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from threading import Lock

import pytest
import torch
import torch.distributed as dist
from checkpoints import join
from programs import Program, run_ranks, wait_until_stopped

import fastensor
from fastensor.checkpoint import agreement, cooperative
from fastensor.data import Staggering
from fastensor.data.staggering import Tokens
from fastensor.files import job_store
from fastensor.files.job_store import call_within
from fastensor.select import share
from fastensor.select.selector import Selector
from fastensor.select.share import Sharing
from fastensor_accelerate import saving as of_accelerate

SHORT_SECONDS = 0.5
PATIENCE_SECONDS = 60.0
STORE = """
import sys
import torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store() -> Iterator[tuple[int, int]]:
    """The port of a store, and its process."""
    with Program("-c", STORE) as program:
        yield int(program.stdout.readline()), program.pid
        program.send_signal(signal.SIGCONT)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


@contextmanager
def silent(pid: int) -> Iterator[None]:
    """The store does not answer in the block, which must not take long."""
    stop(pid)
    started = time.monotonic()
    try:
        yield
        assert time.monotonic() - started < PATIENCE_SECONDS
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_call_that_does_not_return_is_left_alone() -> None:
    with Program("-c", STORE) as program:
        store = dist.TCPStore("127.0.0.1", int(program.stdout.readline()), is_master=False, wait_for_workers=False)
        assert call_within(PATIENCE_SECONDS, store.add, "x", 1) == 1
        with silent(program.pid), pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
            call_within(0.1, store.add, "x", 1)
        assert call_within(PATIENCE_SECONDS, store.add, "x", 0) == 2, "the call that was left has taken effect"
    with pytest.raises(ZeroDivisionError):
        call_within(PATIENCE_SECONDS, lambda: 1 / 0)


class WaitedFor(Future[int]):
    """A result that is waited for, even if its call has returned already."""

    def result(self, timeout: float | None = None) -> int:
        Lock().acquire(timeout=-1 if timeout is None else timeout)  # an error if nobody can wait so long
        return super().result(timeout)


@pytest.mark.parametrize("seconds", [float("inf"), 1e10])
def test_a_call_may_take_for_ever(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "Future", WaitedFor)
    assert call_within(seconds, int) == 0


class ReturnedLate(Future[str]):
    """The call returns after the wait for it is over, and before that is looked at."""

    def result(self, timeout: float | None = None) -> str:
        found = super().result()
        if timeout is not None:
            raise TimeoutError
        return found


def test_a_call_that_returns_as_the_wait_ends_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "Future", ReturnedLate)
    assert call_within(PATIENCE_SECONDS, lambda: "published") == "published"


def test_a_timeout_of_the_call_is_its_own() -> None:
    def call() -> None:
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match="of the call"):
        call_within(PATIENCE_SECONDS, call)


def run(function: Callable[[int, Path, int], None], folder: Path, store: tuple[int, int]) -> None:
    run_ranks(_start, 2, folder, store, function)


def _start(rank: int, folder: Path, store: tuple[int, int], function: Callable[[int, Path, int], None]) -> None:
    join(folder, rank, 2, dist.TCPStore("127.0.0.1", store[0], is_master=False, timeout=timedelta(seconds=300)))
    function(rank, folder, store[1])
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def silent_for_both(rank: int, pid: int) -> Iterator[None]:
    dist.barrier()
    if rank:
        dist.barrier()
        yield
        dist.barrier()
        return
    with silent(pid):
        dist.barrier()
        yield
        dist.barrier()


def test_ranks_that_save_together(tmp_path: Path, store: tuple[int, int]) -> None:
    run(_save_together, tmp_path, store)


def _save_together(rank: int, folder: Path, pid: int) -> None:
    path = folder / "x.ckpt"
    for step in range(2):
        with (
            silent_for_both(rank, pid),
            pytest.raises(fastensor.CheckpointWriteError, match=f"rank {rank} cannot reach the store.*no answer"),
        ):
            cooperative.save({"x": torch.zeros(3)}, path, timeout=SHORT_SECONDS)
        dist.barrier()
        cooperative.save({"step": step}, path)
        assert fastensor.load(path) == {"step": step}
    with silent_for_both(rank, pid), pytest.raises(fastensor.CheckpointReadError, match="cannot reach the store"):
        cooperative.load(path, timeout=SHORT_SECONDS)


def test_ranks_that_agree(tmp_path: Path, store: tuple[int, int]) -> None:
    run(_agree, tmp_path, store)


def _agree(rank: int, folder: Path, pid: int) -> None:
    agreement.PATIENCE = timedelta(seconds=SHORT_SECONDS)
    with silent_for_both(rank, pid):
        found = agreement.Agreement()
        for _ in range(2):
            with pytest.raises(fastensor.CheckpointWriteError, match="x was not saved: a process cannot be reached"):
                found.exchange(None, "x was not saved")
        found.end()


def test_an_agreement_that_has_ended(tmp_path: Path, store: tuple[int, int]) -> None:
    """An agreement that has ended waits for nobody, and does not talk in the script's own process group instead."""
    run(_end, tmp_path, store)


def _end(rank: int, folder: Path, pid: int) -> None:
    found = agreement.Agreement()
    found.exchange(None, "x was not saved")
    if rank == 0:
        found.end()
        agreement.PATIENCE = timedelta(seconds=SHORT_SECONDS)
    else:
        with pytest.raises(fastensor.CheckpointWriteError, match="x was not saved: a process cannot be reached"):
            found.exchange(None, "x was not saved")
    before = "this process has ended the agreement" if rank == 0 else ""
    with pytest.raises(fastensor.CheckpointWriteError, match=f"x was not saved: .* as before: {before}"):
        found.exchange(None, "x was not saved")
    with pytest.raises(fastensor.CheckpointWriteError, match=f"x was not saved: .* as before: {before}"):
        found.gather(None, "x was not saved")
    found.end()


def test_an_agreement_of_one_process_has_nothing_to_end() -> None:
    found = agreement.Agreement()
    found.end()
    found.exchange(None, "x was not saved")


def test_a_process_group_that_was_replaced(tmp_path: Path) -> None:
    """As by a script that destroys the group, and begins again."""
    run_ranks(_begin_again, 2, tmp_path)


def _begin_again(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    unused, used = agreement.Agreement(), agreement.Agreement()
    dist.destroy_process_group()
    (folder / "again").mkdir(exist_ok=True)
    join(folder / "again", rank, 2)
    unused.end()
    with (
        nullcontext()
        if torch.__version__ >= "2.14"  # whoever holds a group that was destroyed still reaches the others by it
        else pytest.raises(fastensor.CheckpointWriteError, match="x was not saved: a process cannot be reached")
    ):
        used.exchange(None, "x was not saved")
    used.end()
    new = agreement.Agreement()
    new.exchange(None, "x was not saved")
    new.end()
    dist.destroy_process_group()


def test_processes_of_accelerate(tmp_path: Path, store: tuple[int, int]) -> None:
    run(_call_save_state, tmp_path, store)


def _call_save_state(rank: int, folder: Path, pid: int) -> None:
    of_accelerate.PATIENCE = timedelta(seconds=SHORT_SECONDS)
    with silent_for_both(rank, pid), pytest.raises(fastensor.CheckpointWriteError, match="process cannot be reached"):
        of_accelerate.SavingProcesses().callers()


def test_ranks_that_share_timings(tmp_path: Path, store: tuple[int, int]) -> None:
    run(_share, tmp_path, store)


def _share(rank: int, folder: Path, pid: int) -> None:
    share._PATIENCE = timedelta(seconds=SHORT_SECONDS)
    with silent_for_both(rank, pid):
        sharing = Sharing(Selector(paper=True), "same")
    assert sharing.leader == rank, "it learns by itself"


@pytest.mark.parametrize("when", ["before", "while it is held"])
def test_processes_that_take_turns(store: tuple[int, int], when: str) -> None:
    port, pid = store
    tokens = Tokens(Staggering(store=f"127.0.0.1:{port}", timeout=SHORT_SECONDS / 2))
    started = time.monotonic()
    if when == "before":
        stop(pid)
    with pytest.raises(OSError, match="for staggering cannot be reached: no answer"), tokens.held():
        stop(pid)
    assert time.monotonic() - started < PATIENCE_SECONDS
    os.kill(pid, signal.SIGCONT)
    with tokens.held():
        pass
