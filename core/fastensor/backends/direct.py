"""The ``direct`` backend: O_DIRECT through reused buffers, with several transfers in flight.

In a save, the calling thread stages windows of the image in order, and other threads write them to the disk. In a load,
threads read ahead in the order that was announced, and the calling thread copies from the buffers to where the bytes
belong. Neither leaves anything in the page cache. Memory beyond the state is eight buffers: 32 MiB.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastensor.backends.base import Extent, Reader
from fastensor.backends.buffers import BUFFER_NBYTES, transfer_buffers
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix

if TYPE_CHECKING:
    from fastensor.stitch.source import Source


class DirectBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "direct"

    def why_unavailable(self) -> str:
        return "" if hasattr(os, "O_DIRECT") else "this operating system has no O_DIRECT"

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        from fastensor.backends.pipeline import (
            write_windows,  # loads need nothing of these, and saves nothing of others
        )
        from fastensor.backends.staging import open_stager

        limits = _limits(fd)
        with _direct_mode(fd), _refusals_reported():
            checksums = write_windows(
                source.nbytes,
                open_stager(source),
                lambda window: posix.write_fully(fd, window.padded(limits.offset_alignment), window.offset),
            )
        posix.truncate(fd, source.nbytes)
        return checksums

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        from fastensor.backends.numpy import BufferedReader
        from fastensor.backends.ring_reader import RingReader

        direct_fd, alignment = open_direct(fd)
        with ExitStack() as undo:
            undo.callback(posix.close_read_only, direct_fd)
            read = partial(posix.read_fully, direct_fd, alignment=alignment)
            resources = ExitStack()
            reader = RingReader(read, alignment, order, elsewhere=BufferedReader(fd), resources=resources)
            resources.push(undo.pop_all())
        return reader

    def open_slots(self, fd: int) -> DirectSlots:
        limits = _limits(fd)
        return DirectSlots(_reopen(fd, os.O_RDWR), limits.offset_alignment)


class DirectSlots:
    """See :class:`fastensor.backends.base.Slots`."""

    def __init__(self, fd: int, alignment: int) -> None:
        self._fd = fd
        self.alignment = alignment

    def write(self, data: memoryview, offset: int) -> None:
        with _refusals_reported():
            posix.write_fully(self._fd, data, offset)

    def read(self, buffer: memoryview, offset: int) -> None:
        with _refusals_reported():
            filled = posix.read_fully(self._fd, buffer, offset, alignment=self.alignment)
        posix.check_end(filled, buffer.nbytes, offset)

    def close(self) -> None:
        posix.close_read_only(self._fd)  # what was written is not needed any more


def open_direct(fd: int) -> tuple[int, int]:
    """A second descriptor of a file, for direct reads, which the caller closes; and the unit of offsets and lengths.

    One block of the file is read, because some filesystems refuse direct I/O only then.

    Raises:
        BackendUnavailableError: the file has no direct I/O, or demands more than our buffers have.
    """
    alignment = _limits(fd).offset_alignment
    direct_fd = _reopen(fd, os.O_RDONLY)
    with ExitStack() as undo:
        undo.callback(posix.close_read_only, direct_fd)
        with _refusals_reported(), transfer_buffers.lending() as lent:
            buffer = transfer_buffers.take(lent)
            buffer.prepare()
            posix.read_fully(direct_fd, buffer.view[:alignment], 0, alignment=alignment)
        undo.pop_all()
    return direct_fd, alignment


def _limits(fd: int) -> posix.DirectLimits:
    if (name := posix.memory_filesystem(fd)) is not None:
        raise BackendUnavailableError(f"{name} lives in memory and has no direct I/O")
    limits = posix.direct_limits(fd)
    if limits is None:
        raise BackendUnavailableError("the filesystem says that this file has no direct I/O")
    if BUFFER_NBYTES % limits.offset_alignment or limits.memory_alignment > posix.ASSUMED_ALIGNMENT:
        raise BackendUnavailableError(f"the filesystem asks for an alignment that the buffers lack: {limits}")
    return limits


def _reopen(fd: int, mode: int) -> int:
    with _refusals_reported():
        try:
            return posix.reopen_direct(fd, mode)
        except FileNotFoundError as error:
            raise BackendUnavailableError("/proc is missing, by which a file is opened once more") from error
        except PermissionError as error:
            raise BackendUnavailableError("this process may not open the file once more") from error


@contextmanager
def _refusals_reported() -> Iterator[None]:
    """Filesystems refuse O_DIRECT by EINVAL: when a file is opened, or only when it is read or written."""
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
