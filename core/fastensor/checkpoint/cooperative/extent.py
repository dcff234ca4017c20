"""One rank's part of a file: finding the file that rank 0 has made, and writing an extent of it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from fastensor.backends import registry
from fastensor.backends.base import Backend, DeviceSlots, SlotBackend
from fastensor.backends.gather import DeviceStager, gathering_device
from fastensor.backends.pipeline import write_windows
from fastensor.backends.registry import Fallback, record_fallback
from fastensor.backends.staging import open_stager
from fastensor.errors import BackendUnavailableError, CheckpointWriteError
from fastensor.files import posix
from fastensor.files.atomic import NewFile
from fastensor.select.context import Context
from fastensor.select.transfer import BackendChoice, Transfer
from fastensor.stitch.extents import Extent
from fastensor.stitch.source import Plan

_TOKEN_NBYTES = 16


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that other processes are to find."""

    path: str
    mark: bytes
    """Random bytes in the file, by which it is told apart from a file of that name on another filesystem."""
    marked_at: int
    """Their offset: behind everything that is written."""
    host: str
    """The machine of the process that has made it."""


def share(new: NewFile, nbytes: int) -> SharedFile:
    """Prepare a new file, which has a hidden name, for other processes.

    Args:
        new: the file.
        nbytes: the size that it will have. Its owner has to truncate it to that.
    """
    mark = secrets.token_bytes(_TOKEN_NBYTES)
    marked_at = -(-nbytes // posix.ASSUMED_ALIGNMENT) * posix.ASSUMED_ALIGNMENT
    posix.write_fully(new.fd, memoryview(mark), marked_at)
    os.close(os.dup(new.fd))  # network filesystems send what was written when a descriptor is closed
    return SharedFile(new.hidden_name, mark, marked_at, socket.gethostname())


@contextmanager
def opened(shared: SharedFile) -> Iterator[int]:
    """Open the file that another process has made, for reading and writing.

    Raises:
        CheckpointWriteError: it is not there: the processes do not share the filesystem.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _not_shared(shared) from error
    try:
        mark = bytearray(_TOKEN_NBYTES)
        if posix.read_fully(fd, memoryview(mark), shared.marked_at) < _TOKEN_NBYTES or mark != shared.mark:
            raise _not_shared(shared)
        yield fd
    except BaseException:
        posix.close_read_only(fd)
        raise
    os.close(fd)


def _not_shared(shared: SharedFile) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"found no file of rank 0's in {os.path.dirname(shared.path)} on {socket.gethostname()}, where rank 0 has made "
        f"one on {shared.host}: all ranks write one file, so they have to share a filesystem; save to a directory that "
        f"all machines share, or on rank 0 alone (fastensor.save)"
    )


def write_extent(
    part: Plan, extent: Extent, fd: int, directory: str, backend: BackendChoice, fallbacks: list[Fallback]
) -> tuple[Transfer, Sequence[int]]:
    """Write an extent of a file by the chosen backend, or by the next one that can write parts. Syncs nothing.

    Args:
        part: the extent, as a file of its own.
        extent: where the extent is.
        fd: the file, open for reading and writing.
        directory: the directory of the file.
        backend: the choice.
        fallbacks: backends that could not be used are added here.

    Returns:
        The transfer, and the CRC32 of each storage's bytes in the extent.

    Raises:
        OSError: the bytes could not be written.
        StateChangedError: a storage was resized meanwhile.
    """
    transfer = Transfer.of_file(
        backend,
        directory,
        part.nbytes,
        Context("write", part.device),
        registry.names_with_slots,
        learn=False,  # other ranks write to the same disk
    )
    write = partial(_write_by, part=part, fd=fd, begin=extent[0])
    return transfer, transfer.run(write, partial(record_fallback, fallbacks))


def _write_by(backend: Backend, part: Plan, fd: int, begin: int) -> Sequence[int]:
    if not isinstance(backend, SlotBackend):
        raise BackendUnavailableError("it writes whole files only, and ranks that save together write parts of one")
    slots = backend.open_slots(fd)
    try:
        device = gathering_device(part)
        if device is not None and isinstance(slots, DeviceSlots) and device.type in slots.device_types:
            of_device = slots.write_from_device
            return write_windows(
                part.nbytes,
                DeviceStager(part, device),
                lambda window: of_device(window.padded(slots.alignment), begin + window.offset),
            )
        return write_windows(
            part.nbytes,
            open_stager(part),
            lambda window: slots.write(window.padded(slots.alignment), begin + window.offset),
        )
    finally:
        slots.close()
