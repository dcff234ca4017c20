"""The index of an LMDB database: what it says, where it is kept, what it survives."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import lmdb
import numpy as np
import pytest
from data.databases import ENGINES, by_engine, by_index, by_lmdb, make, overwrite, some_records, values_of

from fastensor.data import LmdbIndex
from fastensor.errors import DatasetChangedError, FastensorError, UnknownKeyError


@pytest.fixture(params=ENGINES, ids=["0.9", "1.0"][: len(ENGINES)])
def engine(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("writemap", [True, False])
@pytest.mark.parametrize("subdir", [True, False])
def test_records_are_those_of_lmdb(tmp_path: Path, engine: int, subdir: bool, writemap: bool) -> None:
    path = make(tmp_path / "data", some_records(3000).items(), engine=engine, subdir=subdir, writemap=writemap)
    index = LmdbIndex.open(path)
    assert by_index(index) == by_lmdb(path, engine=engine, subdir=subdir)
    assert index.path == str(path / "data.mdb" if subdir else path)
    assert index.offsets.dtype == index.lengths.dtype == np.int64
    assert not index.offsets.flags.writeable


def test_keys_are_found(tmp_path: Path, engine: int) -> None:
    records = some_records(3000)
    index = LmdbIndex.open(make(tmp_path / "data", records.items(), engine=engine))
    keys = sorted(records)
    for position in (0, 1, 1500, 2999):
        assert index.key(position) == keys[position]
        assert index.find(keys[position]) == range(position, position + 1)
    for key in (b"", b"00000000x", b"z"):
        with pytest.raises(UnknownKeyError, match="no record has the key"):
            index.find(key)


@pytest.mark.parametrize("sidecar", ["auto", False])
def test_pickled_indexes_are_the_same(tmp_path: Path, sidecar: Literal["auto", False]) -> None:
    index = LmdbIndex.open(make(tmp_path / "data", some_records(100).items()), sidecar=sidecar)
    copy = pickle.loads(pickle.dumps(index))
    assert by_index(copy) == by_index(index)
    assert copy.fingerprint == index.fingerprint
    assert not copy.offsets.flags.writeable


def in_another_process(function: Callable[..., object], *arguments: object) -> None:
    """py-lmdb opens an environment once in a process."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_snapshot_is_pinned_under_a_writer(tmp_path: Path, engine: int) -> None:
    path = make(tmp_path / "data", some_records(500).items(), engine=engine)
    before = by_lmdb(path, engine=engine)
    with LmdbIndex.open(path, pin=True) as index:
        copy = pickle.dumps(index)
        in_another_process(overwrite, path, 4)
        index.check_unchanged()
        assert by_index(index) == by_index(pickle.loads(copy)) == before
    overwrite(path, 4)
    assert values_of(index) != [
        value for _, value in before
    ]  # the pages were free, and the same places have other bytes


def test_a_forked_child_leaves_the_pin_to_its_parent(tmp_path: Path) -> None:
    path = make(tmp_path / "data", some_records(500).items())
    index = LmdbIndex.open(path, pin=True)
    before = by_index(index)
    child = multiprocessing.get_context("fork").Process(target=index.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    in_another_process(overwrite, path, 4)
    assert by_index(index) == before


def test_a_pin_needs_that_nobody_else_in_the_process_has_the_file_open(tmp_path: Path) -> None:
    path = make(tmp_path / "data", some_records(10).items())
    with lmdb.open(str(path)), pytest.raises(FastensorError, match="already open in this process"):
        LmdbIndex.open(path, pin=True)


def test_a_pin_needs_py_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "data", some_records(10).items())
    monkeypatch.setitem(sys.modules, "lmdb", None)
    assert len(LmdbIndex.open(path)) == 10
    with pytest.raises(
        FastensorError, match=r"pinning a snapshot needs py-lmdb: install Fastensor with its extra lmdb$"
    ):
        LmdbIndex.open(path, pin=True)


def test_a_closed_index_reads_no_keys(tmp_path: Path) -> None:
    with LmdbIndex.open(make(tmp_path / "data", some_records(10).items())) as index:
        assert index.key(3) == b"00000003"
    with pytest.raises(ValueError, match="its index is closed"):
        index.key(3)
    assert len(values_of(index)) == 10


@pytest.mark.parametrize("sidecar", ["auto", False])
def test_changes_are_noticed(tmp_path: Path, engine: int, sidecar: Literal["auto", False]) -> None:
    path = make(tmp_path / "data", some_records(100).items(), engine=engine)
    index = LmdbIndex.open(path, sidecar=sidecar)
    index.check_unchanged()
    copy = pickle.dumps(index)
    overwrite(path, 1)
    with pytest.raises(DatasetChangedError, match="it was written to since it was indexed"):
        index.check_unchanged()
    with pytest.raises(DatasetChangedError, match="since its index was pickled"):
        pickle.loads(copy)
    assert by_index(LmdbIndex.open(path, sidecar=sidecar)) == by_lmdb(path, engine=engine)


def test_a_commit_is_noticed_by_its_number(tmp_path: Path, engine: int) -> None:
    """The clock of a filesystem may not have gone on since the last one, and the file needs no more pages."""
    path = make(tmp_path / "data", some_records(100).items(), engine=engine)
    overwrite(path, 4)
    index = LmdbIndex.open(path)
    before = os.stat(index.path)
    overwrite(path, 1)
    os.utime(index.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(index.path).st_size == before.st_size
    with pytest.raises(DatasetChangedError, match="it was written to since it was indexed"):
        index.check_unchanged()


def test_named_databases(tmp_path: Path, engine: int) -> None:
    path = tmp_path / "data"
    with lmdb.open(str(path), max_dbs=2, **by_engine(engine)) as env:
        for name in (b"images", b"labels"):
            with env.begin(write=True, db=env.open_db(name)) as txn:
                txn.put(b"key", name)
    assert by_index(LmdbIndex.open(path, "labels")) == [(b"key", b"labels")]
    assert by_index(LmdbIndex.open(path, b"images")) == [(b"key", b"images")]
    assert by_index(LmdbIndex.open(path, b"images")) == [(b"key", b"images")]  # from its own sidecar
    with pytest.raises(UnknownKeyError, match=r"no database b'masks'; the file has b'images', b'labels'"):
        LmdbIndex.open(path, "masks")
    with pytest.raises(UnknownKeyError, match=r"in named databases; name one of b'images', b'labels'"):
        LmdbIndex.open(path)


WRITER = (400, (500, 3000))
"""Records of which a writer replaces all values in each of its transactions."""


def is_one_version(values: list[bytes]) -> bool:
    """Whether all values are of one transaction of :func:`overwrite`, which gives all bytes the same value."""
    return len({byte for value in values for byte in value}) == 1


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "unpinned"])
@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_a_file_that_is_being_written_to(
    tmp_path: Path, tally: Counter[str], engine: int, pin: bool, times: int
) -> None:
    """What is read is one version of the data, or it is an error."""
    path = make(tmp_path / "data", some_records(*WRITER).items(), engine=engine)
    overwrite(path, 1)
    writer = multiprocessing.get_context("forkserver").Process(target=overwrite, args=(path, times))
    writer.start()
    while writer.is_alive():
        try:
            with LmdbIndex.open(path, pin=pin) as index:
                values = values_of(index)
                index.check_unchanged()
        except DatasetChangedError:
            assert not pin
            tally["changes of databases noticed"] += 1
        else:
            assert is_one_version(values)
            tally["snapshots read under a writer"] += 1
    assert writer.exitcode == 0
