"""Messages to worker processes, and their answers."""

from __future__ import annotations

from typing import NamedTuple

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
