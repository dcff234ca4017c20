"""Files to be written: their layout, and the memory that their bytes come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fastensor.errors import StateChangedError
from fastensor.stitch.image import Image, Payload


class FileBytes(Protocol):
    """Payload that is read from another file while the new one is written. Used by one thread at a time."""

    def nbytes(self) -> int:
        """Size of the payload."""

    def readinto(self, begin: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with the bytes from ``begin`` on. Returns their CRC32."""

    def check(self, crc32: int) -> None:
        """Compare the CRC32 of all bytes with the expected one, and raise if they differ. Called when all are read."""


class Source(Protocol):
    """A file to be written, as backends get it. ``fastensor.backends.staging`` produces its bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""

    @property
    def device(self) -> str:
        """Kind of the device that the payload comes from; ``staged`` if it has been copied from there already."""

    @property
    def throttled(self) -> bool:
        """True if the time of a write depends on more than the backend: a limited rate, or a file that is read."""

    @property
    def checksums_first(self) -> bool:
        """True if :meth:`head` gives bytes: then all checksums have to be known before the file can be complete."""

    @property
    def known_checksums(self) -> tuple[int, ...] | None:
        """The checksums for :meth:`head`, if they were computed beforehand; else None."""

    def head(self, checksums: Sequence[int]) -> bytes:
        """The bytes that replace the start of the image; empty if the image is right as it is.

        A container whose header carries the checksums of the data behind it can fill them in only when all data have
        been staged.

        Args:
            checksums: the CRC32 of each payload segment; 0 for empty ones.
        """


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a file, and the memory that it borrows: a :class:`Source`. Each container has a subclass.

    The storages must be neither resized nor written until the image has been moved.
    """

    image: Image
    storages: tuple[torch.UntypedStorage | FileBytes, ...]
    """Payload segment ``i`` of the image is ``storages[i]``, or a part of it."""
    tensors: tuple[torch.Tensor, ...] = field(default=(), kw_only=True, compare=False, repr=False)
    """The tensors that were seen in the object, which show these storages. Their version counters say when these were
    changed, unless that was done behind torch's back."""
    progress: Callable[[int], object] = field(default=lambda done: None, kw_only=True, compare=False, repr=False)
    """Called with the bytes of the file that have been staged, after each window, in the thread that stages. What it
    raises ends the transfer."""

    @property
    def nbytes(self) -> int:
        return self.image.nbytes

    @property
    def device(self) -> str:
        devices = {storage.device for storage in self.storages if isinstance(storage, torch.UntypedStorage)}
        kinds = {device.type for device in devices}
        return next(iter(sorted(kinds - {"cpu"})), "cpu")

    @property
    def throttled(self) -> bool:
        return not all(isinstance(storage, torch.UntypedStorage) for storage in self.storages)

    @property
    def checksums_first(self) -> bool:
        return False

    @property
    def known_checksums(self) -> tuple[int, ...] | None:
        return None

    def head(self, checksums: Sequence[int]) -> bytes:
        return b""

    def released(self) -> Plan:
        """The same plan without the borrowed memory."""
        return replace(self, storages=(), tensors=())

    def with_storages(self, storages: Sequence[torch.UntypedStorage | FileBytes]) -> Plan:
        """The same plan with other memory, or files, in place of what it borrows."""
        return replace(self, storages=tuple(storages))


def check_size(storage: torch.UntypedStorage, payload: Payload) -> None:
    """Compare the size of a storage with the one for which the file was planned.

    Raises:
        StateChangedError: the storage has another size than when the file was planned.
    """
    if storage.nbytes() != payload.storage_nbytes:
        raise StateChangedError(
            f"a storage of {payload.storage_nbytes} bytes was resized to {storage.nbytes()} while it was being saved; "
            "keep the state unchanged until save returns"
        )
