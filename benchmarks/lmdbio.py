"""The optimisations of the paper on LMDBIO, by their names, for an ablation like that of its figures 15 to 22.

A strategy is named as in the paper, such as ``LMM-DIO-PROV-COAL``. All of them are switches of ``LmdbDataset``, but
one:

- LMM, one process of a machine reads for all: ``reader="node"``
- DIO, explicit reads instead of page faults: ``engine="pread"`` instead of ``"mapped"``
- COAL, what several batches need is read together: ``merging`` and ``read_ahead_nbytes``
- STAG, only some readers are active at a time: ``staggering``
- PROV, places of records are known without a search. The paper computes them from how the database was made; the index
  has read them from its tree. Without it, readers step through the database by a cursor.
- DM, readers hand their positions on, and read ahead where they guess that their records are: :func:`handed_on`. The
  index makes it pointless, so it is here, and not in Fastensor. It applies to batches in the order of the database, as
  Caffe takes them: reader r takes batch r of each step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from os import stat
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from fastensor.data import Merging, Staggering
from fastensor.data.reading import READ_AHEAD_NBYTES
from fastensor.files import posix

STRATEGIES = ("LMDB", "LMM", "LMM-DM", "LMM-DIO", "LMM-DIO-PROV", "LMM-DIO-PROV-COAL", "LMM-DIO-PROV-COAL-STAG")
"""The rows of the paper's table 1."""
_OPTIMISATIONS = {"LMM", "DM", "DIO", "PROV", "COAL", "STAG"}
_APART = Merging(gap_nbytes=0, read_nbytes=1)
_MARGIN = 0.25
"""By which part of a batch a guess begins earlier and ends later than records are expected."""


def has_index(strategy: str) -> bool:
    """Whether a strategy knows the places of records: then ``LmdbDataset`` reads, with :func:`options`. Otherwise
    :func:`handed_on` does, or :func:`stepped` without DM.

    Raises:
        ValueError: there is no such optimisation.
    """
    parts = {*strategy.split("-")} - {"LMDB"}
    if unknown := parts - _OPTIMISATIONS:
        raise ValueError(f"the optimisations are {sorted(_OPTIMISATIONS)}, found {sorted(unknown)}")
    return "PROV" in parts


def options(strategy: str, *, active: int = 1, store: str = "") -> dict[str, Any]:
    """Arguments of ``LmdbDataset``, any of whose optimisations may be left out, not only in the order of the paper.

    Args:
        strategy: names of optimisations, with hyphens between them. The index is always used: see :func:`has_index`.
        active: for STAG, how many processes read at a time.
        store: for STAG, ``host:port`` of the store.

    Raises:
        ValueError: there is no such optimisation.

    >>> options("LMM-DIO")
    {'reader': 'node', 'engine': 'pread', 'merging': Merging(gap_nbytes=0, read_nbytes=1), 'read_ahead_nbytes': 1}
    """
    has_index(strategy)
    parts = strategy.split("-")
    chosen: dict[str, Any] = {
        "reader": "node" if "LMM" in parts else "process",
        "engine": "pread" if "DIO" in parts else "mapped",
        "merging": Merging() if "COAL" in parts else _APART,
        "read_ahead_nbytes": READ_AHEAD_NBYTES if "COAL" in parts else 1,  # one batch
    }
    if "STAG" in parts:
        chosen["staggering"] = Staggering(active, store=store)
    return chosen


@dataclass(slots=True)
class Guess:
    """Where a reader expects its next batch, by its last ones (section 4.2.2 of the paper)."""

    readers: int
    last: tuple[int, int] | None = None
    """Where the last batch began and ended in the file, in bytes."""
    step_nbytes: int = 0
    """By how much further the next one is expected."""

    def learn(self, begin: int, end: int) -> None:
        """Add the place of a batch. The first one tells how large the batches of the others are, too."""
        self.step_nbytes = self.readers * (end - begin) if self.last is None else begin - self.last[0]
        self.last = begin, end

    def next(self) -> tuple[int, int] | None:
        """Where the next batch may begin and end; None before the first one."""
        if self.last is None:
            return None
        begin, end = (place + self.step_nbytes for place in self.last)
        margin = int(_MARGIN * (end - begin))
        return max(begin - margin, 0), max(end + margin, 0)


def handed_on(
    path: Path, rank: int, readers: int, batch_size: int, steps: int, before: Connection, after: Connection
) -> Iterator[list[bytes]]:
    """DM: the batches of one reader. Each reader begins where the one before has ended, so nobody searches.

    A position is handed on as a key. The paper hands on py-lmdb's cursor itself, with the file mapped at the same
    address everywhere; by a key, LMDB goes down the tree once for each batch. While a reader waits for its position,
    the kernel reads where the batch is expected.

    Args:
        path: the data file.
        rank: of the reader, from 0.
        readers: their number.
        batch_size: records of a batch.
        steps: batches of each reader. The database has the records of all of them.
        before: gives the position of the reader before; for reader 0, of the last one.
        after: takes the position of the next reader.
    """
    guess = Guess(readers)
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env,
        env.begin(buffers=True) as txn,
        path.open("rb") as file,
        txn.cursor() as cursor,
    ):
        nbytes, base = stat(path).st_size, _mapped_at(path)
        for step in range(steps):
            if (expected := guess.next()) is not None and expected[0] < nbytes:
                posix.will_need(file.fileno(), expected[0], min(expected[1], nbytes) - expected[0])
            if rank or step:
                cursor.set_key(before.recv_bytes())
            else:
                cursor.first()
            views = [cursor.value()]
            while len(views) < batch_size and cursor.next():
                views.append(cursor.value())
            is_last = rank == readers - 1 and step == steps - 1
            if not is_last:
                cursor.next()
                after.send_bytes(bytes(cursor.key()))
            places = [(np.frombuffer(view, np.uint8).ctypes.data - base, len(view)) for view in views]
            guess.learn(min(begin for begin, _ in places), max(begin + length for begin, length in places))
            yield [bytes(view) for view in views]


def stepped(path: Path, rank: int, readers: int, batch_size: int, steps: int) -> Iterator[list[bytes]]:
    """Without DM or PROV: each reader steps over the records of all others (section 3.3.2 of the paper).

    Args:
        path, rank, readers, batch_size, steps: as for :func:`handed_on`.
    """
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env,
        env.begin(buffers=True) as txn,
        txn.cursor() as cursor,
    ):
        records = iter(cursor)
        for number in range(steps * readers):
            values = [value for _, (_, value) in zip(range(batch_size), records, strict=False)]
            if number % readers == rank:
                yield [bytes(value) for value in values]


def _mapped_at(path: Path) -> int:
    """The address at which LMDB has mapped a file into this process."""
    found = re.search(rf"^([0-9a-f]+)-\S+ \S+ 0+ .* {re.escape(str(path.resolve()))}$", _maps(), re.M)
    if found is None:
        raise RuntimeError(f"{path} is not mapped from its beginning")
    return int(found[1], 16)


def _maps() -> str:
    return Path("/proc/self/maps").read_text()
