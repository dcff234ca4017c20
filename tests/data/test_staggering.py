"""Only so many processes read at a time; one that dies with a token does not stop the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from data.databases import make, some_records
from programs import Program
from torch.distributed import TCPStore

from fastensor.data import LmdbDataset, LmdbLoader, Staggering
from fastensor.data.staggering import Tokens

RECORDS = some_records(200)
VALUES = [RECORDS[key] for key in sorted(RECORDS)]


@pytest.fixture
def store() -> Iterator[str]:
    """The address of a store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"
    del server


@pytest.mark.parametrize("active", [1, 2])
def test_so_many_hold_a_token_at_a_time_and_all_get_one(store: str, active: int) -> None:
    """``active`` of five meet in a turn: no fewer, or the barrier breaks; no more are counted."""
    readers = 2 * active + 1
    turns = deque(range(4 * active * readers))  # of all: a reader that has taken one is met by another one
    together = threading.Barrier(active, timeout=60)
    counting = threading.Lock()
    holding: list[int] = []
    most = 0

    def take_turn() -> bool:
        try:
            turns.pop()
        except IndexError:
            return False
        return True

    def read(reader: int) -> None:
        nonlocal most
        tokens = Tokens(Staggering(active, store=store))
        while take_turn():
            with tokens.held():
                with counting:
                    holding.append(reader)
                    most = max(most, len(holding))
                together.wait()
                with counting:
                    holding.remove(reader)

    with ThreadPoolExecutor(readers) as threads:
        list(threads.map(read, range(readers)))
    assert most == active


HOLDER = """
import sys
from fastensor.data.staggering import Staggering, Tokens
with Tokens(Staggering(1, store=sys.argv[1])).held():
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_dead_holder_times_out(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with Program("-c", HOLDER, store) as holder:
        assert holder.stdout.readline() == "holds\n"
        holder.kill()
        holder.wait()
    tokens = Tokens(Staggering(1, store=store, timeout=0.2))
    for _ in range(3):
        with tokens.held():
            pass
    assert [record.getMessage()[:40] for record in caplog.records] == ["a process has held the token for reading"]


def test_a_slow_holder_does_not_disturb_those_after_it(store: str) -> None:
    slow, *others = (Tokens(Staggering(1, store=store, timeout=0.1)) for _ in range(3))
    with slow.held(), others[0].held():
        pass
    for tokens in (*others, slow):
        with tokens.held():
            pass


def test_a_store_that_is_lost_is_an_error(store: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tokens = Tokens(Staggering(1, store=f"127.0.0.1:{server.port}"))
    with tokens.held():
        pass
    del server
    with pytest.raises(OSError, match="for staggering cannot be reached"), tokens.held():
        pass


RANK = """
import sys
from fastensor.data import LmdbDataset, LmdbLoader, Staggering
dataset = LmdbDataset(sys.argv[1], engine="pread", staggering=Staggering(1, store=sys.argv[2]))
rank = int(sys.argv[3])
loader = LmdbLoader(dataset, 5, ranks=(rank, 3), num_workers=rank % 2, collate_fn=list)
print(*(len(value) for batch in loader for value in batch))
"""


def test_ranks_that_take_turns_read_every_sample(store: str, tmp_path: Path) -> None:
    path = make(tmp_path / "db", RECORDS.items())
    ranks = [Program("-c", RANK, path, store, rank) for rank in range(3)]
    found = [rank.communicate() for rank in ranks]
    assert [error for _, error in found] == ["", "", ""]
    assert sorted(int(length) for out, _ in found for length in out.split()) == sorted(map(len, VALUES))


def test_node_readers_take_turns(store: str, tmp_path: Path) -> None:
    path = make(tmp_path / "db", RECORDS.items())
    datasets = [LmdbDataset(path, reader="node", engine="pread", staggering=Staggering(1, store=store)) for _ in "ab"]
    for batch in np.array_split(np.arange(len(VALUES)), 10):
        for dataset in datasets:
            assert dataset.__getitems__(batch) == [VALUES[position] for position in batch]
    assert len({dataset._node.pid for dataset in datasets if dataset._node}) == 2


def test_arguments_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1, found 0"):
        Staggering(0, store="here:1")
    with pytest.raises(ValueError, match="positive number of seconds, found 0"):
        Staggering(1, store="here:1", timeout=0)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*pass store="):
        Staggering()
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Staggering(2).store == "there:29500"


def test_a_store_that_is_lost_breaks_no_sample(store: str, tmp_path: Path) -> None:
    """``on_error="skip"`` leaves none out for it: all of them are sound."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    staggering = Staggering(1, store=f"127.0.0.1:{server.port}")
    dataset = LmdbDataset(make(tmp_path / "db", RECORDS.items()), engine="pread", staggering=staggering)
    loader = LmdbLoader(dataset, 8, shuffle="none", on_error="skip", collate_fn=list)
    assert dataset[0] == VALUES[0]
    del server
    with pytest.raises(OSError, match="for staggering cannot be reached") as raised:
        next(iter(loader))
    assert not hasattr(raised.value, "__notes__")  # no other sample was tried
    assert loader.skipped == 0
