"""Writing a file window by window: the calling thread stages windows in order, and other threads write them, several
at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack

from fastensor.backends.buffers import BUFFER_COUNT, TRANSFERS_IN_FLIGHT, transfer_nbytes
from fastensor.backends.staging import Stager, W
from fastensor.backends.threads import open_pool, shut_down, submit


def write_windows(total: int, opened: AbstractContextManager[Stager[W]], write: Callable[[W], object]) -> Sequence[int]:
    """Write a whole image.

    Args:
        total: size of the image in bytes.
        opened: produces the windows of the image.
        write: writes all of a complete window. Called by several threads at once. Windows begin at multiples of half
            a buffer's size.

    Returns:
        The CRC32 of each storage's payload.

    Raises:
        StateChangedError: a storage was resized meanwhile.
        OSError: what ``write`` raised. No call of ``write`` runs any more.
    """
    size = transfer_nbytes(total)
    threads = min(TRANSFERS_IN_FLIGHT, max(-(-total // size) // 2, 1))  # two transfers each, or more
    with opened as stager, ExitStack() as stack:
        pool = open_pool(threads, "fastensor-write")
        stack.callback(shut_down, pool)
        most_pending = BUFFER_COUNT - stager.asynchronous
        pending: deque[Future[None]] = deque()
        for window in _complete_windows(stager, total, size):
            pending.append(submit(pool, _write_and_release, window, write, stager))
            if len(pending) == most_pending:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        return stager.checksums


def _complete_windows(stager: Stager[W], total: int, size: int) -> Iterator[W]:
    """The windows in order. While one is checksummed and written, the device copies the next one."""
    begun: W | None = None
    for offset in range(0, total, size):
        window = stager.begin(offset, min(size, total - offset))
        if begun is not None:
            stager.finish(begun)
            yield begun
        begun = window
        if not stager.asynchronous:
            stager.finish(window)
            yield window
            begun = None
    if begun is not None:
        stager.finish(begun)
        yield begun


def _write_and_release(window: W, write: Callable[[W], object], stager: Stager[W]) -> None:
    try:
        write(window)
    except BaseException as failure:
        stager.fail(failure)
        raise
    stager.release(window)
