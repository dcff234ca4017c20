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
