"""The paper's optimisations can be switched by name, and all read the same records."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from data.databases import make

from fastensor.data import LmdbDataset

ROOT = Path(__file__).parents[2]
READERS, BATCH, STEPS = 3, 8, 5
VALUES = [bytes([number % 251]) * (500 if number % 3 else 5000) for number in range(READERS * BATCH * STEPS)]


def module() -> Any:
    if "lmdbio" not in sys.modules:
        spec = importlib.util.spec_from_file_location("lmdbio", ROOT / "benchmarks" / "lmdbio.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["lmdbio"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["lmdbio"])
    return sys.modules["lmdbio"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = ((b"%06d" % number, value) for number, value in enumerate(VALUES))
    return make(tmp_path_factory.mktemp("lmdbio") / "db", records, subdir=False)


def of_rank(rank: int) -> list[list[bytes]]:
    return [VALUES[begin : begin + BATCH] for begin in range(rank * BATCH, len(VALUES), READERS * BATCH)]


@pytest.mark.parametrize("strategy", ["LMDB", "DIO", "COAL-DIO", "LMM-DIO-PROV-COAL"])
def test_strategies_are_arguments_of_a_dataset(path: Path, strategy: str) -> None:
    assert list(LmdbDataset(path, **module().options(strategy)).__getitems__(range(len(VALUES)))) == VALUES


def test_names_of_strategies() -> None:
    lmdbio = module()
    assert [name for name in lmdbio.STRATEGIES if lmdbio.has_index(name)] == [
        "LMM-DIO-PROV", "LMM-DIO-PROV-COAL", "LMM-DIO-PROV-COAL-STAG",
    ]  # fmt: skip
    assert lmdbio.options("STAG", active=2, store="there:1")["staggering"].active == 2
    with pytest.raises(ValueError, match=r"found \['PROVE'\]"):
        lmdbio.options("LMM-PROVE")


def _read(path: Path, rank: int, before: Connection, after: Connection, result: Connection) -> None:
    result.send(list(module().handed_on(path, rank, READERS, BATCH, STEPS, before, after)))


def test_positions_are_handed_on(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    positions = [context.Pipe(duplex=False) for _ in range(READERS)]
    results = [context.Pipe(duplex=False) for _ in range(READERS)]
    processes = [
        context.Process(
            target=_read,
            args=(path, rank, positions[rank][0], positions[(rank + 1) % READERS][1], results[rank][1]),
        )
        for rank in range(READERS)
    ]
    for process in processes:
        process.start()
    found = [receive.recv() for receive, _ in results]
    for process in processes:
        process.join()
    assert found == [of_rank(rank) for rank in range(READERS)]


def test_readers_that_step_over_the_records_of_others(path: Path) -> None:
    assert [list(module().stepped(path, rank, READERS, BATCH, STEPS)) for rank in range(READERS)] == [
        of_rank(rank) for rank in range(READERS)
    ]


def test_guesses_come_from_the_last_batches() -> None:
    guess = module().Guess(readers=4)
    assert guess.next() is None
    guess.learn(1000, 1400)
    assert guess.next() == (2500, 3100)  # 1600 further, and a quarter of the batch around
    guess.learn(2700, 3100)
    assert guess.next() == (4300, 4900)  # 1700 further
