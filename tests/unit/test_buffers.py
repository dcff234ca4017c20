"""The buffer pool: what it lends, keeps and forgets."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch

from fastensor.backends import buffers
from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES, Buffer, BufferPool, map_buffers


def no_waiting() -> AbstractContextManager[None]:
    raise AssertionError("a buffer is idle")


def test_a_pool_never_lends_more_than_it_has() -> None:
    pool = BufferPool(lambda: 2 * BUFFER_NBYTES + 7)
    pool.reserve(9 * BUFFER_NBYTES)
    held: list[Buffer] = []
    first = pool.wait_and_take(held, while_waiting=no_waiting, stopped=lambda: False)
    second = pool.take(held)
    assert first is not None
    assert held == [first, second]
    with pytest.raises(MemoryError, match="lent"):
        pool.take(held)
    waits: list[bool] = []
    assert pool.wait_and_take(held, while_waiting=lambda: nullcontext(waits.append(True)), stopped=lambda: True) is None
    assert waits == [True]
    pool.give(first)
    assert pool.wait_and_take(held, while_waiting=no_waiting, stopped=lambda: False) is first
    assert (pool.nbytes, pool.free_nbytes, pool.peak_nbytes) == (2 * BUFFER_NBYTES, 0, 2 * BUFFER_NBYTES)
    pool.close()
    pool.give(second)
    assert pool.nbytes == BUFFER_NBYTES
    for take in (pool.take, lambda held: pool.wait_and_take(held, while_waiting=nullcontext, stopped=lambda: False)):
        with pytest.raises(RuntimeError, match="released"):
            take(held)


def test_more_memory_than_there_are_addresses() -> None:
    with pytest.raises(MemoryError, match="staging"):
        BufferPool(lambda: 1 << 63).reserve(1 << 62)


def test_a_pool_grows_as_needed_and_asks_for_its_limit_once() -> None:
    asked = []
    pool = BufferPool(lambda: asked.append(True) or 3 * BUFFER_NBYTES)  # type: ignore[func-returns-value]
    assert (pool.nbytes, asked) == (0, [])
    for wanted, found in ((2 * BUFFER_NBYTES - 5, 2), (1, 2), (2 * BUFFER_NBYTES + 1, 3), (4 * BUFFER_NBYTES, 3)):
        pool.reserve(wanted)
        assert pool.nbytes == found * BUFFER_NBYTES
    assert len(asked) == 1
    assert pool.has_room(100 * BUFFER_NBYTES)


def test_idle_buffers_are_touched_and_lent_ones_left_alone() -> None:
    pool = BufferPool(lambda: 3 * BUFFER_NBYTES)
    pool.reserve(3 * BUFFER_NBYTES)
    held: list[Buffer] = []
    lent = pool.take(held)
    pool.touch_idle()
    assert pool.free_nbytes == 2 * BUFFER_NBYTES
    assert [pool.take(held).is_touched, pool.take(held).is_touched, lent.is_touched] == [True, True, False]
    assert len({id(buffer) for buffer in held}) == 3
    pool.close()
    for buffer in held:
        pool.give(buffer)
    assert pool.nbytes == 0


@pytest.mark.parametrize("limit", [None, lambda: 3 * BUFFER_NBYTES])
def test_a_dropped_pool_unpins_its_memory(monkeypatch: pytest.MonkeyPatch, limit: None) -> None:
    released: list[Buffer] = []
    monkeypatch.setattr(Buffer, "release", lambda self: released.append(self))
    pool = BufferPool(limit)
    if limit is None:
        with pool.lending() as held:
            taken = [pool.take(held) for _ in range(3)]
        del taken
    else:
        pool.reserve(3 * BUFFER_NBYTES)
    del pool
    gc.collect()
    assert len(released) == 3


def test_a_pool_without_a_limit_keeps_what_one_transfer_needs_and_lends_it_again() -> None:
    pool = BufferPool()
    with pool.lending() as held:
        lent = [pool.take(held) for _ in range(BUFFER_COUNT + 3)]
        assert len({buffer.address for buffer in lent}) == BUFFER_COUNT + 3
    assert pool.free_nbytes == BUFFER_COUNT * BUFFER_NBYTES
    with pool.lending() as held:
        assert {pool.take(held) for _ in range(BUFFER_COUNT)} < set(lent)
    pool.close()
    assert pool.free_nbytes == 0


def test_a_pool_without_a_limit_takes_no_lock() -> None:
    """A signal handler may save while another thread, or the code that it interrupts, is in the pool."""
    pool = BufferPool()
    with mock.patch.object(pool, "_changed", None), pool.lending() as held:
        pool.give(map_buffers(1)[0])
        pool.take(held)
        pool.take(held)


def test_buffers_stay_with_their_process() -> None:
    """A forked child sees none of the bytes, changes none, and neither lends, frees nor unpins the parent's buffers."""
    limited, unlimited = BufferPool(lambda: 2 * BUFFER_NBYTES), BufferPool()
    limited.reserve(2 * BUFFER_NBYTES)
    with unlimited.lending() as held:
        unlimited.take(held)
    with limited.lending() as held:
        buffer = limited.take(held)
        assert buffer.address % 4096 == 0
        buffer.array[0] = 7
        buffer._pinned_for = torch.device("cuda")  # in the child, CUDA must not be asked
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                seen = int(buffer.array[0])
                buffer.array[0] = 8
                buffer.release()
                assert (seen, limited.nbytes, limited.free_nbytes, unlimited.free_nbytes) == (0, 0, 0, 0)
                limited.give(buffer)
                assert limited.free_nbytes == 0
                limited.reserve(BUFFER_NBYTES)
                with limited.lending() as own, unlimited.lending() as more:
                    for fresh in (limited.take(own), unlimited.take(more)):
                        fresh.array[:] = 9
                        assert fresh.address != buffer.address
                code = 0
            finally:
                os._exit(code)
        buffer._pinned_for = None
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert buffer.array[0] == 7


def test_copies_work_without_pinning(caplog: pytest.LogCaptureFixture) -> None:
    buffers._warn_unpinned.cache_clear()
    cudart = mock.Mock(**{"cudaHostRegister.return_value": 2})
    with (
        mock.patch.object(buffers, "_cudart", return_value=cudart),
        mock.patch("torch.cuda.device"),
        caplog.at_level(logging.WARNING, "fastensor"),
    ):
        for buffer in map_buffers(2):
            buffer.prepare(torch.device("cuda", 0))
            buffer.release()
    assert len(caplog.records) == 1
    cudart.cudaHostUnregister.assert_not_called()
