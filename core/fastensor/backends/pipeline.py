"""Writing a file window by window: one thread stages, others write, several transfers in flight.

The calling thread produces windows of the image in order, and threads hand them to whatever puts them on the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, Self

from fastensor.backends.memory import BUFFER_COUNT
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, transfer_nbytes
from fastensor.backends.staging import Stager, W
from fastensor.backends.threads import open_pool, shut_down, submit


def write_windows(total: int, opened: AbstractContextManager[Stager[W]], write: Callable[[W], object]) -> Sequence[int]:
    """Write a whole image.

    Args:
        total: bytes of the image.
        opened: what produces its windows.
        write: called with each window, complete, by several threads at once; puts all of it where it belongs. Windows
            begin at multiples of half a buffer's size.

    Returns:
        The CRC32 of each storage's payload.

    Raises:
        StateChangedError: a storage was resized meanwhile.
        OSError: from ``write``, which nobody is in any more.
    """
    size = transfer_nbytes(total)
    begun: W | None = None
    with opened as stager, _Writers(write, -(-total // size), stager) as writers:
        for number, offset in enumerate(range(0, total, size)):
            if number >= BUFFER_COUNT:
                writers.wait_for_oldest()
            window = stager.begin(offset, min(size, total - offset))
            if not stager.asynchronous:
                stager.finish(window)
                writers.submit(window)
                continue
            # The device copies the next window while this one is checksummed and written.
            if begun is not None:
                stager.finish(begun)
                writers.submit(begun)
            begun = window
        if begun is not None:
            stager.finish(begun)
            writers.submit(begun)
        writers.wait_for_all()
        return stager.checksums


class _Writers(Generic[W]):
    """Threads that write windows and release them. Left only when none of them is writing any more."""

    def __init__(self, write: Callable[[W], object], windows: int, stager: Stager[W]) -> None:
        self._write = write
        self._stager = stager
        threads = min(TRANSFERS_IN_FLIGHT, max(windows // 2, 1))  # two transfers each, or more
        self._pool = open_pool(threads, "fastensor-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        shut_down(self._pool)

    def submit(self, window: W) -> None:
        """Write a finished window."""
        self._pending.append(submit(self._pool, self._write_window, window))

    def wait_for_oldest(self) -> None:
        self._pending.popleft().result()

    def _write_window(self, window: W) -> None:
        try:
            self._write(window)
        except BaseException as failure:
            self._stager.fail(failure)
            raise
        self._stager.release(window)

    def wait_for_all(self) -> None:
        while self._pending:
            self.wait_for_oldest()
