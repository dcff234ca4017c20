"""Writing a file window by window: one thread stages, others write, several transfers in flight.

The calling thread produces windows of the image in order, and threads hand them to whatever puts them on the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, Self, TypeVar

from fastensor.backends.memory import BUFFER_COUNT
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, transfer_nbytes
from fastensor.backends.threads import open_pool, shut_down, submit

Data = TypeVar("Data")
Data_co = TypeVar("Data_co", covariant=True)


class PaddedWindow(Protocol[Data_co]):
    """A part of a file, in memory of the host or of a device."""

    @property
    def offset(self) -> int:
        """Where in the file it begins."""

    def padded(self, alignment: int) -> Data_co:
        """The data, and zeros behind it up to a multiple of the alignment."""


class WindowStager(Protocol[Data_co]):
    """Produces windows: see :class:`fastensor.backends.staging.Stager`, which is one for memory of the host."""

    @property
    def asynchronous(self) -> bool: ...
    @property
    def checksums(self) -> tuple[int, ...]: ...
    def begin(self, offset: int, nbytes: int) -> PaddedWindow[Data_co]: ...
    def finish(self, window: Any) -> object: ...
    def release(self, window: Any) -> None: ...
    def fail(self, failure: BaseException) -> None: ...


def write_windows(
    total: int, opened: AbstractContextManager[WindowStager[Data]], alignment: int, write: Callable[[Data, int], object]
) -> Sequence[int]:
    """Write a whole image, and up to ``alignment - 1`` zeros behind it.

    Args:
        total: bytes of the image.
        opened: what produces its windows.
        alignment: what all offsets and lengths are multiples of; divides the size of a buffer.
        write: ``write(data, offset)``, called with each window by several threads at once, puts all of it there.

    Returns:
        The CRC32 of each storage's payload.

    Raises:
        StateChangedError: a storage was resized meanwhile.
        OSError: from ``write``, which nobody is in any more.
    """
    size = transfer_nbytes(total)
    begun: PaddedWindow[Data] | None = None
    with opened as stager, _Writers(write, alignment, -(-total // size), stager) as writers:
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


class _Writers(Generic[Data]):
    """Threads that write windows and release them. Left only when none of them is writing any more."""

    def __init__(
        self, write: Callable[[Data, int], object], alignment: int, windows: int, stager: WindowStager[Data]
    ) -> None:
        self._write = write
        self._alignment = alignment
        self._stager = stager
        threads = min(TRANSFERS_IN_FLIGHT, max(windows // 2, 1))  # two transfers each, or more
        self._pool = open_pool(threads, "fastensor-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        shut_down(self._pool)

    def submit(self, window: PaddedWindow[Data]) -> None:
        """Write a finished window; its tail is padded to a whole block."""
        self._pending.append(submit(self._pool, self._write_window, window, window.padded(self._alignment)))

    def wait_for_oldest(self) -> None:
        self._pending.popleft().result()

    def _write_window(self, window: PaddedWindow[Data], data: Data) -> None:
        try:
            self._write(data, window.offset)
        except BaseException as failure:
            self._stager.fail(failure)
            raise
        self._stager.release(window)

    def wait_for_all(self) -> None:
        while self._pending:
            self.wait_for_oldest()
