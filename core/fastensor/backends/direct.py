"""The ``direct`` backend: O_DIRECT through a ring of reused buffers, several transfers in flight.

Saving: the calling thread stages windows of the image in order, and writer threads put them on the disk. Loading:
reader threads run ahead through the file in the order that was announced, and the calling thread copies from the ring
to where the bytes belong. Neither leaves anything in the page cache. Memory beyond the state is the ring: 32 MiB.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial

from fastensor.backends import posix
from fastensor.backends.base import Availability, Capabilities, Extent, Reader
from fastensor.backends.memory import BUFFER_COUNT, BUFFER_NBYTES, borrowed_ring
from fastensor.backends.numpy import BufferedReader
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, RingReader, transfer_nbytes
from fastensor.backends.staging import Stager, Window, open_stager
from fastensor.backends.threads import open_pool, shut_down, submit
from fastensor.errors import BackendUnavailableError
from fastensor.stitch.source import Source


class DirectBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "direct"

    def availability(self) -> Availability:
        if not hasattr(os, "O_DIRECT"):
            return Availability(False, "this operating system has no O_DIRECT")
        return Availability(True)

    def capabilities(self) -> Capabilities:
        return Capabilities(bypasses_page_cache=True, extra_nbytes=BUFFER_COUNT * BUFFER_NBYTES)

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        limits = _limits(fd)
        with _direct_mode(fd):
            checksums = _write(source, fd, limits)
        posix.truncate(fd, source.nbytes)
        return checksums

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        limits = _limits(fd)
        with _refusals_reported():
            direct_fd = posix.reopen_direct(fd)
        with ExitStack() as undo:
            undo.callback(posix.close_read_only, direct_fd)
            with _refusals_reported(), borrowed_ring() as ring:
                block = ring.buffer(0).view[: limits.offset_alignment]
                posix.read_fully(direct_fd, block, 0, alignment=limits.offset_alignment)
            read = partial(_read_direct, direct_fd, limits.offset_alignment)
            resources = ExitStack()
            reader = RingReader(read, limits.offset_alignment, order, elsewhere=BufferedReader(fd), resources=resources)
            resources.push(undo.pop_all())
        return reader


def _read_direct(fd: int, alignment: int, buffer: memoryview, offset: int) -> int:
    return posix.read_fully(fd, buffer, offset, alignment=alignment)


def _limits(fd: int) -> posix.DirectLimits:
    if (name := posix.memory_filesystem(fd)) is not None:
        raise BackendUnavailableError(f"{name} lives in memory and has no direct I/O")
    limits = posix.direct_limits(fd)
    if limits is None:
        raise BackendUnavailableError("the filesystem says that this file has no direct I/O")
    if BUFFER_NBYTES % limits.offset_alignment or limits.memory_alignment > posix.ASSUMED_ALIGNMENT:
        raise BackendUnavailableError(f"the filesystem asks for an alignment that the buffers lack: {limits}")
    return limits


@contextmanager
def _refusals_reported() -> Iterator[None]:
    """EINVAL is how filesystems refuse O_DIRECT: when a file is opened, or only when it is read or written."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise BackendUnavailableError("the filesystem refused direct I/O (EINVAL)") from error
        raise


@contextmanager
def _direct_mode(fd: int) -> Iterator[None]:
    with _refusals_reported():
        posix.set_direct(fd, True)
    try:
        yield
    finally:
        posix.set_direct(fd, False)


def _write(source: Source, fd: int, limits: posix.DirectLimits) -> Sequence[int]:
    size = transfer_nbytes(source.nbytes)
    begun: Window | None = None
    with (
        open_stager(source) as stager,
        _Writers(fd, limits.offset_alignment, -(-source.nbytes // size), stager) as writers,
    ):
        for number, offset in enumerate(range(0, source.nbytes, size)):
            if number >= BUFFER_COUNT:
                writers.wait_for_oldest()
            with _refusals_reported():  # of windows before, which it may have to wait for
                window = stager.begin(offset, min(size, source.nbytes - offset))
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


class _Writers:
    """Threads that write windows and release them. Left only when none of them is writing any more."""

    def __init__(self, fd: int, alignment: int, windows: int, stager: Stager) -> None:
        self._fd = fd
        self._alignment = alignment
        self._stager = stager
        threads = min(TRANSFERS_IN_FLIGHT, max(windows // 2, 1))  # two transfers each, or more
        self._pool = open_pool(threads, "fastensor-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *exc: object) -> None:
        shut_down(self._pool)

    def submit(self, window: Window) -> None:
        """Write a finished window; its tail is padded to a whole block, which truncation takes away again."""
        self._pending.append(submit(self._pool, self._write, window, window.padded(self._alignment)))

    def wait_for_oldest(self) -> None:
        with _refusals_reported():
            self._pending.popleft().result()

    def _write(self, window: Window, data: memoryview) -> None:
        try:
            posix.write_fully(self._fd, data, window.offset)
        except BaseException as failure:
            self._stager.fail(failure)
            raise
        self._stager.release(window)

    def wait_for_all(self) -> None:
        while self._pending:
            self.wait_for_oldest()
