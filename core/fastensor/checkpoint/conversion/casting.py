"""Tensors that get another dtype while their bytes go by."""

from __future__ import annotations

import torch
from isal import isal_zlib

from fastensor.errors import UnsupportedContentError
from fastensor.stitch.source import FileBytes

_PIECE_ELEMENTS = 1 << 20
"""How many elements are cast at a time."""


class CastBytes(FileBytes):
    """The bytes of a tensor in another dtype, asked for from front to back, once or several times.

    Args:
        source: the bytes of the tensor as it is.
        dtype: its dtype, of floats.
        wanted: the dtype that it gets.
        title: what messages call it.
    """

    def __init__(self, source: FileBytes, dtype: torch.dtype, wanted: torch.dtype, title: str) -> None:
        self._source = source
        self._dtype = dtype
        self._wanted = wanted
        self._title = title
        self._numel = source.nbytes() // dtype.itemsize
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._read = 0
        """How many elements have been read."""
        self._at = 0
        """Where the rest of the piece begins in the new bytes."""
        self._crc32 = 0
        """The CRC32 of the bytes of the source that have been read."""
        self._piece = memoryview(b"")
        """New bytes that were not asked for yet."""

    def nbytes(self) -> int:
        return self._numel * self._wanted.itemsize

    def readinto(self, begin: int, buffer: memoryview) -> int:
        if begin == 0:
            self._begin_anew()
        assert begin == self._at
        done = 0
        while done < buffer.nbytes:
            if not self._piece:
                self._piece = self._next_piece()
            taken = self._piece[: buffer.nbytes - done]
            buffer[done : done + taken.nbytes] = taken
            self._piece = self._piece[taken.nbytes :]
            done += taken.nbytes
        self._at += done
        return int(isal_zlib.crc32(buffer))

    def _next_piece(self) -> memoryview:
        size = self._dtype.itemsize
        count = min(_PIECE_ELEMENTS, self._numel - self._read)
        values = torch.empty(count, dtype=self._dtype)
        memory = values.view(torch.uint8).numpy().data
        crc32 = self._source.readinto(self._read * size, memory)
        self._crc32 = isal_zlib.crc32_combine(self._crc32, crc32, memory.nbytes)
        self._read += count
        return self._cast(values).view(torch.uint8).numpy().data

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        """
        Raises:
            UnsupportedContentError: finite values would become infinite.
        """
        found = values.to(self._wanted)
        if overflown := int((found.isinf() & values.isfinite()).sum()):
            raise UnsupportedContentError(
                f"{self._title}: {overflown} finite values would be infinite in {self._wanted}, the largest is "
                f"{float(values[values.isfinite()].abs().max()):g}; choose a dtype of a wider range, such as bfloat16"
            )
        return found

    def check(self, crc32: int) -> None:
        """Have the source compared. The CRC32 of the new bytes says nothing about it."""
        self._source.check(self._crc32)
