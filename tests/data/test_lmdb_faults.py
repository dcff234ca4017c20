"""A call that fails, or moves fewer bytes, while an index is made or values are read: an error, or the right values."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from data.databases import make, some_records

from fastensor.data import LmdbDataset, LmdbIndex
from fastensor.data.engines.choice import EngineName
from fastensor.errors import BackendUnavailableError, FastensorError
from fastensor.testing import Fault, failing_call, short_call
from fastensor.testing.calls import Call, intercepted

COUNT = 40


@pytest.mark.parametrize("engine", ["mapped", "pread", "willneed", "direct"])
@pytest.mark.parametrize("inject", [failing_call, short_call])
def test_every_call_may_fail(
    tmp_path: Path,
    tally: Counter[str],
    engine: EngineName,
    inject: Callable[[int], AbstractContextManager[Fault]],
) -> None:
    records = some_records(COUNT)
    path = make(tmp_path / "db", records.items())
    keys, values = list(records), list(records.values())

    def read_all() -> None:
        with LmdbIndex.open(path) as index:
            assert [index.key(number) for number in range(0, COUNT, 7)] == keys[::7]
            dataset: LmdbDataset[bytes] = LmdbDataset(index, engine=engine)
            assert dataset.__getitems__(range(COUNT)) == values
            assert dataset[3] == values[3]

    failed = 0
    for number in itertools.count(1):
        for sidecar in path.parent.rglob("*fastensor*"):
            sidecar.unlink()
        with inject(number) as fault:
            try:
                read_all()
            except BackendUnavailableError as error:
                if not fault.fired:
                    pytest.skip(str(error))
            except (FastensorError, OSError):
                assert fault.fired
                failed += 1
        if not fault.fired:
            break
    assert number > 10
    tally["training data: calls failed or cut short"] += number - 1
    if inject is failing_call:
        assert failed > 3
    read_all()


@pytest.mark.parametrize("engine", ["mapped", "willneed"])
def test_advice_that_is_refused_is_no_error(tmp_path: Path, engine: EngineName) -> None:
    records = some_records(COUNT)
    path = make(tmp_path / "db", records.items())
    refused: Counter[str] = Counter()

    def refuse(call: Call) -> Any:
        if call.name != "posix_fadvise":
            return call.perform()
        refused[call.name] += 1
        raise OSError(errno.ENOSYS, "no advice is taken")

    with intercepted(refuse):
        dataset: LmdbDataset[bytes] = LmdbDataset(path, engine=engine)
        assert dataset.__getitems__(range(COUNT)) == list(records.values())
    assert refused["posix_fadvise"] > (2 if engine == "willneed" else 0)
