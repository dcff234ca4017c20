"""The protocol of an engine, and what engines share: bringing values by reads that are merged and begun ahead."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import torch

from fastensor.data.coalescing import Extents, Integers, Reads
from fastensor.files import posix

Value: TypeAlias = memoryview | torch.Tensor | bytes
"""The bytes of a value: a read-only memoryview of unsigned bytes, or a tensor of uint8 on a GPU. It stays valid while
it is kept. Meanwhile the whole read that has brought it stays in memory, or the file stays mapped. Or a copy."""

_READS_AHEAD = 256
_NBYTES_AHEAD = 16 << 20
"""The most reads and bytes that are under way beyond those that are needed now, or twice what was just taken, if that
is more. More would make no disk faster, and to begin them takes time."""
_MANY = 256
_SMALL_NBYTES = 512
"""NumPy copies so many values, all of one length up to this, in a third of the time of slices."""


def copies_of(values: Sequence[Value]) -> list[Value]:
    """Views as ``bytes``, tensors as they are."""
    return [bytes(value) if isinstance(value, memoryview) else value for value in values]


def copies_of_parts(memory: Value | mmap.mmap, begins: Integers, lengths: Integers) -> list[Value]:
    """Parts of memory as ``bytes``, shorter where it ends; those of tensors as they are.

    >>> copies_of_parts(b"abcdef", np.array([4, 0]), np.array([3, 2]))
    [b'ef', b'ab']
    """
    if len(lengths) >= _MANY and not isinstance(memory, torch.Tensor) and _fit_small(begins, lengths, len(memory)):
        nbytes = int(lengths[0])
        anywhere = np.ndarray(len(memory) - nbytes + 1, f"V{nbytes}", memory, strides=1)
        found: list[Value] = anywhere[begins].tolist()
        return found
    places = zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
    values = [memory[begin:end] for begin, end in places]
    return copies_of(values) if isinstance(memory, memoryview) else values


def _fit_small(begins: Integers, lengths: Integers, memory_nbytes: int) -> bool:
    nbytes = int(lengths[0])
    fit = 0 < nbytes <= _SMALL_NBYTES and int(begins.max()) + nbytes <= memory_nbytes
    return fit and bool((lengths == nbytes).all())


class Fetch(Protocol):
    """Values that an engine has begun to bring. Dropping it gives them up."""

    def take(self, begin: int, end: int, *, copied: bool = False) -> Sequence[Value]:
        """The values from number ``begin`` to before ``end``, waiting for those that are not there yet.

        With ``copied``, they are ``bytes``, which takes less time than copies of views; but tensors stay tensors.

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
        self._lengths = extents.lengths
        self._reads = reads
        self._untaken: list[int] = np.bincount(reads.read_of).tolist()
        """Number of values of each read that have not been taken."""
        self._is_value = len(reads) == len(extents) and np.array_equal(reads.lengths, extents.lengths)
        """True if each value is what a read of its own brings."""
        self._nbytes_until = np.cumsum(reads.lengths)
        self._begin = begin
        self._finish = finish
        self._begun = 0
        self._held: dict[int, Value] = {}
        """Reads some of whose values have not been taken."""
        self._begin_until(_READS_AHEAD, _NBYTES_AHEAD)

    def take(self, begin: int, end: int, *, copied: bool = False) -> list[Value]:
        read_of, lengths = self._reads.read_of[begin:end], self._lengths[begin:end]
        needed, nbytes = int(read_of.max()) + 1, int(lengths.sum())
        self._begin_until(needed, None)
        ahead = int(self._nbytes_until[needed - 1]) + max(_NBYTES_AHEAD, 2 * nbytes)
        self._begin_until(needed + max(_READS_AHEAD, 2 * (end - begin)), ahead)
        values = self._cut(read_of, self._reads.begin_in_read[begin:end], lengths, copied=copied)
        if sum(map(len, values)) < nbytes:
            self._raise_end_of_file(values, begin)
        return values

    def _cut(self, read_of: Integers, begins: Integers, lengths: Integers, *, copied: bool) -> list[Value]:
        if self._is_value:
            finish = self._finish
            found = [finish(read) for read in read_of.tolist()]
            return copies_of(found) if copied else [memoryview(one) if isinstance(one, bytes) else one for one in found]
        if copied and len(read_of) >= _MANY:
            cuts = [0, *(np.flatnonzero(read_of[1:] != read_of[:-1]) + 1).tolist(), len(read_of)]
            if (len(cuts) - 1) * _MANY <= len(read_of):
                values: list[Value] = []
                for first, last in pairwise(cuts):
                    data = self._finished(int(read_of[first]), last - first)
                    values += copies_of_parts(data, begins[first:last], lengths[first:last])
                return values
        numbers: list[int] = read_of.tolist()
        memory = {read: self._finished(read, count) for read, count in Counter(numbers).items()}
        if not copied:
            memory = {read: memoryview(data) if isinstance(data, bytes) else data for read, data in memory.items()}
        places = zip(numbers, begins.tolist(), (begins + lengths).tolist(), strict=True)
        values = [memory[read][first:last] for read, first, last in places]
        return copies_of(values) if copied and not isinstance(values[0], bytes) else values

    def _finished(self, read: int, count: int) -> Value:
        """The bytes of a read, of which so many values are taken now."""
        data = self._held.pop(read) if read in self._held else self._finish(read)
        self._untaken[read] -= count
        if self._untaken[read]:
            self._held[read] = data
        return data

    def _begin_until(self, end: int, nbytes: int | None) -> None:
        """Begin all reads before number ``end``, or fewer, so that all together have at most ``nbytes``."""
        if nbytes is not None:
            end = min(end, int(np.searchsorted(self._nbytes_until, nbytes, side="right")))
        for read in range(self._begun, min(end, len(self._untaken))):
            self._begin(read)
            self._begun = read + 1

    def _raise_end_of_file(self, values: Sequence[Value], begin: int) -> None:
        for number, value in enumerate(values, begin):
            offset = int(self._reads.offsets[self._reads.read_of[number]] + self._reads.begin_in_read[number])
            posix.check_end(len(value), int(self._lengths[number]), offset)
