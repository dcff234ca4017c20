"""The buffer pool: what it lends, keeps and forgets."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from fastensor.backends import buffers
from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES, Buffer, BufferPool, map_buffers, runs_of


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


@contextmanager
def cuda(status: int = 0) -> Iterator[mock.Mock]:
    """CUDA's functions, which answer with a status."""
    cudart = mock.Mock(**{"cudaHostRegister.return_value": status, "cudaHostUnregister.return_value": 0})
    with (
        mock.patch.object(buffers, "_cudart", return_value=cudart),
        mock.patch("torch.cuda.device"),
        mock.patch("torch.cuda.check_error"),
        mock.patch("torch.cuda.synchronize", cudart.synchronize),
    ):
        yield cudart


@pytest.mark.parametrize("limit", [None, lambda: 3 * BUFFER_NBYTES])
def test_a_dropped_pool_unpins_its_memory(limit: None) -> None:
    with cuda() as cudart:
        pool = BufferPool(limit)
        if limit is not None:
            pool.reserve(3 * BUFFER_NBYTES)
        with pool.lending() as held:
            for _ in range(3):
                pool.take(held).prepare(torch.device("cuda", 0))
        mappings = 3 if limit is None else 1
        assert cudart.cudaHostRegister.call_count == mappings
        cudart.cudaHostUnregister.assert_not_called()
        del pool
        gc.collect()
        assert cudart.cudaHostUnregister.call_count == mappings
        last, before = cudart.method_calls[-1], cudart.method_calls[-2]
        assert (before[0], last[0]) == ("synchronize", "cudaHostUnregister"), "copies may be queued"


def test_lent_memory_is_unpinned_when_it_is_dropped_after_its_pool() -> None:
    with cuda() as cudart:
        pool, held = BufferPool(lambda: 2 * BUFFER_NBYTES), list[Buffer]()
        pool.reserve(2 * BUFFER_NBYTES)
        pool.take(held).prepare(torch.device("cuda", 0))
        pool.close()
        cudart.cudaHostUnregister.assert_not_called()
        held.clear()
        gc.collect()
        cudart.cudaHostUnregister.assert_called_once()


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
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                seen = int(buffer.array[0])
                buffer.array[0] = 8
                buffers._unpin(buffer.address, torch.device("cuda"), os.getppid())  # CUDA must not be asked
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
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert buffer.array[0] == 7


def test_buffers_that_were_mapped_together_are_pinned_and_unpinned_together() -> None:
    device = torch.device("cuda", 0)
    with cuda() as cudart:
        mapped = map_buffers(3)
        address = mapped[0].address
        for buffer in mapped:
            buffer.prepare(device)
        cudart.cudaHostRegister.assert_called_once_with(address, 3 * BUFFER_NBYTES, 0)
        del buffer, mapped[:2]
        gc.collect()
        cudart.cudaHostUnregister.assert_not_called()
        mapped.clear()
        gc.collect()
        cudart.cudaHostUnregister.assert_called_once_with(address)


def test_neighbours_are_one_run() -> None:
    first, other = map_buffers(4), map_buffers(2)
    for number, buffer in enumerate((*first, *other)):
        buffer.array[:] = number
    chosen = [first[1], first[2], other[0], first[0], first[3], other[1]]
    found = [(len(run.buffers), run.as_tensor()[::BUFFER_NBYTES].tolist()) for run in runs_of(chosen)]
    assert found == [(2, [1, 2]), (1, [4]), (1, [0]), (1, [3]), (1, [5])]
    (whole,) = runs_of(first)
    assert whole.nbytes == len(whole.view) == 4 * BUFFER_NBYTES
    assert whole.address == whole.as_tensor().data_ptr() == first[0].address
    assert not list(runs_of([]))


def test_copies_work_without_pinning(caplog: pytest.LogCaptureFixture) -> None:
    buffers._warn_unpinned.cache_clear()
    with cuda(status=2) as cudart, caplog.at_level(logging.WARNING, "fastensor"):
        for buffer in [*map_buffers(2), *map_buffers(1)]:
            buffer.prepare(torch.device("cuda", 0))
        del buffer
        gc.collect()
    assert len(caplog.records) == 1
    assert cudart.cudaHostRegister.call_count == 2
    cudart.cudaHostUnregister.assert_not_called()


def test_no_more_is_lent_than_is_idle() -> None:
    pool = BufferPool(lambda: 8 * BUFFER_NBYTES)
    pool.reserve(5 * BUFFER_NBYTES)
    holder: list[Buffer] = []
    first, rest = pool.take_idle(holder, 2), pool.take_idle(holder, 6)
    assert (len(first), len(rest)) == (2, 3)
    assert holder == [*first, *rest]
    assert len(set(holder)) == 5
    assert not pool.take_idle(holder, 1)
    pool.give(holder.pop())
    assert len(pool.take_idle(holder, 4)) == 1
    pool.close()
