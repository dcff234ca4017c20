"""LMDB databases made by py-lmdb, and what py-lmdb reads from them: the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lmdb

from fastensor.data import LmdbIndex

ENGINES = (0, 1)
"""LMDB 0.9, which writes data version 1, and LMDB 1.0, which writes version 3."""
MAP_NBYTES = 1 << 30


def make(path: Path, records: Iterable[tuple[bytes, bytes]], *, engine: int = 0, **options: Any) -> Path:
    """An environment with records in its main database."""
    with (
        lmdb.open(str(path), map_size=MAP_NBYTES, lib_version=engine, sync=False, **options) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in records:
            txn.put(key, value)
    return path


def some_records(count: int, sizes: Iterable[int] = (0, 1, 30, 500, 2000, 2100, 5000, 70000)) -> dict[bytes, bytes]:
    """Records whose values fit into leaf pages, need one overflow page, or several."""
    chance = random.Random(count)
    choices = tuple(sizes)
    return {b"%08d" % number: chance.randbytes(chance.choice(choices)) for number in range(count)}


def by_lmdb(path: Path, *, engine: int = 0, subdir: bool = True) -> list[tuple[bytes, bytes]]:
    """The records of the main database, in order, by py-lmdb."""
    with lmdb.open(str(path), readonly=True, lock=False, lib_version=engine, subdir=subdir) as env, env.begin() as txn:
        return list(txn.cursor())


def by_index(index: LmdbIndex) -> list[tuple[bytes, bytes]]:
    """The records of an index, in order."""
    data = Path(index.path).read_bytes()
    places = zip(index.keys(), index.offsets.tolist(), index.lengths.tolist(), strict=True)
    return [(key, data[offset : offset + nbytes]) for key, offset, nbytes in places]
