"""Datasets of Ray Data as map-style datasets: their blocks stay in Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Self

import numpy as np
import ray
from ray.data import Dataset
from ray.data.block import BlockAccessor

from fastensor.data.coalescing import Integers


class Rows:
    """The rows of a dataset, each a dict. Any member of the cluster can read them, until the process that has made this
    object ends: the blocks belong to it.

    Args:
        blocks: references to Arrow tables.
        ends: for each block how many rows it and those before it have.
    """

    def __init__(self, blocks: Sequence[Any], ends: Integers) -> None:
        self._blocks = blocks
        self._ends = ends

    @classmethod
    def of(cls, dataset: Dataset) -> Self:
        """Run what makes a dataset, and keep its rows, in their order."""
        blocks = dataset.materialize().to_arrow_refs()
        count = ray.remote(num_cpus=0)(_count)
        return cls(blocks, np.cumsum(ray.get([count.remote(block) for block in blocks]), dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        wanted = np.unique(np.asarray(positions, np.int64))
        numbers = np.searchsorted(self._ends, wanted, side="right").tolist()
        for number, pairs in groupby(zip(numbers, wanted.tolist(), strict=True), key=lambda pair: pair[0]):
            of_block = [position for _, position in pairs]
            begin = int(self._ends[number - 1]) if number else 0
            block = BlockAccessor.for_block(ray.get(self._blocks[number]))
            taken = BlockAccessor.for_block(block.take([position - begin for position in of_block]))
            rows: Iterator[Any] = taken.iter_rows(public_row_format=True)
            found |= {position: dict(row) for position, row in zip(of_block, rows, strict=True)}
        return [found[position] for position in positions]


def _count(table: Any) -> int:
    return int(table.num_rows)
