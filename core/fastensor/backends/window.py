"""Small parts of a file that follow each other, read together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from fastensor.backends.base import Extent

ALIGNMENT = 64
"""What is so aligned in the file is so aligned in memory, as torch has all memory."""
WINDOW_NBYTES = 1 << 20
SMALL_NBYTES = 64 << 10
"""Parts up to this size are worth reading with those behind them."""


class Window:
    """A part of a file in memory, which moves on as it is asked for parts further on.

    While each part begins where the one before has ended, more and more is read ahead, up to 1 MiB. Used by one thread,
    and not any more when reading has failed.

    Args:
        read: called with an offset, and the memory to fill from there.
        end: of what may be read.
        kept: whether the memory is kept by whoever asks: then none of it is used again.
    """

    def __init__(self, read: Callable[[int, memoryview], object], end: int, *, kept: bool = False) -> None:
        self._read = read
        self._end = end
        self._kept = kept
        self._array: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._data = self._array.data
        self._address = 0
        self._begin = 0
        self.next = 0
        """Where the part is expected that is asked for next."""

    def part(self, begin: int, nbytes: int, *, ahead: bool = True) -> memoryview:
        """So many bytes of the file; they stay until the next call, or for ever if ``kept``. Raises what reading does.

        Args:
            begin, nbytes: where they are.
            ahead: whether what is behind them may be read with them.
        """
        if not self._begin <= begin <= begin + nbytes <= self._begin + self._data.nbytes:
            more = min(2 * self._data.nbytes, WINDOW_NBYTES) if ahead and begin == self.next else 0
            self._move(begin, min(max(nbytes, more), self._end - begin))
        self.next = begin + nbytes
        at = begin - self._begin
        return self._data[at : at + nbytes]

    def array(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The same of a part within the one that was asked for last, as an array."""
        at = begin - self._begin
        return self._array[at : at + nbytes]

    def address_of(self, offset: int) -> int:
        """Where a byte of the part that was asked for last is in memory."""
        return self._address + offset - self._begin

    def _move(self, begin: int, nbytes: int) -> None:
        if self._kept or nbytes != self._data.nbytes:
            shift = begin % ALIGNMENT
            memory = torch.empty(shift + nbytes, dtype=torch.uint8, device="cpu")
            self._array = memory.numpy()[shift:]
            self._data = self._array.data
            self._address = memory.data_ptr() + shift
        self._read(begin, self._data)
        self._begin = begin


def joined(parts: Iterable[tuple[int, int]]) -> list[Extent]:
    """What a reader is told that will be read: parts that follow each other are one, up to the size of a window.

    Args:
        parts: begin and end of each.

    >>> joined([(0, 5), (5, 9), (10, 11)])
    [Extent(begin=0, end=9), Extent(begin=10, end=11)]
    """
    runs: list[list[int]] = []
    for begin, end in parts:
        if not runs or runs[-1][1] != begin or begin - runs[-1][0] > WINDOW_NBYTES:
            runs.append([begin, end])
        runs[-1][1] = end
    return [Extent(begin, end) for begin, end in runs]
