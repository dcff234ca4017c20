"""The protocol of an engine, and what engines share: bringing values by reads that are merged and begun ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from fastensor.data.coalescing import Extents, Reads
from fastensor.files import posix

Value: TypeAlias = memoryview | torch.Tensor
"""The bytes of a value: a read-only memoryview of unsigned bytes, or a tensor of uint8 on a GPU. It stays valid while
it is kept. Meanwhile the whole read that has brought it stays in memory, or the file stays mapped."""

_READS_AHEAD = 256
_NBYTES_AHEAD = 16 << 20
"""The most reads and bytes that are under way beyond those that are needed now, or twice what was just taken, if that
is more. More would make no disk faster, and to begin them takes time."""


class Fetch(Protocol):
    """Values that an engine has begun to bring. Dropping it gives them up."""

    def take(self, begin: int, end: int) -> Sequence[Value]:
        """The values from number ``begin`` to before ``end``, waiting for those that are not there yet.

        Each value is taken once at most. Values that are taken in the order of their numbers arrive soonest.

        Raises:
            OSError: the file cannot be read.
            fastensor.files.posix.EndOfFile: the file ends before a value does.
        """


class Engine(Protocol):
    """A way to read values of one file that is open. Used by one thread at a time, in the process that opened it.

    An engine that reads by way of another process, or waits for its turn, implements the same protocol.
    """

    @property
    def name(self) -> str:
        """The name that users pass as ``engine=``."""

    @property
    def reads_ahead(self) -> bool:
        """True if values arrive sooner when several batches are fetched together, or before they are wanted."""

    def fetch(self, extents: Extents) -> Fetch:
        """Begin to bring values, at least one, that will be wanted in this order.

        Returns at once, as far as the engine can read ahead at all. Several fetches may be under way.

        Raises:
            OSError: the file cannot be read.
        """

    def close(self) -> None:
        """Give up threads and memory, and wait for reads that are under way. Values that were taken stay valid. In a
        forked child, only the child's own resources are given up. A second call does nothing."""


class ReadsFetch:
    """A fetch by reads that are begun ahead, in the order in which they are needed. See :class:`Fetch`.

    All engines that read ahead bring values like this. Checkpoints are read ahead by
    :class:`fastensor.backends.ring_reader.RingReader`: their bytes are copied, through few buffers, to tensors that are
    there already. Here nobody has memory yet, and a read is the memory of its values.

    Args:
        extents: the values.
        reads: what brings them.
        begin: ``begin(r)`` begins read number r, without waiting. Called once for each read, in order.
        finish: ``finish(r)`` waits for read number r and returns its bytes: fewer than its length only where the file
            ends. Called once for each read.
    """

    def __init__(
        self, extents: Extents, reads: Reads, begin: Callable[[int], None], finish: Callable[[int], Value]
    ) -> None:
        self._read_of: list[int] = reads.read_of.tolist()
        self._begins: list[int] = reads.begin_in_read.tolist()
        self._lengths: list[int] = extents.lengths.tolist()
        self._offsets: list[int] = reads.offsets.tolist()
        self._missing: list[int] = np.bincount(reads.read_of).tolist()
        """Number of values of each read that have not been taken."""
        self._nbytes_until = np.cumsum(reads.lengths)
        self._begin = begin
        self._finish = finish
        self._begun = 0
        self._held: dict[int, Value] = {}
        """Reads some of whose values have not been taken."""
        self._begin_until(_READS_AHEAD, _NBYTES_AHEAD)

    def take(self, begin: int, end: int) -> list[Value]:
        needed = max(self._read_of[begin:end]) + 1
        ahead = max(_READS_AHEAD, 2 * (end - begin))
        nbytes_ahead = max(_NBYTES_AHEAD, 2 * sum(self._lengths[begin:end]))
        self._begin_until(needed, None)
        self._begin_until(needed + ahead, int(self._nbytes_until[needed - 1]) + nbytes_ahead)
        places = zip(self._read_of[begin:end], self._begins[begin:end], self._lengths[begin:end], strict=True)
        return [self._take(read, at, length) for read, at, length in places]

    def _begin_until(self, end: int, nbytes: int | None) -> None:
        """Begin all reads before number ``end``, or fewer, so that all together have at most ``nbytes``."""
        if nbytes is not None:
            end = min(end, int(np.searchsorted(self._nbytes_until, nbytes, side="right")))
        for read in range(self._begun, min(end, len(self._missing))):
            self._begin(read)
            self._begun = read + 1

    def _take(self, read: int, begin: int, length: int) -> Value:
        held = self._held.get(read)
        if held is None:
            held = self._held[read] = self._finish(read)
        self._missing[read] -= 1
        if not self._missing[read]:
            del self._held[read]
        value = held[begin : begin + length]
        if len(value) < length:
            posix.check_end(len(value), length, self._offsets[read] + begin)
        return value
