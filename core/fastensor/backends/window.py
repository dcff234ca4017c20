"""Reading small neighbouring parts of a file together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from fastensor.backends.base import Extent
from fastensor.backends.memory import Bytes

ALIGNMENT = 64
"""Parts that are aligned to this in the file are so in memory, too, as all memory of torch is."""
WINDOW_NBYTES = 1 << 20
"""Bytes that are read together, about."""
SMALL_NBYTES = 64 << 10
"""Parts up to this size are read together with the parts behind them."""


class ReadWindow:
    """A part of a file in memory, which holds neighbours that are read together. Use it in one thread, and not after a
    read has failed.

    Args:
        read: called with an offset, and the memory to fill from there.
        runs: the extents that are read together, from :func:`joined`.
        kept: whether the caller keeps the memory, so that none of it is used again.
    """

    def __init__(
        self, read: Callable[[int, memoryview], object], runs: Iterable[Extent], *, kept: bool = False
    ) -> None:
        self._read = read
        self._ends = {run.begin: run.end for run in runs}
        self._kept = kept
        self._array: Bytes = np.empty(0, np.uint8)
        self._data = self._array.data
        self._address = 0
        self._begin = 0

    def part(self, begin: int, nbytes: int) -> memoryview:
        """A part of the file, which stays in memory until the next call, or for good if ``kept``.

        The first part of a run causes one read of the whole run. Parts in another order than planned are read one by
        one. Raises what ``read`` raises.
        """
        if not self._begin <= begin <= begin + nbytes <= self._begin + self._data.nbytes:
            self._move(begin, max(self._ends.get(begin, 0) - begin, nbytes))
        at = begin - self._begin
        return self._data[at : at + nbytes]

    def array(self, begin: int, nbytes: int) -> Bytes:
        """A part of what the last :meth:`part` returned, as an array."""
        at = begin - self._begin
        return self._array[at : at + nbytes]

    def address_of(self, offset: int) -> int:
        """The address of a byte of what the last :meth:`part` returned."""
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
    """The extents to read at once: small parts that follow each other become one, up to about the size of a window.

    Args:
        parts: begin and end of each part, and whether the part is small, in the order of reading.

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
