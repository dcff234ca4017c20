"""What is saved: an image, and the memory that its payload comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastensor.stitch.image import Image


@dataclass(frozen=True, slots=True)
class Source:
    """A planned file. Each container has its own kind.

    The storages are borrowed: they must be neither resized nor written until the image has been moved.
    """

    image: Image
    storages: tuple[torch.UntypedStorage, ...]
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
