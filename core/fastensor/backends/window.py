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
"""About so much is read together."""
SMALL_NBYTES = 64 << 10
"""Parts up to this size are worth reading with those behind them."""


class Window:
    """A part of a file in memory: small neighbours, which are planned to be read together. Use it in one thread, and
    not any more when reading has failed.

    Args:
        read: called with an offset, and the memory to fill from there.
        runs: what is read together, by :func:`joined`.
        kept: whether the memory is kept by whoever asks: then none of it is used again.
    """

    def __init__(
        self, read: Callable[[int, memoryview], object], runs: Iterable[Extent], *, kept: bool = False
    ) -> None:
        self._read = read
        self._ends = {run.begin: run.end for run in runs}
        self._kept = kept
        self._array: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._data = self._array.data
        self._address = 0
        self._begin = 0

    def part(self, begin: int, nbytes: int) -> memoryview:
        """So many bytes of the file; they stay until the next call, or for ever if ``kept``. Raises what reading does.

        With the first part of a run all of the run is read. Who asks for parts in another order than planned reads them
        one by one.
        """
        if not self._begin <= begin <= begin + nbytes <= self._begin + self._data.nbytes:
            self._move(begin, max(self._ends.get(begin, 0) - begin, nbytes))
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


def joined(parts: Iterable[tuple[int, int, bool]]) -> list[Extent]:
    """What is read in one go: small parts that follow each other are one, up to about the size of a window.

    Args:
        parts: begin and end of each, and whether it is small, in the order in which they will be asked for.

    >>> joined([(0, 5, True), (5, 9, True), (10, 11, True), (11, 99, False), (99, 100, True)])
    [Extent(begin=0, end=9), Extent(begin=10, end=11), Extent(begin=11, end=99), Extent(begin=99, end=100)]
    """
    runs: list[list[int]] = []
    grows = False
    for begin, end, is_small in parts:
        if grows and is_small and runs[-1][1] == begin and end - runs[-1][0] <= WINDOW_NBYTES:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
        grows = is_small
    return [Extent(begin, end) for begin, end in runs]
