"""Random databases: the index says what py-lmdb says."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from data.databases import ENGINES, by_index, random_environment
from hypothesis import given
from hypothesis import strategies as st

from fastensor.data import LmdbIndex


@given(seed=st.integers(0, 2**32), engine=st.sampled_from(ENGINES))
def test_every_record_of_every_database(tally: Counter[str], seed: int, engine: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        random_environment(Path(folder, "data"), seed, engine) as (env, databases),
    ):
        for database in databases:
            handle = env.open_db(database.name, create=False)
            with env.begin(db=handle) as txn:
                expected = list(txn.cursor())
            index = LmdbIndex.open(Path(folder, "data"), database.name, sidecar=False)
            assert by_index(index) == expected
            for position in range(0, len(index), 197):
                assert position in index.find(expected[position][0])
            tally["databases compared with py-lmdb"] += 1
            tally["records compared with py-lmdb"] += len(expected)
