"""The index of an LMDB database: what it says, where it is kept, what it survives."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from data.databases import ENGINES, by_index, by_lmdb, make, some_records

from fastensor.data import LmdbIndex
from fastensor.errors import UnknownKeyError


@pytest.fixture(params=ENGINES, ids=["0.9", "1.0"])
def engine(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("subdir", [True, False])
def test_records_are_those_of_lmdb(tmp_path: Path, engine: int, subdir: bool) -> None:
    path = make(tmp_path / "data", some_records(3000).items(), engine=engine, subdir=subdir)
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
