"""Datasets give what py-lmdb gives, in every kind of process, and notice what is wrong with their file."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from data.databases import ENGINES as LMDB_VERSIONS
from data.databases import make, some_records
from programs import run
from torch.distributed import TCPStore
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Subset

from fastensor.data import LmdbDataset, LmdbIndex, Merging, ReadAheadSampler, decoders
from fastensor.data.coalescing import Extents
from fastensor.data.engines.choice import EngineName, Strategy
from fastensor.data.reading import ValueReader
from fastensor.data.staggering import Staggering
from fastensor.data.sweeping import Sweep, begin_sweep, swept_nbytes
from fastensor.errors import (
    BackendUnavailableError,
    CorruptDatasetError,
    DatasetChangedError,
    UnknownKeyError,
)
from fastensor.files import posix

COUNT = 300
ON_HOST: list[EngineName] = ["mapped", "pread", "willneed", "direct"]


@pytest.fixture(scope="module", params=LMDB_VERSIONS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dataset") / "db", some_records(COUNT).items(), engine=request.param)


@pytest.fixture
def values(path: Path) -> list[bytes]:
    return list(some_records(COUNT).values())


def opened(path: Path | LmdbIndex, **how: Any) -> LmdbDataset[Any]:
    dataset: LmdbDataset[Any] = LmdbDataset(path, **how)
    try:
        dataset[0]
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return dataset


@pytest.mark.parametrize("engine", ON_HOST)
def test_samples_are_the_values_in_the_order_of_the_keys(path: Path, values: list[bytes], engine: EngineName) -> None:
    dataset = opened(path, engine=engine)
    assert dataset.reading_by == engine
    assert len(dataset) == COUNT
    assert [dataset[position] for position in range(COUNT)] == values
    order = random.Random(1).choices(range(-COUNT, COUNT), k=500)  # with repetitions
    assert dataset.__getitems__(order) == [values[position] for position in order]
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("engine", ON_HOST)
@pytest.mark.parametrize("read_ahead_nbytes", [0, 200_000, 1 << 30])
def test_batches_that_were_announced(
    path: Path, values: list[bytes], engine: EngineName, read_ahead_nbytes: int
) -> None:
    """Whether batches are asked for as announced, left out, asked for again, or not announced: they are right."""
    dataset = opened(path, engine=engine, read_ahead_nbytes=read_ahead_nbytes, merging=Merging(read_nbytes=50_000))
    order = np.random.default_rng(1).permutation(COUNT).reshape(30, 10)
    dataset.read_ahead(order[:20])
    dataset.read_ahead(order[20:])
    asked = [order[0], order[1], order[5], order[2], np.array([7]), *order[6:12], *order[28:], order[0]]
    for batch in asked:
        assert dataset.__getitems__(batch) == [values[position] for position in batch]


@pytest.mark.parametrize("decode", [None, bytes])
@pytest.mark.parametrize("read_ahead_nbytes", [0, 100_000, 1 << 30])
@pytest.mark.parametrize("engine", ON_HOST)
def test_an_iteration_reads_in_batches(
    path: Path,
    values: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    engine: EngineName,
    read_ahead_nbytes: int,
    decode: Any,
) -> None:
    dataset = opened(path, engine=engine, decode=decode, read_ahead_nbytes=read_ahead_nbytes)
    reads: list[int] = []
    read = ValueReader.read

    def counted(self: ValueReader, positions: Any, **how: Any) -> Any:
        reads.append(len(positions))
        assert len(positions) == 1 or dataset.index.lengths[positions].sum() <= min(read_ahead_nbytes, 1 << 20)
        return read(self, positions, **how)

    monkeypatch.setattr(ValueReader, "read", counted)
    assert list(dataset) == values
    assert sum(reads) == COUNT
    assert len(reads) < COUNT // 5 if read_ahead_nbytes else len(reads) == COUNT
    chosen = [5, 7, 299, 7]
    assert list(dataset.select(chosen)) == [values[position] for position in chosen]
    assert list(dataset.select([])) == []


def test_an_iteration_reads_few_long_values_among_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [bytes([number]) * (40_000 if number > 240 else 10) for number in range(250)]
    path = make(tmp_path / "db", {b"%03d" % number: value for number, value in enumerate(values)}.items())
    dataset = opened(path, read_ahead_nbytes=100_000)
    reads: list[int] = []
    read = ValueReader.read

    def summed(self: ValueReader, positions: Any, **how: Any) -> Any:
        reads.append(int(dataset.index.lengths[positions].sum()))
        return read(self, positions, **how)

    monkeypatch.setattr(ValueReader, "read", summed)
    assert list(dataset) == values
    assert 80_000 <= max(reads) <= 100_000
    assert len(reads) < 12


def test_an_iteration_goes_on_behind_an_error_of_any_kind(
    path: Path, values: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_one = ValueReader.read_one

    def fail(*arguments: Any, **how: Any) -> Any:
        raise MemoryError("no room")

    def fail_once(self: ValueReader, position: int, **how: Any) -> Any:
        return fail() if position == 3 else read_one(self, position, **how)

    monkeypatch.setattr(ValueReader, "read", fail)
    monkeypatch.setattr(ValueReader, "read_one", fail_once)
    samples = iter(opened(path))
    assert [next(samples) for _ in range(3)] == values[:3]
    with pytest.raises(MemoryError, match="no room"):
        next(samples)
    assert list(samples) == values[4:]


def test_an_iteration_decodes_what_is_asked_for_and_goes_on_behind_errors(path: Path, values: list[bytes]) -> None:
    decoded: list[bytes] = []

    def decode(value: Any) -> bytes:
        decoded.append(bytes(value))
        if len(decoded) in (2, 4):
            raise IndexError("broken")
        return decoded[-1]

    samples = iter(opened(path))
    assert next(samples) == values[0]
    dataset: LmdbDataset[bytes] = LmdbDataset(path, decode=decode)
    samples = iter(dataset)
    assert next(samples) == values[0]
    for number in (1, 3):
        assert decoded == values[:number]
        with pytest.raises(IndexError, match="broken") as caught:
            next(samples)
        assert caught.value.__notes__ == [f"This was sample {number} of {dataset.index.path}"]
        assert next(samples) == values[number + 1]
    assert list(samples) == values[5:]


@pytest.mark.parametrize("decode", [None, bytes])
@pytest.mark.parametrize("engine", ["pread", "willneed", "direct"])
def test_an_iteration_of_a_file_that_is_cut_off(tmp_path: Path, engine: EngineName, decode: Any) -> None:
    """The iteration gives the samples that are left, and an error for each of the others; of a file that was written
    to, errors alone."""
    records = some_records(100)
    dataset = opened(make(tmp_path / "db", records.items()), engine=engine, decode=decode)
    dataset.index.check_unchanged = lambda: None  # type: ignore[method-assign]
    nbytes = int(np.median(dataset.index.offsets))
    os.truncate(dataset.index.path, nbytes)
    samples, found = iter(dataset), []
    for _ in range(100):
        try:
            found.append(next(samples))
        except CorruptDatasetError:
            found.append(None)
    with pytest.raises(StopIteration):
        next(samples)
    ends = (dataset.index.offsets + dataset.index.lengths).tolist()
    assert found == [
        value if end <= nbytes or not value else None for value, end in zip(records.values(), ends, strict=True)
    ]
    del dataset.index.check_unchanged
    samples = iter(dataset)
    for _ in range(2):
        with pytest.raises((DatasetChangedError, CorruptDatasetError)):
            next(samples)


def test_a_file_that_is_written_to_during_an_iteration(tmp_path: Path) -> None:
    """Samples that are decoded later may be views of the file."""
    dataset = opened(make(tmp_path / "db", some_records(20).items()), engine="mapped", decode=bytes)
    samples = iter(dataset)
    next(samples)
    make(tmp_path / "db", [(b"new", b"value")])
    with pytest.raises(DatasetChangedError):
        next(samples)


def test_an_iteration_gives_what_a_subclass_makes(path: Path, values: list[bytes]) -> None:
    class Numbered(LmdbDataset[Any]):
        def __getitem__(self, position: int) -> Any:
            return position, super().__getitem__(position)

    assert list(Numbered(path)) == list(enumerate(values))


@pytest.mark.parametrize("decode", [None, bytes])
@pytest.mark.parametrize(("count", "nbytes"), [(3000, 300), (900, 3000), (40, 70_000)])
@pytest.mark.parametrize("stride", [1, 2, 4, 9])
def test_strides_are_those_of_py_lmdb(tmp_path: Path, count: int, nbytes: int, stride: int, decode: Any) -> None:
    """By all processes that take every n-th value, one after the other: streams that are read with their gaps, and
    streams of which values are read one by one."""
    chance = random.Random(1)
    records = {b"%08d" % number: chance.randbytes(nbytes) for number in range(count)}
    path = make(tmp_path / "db", records.items())
    dataset = opened(path, engine="willneed", decode=decode, merging=Merging(read_nbytes="128KiB"))
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        values = list(transaction.cursor().iternext(keys=False))
    for rank in range(stride):
        positions = np.arange(rank, count, stride)
        batches = np.array_split(positions, 9)
        found = [sample for batch in ReadAheadSampler(batches) for sample in dataset.__getitems__(batch)]
        assert found == [values[position] for position in positions]


def test_positions_may_change_after_they_were_given(path: Path, values: list[bytes]) -> None:
    dataset = opened(path, engine="willneed")
    selected, announced = np.arange(10, 20), np.array([[1, 2], [3, 4]])
    some = dataset.select(selected)
    dataset.read_ahead(announced)
    asked = announced.copy()
    selected[:] = announced[:] = 0
    assert [some[position] for position in range(10)] == values[10:20]
    assert [dataset.__getitems__(batch) for batch in asked] == [values[1:3], values[3:5]]


def test_a_mapped_file_takes_no_announcements(path: Path, values: list[bytes]) -> None:
    """Announcing batches would be of no use there, and take time."""
    dataset = opened(path, engine="mapped")
    sampler = ReadAheadSampler(np.arange(COUNT).reshape(30, 10))
    assert [sample for batch in sampler for sample in dataset.__getitems__(batch)] == values
    assert [sample for batch in islice(sampler, 1) for sample in dataset.__getitems__(batch)] == values[:10]
    assert not dataset._opened()._expected


def test_what_a_mapped_file_was_told_is_read_ahead_when_it_has_left_the_page_cache(
    path: Path, values: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is announced once: before the engine that reads ahead is chosen."""
    resident = [1.0]
    monkeypatch.setattr("fastensor.files.posix.resident_fraction", lambda fd, nbytes: resident[0])
    monkeypatch.setattr("fastensor.data.reading._LEAST_VALUES_PER_CHOICE", 100)
    monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 0)  # nothing is swept
    dataset: LmdbDataset[bytes] = LmdbDataset(path)
    batches = np.random.default_rng(1).permutation(COUNT).reshape(30, 10)
    for number, batch in enumerate(ReadAheadSampler(batches, batches_ahead=8)):
        assert dataset.__getitems__(batch) == [values[position] for position in batch]
        if dataset.reading_by == "willneed":
            break
        assert number < 20
        resident[0] = 0.0
    following = batches[number + 1 : number + 9]
    assert dataset._opened().begun_nbytes == sum(max(len(values[position]), 4096) for position in following.flat)


def test_reading_ahead_stays_within_its_memory(path: Path) -> None:
    index = LmdbIndex.open(path)
    reader = ValueReader(
        index.fileno(),
        Extents(index.offsets, index.lengths),
        Strategy("pread"),
        read_ahead_nbytes=300_000,
    )
    batches = np.random.default_rng(1).permutation(COUNT).reshape(60, 5)
    reader.expect(batches)
    begun = []
    for batch in batches:
        reader.read(batch)
        begun.append(reader.begun_nbytes)
    assert 150_000 < max(begun) <= 300_000
    assert begun[-1] == 0
    reader.close()


@pytest.mark.parametrize("engine", ["pread", "willneed", "direct"])
def test_reading_small_values_ahead_stays_within_its_memory(tmp_path: Path, engine: EngineName) -> None:
    """Each value takes the memory of the page, or of the read, that has brought it."""
    count, most = 40_000, 1 << 20
    path = make(tmp_path / "db", [(b"%08d" % number, b"%0200d" % number) for number in range(count)])
    dataset = opened(path, engine=engine, read_ahead_nbytes=most)
    batches = np.random.default_rng(1).permutation(count).reshape(-1, 16)[:600]
    gc.collect()
    tracemalloc.start()
    try:
        for batch in ReadAheadSampler(batches, batches_ahead=300):
            assert dataset.__getitems__(batch) == [b"%0200d" % position for position in batch]
        assert tracemalloc.get_traced_memory()[1] < 3 * most
    finally:
        tracemalloc.stop()


def test_a_batch_of_any_sampler_is_announced_to_its_worker() -> None:
    """Worker w of 3 gets batches w, w + 3, ...: before each it knows the next two of them."""
    batches = [[number, number] for number in range(20)]
    known: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, batch in enumerate(ReadAheadSampler(batches, num_workers=3, batches_ahead=2)):
        assert batch == batches[number]
        known[number % 3] += [int(upcoming[0]) for upcoming in pickle.loads(pickle.dumps(batch)).upcoming]
        assert known[number % 3][: number // 3 + 2] == list(range(number % 3 + 3, 20, 3))[: number // 3 + 2]
    assert len(ReadAheadSampler(batches)) == 20
    with pytest.raises(ValueError, match="at least 1, found 0"):
        ReadAheadSampler(batches, batches_ahead=0)


@pytest.mark.parametrize(("workers", "start"), [(0, None), (3, "fork"), (2, "spawn")])
def test_a_loader_with_workers(tmp_path: Path, workers: int, start: str | None) -> None:
    values = list(some_records(COUNT).values())
    dataset = opened(
        make(tmp_path / "db", some_records(COUNT).items())
    )  # this process has read already: workers have to open for themselves
    sampler = ReadAheadSampler(BatchSampler(RandomSampler(dataset), 16, False), num_workers=workers)
    loader: DataLoader[bytes] = DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, multiprocessing_context=start, collate_fn=list
    )
    found = [sample for batch in loader for sample in batch]
    assert sorted(found) == sorted(values)


@pytest.mark.parametrize("engine", ON_HOST)
def test_a_forked_child_reads_while_the_parent_does(path: Path, values: list[bytes], engine: EngineName) -> None:
    dataset = opened(path, engine=engine)
    dataset.read_ahead([[1, 2], [3, 4]])
    dataset[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset.__getitems__([1, 2, 250]) == [values[1], values[2], values[250]] else 1)
    assert dataset.__getitems__([1, 2]) == values[1:3]
    assert dataset.__getitems__([3, 4]) == values[3:5]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_share_a_dataset(path: Path, values: list[bytes]) -> None:
    dataset, wrong = opened(path, engine="willneed"), []

    def read(seed: int) -> None:
        for batch in np.random.default_rng(seed).permutation(COUNT).reshape(30, 10):
            wrong.extend(
                position
                for position, value in zip(batch, dataset.__getitems__(batch), strict=True)
                if value != values[position]
            )

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_copies_are_independent(path: Path, values: list[bytes]) -> None:
    dataset = opened(path, decode=decoders.Array("u1"))
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
        assert other._reader is None
        assert other[7].tobytes() == values[7]


def test_keys(path: Path, values: list[bytes]) -> None:
    dataset = opened(path)
    assert dataset.get(b"00000007") == values[7]
    assert dataset.positions_of([b"00000009", b"00000003"]).tolist() == [9, 3]
    with pytest.raises(UnknownKeyError, match="no record has the key b'nine'"):
        dataset.get(b"nine")
    odd = dataset.select(range(1, COUNT, 2))
    assert odd.positions_of([b"00000009", b"00000003"]).tolist() == [4, 1]
    with pytest.raises(UnknownKeyError, match="b'00000002' is not one of the samples"):
        odd.get(b"00000002")


def test_duplicates_are_samples_of_their_own(tmp_path: Path) -> None:
    records = [(b"a", b"2"), (b"a", b"1"), (b"b", b"3")]
    with lmdb.open(str(tmp_path), max_dbs=1) as env, env.begin(write=True) as txn:
        db = env.open_db(b"some", txn=txn, dupsort=True)
        for key, value in records:
            txn.put(key, value, db=db)
    dataset: LmdbDataset[bytes] = LmdbDataset(tmp_path, "some")
    assert [*dataset] == [b"1", b"2", b"3"]  # type: ignore[misc]  # a dataset ends with IndexError, as sequences do
    assert dataset.get(b"a") == b"1"
    assert dataset.positions_of([b"a", b"b"]).tolist() == [0, 1, 2]


def test_subsets_and_other_wrappers(path: Path, values: list[bytes]) -> None:
    dataset = opened(path)
    selected = dataset.select([5, -1, 5]).select([1, 2])
    assert [selected[0], selected[-1]] == [values[-1], values[5]]
    assert len(selected) == 2
    subset = Subset(dataset, [8, 9])
    assert list(DataLoader(subset, batch_size=2, collate_fn=list)) == [values[8:10]]
    assert ConcatDataset([selected, subset])[3] == values[9]
    with pytest.raises(IndexError, match=r"it has 2 samples, found position 2"):
        selected[2]
    with pytest.raises(IndexError, match=r"it has 300 samples, found position -301"):
        dataset.select([-301])


def test_an_empty_database(tmp_path: Path) -> None:
    dataset: LmdbDataset[bytes] = LmdbDataset(make(tmp_path / "db", []))
    assert len(dataset) == 0
    assert dataset.__getitems__([]) == []
    assert dataset.mean_nbytes == 0
    assert dataset.content_id() == dataset.content_id()
    with pytest.raises(IndexError, match="it has 0 samples, found position 0"):
        dataset[0]


def test_the_content_is_that_of_copies_and_of_no_other(path: Path, tmp_path: Path) -> None:
    content = LmdbDataset(path).content_id()
    records = some_records(COUNT)
    assert LmdbDataset(make(tmp_path / "copy", records.items())).content_id() == content
    records[b"00000000"] = bytes(len(records[b"00000000"])) or b"x"
    assert LmdbDataset(make(tmp_path / "other", records.items())).content_id() != content
    assert LmdbDataset(path).select(range(299)).content_id() != content


@pytest.mark.parametrize("engine", ON_HOST)
def test_a_file_that_is_written_to(tmp_path: Path, engine: EngineName) -> None:
    dataset = opened(make(tmp_path / "db", some_records(20).items()), engine=engine)
    make(tmp_path / "db", [(b"new", b"value")])
    with pytest.raises(DatasetChangedError, match="it was written to since it was indexed; open it anew"):
        dataset[0]


_OVERWRITE = """
import sys, lmdb
with lmdb.open(sys.argv[1], map_size=1 << 30, sync=False) as env:
    for number in range(5):
        with env.begin(write=True) as txn:
            for key, value in list(txn.cursor()):
                txn.put(key, bytes([number]) * len(value))
"""


def test_a_pinned_snapshot_outlives_writers(tmp_path: Path) -> None:
    records = some_records(50)
    path = make(tmp_path / "db", records.items())
    with LmdbIndex.open(path, pin=True) as index:
        datasets = [opened(index, engine=engine) for engine in ON_HOST]
        run("-c", _OVERWRITE, path)
        for dataset in datasets:
            assert dataset.__getitems__(range(50)) == list(records.values())


@pytest.mark.parametrize("engine", ["pread", "willneed", "direct"])
def test_a_file_that_is_cut_off(tmp_path: Path, engine: EngineName) -> None:
    dataset = opened(make(tmp_path / "db", some_records(100).items()), engine=engine)
    os.truncate(dataset.index.path, 8192)
    last = int(np.argmax(dataset.index.offsets))
    with pytest.raises(CorruptDatasetError, match=r"the file ends before offset \d+: it was cut off"):
        dataset[last]


def test_a_sample_that_cannot_be_decoded(path: Path) -> None:
    """The error says which sample it was."""
    dataset = opened(path)
    dataset.decode = decoders.npy
    with pytest.raises(ValueError, match=r"numpy\.save") as caught:
        dataset.__getitems__([17])
    assert caught.value.__notes__ == [f"This was sample 17 of {dataset.index.path}"]


def test_the_choice_follows_the_page_cache(path: Path, values: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that reads what is not resident is followed by one that maps the file; batches announced stay right."""
    resident = [0.0]
    monkeypatch.setattr("fastensor.files.posix.resident_fraction", lambda fd, nbytes: resident[0])
    monkeypatch.setattr("fastensor.data.reading._LEAST_VALUES_PER_CHOICE", 100)
    monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 0)  # nothing is swept
    dataset: LmdbDataset[bytes] = LmdbDataset(path)
    batches = np.random.default_rng(1).permutation(COUNT).reshape(30, 10)
    dataset.read_ahead(batches)
    engines = []
    for number, batch in enumerate(batches):
        resident[0] = float(number >= 15)
        assert dataset.__getitems__(batch) == [values[position] for position in batch]
        engines.append(dataset.reading_by)
    assert engines[:15] == ["willneed"] * 15
    assert engines[-1] == "mapped"


@pytest.fixture
def cold(path: Path, tmp_path: Path) -> Path:
    """A copy of the database, out of the page cache."""
    if path.is_dir():
        shutil.copytree(path, tmp_path / "cold")
    else:
        shutil.copy(path, tmp_path / "cold")
    with LmdbIndex.open(tmp_path / "cold", sidecar=False) as index:
        os.fsync(index.fileno())
        if posix.evict(index.fileno(), os.fstat(index.fileno()).st_size):
            pytest.skip("this filesystem keeps files in memory")
    return tmp_path / "cold"


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[Sweep]:
    """The sweeps that begin; one is due after 50 of 300 values."""
    begun: list[Sweep] = []

    def begin(fd: int, nbytes: int, missing: float) -> Sweep | None:
        sweep = begin_sweep(fd, nbytes, missing)
        begun.extend([sweep] if sweep else [])
        return sweep

    monkeypatch.setattr("fastensor.data.reading.begin_sweep", begin)
    monkeypatch.setattr("fastensor.data.reading._LEAST_VALUES_PER_CHOICE", 100)
    return begun


def read_shuffled(dataset: LmdbDataset[bytes], values: list[bytes], batches: slice) -> None:
    for batch in np.random.default_rng(1).permutation(COUNT).reshape(30, 10)[batches]:
        assert dataset.__getitems__(batch) == [values[position] for position in batch]


def test_a_file_that_fits_into_memory_is_swept(cold: Path, values: list[bytes], sweeps: list[Sweep]) -> None:
    """Soon the whole file is in memory, whatever was read of it, and it is mapped."""
    dataset: LmdbDataset[bytes] = LmdbDataset(cold)
    read_shuffled(dataset, values, slice(4))
    assert not sweeps
    read_shuffled(dataset, values, slice(4, 5))
    (sweep,) = sweeps
    sweep._thread.join()
    assert posix.resident_fraction(dataset.index.fileno(), os.fstat(dataset.index.fileno()).st_size) > 0.95
    read_shuffled(dataset, values, slice(5, 30))
    assert dataset.reading_by == "mapped"
    assert len(sweeps) == 1


@pytest.mark.parametrize(
    "why", ["memory", "a small selection", "a named engine", "staggering", "the order of the file"]
)
def test_a_file_is_not_swept(
    cold: Path, values: list[bytes], sweeps: list[Sweep], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "memory":
        nbytes = (cold / "data.mdb" if cold.is_dir() else cold).stat().st_size
        monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: nbytes // 10)
    how: dict[str, Any] = {"engine": "willneed"} if why == "a named engine" else {}
    if why == "staggering":
        server = TCPStore("127.0.0.1", 0, is_master=True)
        how["staggering"] = Staggering(1, store=f"127.0.0.1:{server.port}")
    dataset: LmdbDataset[bytes] = LmdbDataset(cold, **how)
    if why == "a small selection":
        some = dataset.select(range(COUNT // 5))
        for _ in range(2):
            assert some.__getitems__(range(COUNT // 5)) == values[: COUNT // 5]
    if why == "the order of the file":
        for batch in np.argsort(dataset.index.offsets).reshape(10, -1):
            assert dataset.__getitems__(batch) == [values[position] for position in batch]
    else:
        read_shuffled(dataset, values, slice(4 if why == "a small selection" else 30))
    assert not sweeps


def test_a_sweep_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the reader is closed, or others need memory."""
    with (tmp_path / "data").open("w+b") as file:
        os.truncate(file.fileno(), 1 << 30)
        asked: list[int] = []

        def ask(fd: int, begin: int, nbytes: int) -> None:
            asked.append(begin)
            has_begun.set()
            may_go_on.wait()

        has_begun, may_go_on = threading.Event(), threading.Event()
        monkeypatch.setattr("fastensor.data.sweeping.bring", ask)
        monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 1 << 40)
        sweep = Sweep(file.fileno(), 1 << 30)
        assert has_begun.wait(20)
        sweep.stop()
        assert not sweep.is_over
        may_go_on.set()
        sweep._thread.join()
        assert sweep.is_over
        assert asked == [0]

        asked.clear()
        monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 1 << 30 if asked else 1 << 40)
        Sweep(file.fileno(), 1 << 30)._thread.join()
        assert asked == [0]


def test_a_sweep_ends_with_its_dataset(cold: Path, values: list[bytes], sweeps: list[Sweep]) -> None:
    dataset: LmdbDataset[bytes] = LmdbDataset(cold)
    read_shuffled(dataset, values, slice(30))
    (sweep,) = sweeps
    assert not sweep._stopped
    del dataset
    gc.collect()
    assert sweep._stopped


def test_files_are_swept_while_they_fit_into_memory_together(
    cold: Path, values: list[bytes], sweeps: list[Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # sweeps of other tests
    other = cold.with_name("other")
    (shutil.copytree if cold.is_dir() else shutil.copy)(cold, other)
    first: LmdbDataset[bytes] = LmdbDataset(cold)
    second: LmdbDataset[bytes] = LmdbDataset(other)
    fd = second.index.fileno()
    nbytes = os.fstat(fd).st_size
    os.fsync(fd)
    for dataset in (first, second):  # the copy has brought both into the page cache
        posix.evict(dataset.index.fileno(), nbytes)
    monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 2 * nbytes)
    read_shuffled(first, values, slice(30))
    (sweep,) = sweeps
    sweep._thread.join()
    read_shuffled(second, values, slice(30))
    assert len(sweeps) == 1

    del first, sweep
    sweeps.clear()
    gc.collect()  # its pages need not stay any more
    posix.evict(fd, nbytes)
    read_shuffled(second, values, slice(30))
    assert len(sweeps) == 1


def test_a_file_that_is_swept_twice_takes_memory_once(cold: Path) -> None:
    gc.collect()  # sweeps of other tests
    with LmdbIndex.open(cold) as index, (cold.parent / "empty").open("wb") as other:
        nbytes = os.fstat(index.fileno()).st_size
        before = swept_nbytes(besides=other.fileno())
        begun = [Sweep(index.fileno(), nbytes) for _ in range(2)]
        assert swept_nbytes(besides=other.fileno()) == before + nbytes
        assert swept_nbytes(besides=index.fileno()) == before
        for sweep in begun:
            sweep._thread.join()


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[list[int]]:
    """Descriptors of two files of three pieces, without contents."""
    with (tmp_path / "first").open("w+b") as first, (tmp_path / "second").open("w+b") as second:
        for file in (first, second):
            os.truncate(file.fileno(), 192 << 20)
        yield [first.fileno(), second.fileno()]


def test_after_a_sweep_has_given_up_only_what_it_asked_for_counts(
    sparse: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # sweeps of other tests
    asked: list[int] = []
    monkeypatch.setattr("fastensor.data.sweeping.bring", lambda fd, begin, nbytes: asked.append(begin))
    monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: 0 if asked else 1 << 40)
    before = swept_nbytes(besides=sparse[1])
    sweep = Sweep(sparse[0], 192 << 20)
    sweep._thread.join()
    assert asked == [0]
    assert swept_nbytes(besides=sparse[1]) == before + (64 << 20)


def test_where_memory_gets_short_sweeps_give_way(sparse: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # sweeps of other tests
    available, may_go_on = [1 << 40], threading.Event()
    monkeypatch.setattr("fastensor.data.sweeping.bring", lambda fd, begin, nbytes: may_go_on.wait())
    monkeypatch.setattr("fastensor.data.sweeping.available_memory", lambda: available[0])
    sweeps = [Sweep(fd, 192 << 20) for fd in sparse]
    available[0] = 400 << 20  # half of it has room for one of them
    may_go_on.set()
    for sweep in sweeps:
        sweep._thread.join()
    assert min(sweep.nbytes for sweep in sweeps) <= 64 << 20


def test_a_process_that_is_forked_during_a_sweep_goes_on_by_itself(cold: Path, values: list[bytes]) -> None:
    dataset: LmdbDataset[bytes] = LmdbDataset(cold)
    with LmdbIndex.open(cold) as index:
        sweep = Sweep(index.fileno(), os.fstat(index.fileno()).st_size)
        child = os.fork()
        if not child:
            read_shuffled(dataset, values, slice(30))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sweep._thread.join()
