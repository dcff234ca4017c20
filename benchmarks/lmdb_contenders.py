"""Who reads training data in LMDB: py-lmdb in three forms, Fastensor and parts of it, raw files, other formats."""

from __future__ import annotations

import atexit
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

import lmdb
from lmdb_scenarios import ORDERS, Cell, Order, Size, State, batches_of
from lmdbio import options
from torch.utils.data import DataLoader, Dataset

from fastensor.data import LmdbDataset, LmdbIndex, ReadAheadSampler
from fastensor.data.plan import Positions
from fastensor.data.samplers import AnnouncedBatch

READAHEAD, NO_READAHEAD = "py-lmdb", "py-lmdb, readahead=False"
HELPED = ("py-lmdb + WILLNEED, near", "py-lmdb + WILLNEED, far")
OURS, RAW, FIO = "fastensor", "raw files", "fio"
LITDATA, STREAMING = "litdata", "mosaicml-streaming"
STOCK = (READAHEAD, NO_READAHEAD)
PEERS = {LITDATA: "litdata", STREAMING: "streaming"}
"""What is measured if it is installed: distributions, which the ways are named after, and their modules."""
PEERS_OF_ORDER: dict[Order, Sequence[str]] = {
    "sequential": (LITDATA, STREAMING),
    "strided": (),
    "full": (STREAMING,),
    "block": (LITDATA,),
}
"""Who has an order of its own that is comparable."""
READ_AHEAD_NBYTES = 32 << 20


class PyLmdb(Dataset[bytes]):
    """Samples by py-lmdb; with ``ahead``, it announces the pages of so many samples that come next."""

    def __init__(self, path: Path, *, readahead: bool, ahead: int = 0) -> None:
        self._transaction = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=readahead).begin()
        self._index = LmdbIndex.open(path) if ahead else None
        self._ahead = ahead

    def __getitems__(self, positions: Sequence[int]) -> list[bytes]:
        if self._index is not None and isinstance(positions, AnnouncedBatch):
            fd = self._index.fileno()
            for batch in positions.upcoming:
                offsets, lengths = self._index.offsets[batch].tolist(), self._index.lengths[batch].tolist()
                for offset, length in zip(offsets, lengths, strict=True):
                    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        get = self._transaction.get
        return [get(b"%08d" % position) for position in positions]

    def batches_ahead(self, size: Size) -> int:
        return max(self._ahead // size.batch, 1)


class RawFiles(Dataset[bytes]):
    """Samples that have files of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitems__(self, positions: Sequence[int]) -> list[bytes]:
        return [raw_file(self._folder, position).read_bytes() for position in positions]


def raw_file(folder: Path, position: int) -> Path:
    return folder / f"{position // 1000}" / f"{position}"


@dataclass(frozen=True, slots=True)
class Files:
    """The same records in every form."""

    folder: Path

    def lmdb(self, size: str) -> Path:
        return self.folder / f"{size}.lmdb"

    def raw(self, size: str) -> Path:
        return self.folder / f"{size}.raw"

    def litdata(self, size: str) -> Path:
        return self.folder / f"{size}.litdata"

    def mds(self, size: str) -> Path:
        """The format of mosaicml-streaming."""
        return self.folder / f"{size}.mds"


Loading: TypeAlias = Callable[[Files, str, Size, list[Positions]], Any]
"""Makes an iterable of batches, of one rank."""


def stock(files: Files, name: str, size: Size, batches: list[Positions], *, readahead: bool) -> Any:
    return DataLoader(PyLmdb(files.lmdb(name), readahead=readahead), batch_sampler=batches, collate_fn=list)


def helped(files: Files, name: str, size: Size, batches: list[Positions], *, far: bool) -> Any:
    dataset = PyLmdb(files.lmdb(name), readahead=False, ahead=size.far if far else size.near)
    sampler = ReadAheadSampler(batches, batches_ahead=dataset.batches_ahead(size))
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=list)


def ours(
    files: Files, name: str, size: Size, batches: list[Positions], *, engine: Any = "auto", announced: bool = True
) -> Any:
    """What ``LmdbLoader`` does, in an order that it may not have."""
    dataset = LmdbDataset(files.lmdb(name), engine=engine, read_ahead_nbytes=READ_AHEAD_NBYTES)
    ahead = min(max(READ_AHEAD_NBYTES // (size.batch * size.nbytes), 2), 1024)
    sampler = ReadAheadSampler(batches, batches_ahead=ahead) if announced else batches
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=list)


def raw(files: Files, name: str, size: Size, batches: list[Positions]) -> Any:
    return DataLoader(RawFiles(files.raw(name)), batch_sampler=batches, collate_fn=list)


def by_litdata(files: Files, name: str, size: Size, batches: list[Positions], *, shuffle: bool) -> Any:
    """As many batches as the others have, but of other samples."""
    import litdata

    dataset = litdata.StreamingDataset(str(files.litdata(name)), shuffle=shuffle, drop_last=False)
    loader = DataLoader(dataset, batch_size=size.batch, collate_fn=lambda batch: [bytes(value) for value in batch])
    return First(loader, len(batches))


@dataclass(frozen=True, slots=True)
class First:
    """The first batches of each pass over a loader."""

    loader: Any
    count: int

    def __iter__(self) -> Iterator[list[bytes]]:
        return islice(self.loader, self.count)


def by_streaming(files: Files, name: str, size: Size, batches: list[Positions], *, shuffle: bool) -> Any:
    """As many batches as the others have, after the first one, but of other samples if they are shuffled.

    It makes the order of an epoch when the first batch is asked for. Locks of the process are files in a folder of its
    own. Its shared memory is removed by ``atexit``, which a process of ``multiprocessing`` does not run by itself.
    """
    from streaming import StreamingDataset

    tempfile.tempdir = tempfile.mkdtemp(dir=files.folder)
    Finalize(None, atexit._run_exitfuncs, exitpriority=0)
    dataset = StreamingDataset(
        local=str(files.mds(name)), batch_size=size.batch, shuffle=shuffle, shuffle_algo="naive", num_canonical_nodes=1
    )
    loader = DataLoader(dataset, batch_size=size.batch, collate_fn=lambda batch: [sample["value"] for sample in batch])
    begun = iter(loader)
    next(begun)
    return Next(begun, len(batches))


@dataclass(frozen=True, slots=True)
class Next:
    """The next batches of a pass that has begun: each iteration goes on where the one before has ended."""

    batches: Iterator[list[bytes]]
    count: int

    def __iter__(self) -> Iterator[list[bytes]]:
        return islice(self.batches, self.count)


LOADING: dict[str, Loading] = {
    READAHEAD: partial(stock, readahead=True),
    NO_READAHEAD: partial(stock, readahead=False),
    HELPED[0]: partial(helped, far=False),
    HELPED[1]: partial(helped, far=True),
    OURS: ours,
    RAW: raw,
}
ABLATION: dict[str, Loading] = {
    "explicit reads, order unknown (pread)": partial(ours, engine="pread", announced=False),
    "+ order known within a batch (willneed)": partial(ours, engine="willneed", announced=False),
    "+ order known ahead, merged, not begun ahead (pread)": partial(ours, engine="pread"),
    "+ order known ahead, begun ahead (willneed)": partial(ours, engine="willneed"),
    "+ past the page cache (direct)": partial(ours, engine="direct"),
}
"""Parts of what ``OURS`` does, in one process."""
STORE = "LMDB_BENCHMARK_STORE"
"""``host:port`` of the store for staggering."""
PAPER = ("LMDB", "DIO", "LMM", "LMM-DIO", "LMM-DIO-COAL", "LMM-DIO-COAL-STAG")
"""Strategies of ``lmdbio.py``. All have PROV: the index has the places of records. So there is nothing for DM to do."""
ACTIVE = 2
"""Processes that read at a time, with STAG."""


def by_strategy(files: Files, name: str, size: Size, batches: list[Positions], *, strategy: str) -> Any:
    """What the paper's optimisations do. The processes of a run find each other by ``FASTENSOR_NODE_READER``, and the
    store of the turns by ``STORE``."""
    how = options(strategy, active=ACTIVE, store=os.environ.get(STORE, ""))
    dataset = LmdbDataset(files.lmdb(name), **how)
    ahead = min(max(how["read_ahead_nbytes"] // (size.batch * size.nbytes), 1), 1024)
    return DataLoader(dataset, batch_sampler=ReadAheadSampler(batches, batches_ahead=ahead), collate_fn=list)


def loading_of(cell: Cell) -> Loading:
    if cell.way == LITDATA:
        return partial(by_litdata, shuffle=cell.order == "block")
    if cell.way == STREAMING:
        return partial(by_streaming, shuffle=cell.order == "full")
    if cell.way in PAPER:
        return partial(by_strategy, strategy=cell.way)
    return (LOADING | ABLATION)[cell.way]


def ways_of(order: Order, world: int, state: State) -> list[str]:
    ways = [READAHEAD, OURS, RAW] if state == "warm" else [*STOCK, *HELPED, OURS, RAW]
    if world == 1:
        ways += [way for way in PEERS_OF_ORDER[order] if installed(way)]
    return ways


def installed(peer: str) -> bool:
    try:
        distribution(peer)
    except PackageNotFoundError:
        return False
    return True


def make_files(files: Files, name: str, size: Size) -> None:
    """Write the records, and build the index."""
    chance = random.Random(1)
    pool = chance.randbytes(max(4 * size.nbytes, 8 << 20))
    begins = [chance.randrange(len(pool) - size.nbytes) for _ in range(size.count)]

    def value(position: int) -> bytes:
        return pool[begins[position] : begins[position] + size.nbytes]

    with lmdb.open(str(files.lmdb(name)), map_size=1 << 36, subdir=False, sync=False) as env:
        with env.begin(write=True) as txn:
            for position in range(size.count):
                txn.put(b"%08d" % position, value(position), append=True)
        env.sync(True)
    LmdbIndex.open(files.lmdb(name)).close()
    read = {
        int(position)
        for order in ORDERS
        for batches in (batches_of(size, order, rank, 4) for rank in range(4))
        for batch in [*batches, *batches_of(size, order, 0, 1)]
        for position in batch
    }
    for position in sorted(read):
        path = raw_file(files.raw(name), position)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value(position))
    if installed(LITDATA):
        from litdata.streaming.writer import BinaryWriter

        files.litdata(name).mkdir()
        writer = BinaryWriter(str(files.litdata(name)), chunk_bytes=64 << 20)
        for position in range(min(2 * size.taken, size.count)):
            writer[position] = value(position)
        writer.done()
        writer.merge()
    if installed(STREAMING):
        from streaming import MDSWriter

        with MDSWriter(out=str(files.mds(name)), columns={"value": "bytes"}, size_limit=64 << 20) as shards:
            for position in range(size.count):
                shards.write({"value": value(position)})
    os.sync()


def paths_of(files: Files, cell: Cell) -> list[Path]:
    if cell.way == RAW:
        return [path for path in files.raw(cell.size).rglob("*") if path.is_file()]
    if cell.way in PEERS:
        folder = files.litdata(cell.size) if cell.way == LITDATA else files.mds(cell.size)
        return [path for path in folder.iterdir() if path.is_file()]
    return [files.lmdb(cell.size)]
