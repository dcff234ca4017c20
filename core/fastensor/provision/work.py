"""Messages to worker processes, and their answers. Pickles of small arrays are slow, so theirs have one for all."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastensor.data.coalescing import Integers


class Work(NamedTuple):
    """Message to a worker: make a batch, or read samples for the cache."""

    number: int
    loader: int
    """-1: only read."""
    seed: int
    epoch: int
    slot_offset: int
    slot_nbytes: int
    positions: Integers
    offsets: Integers
    """Offset of each sample in the cache; -1: it is not there."""
    lengths: Integers
    """Bytes of each sample in the cache."""

    def __reduce__(self) -> tuple[Any, ...]:
        *head, positions, offsets, lengths = self
        return _work_of, (head, np.concatenate([positions, offsets, lengths]).tobytes())


def _work_of(head: list[Any], numbers: bytes) -> Work:
    return Work(*head, *np.frombuffer(numbers, np.int64).reshape(3, -1))


class Done(NamedTuple):
    """Answer of a worker."""

    number: int
    nbytes: int
    """Bytes of the batch, which is in its slot or in memory of its own."""
    read: Integers
    """Positions of the samples that it has read."""
    lengths: Integers
    """Their bytes."""
    lost: Integers
    """Positions of the samples whose bytes in the cache were not what had been stored."""
    skipped: int = 0
    """Samples of the batch that could not be made, and were left out."""

    def __reduce__(self) -> tuple[Any, ...]:
        number, nbytes, read, lengths, lost, skipped = self
        return _done_of, (number, nbytes, np.concatenate([read, lengths, lost]).tobytes(), len(read), skipped)


def _done_of(number: int, nbytes: int, numbers: bytes, read: int, skipped: int) -> Done:
    positions, lengths, lost = np.split(np.frombuffer(numbers, np.int64), [read, 2 * read])
    return Done(number, nbytes, positions, lengths, lost, skipped)
