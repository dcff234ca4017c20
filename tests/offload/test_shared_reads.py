"""Reads of one range by several threads: the pieces of what is needed first are read at the same time."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from fastensor.backends import direct, numpy
from fastensor.errors import BackendUnavailableError
from fastensor.offload import ActivationOffload, OffloadError, jobs, moving

PIECE_NBYTES = 8192


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "PIECE_NBYTES", PIECE_NBYTES)


class Saved:
    """A graph that needs one range, of a piece for each reader, which is on the disk."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.x = torch.randn(jobs.THREADS * PIECE_NBYTES // 4, requires_grad=True)
        with offload.step():
            self.loss = self.x.exp().sum()
        offload.settle()

    def check_backward(self) -> None:
        (found,) = torch.autograd.grad(self.loss, self.x, retain_graph=True)
        assert torch.equal(found, self.x.exp())


def reading(slots: type, before: Callable[[], None]) -> Any:
    """Call ``before`` in each read."""
    read = slots.read  # type: ignore[attr-defined]

    def patched(*arguments: Any) -> Any:
        before()
        return read(*arguments)

    return mock.patch.object(slots, "read", patched)


def test_all_threads_read_one_range_at_the_same_time(make: Any) -> None:
    offload = make(backend="numpy")
    saved = Saved(offload)
    all_there = threading.Barrier(jobs.THREADS)
    with reading(numpy.BufferedSlots, lambda: all_there.wait(30)):
        saved.check_backward()
    assert offload.statistics().read_bytes == 4 * len(saved.x)


def test_a_thread_that_begins_at_once_gets_as_many_helpers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread of a read has taken a piece before the other threads are asked to help."""
    offload = make(backend="numpy")
    saved = Saved(offload)
    begun, all_there = threading.Event(), threading.Barrier(jobs.THREADS)
    submit = jobs.submit

    def submit_and_wait(*arguments: Any) -> Any:
        submitted = submit(*arguments)
        assert begun.wait(30)
        return submitted

    def before_read() -> None:
        begun.set()
        all_there.wait(10)

    monkeypatch.setattr(jobs, "submit", submit_and_wait)
    with reading(numpy.BufferedSlots, before_read):
        saved.check_backward()


@pytest.mark.parametrize("number", range(1, jobs.THREADS + 1))
def test_one_of_the_threads_fails(make: Any, number: int) -> None:
    offload = make(backend="numpy")
    saved = Saved(offload)
    all_there = threading.Barrier(jobs.THREADS)

    def fail_once() -> None:
        if all_there.wait(30) + 1 == number:
            raise OSError(errno.EIO, "the disk is broken")

    with reading(numpy.BufferedSlots, fail_once), pytest.raises(OffloadError, match="the disk is broken"):
        saved.check_backward()
    assert not offload.statistics().read_bytes
    del saved
    gc.collect()  # tracebacks hold graphs
    offload.settle()
    assert offload.memory_usage()["on_ssd"] == 0
    Saved(offload).check_backward()


def test_direct_io_that_is_refused_in_all_threads(make: Any) -> None:
    def refuse() -> None:
        raise BackendUnavailableError("refused")

    offload = make(backend="direct")
    saved = Saved(offload)
    with reading(direct.DirectSlots, refuse):
        saved.check_backward()


def test_reads_that_close_cancels_are_waited_for_by_nobody(make: Any) -> None:
    """More ranges are needed than there are threads when the offload is closed: all who need one get an error."""
    offload = make(backend="numpy")
    graphs = [Saved(offload) for _ in range(jobs.THREADS + 3)]
    begun, go_on = threading.Semaphore(0), threading.Event()
    ends: list[str] = []

    def before_read() -> None:
        begun.release()
        assert go_on.wait(60)

    def need(graph: Saved) -> None:
        try:
            _ = graph.loss.grad_fn.next_functions[0][0]._saved_result  # type: ignore[union-attr]
        except OffloadError:
            ends.append("lost")
        else:
            ends.append("read")

    needing = [threading.Thread(target=need, args=[graph], daemon=True) for graph in graphs]
    shut_down = jobs.shut_down

    def cancel_and_go_on(pool: Any) -> None:
        pool.shutdown(wait=False, cancel_futures=True)
        if pool._thread_name_prefix.endswith("read"):
            go_on.set()
        shut_down(pool)

    with reading(numpy.BufferedSlots, before_read), mock.patch.object(jobs, "shut_down", cancel_and_go_on):
        for thread in needing:
            thread.start()
        for _ in range(jobs.THREADS):
            assert begun.acquire(timeout=60)
        closing = threading.Thread(target=offload.close, daemon=True)
        closing.start()
        for thread in (*needing, closing):
            thread.join(20)
        assert not any(thread.is_alive() for thread in (*needing, closing))
        offload.settle()
    assert len(ends) == len(graphs)
