"""What is saved: a planned file, and the memory that its payload comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fastensor.errors import StateChangedError, UnsupportedContentError
from fastensor.stitch.image import Image, Payload


class FileBytes(Protocol):
    """A run of bytes of another file, for payload that need not be in memory. Used by one thread at a time."""

    def nbytes(self) -> int:
        """How many there are."""

    def readinto(self, begin: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with what stands from ``begin`` on; returns the CRC32 of it."""

    def check(self, crc32: int) -> None:
        """Raise if the bytes, of which this is the CRC32, are not the right ones. Called once all have been read."""


class Source(Protocol):
    """A file to be written: what a backend gets. How its bytes are had is told by ``fastensor.backends.staging``."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""

    @property
    def device(self) -> str:
        """Kind of the device that the payload comes from; ``staged`` if it has been copied from there already."""

    @property
    def throttled(self) -> bool:
        """Whether moving the file waits for more than the backend, so that the time is not the backend's."""

    @property
    def checksums_first(self) -> bool:
        """Whether :meth:`head` has something to say."""

    @property
    def known_checksums(self) -> tuple[int, ...] | None:
        """What :meth:`head` needs, if it was found out beforehand."""

    def head(self, checksums: Sequence[int]) -> bytes:
        """What stands at the start of the file in place of what the image has there; empty if that is right already.

        A container that keeps checksums in front of what they are of can only fill them in when all of it has been
        staged.

        Args:
            checksums: the CRC32 of each payload segment; 0 for those that are empty.
        """


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a file, and the memory that it borrows: a :class:`Source`. Each container has its own kind.

    The storages must be neither resized nor written until the image has been moved.
    """

    image: Image
    storages: tuple[torch.UntypedStorage | FileBytes, ...]
    """Payload segment ``i`` of the image is a part of, or all of, ``storages[i]``."""

    @property
    def nbytes(self) -> int:
        return self.image.nbytes

    @property
    def device(self) -> str:
        kinds = {storage.device.type for storage in self.storages if isinstance(storage, torch.UntypedStorage)}
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
        """The same plan, without what it borrows."""
        return replace(self, storages=())


def check_size(storage: torch.UntypedStorage, payload: Payload) -> None:
    """Check that a storage has the size for which the file was planned.

    Raises:
        StateChangedError: the storage has another size than when the file was planned.
    """
    if storage.nbytes() != payload.storage_nbytes:
        raise StateChangedError(
            f"a storage of {payload.storage_nbytes} bytes was resized to {storage.nbytes()} while it was being saved; "
            "keep the state unchanged until save returns"
        )


def skips_values() -> bool:
    """Whether ``torch.serialization.skip_data`` is active in this thread."""
    options = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(options, "skip_data", False))


def check_values_are_wanted() -> None:
    """
    Raises:
        UnsupportedContentError: whoever saves has asked torch for files without values.
    """
    if skips_values():
        raise UnsupportedContentError(
            "torch.serialization.skip_data is active here, which asks for a file without values; found that Fastensor "
            "is to write it, which writes none such: save outside of its block, or with torch.save"
        )
