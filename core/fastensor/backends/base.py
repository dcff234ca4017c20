"""What a backend is: the seam between the layout of a file and the ways of moving it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fastensor.stitch.source import Source


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can work on this machine, and if not, why."""

    available: bool
    reason: str = ""
    """Empty if available; otherwise what is missing, in a sentence that can be shown to a user."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a file: ``[begin, end)`` in bytes."""

    begin: int
    end: int


class Reader(Protocol):
    """Random access to one file, fast if the order that was announced is kept. Used by one thread."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        """Fill ``buffer`` from ``offset`` and return the CRC32 of its bytes (0 without ``checksum``).

        The buffer is the caller's; when this returns or raises, nothing writes to it any more.

        Raises:
            OSError: the file cannot be read there.
            fastensor.files.posix.EndOfFile: it ends before the buffer is full.
        """

    def close(self) -> None:
        """Stop reading ahead and give back memory. The file stays open. Calling it again does nothing."""


@runtime_checkable
class BatchReader(Reader, Protocol):
    """A reader to which the order does not matter, and which fills several buffers by several threads at once."""

    def read_batch(self, pieces: Sequence[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        """As :meth:`Reader.readinto`, for buffers each with its offset. Returns the CRC32 of each."""


class Slots(Protocol):
    """An open file any part of which is written and read, again and again. Every method may be called from several
    threads at once, for parts that do not overlap. What has been written stays out of the page cache, or leaves it."""

    @property
    def alignment(self) -> int:
        """What offsets, and lengths and addresses of host memory, are multiples of; a power of two, at most 4096."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it.

        Raises:
            OSError: the file does not take it.
            BackendUnavailableError: this backend cannot write to this file after all.
        """

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer.

        Raises:
            OSError: the file cannot be read there, or ends before.
            BackendUnavailableError: this backend cannot read from this file after all.
        """

    def close(self) -> None:
        """Nothing is written or read any more. The descriptor that it was opened with stays open."""


@runtime_checkable
class DeviceSlots(Slots, Protocol):
    """Slots that move bytes of devices by themselves. Tensors are of uint8 and contiguous, and nothing is queued that
    concerns their memory; lengths may be any."""

    @property
    def device_types(self) -> Set[str]:
        """Kinds of devices."""

    def write_from_device(self, values: torch.Tensor, offset: int) -> None:
        """As :meth:`Slots.write`."""

    def read_to_device(self, values: torch.Tensor, offset: int) -> None:
        """As :meth:`Slots.read`."""


@runtime_checkable
class SlotBackend(Protocol):
    """A backend that moves parts of files, too."""

    def open_slots(self, fd: int) -> Slots:
        """Of a file that is open for reading and writing, and stays so.

        Raises:
            BackendUnavailableError: this backend cannot use this file.
        """


@runtime_checkable
class Backend(Protocol):
    """A way of moving images. Stateless between calls; every method may be called from several threads at once."""

    @property
    def name(self) -> str:
        """What users pass as ``backend=``."""

    def availability(self) -> Availability:
        """Whether the backend can work here at all. A single file may still be refused."""

    @property
    def extra_bytes(self) -> int | None:
        """The most memory in bytes, beyond the state itself, that one transfer takes. None: as much as the largest
        storage on a device, because the backend copies such storages to the host whole."""

    def can_write(self, source: Source) -> bool:
        """Whether it knows how to write this kind of source at all. A single file may still be refused."""

    def write(self, source: Source, fd: int) -> Sequence[int]:
        """Write the whole image to an open, empty, seekable file.

        Afterwards the file has exactly the image's bytes; they need not be durable yet, that is the caller's
        business. ``fd`` stays open and has the flags that it came with. Storages are only read. The file may have
        space preallocated beyond its final size.

        Returns:
            What :meth:`Source.head` needs: the CRC32 of each storage's payload. Whoever calls writes the head. May be
            empty for a source without one.

        Raises:
            BackendUnavailableError: this file cannot be written this way; another backend may start over on ``fd``.
            OSError: a write failed; what the file holds is undefined.
            StateChangedError: a storage was resized while it was being saved.
        """

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        """Prepare to read a file of ``nbytes`` bytes.

        Args:
            fd: open for reading; stays open and is used until the reader is closed.
            nbytes: the file's size.
            order: the extents that will be asked for, in the order in which they will be asked for, as far as that
                can be foretold. Reading them ahead may not begin before the first one is asked for.

        Raises:
            BackendUnavailableError: this file cannot be read this way.
        """
