"""The bytes of tensors, read from their files in the order in which a new file needs them, and cast on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from isal import isal_zlib

from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions
from fastensor.checkpoint.reading.reader import PartReader, extents_of
from fastensor.checkpoint.tools.catalog import Located
from fastensor.errors import UnsupportedContentError
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.source import FileBytes


class InFile(NamedTuple):
    """A tensor, and the open file that it is in."""

    file: OpenedFile
    tensor: Located


class SourceTensors:
    """Reads tensors in the order in which the target needs them. At any time, one file is read.

    A target whose checksums come first is gone through twice, once for the checksums. Reading starts anew whenever the
    first tensor of a run is begun: of tensors that follow each other in the target, and lie in one file.

    Args:
        order: all tensors, in the order of the target.
        verify: whether they are compared with their checksums.
        backend: as for :func:`fastensor.load`.
        progress: called with the bytes that have been read, and those of all tensors.
    """

    def __init__(self, order: Sequence[InFile], *, verify: bool, backend: BackendChoice, progress: Progress) -> None:
        filled = [one for one in order if one.tensor.info.nbytes]
        self._total = sum(one.tensor.info.nbytes for one in filled)
        self._runs: dict[InFile, tuple[list[InFile], int]] = {}
        """The tensors of each run by the first of them, and the bytes of all runs before."""
        before = 0
        for _, group in groupby(filled, key=lambda one: id(one.file)):
            run = list(group)
            self._runs[run[0]] = run, before
            before += sum(one.tensor.info.nbytes for one in run)
        self._verify = verify
        self._options = ReadOptions(backend)
        self._progress = progress
        self._done = 0
        self._reader: PartReader | None = None

    def readinto(self, one: InFile, begin: int, buffer: memoryview) -> int:
        """Read a range of a tensor. Returns the CRC32 of the range."""
        if begin == 0 and one in self._runs:
            self._begin(*self._runs[one])
        assert self._reader is not None
        part = one.tensor.part
        if one.tensor.info.nbytes < part.nbytes:
            self._reader.check(part)
        crc32 = self._reader.read_range(part, one.tensor.span[0] + begin, buffer)
        self._done += buffer.nbytes
        self._progress(self._done, self._total)
        return crc32

    def _begin(self, run: Sequence[InFile], before: int) -> None:
        self.close()
        order = extents_of(dict.fromkeys(one.tensor.part for one in run))
        self._reader = PartReader(run[0].file, order, self._options, verify=self._verify)
        self._done = before

    def check(self, one: InFile, crc32: int) -> None:
        """Compare a tensor that was read whole. The record of a tensor that is a part of it was compared before."""
        assert self._reader is not None
        if one.tensor.info.nbytes == one.tensor.part.nbytes:
            self._reader.check_read(one.tensor.part, crc32)

    def close(self) -> None:
        """Close the reader. The files stay open."""
        if self._reader is not None:
            self._reader.close(completed=True)
            self._reader = None


class SourceBytes(FileBytes):
    """The bytes of one tensor of the source."""

    def __init__(self, source: SourceTensors, one: InFile) -> None:
        self._source = source
        self._one = one

    def nbytes(self) -> int:
        return self._one.tensor.info.nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        return self._source.readinto(self._one, begin, buffer)

    def check(self, crc32: int) -> None:
        self._source.check(self._one, crc32)


class PiecewiseBytes(FileBytes):
    """Bytes that are asked for from front to back, once or several times.

    Args:
        nbytes: how many.
        begin: begins to read: gives all bytes in pieces. What it does behind the last piece, it does before the last
            bytes are given out. A piece is given up before the next one is asked for.
        report: called with the number of bytes that have been read.
    """

    def __init__(
        self,
        nbytes: int,
        begin: Callable[[], Iterator[memoryview]],
        report: Callable[[int], object] = lambda done: None,
    ) -> None:
        self._nbytes = nbytes
        self._begin = begin
        self._report = report
        self._pieces: Iterator[memoryview] = iter(())
        self._piece = memoryview(b"")
        """Rest of the piece that was read last."""
        self._at = 0
        """Offset of that rest."""

    def nbytes(self) -> int:
        return self._nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        if begin == 0 or begin < self._at:
            self._pieces, self._piece, self._at = self._begin(), memoryview(b""), 0
        assert begin == self._at
        done = 0
        while done < buffer.nbytes:
            if not self._piece:
                self._piece = memoryview(b"")  # so that the memory is free before more is used
                self._piece = next(self._pieces)
            taken = self._piece[: buffer.nbytes - done]
            buffer[done : done + taken.nbytes] = taken
            self._piece = self._piece[taken.nbytes :]
            done += taken.nbytes
        self._at += done
        if self._at == self._nbytes:
            self._piece = memoryview(b"")
            next(self._pieces, None)
        self._report(self._at)
        return int(isal_zlib.crc32(buffer))

    def check(self, crc32: int) -> None:
        """The pieces have been compared when they were read."""


_PIECE_ELEMENTS = 1 << 20
"""Elements that are cast at a time."""


def cast_bytes(source: FileBytes, dtype: torch.dtype, wanted: torch.dtype, title: str) -> FileBytes:
    """The bytes of a tensor in another dtype, asked for from front to back, once or several times.

    Args:
        source: the bytes of the tensor as it is. It is compared when all of them have been cast.
        dtype: its dtype, of floats.
        wanted: the dtype that it gets.
        title: what messages call it.
    """
    nbytes = source.nbytes() // dtype.itemsize * wanted.itemsize
    return PiecewiseBytes(nbytes, partial(_cast_pieces, source, dtype, wanted, title))


def _cast_pieces(source: FileBytes, dtype: torch.dtype, wanted: torch.dtype, title: str) -> Iterator[memoryview]:
    numel = source.nbytes() // dtype.itemsize
    crc32 = 0
    for at in range(0, numel, _PIECE_ELEMENTS):
        values = torch.empty(min(_PIECE_ELEMENTS, numel - at), dtype=dtype)
        memory = values.view(torch.uint8).numpy().data
        crc32 = isal_zlib.crc32_combine(crc32, source.readinto(at * dtype.itemsize, memory), memory.nbytes)
        yield _cast(values, wanted, title).view(torch.uint8).numpy().data
    source.check(crc32)


def _cast(values: torch.Tensor, wanted: torch.dtype, title: str) -> torch.Tensor:
    """
    Raises:
        UnsupportedContentError: finite values would become infinite.
    """
    found = values.to(wanted)
    if overflown := int((found.isinf() & values.isfinite()).sum()):
        raise UnsupportedContentError(
            f"{title}: {overflown} finite values would be infinite in {wanted}, the largest is "
            f"{float(values[values.isfinite()].abs().max()):g}; choose a dtype of a wider range, such as bfloat16"
        )
    return found
