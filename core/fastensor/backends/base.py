"""The protocols of a backend: the seam between the layout of a file and the ways of moving it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from fastensor.stitch.source import Source


class Extent(NamedTuple):
    """A part of a file: ``[begin, end)`` in bytes."""

    begin: int
    end: int


class Reader(Protocol):
    """Random access to one file, fast in the order that was announced. Used by one thread."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        """Fill ``buffer`` from ``offset`` and return the CRC32 of its bytes (0 without ``checksum``).

        The buffer is the caller's. When the method returns or raises, nothing writes to the buffer any more.

        Raises:
            OSError: the file cannot be read there.
            fastensor.files.posix.EndOfFile: the file ends before the buffer is full.
        """

    def close(self) -> None:
        """Stop reading ahead and give back memory. The file stays open. A second call does nothing."""


@runtime_checkable
class BatchReader(Reader, Protocol):
    """A reader that is fast in any order, and fills several buffers at once by several threads."""

    def read_batch(self, pieces: Sequence[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        """Fill each buffer from its offset, as :meth:`Reader.readinto` does. Returns the CRC32 of each."""


class Slots(Protocol):
    """An open file whose parts are written and read again and again.

    Several threads may call any method at once, for parts that do not overlap. Bytes that were written do not stay in
    the page cache.
    """

    @property
    def alignment(self) -> int:
        """Unit of offsets, and of lengths and addresses of host memory: a power of two, at most 4096."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``.

        Raises:
            OSError: the file does not take the bytes.
            BackendUnavailableError: this backend cannot write to this file after all.
        """

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``.

        Raises:
            OSError: the file cannot be read there, or ends before the buffer is full.
            BackendUnavailableError: this backend cannot read from this file after all.
        """

    def close(self) -> None:
        """Give up what was opened, when no method runs any more. The descriptor of :meth:`SlotBackend.open_slots` stays
        open. In a forked child only the child's copies are given up."""


@runtime_checkable
class DeviceSlots(Slots, Protocol):
    """Slots that move bytes of devices by themselves. Tensors are contiguous, of uint8 and of any length, and no queued
    work uses their memory."""

    @property
    def device_types(self) -> Set[str]:
        """Types of the devices, such as ``cuda``."""

    def write_from_device(self, values: torch.Tensor, offset: int) -> None:
        """See :meth:`Slots.write`."""

    def read_to_device(self, values: torch.Tensor, offset: int) -> None:
        """See :meth:`Slots.read`."""


@runtime_checkable
class SlotBackend(Protocol):
    """A backend that also moves parts of files. Activation offload uses such backends."""

    def open_slots(self, fd: int) -> Slots:
        """Open slots on ``fd``, which must be readable and writable. The caller keeps ownership of ``fd``.

        Raises:
            BackendUnavailableError: this backend cannot use the file.
        """


@runtime_checkable
class Backend(Protocol):
    """A way of moving files. Stateless between calls. Several threads may call any method at once."""

    @property
    def name(self) -> str:
        """The name that users pass as ``backend=``."""

    def why_unavailable(self) -> str:
        """Reason for which the backend cannot work here at all, for a user; empty if it can. It may still refuse a
        file."""

    def can_write(self, source: Source) -> bool:
        """True if the backend can write this kind of source at all. It may still refuse a file."""

    def write(self, source: Source, fd: int) -> Sequence[int]:
        """Write the whole image to an open, empty, seekable file.

        Afterwards the file has exactly the image's bytes. The caller makes them durable, and writes the source's head.
        ``fd`` stays open and keeps its flags. Storages are only read. The file may have space preallocated beyond its
        final size.

        Returns:
            The CRC32 of each storage's payload, for :meth:`Source.head`. May be empty for a source without a head.

        Raises:
            BackendUnavailableError: this backend cannot write the file. Another one may start over on ``fd``.
            OSError: a write failed. The contents of the file are undefined.
            StateChangedError: a storage was resized while it was being saved.
        """

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        """Prepare to read a file of ``nbytes`` bytes.

        Args:
            fd: open for reading. Stays open, and is used until the reader is closed.
            nbytes: the file's size.
            order: the extents that will be asked for, in that order, as far as the caller knows. Reading ahead may not
                begin before the first one is asked for.

        Raises:
            BackendUnavailableError: this backend cannot read the file.
        """
