"""What is measured of training data in LMDB: sizes of records, orders, numbers of processes, states of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fastensor.data import EpochPlan
from fastensor.data.plan import Positions

Order: TypeAlias = Literal["sequential", "strided", "full", "block"]
State: TypeAlias = Literal["cold", "warm", "limited", "epoch"]
"""What is in memory of a file, and how much is read: of a ``cold`` file a twentieth of an epoch, or less; in an
``epoch`` all of a file that was cold."""
STATES: tuple[State, ...] = ("cold", "warm")
"""The states of a file in which every order is measured."""
ORDERS: tuple[Order, ...] = ("sequential", "strided", "full", "block")
"""Batches in the order of the keys; Caffe's sharding, rank r reads records r, r + N, r + 2 N …; all records shuffled;
blocks of 256 KiB shuffled, and mixed among 64."""
IN_ORDER: tuple[Order, ...] = ("sequential", "strided")
"""Those in which all processes together read the file from its beginning on."""
BLOCK_NBYTES, BLOCKS_PER_GROUP = 256 << 10, 64


@dataclass(frozen=True, slots=True)
class Size:
    """Records of one size, and how they are read."""

    nbytes: int
    count: int
    """Records of the file."""
    taken: int
    """Samples of a run, by all ranks."""
    batch: int
    near: int
    far: int
    """How many records ahead the kernel is told by ``HELPED``."""


SIZES = {
    "300 B": Size(300, 1_000_000, 12_800, 256, 128, 512),
    "3 KB": Size(3000, 250_000, 12_800, 64, 64, 256),
    "110 KB": Size(110_000, 9_000, 640, 16, 32, 128),
    "1 MB": Size(1_000_000, 1_000, 64, 4, 8, 32),
}
TINY = {
    "300 B": Size(300, 3000, 512, 32, 32, 64),
    "110 KB": Size(110_000, 100, 24, 4, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured."""

    size: str
    order: Order
    world: int
    state: State
    way: str


def batches_of(size: Size, order: Order, rank: int, world: int) -> list[Positions]:
    """The batches of one rank, for its part of the samples of a run."""
    count = max(size.taken // (world * size.batch), 1)
    if order == "strided":
        positions = np.arange(rank, size.count, world)[: count * size.batch]
        return np.split(positions, count)
    plan = EpochPlan(
        size.count, seed=1, shuffle="none" if order == "sequential" else order, batch_size=size.batch,
        rank=rank, world_size=world, block_size=max(BLOCK_NBYTES // size.nbytes, 1), blocks_per_group=BLOCKS_PER_GROUP,
    )  # fmt: skip
    return [batch for _, batch in zip(range(count), plan.batches(0), strict=False)]
