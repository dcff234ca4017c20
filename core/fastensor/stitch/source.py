"""What is saved: an image, and the memory that its payload comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fastensor.stitch.image import Image


class FileBytes(Protocol):
    """A run of bytes of another file, for payload that need not be in memory. Used by one thread at a time."""

    def nbytes(self) -> int:
        """How many there are."""

    def readinto(self, begin: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with what stands from ``begin`` on; returns the CRC32 of it."""

    def check(self, crc32: int) -> None:
        """Raise if the bytes, of which this is the CRC32, are not the right ones. Called once all have been read."""


@dataclass(frozen=True, slots=True)
class Source:
    """A planned file. Each container has its own kind.

    The storages are borrowed: they must be neither resized nor written until the image has been moved.
    """

    image: Image
    storages: tuple[torch.UntypedStorage | FileBytes, ...]
    """Payload segment ``i`` of the image is a part of, or all of, ``storages[i]``."""

    @property
    def checksums_first(self) -> bool:
        """Whether :meth:`head` has something to say."""
        return False

    def head(self, checksums: Sequence[int]) -> bytes:
        """What stands at the start of the file in place of what the image has there; empty if that is right already.

        A container that keeps checksums in front of what they are of can only fill them in when all of it has been
        staged.

        Args:
            checksums: the CRC32 of each payload segment; 0 for those that are empty.
        """
        return b""
