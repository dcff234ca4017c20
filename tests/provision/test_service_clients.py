"""A client that sends nonsense is dropped, and disturbs no other one."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import Program
from provision.datasets import Numbers

from fastensor.data import EpochPlan, processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.provision import DataService, ProvisionError
from fastensor.provision.embedded.protocol import (
    BadMessage,
    Hello,
    Say,
    hello_of,
    joined,
    parted,
    start_as_json,
    start_of,
)
from fastensor.provision.engine import Facts, Start

N = 40


@pytest.fixture
def service(folder: Path, warm_services: list[Program]) -> Iterator[DataService]:
    found = Numbers(N, folder)
    with DataService.start(found, cache_bytes=1 << 20, workers=1) as service:
        yield service


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def wait_for(connection: Connection) -> Any:
    while (message := connection.receive()) is None:
        assert connection.wait(10)
    return message


def is_dropped(connection: Connection) -> bool:
    try:
        while True:
            wait_for(connection)
    except ConnectionLost:
        connection.close()
        return True


def test_nonsense_is_logged_with_a_limit(service: DataService, warm_services: list[Program]) -> None:
    """Few lines, and short ones."""
    for number in range(32):
        other = processes.reach(service.address.removeprefix("local:"))
        assert wait_for(other).kind == Say.HELLO
        if number < 31:
            other.send(99, bytes(64))
        else:
            other.send(Say.REGISTER, *joined({"on_error": "x\n" * 10_000}, b""))
        assert is_dropped(other)
    service.stop()
    assert warm_services[0].stderr is not None
    lines = [line for line in warm_services[0].stderr.read().splitlines() if "has dropped a client" in line]
    assert len(lines) == 10 + len((16, 32))
    assert max(map(len, lines)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLAN = EpochPlan(N, batch_size=4)
WRONG = [
    (Say.REGISTER, b""),
    (Say.REGISTER, struct.pack("=q", 1 << 40) + b"{}"),
    (Say.REGISTER, b"".join(joined({"ahead": 0}, b""))),
    (Say.REGISTER, b"".join(joined({"buffer_nbytes": 1 << 60}, b""))),
    (Say.REGISTER, b"".join(joined({"wish": 1}, b""))),
    (Say.REGISTER, b"".join(joined({"on_error": "ignore"}, b""))),
    (Say.REGISTER, b"".join(joined({"on_error": []}, b""))),
    (Say.START, start_as_json(Start(PLAN, 0, 0))),
    (Say.CREDIT, struct.pack("=qqd", 0, 0, 0.0)),
    (Say.PRELOAD, b"[]"),
    (Say.PRELOAD, start_as_json(Start(EpochPlan(N + 1), 0, 0))),
    (Say.PRELOAD, start_as_json(Start(PLAN, 0, N + 1))),
    (Say.PRELOAD, start_as_json(Start(PLAN, 1 << 40, 0))),
    (Say.DONE, b""),
    (99, b""),
]


def test_a_client_that_sends_nonsense_is_dropped_alone(service: DataService) -> None:
    loader = service.loader(8)
    batches = iter(loader)
    found = next(batches)["id"].tolist()
    name = service.address.removeprefix("local:")
    for said in WRONG:
        other = processes.reach(name)
        assert wait_for(other).kind == Say.HELLO
        other.send(*said)
        assert is_dropped(other), said
    other = processes.reach(name)
    other.send(Say.REGISTER, *joined({}, b""))
    other.send(Say.CREDIT, struct.pack("=qqd", 0, 0, 0.0), np.array([7], np.int64))
    assert is_dropped(other)
    assert sorted(found + ids(batches)) == list(range(N))


HELLO = Hello(1, Facts(samples=N, fingerprint="", cache_nbytes=0, workers=1)).as_json()


@pytest.mark.parametrize(
    "said",
    [
        b"{}", b"[]", b'{"pid": "1"}', b'{"pid": 1, "facts": 7}', HELLO.replace(b'"workers": 1', b'"workers": "1"'),
        HELLO.replace(b'"seed"', b'"other"'),
    ],
)  # fmt: skip
def test_what_another_program_says_is_no_service(said: bytes) -> None:
    name = f"no-service-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as other, ThreadPoolExecutor(1) as thread:
        other.bind(f"\0{name}")
        other.listen()

        def answer() -> None:
            connection = Connection(other.accept()[0])
            connection.send(Say.HELLO, said)
            assert is_dropped(connection)

        answered = thread.submit(answer)
        with pytest.raises(ProvisionError, match=f"there is no data service at local:{name}"):
            DataService.connect(f"local:{name}", timeout=0)
        answered.result()


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_bytes_are_a_message_or_nonsense(body: bytes) -> None:
    for parse in (parted, hello_of, lambda view: start_of(view, N)):
        try:
            parse(memoryview(body))
        except BadMessage:
            continue


FIELDS = ["n", "seed", "shuffle", "batch_size", "world_size", "rank", "drop_last", "block_size", "blocks_per_group"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.dictionaries(st.sampled_from(["epoch", "consumed"]), JSON))
def test_any_start_is_checked(plan: dict[str, Any], rest: dict[str, Any]) -> None:
    said = {"plan": {"n": N, **plan}, "epoch": 0, "consumed": 0, **rest}
    try:
        start = start_of(memoryview(json.dumps(said).encode()), N)
    except BadMessage:
        return
    assert start.plan.n == N
    assert 0 <= start.consumed <= N
    assert sum(map(len, zip(start.plan.batches(start.epoch, start.consumed), range(3), strict=False))) >= 0
