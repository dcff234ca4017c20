"""What is found where the bytes of a file are not those that were saved. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file whose bytes are not those that were saved."""

    part: str
    """The title of the part, such as ``record 'archive/data/0'``."""
    offset: int
    """Offset of the part in the file."""
    nbytes: int
    found: int
    """The CRC32 that its bytes have."""
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.part} ({self.nbytes} bytes at offset {self.offset}) has CRC32 {self.found:08x}, "
            f"expected {self.expected:08x}"
        )
