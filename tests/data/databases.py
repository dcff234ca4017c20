"""LMDB databases made by py-lmdb, and what py-lmdb reads from them: the oracle."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
from packaging.version import Version

from fastensor.data import LmdbIndex

ENGINES = (0, 1) if Version(lmdb.__version__).major >= 3 else (0,)
"""LMDB 0.9, which writes data version 1, and LMDB 1.0, which writes version 3; py-lmdb has both from 3.0 on."""
MAP_NBYTES = 1 << 28


def by_engine(engine: int) -> dict[str, Any]:
    """The argument of ``lmdb.open`` that chooses an engine, where there is a choice."""
    assert engine in ENGINES
    return {"lib_version": engine} if len(ENGINES) > 1 else {}


def make(path: Path, records: Iterable[tuple[bytes, bytes]], *, engine: int = 0, **options: Any) -> Path:
    """An environment with records in its main database."""
    with (
        lmdb.open(str(path), map_size=MAP_NBYTES, **by_engine(engine), sync=False, **options) as env,
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
    with lmdb.open(str(path), readonly=True, lock=False, **by_engine(engine), subdir=subdir) as env, env.begin() as txn:
        return list(txn.cursor())


def by_index(index: LmdbIndex) -> list[tuple[bytes, bytes]]:
    """The records of an index, in order."""
    return list(zip(index.keys(), values_of(index), strict=True))


def values_of(index: LmdbIndex) -> list[bytes]:
    """The bytes that are where an index says that the values are."""
    data = Path(index.path).read_bytes()
    places = zip(index.offsets.tolist(), index.lengths.tolist(), strict=True)
    return [data[offset : offset + nbytes] for offset, nbytes in places]


@dataclass(frozen=True)
class Database:
    """A named database, or the main one, of a random environment."""

    name: bytes | None
    flags: dict[str, bool]

    @property
    def has_integer_keys(self) -> bool:
        return self.flags.get("integerkey", False)

    def key(self, chance: random.Random, most: int) -> bytes:
        """A random key, from so few that they meet."""
        if self.has_integer_keys:
            return chance.randrange(3000).to_bytes(8, sys.byteorder)
        return chance.choice((b"%d", b"%05d", b"k" * (most - 4) + b"%04d")) % chance.randrange(2000)

    def value(self, chance: random.Random, most: int) -> bytes:
        """A random value: of one size, or small, if there may be several of a key."""
        if self.flags.get("integerdup") or self.flags.get("dupfixed"):
            return chance.randrange(1 << 20).to_bytes(8, sys.byteorder)
        if self.flags.get("dupsort"):
            return chance.randbytes(chance.choice((1, 2, 8, 100, most)))
        return chance.randbytes(chance.choice((0, 1, 7, 100, 1000, 2000, 2040, 4080, 4081, 9000, 40000)))


FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"reverse_key": True},
    {"integerkey": True},
    {"dupsort": True},
    {"dupsort": True, "dupfixed": True},
    {"dupsort": True, "dupfixed": True, "integerdup": True},
    {"dupsort": True, "integerkey": True, "reverse_key": False},
    {"dupsort": True, "reverse_key": True},
)

NAMES = (b"one", b"two", b"three" * 30)


@contextmanager
def random_environment(path: Path, seed: int, engine: int) -> Iterator[tuple[lmdb.Environment, list[Database]]]:
    """An environment after random transactions, which put, overwrite and delete in several databases of all flags."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"writemap": chance.random() < 0.3, "subdir": chance.random() < 0.7}
    if engine == 1:
        options["writemap"] = False  # mdb_freelist_save of LMDB 1.0.2 aborts the process ("x <= dl[0].mid")
    with lmdb.open(str(path), map_size=MAP_NBYTES, max_dbs=8, **by_engine(engine), sync=False, **options) as env:
        databases = [
            Database(None, {}),
            *(Database(name, chance.choice(FLAGS)) for name in NAMES[: chance.randint(0, 3)]),
        ]
        handles = [env.open_db(one.name, **one.flags) for one in databases]
        for _ in range(chance.randint(1, 6)):
            with env.begin(write=True) as txn:
                for database, handle in zip(databases, handles, strict=True):
                    _change(txn, database, handle, chance, env.max_key_size())
                txn.put(b"a main database", b"of names alone is refused", db=handles[0])
        yield env, databases


def _change(txn: lmdb.Transaction, database: Database, handle: Any, chance: random.Random, most: int) -> None:
    """Some random puts and deletes. Now and then a key gets so many values that they need a tree."""
    if database.name is not None and chance.random() < 0.05:
        txn.drop(handle, delete=False)
    for _ in range(chance.choice((0, 1, 5, 50, 300))):
        txn.put(database.key(chance, most), database.value(chance, most), db=handle)
    if database.flags.get("dupsort"):
        for _ in range(chance.randint(0, 2)):
            key = database.key(chance, most)
            for _ in range(chance.choice((10, 300, 1500))):
                txn.put(key, database.value(chance, most), db=handle)
    if chance.random() < 0.6:
        keys = [key for key, _ in txn.cursor(db=handle) if chance.random() < 0.3]
        for key in keys:
            if database.name is not None or key.rstrip(b"\0") not in NAMES:
                txn.delete(key, db=handle)


def overwrite(path: Path, times: int) -> None:
    """Replace every value of the main database by others, in as many transactions: writers reuse pages by the third."""
    with lmdb.open(str(path), map_size=8 * MAP_NBYTES, sync=False) as env:  # pinned snapshots make files grow
        for turn in range(times):
            with env.begin(write=True) as txn:
                for key, value in list(txn.cursor()):
                    txn.put(key, bytes([turn % 256]) * len(value))
