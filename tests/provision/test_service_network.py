"""Over TCP come the same batches, to those who know the token; whatever others send, they get nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
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
from provision.conftest import has_ended, wait_until, warm_starts
from provision.datasets import Numbers, ids_only

from fastensor.data import EpochPlan, processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.errors import FastensorError
from fastensor.provision import DataService, ProvisionError
from fastensor.provision.embedded import wire
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
from fastensor.provision.service import NAME_VARIABLE

N = 40
TOKEN = "a secret of the tests"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataService]:
    """A service of all tests that only use it."""
    found = Numbers(N, tmp_path_factory.mktemp("shared"))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        warm_starts(monkeypatch),
        DataService.start(found, cache_bytes=1 << 20, workers=1, listen="localhost:0", token=TOKEN) as service,
    ):
        yield service


@pytest.fixture
def service(folder: Path, warm_services: list[Program]) -> Iterator[DataService]:
    found = Numbers(N, folder)
    with DataService.start(found, cache_bytes=1 << 20, workers=1, listen="localhost:0", token=TOKEN) as service:
        yield service


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def call(service: DataService) -> Connection:
    return Connection(socket.create_connection(wire.parsed_address(service.address.removeprefix("tcp://"))))


def test_batches_come_through_the_socket(shared: DataService) -> None:
    assert shared.address.startswith("tcp://127.0.0.1:")
    with DataService.connect(shared.address, token=TOKEN) as remote:
        loader = remote.loader(7, seed=1, buffer_bytes=20_000)
        for epoch in range(2):
            kept = list(loader)
            assert ids(kept) == EpochPlan(N, seed=1).order(epoch).tolist()
            for batch in kept:
                assert (batch["bytes"].numpy() == (batch["id"].numpy() % 251)[:, None]).all()
                assert batch["bytes"].data_ptr() % 16 == 0
                batch["bytes"] += 1
        assert sorted(number for batch in remote.loader(7, collate_fn=ids_only) for number in batch["id"]) == [
            *range(N)
        ]
        assert {loader["is_local"] for loader in remote.status()["loaders"]} == {False}


def test_a_remote_client_goes_on_when_the_server_was_killed(service: DataService) -> None:
    with DataService.connect(service.address, token=TOKEN) as remote:
        pair = [service.loader(4, seed=1, ranks=(0, 2)), remote.loader(4, seed=1, ranks=(1, 2))]
        found: list[int] = []
        for number, batches in enumerate(zip(*pair, strict=True)):
            found += ids(batches)
            if number == 1:
                pid = service.status()["pid"]
                os.kill(pid, signal.SIGKILL)
                assert has_ended(pid)
        assert sorted(found) == list(range(N))


def test_who_has_started_the_service_starts_it_again_for_others(service: DataService) -> None:
    """Although it asks for nothing itself."""
    with DataService.connect(service.address, token=TOKEN) as remote:
        loader, found = remote.loader(4, seed=1, buffer_bytes=10_000), []
        for number, batch in enumerate(loader):
            found += batch["id"].tolist()
            if number == 1:
                pid = remote.status()["pid"]
                os.kill(pid, signal.SIGKILL)
                assert has_ended(pid)
        assert sorted(found) == list(range(N))


def test_another_token_or_none_is_refused(shared: DataService) -> None:
    with pytest.raises(ProvisionError, match="has another token"):
        DataService.connect(shared.address, token="wrong")
    with pytest.raises(ProvisionError, match="needs a token"):
        DataService.connect(shared.address)
    wait_until(lambda: shared.status()["clients"] == 2)  # a thread of this process looks after the service


def test_listening_elsewhere_needs_a_token(folder: Path, warm_services: list[Program]) -> None:
    with pytest.raises(ProvisionError, match="give it a token="):
        DataService.start(Numbers(N, folder), cache_bytes=0, workers=1, listen="0.0.0.0:0")
    with pytest.raises(ProvisionError, match="expected host:port"):
        DataService.start(Numbers(N, folder), cache_bytes=0, workers=1, listen="localhost")


def test_a_port_that_is_taken_is_an_error(folder: Path, warm_services: list[Program]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ProvisionError, match=f"cannot listen on {where}"):
            DataService.start(Numbers(N, folder), cache_bytes=0, workers=1, listen=where)


def test_on_loopback_without_a_token_no_function_is_taken(folder: Path, warm_services: list[Program]) -> None:
    found = Numbers(N, folder)
    with DataService.start(found, cache_bytes=0, workers=1, listen="127.0.0.1:0") as service:
        with DataService.connect(service.address) as remote:
            assert sorted(ids(remote.loader(8))) == list(range(N))
            with pytest.raises(ProvisionError, match="only over its machine's own sockets, or with a token"):
                next(iter(remote.loader(8, collate_fn=ids_only)))
        hostile = call(service)
        assert wait_for(hostile).kind == Say.HELLO
        hostile.send(Say.REGISTER, *joined({}, pickle.dumps(Bomb(folder / "exploded"))))
        assert is_dropped(hostile)
        assert not (folder / "exploded").exists()
        with pytest.raises(ProvisionError, match="has not asked for the token"):
            DataService.connect(service.address, token=TOKEN)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


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


def test_strangers_are_dropped_by_their_first_message(shared: DataService) -> None:
    answers = [(Say.ANSWER, b"x" * nbytes) for nbytes in (0, 63, 64, 65)]
    for said in [(Say.REGISTER, b"{}"), (Say.ASK, b""), (Say.SPEC, b""), *answers]:
        stranger = call(shared)
        assert wait_for(stranger).kind == Say.CHALLENGE
        stranger.send(*said)
        assert is_dropped(stranger), said
    wait_until(lambda: shared.status()["clients"] == 2)


def test_a_long_first_message_is_not_waited_for(shared: DataService) -> None:
    with socket.create_connection(wire.parsed_address(shared.address.removeprefix("tcp://"))) as stranger:
        stranger.sendall(struct.pack("<QB", 1 << 39, Say.ANSWER))
        assert stranger.recv(1000)[-32:]
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("token", [TOKEN, None])
def test_nonsense_of_strangers_is_logged_with_a_limit(
    folder: Path, warm_services: list[Program], token: str | None
) -> None:
    """Few lines, and short ones, with a token and, on loopback, without one."""
    with DataService.start(Numbers(N, folder), cache_bytes=0, workers=1, listen="localhost:0", token=token) as service:
        for _ in range(40 if token else 31):
            stranger = call(service)
            wait_for(stranger)
            stranger.send(Say.ANSWER if token else 99, bytes(64))
            assert is_dropped(stranger)
        if token is None:
            stranger = call(service)
            wait_for(stranger)
            stranger.send(Say.REGISTER, *joined({"on_error": "x\n" * 10_000}, b""))
            assert is_dropped(stranger)
    assert warm_services[0].stderr is not None
    lines = [line for line in warm_services[0].stderr.read().splitlines() if "has dropped a client" in line]
    assert len(lines) == 10 + len((16, 32))
    assert max(map(len, lines)) < 500


def test_many_strangers_do_not_keep_others_out(shared: DataService) -> None:
    strangers = [call(shared) for _ in range(100)]
    with DataService.connect(shared.address, token=TOKEN) as remote:
        assert sorted(ids(remote.loader(8))) == list(range(N))
    for stranger in strangers:
        stranger.close()


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


def test_a_known_client_that_sends_nonsense_is_dropped_alone(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "nonsense")
    service = request.getfixturevalue("service")
    loader = service.loader(8)
    batches = iter(loader)
    found = next(batches)["id"].tolist()
    name = processes.name_of_service("provision", "nonsense", f"numbers-{N}-1000", "")
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


HELLO = Hello(1, Facts(samples=N, fingerprint="", cache_nbytes=0, workers=1), b"").as_json()


@pytest.mark.parametrize(
    "said",
    [
        b"{}", b"[]", b'{"pid": 1}', b'{"pid": "1", "proof": ""}', b'{"pid": 1, "proof": "", "facts": 7}',
        b'{"pid": 1, "proof": "x", "facts": null}', HELLO.replace(b'"workers": 1', b'"workers": "1"'),
        HELLO.replace(b'"seed"', b'"other"'),
    ],
)  # fmt: skip
def test_what_another_program_says_is_no_service(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as thread:

        def answer() -> None:
            connection = Connection(other.accept()[0])
            connection.send(Say.HELLO, said)
            assert is_dropped(connection)

        answered = thread.submit(answer)
        with pytest.raises(ProvisionError, match="there is no data service at tcp://"):
            DataService.connect(f"tcp://127.0.0.1:{other.getsockname()[1]}", timeout=0)
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


def test_errors_are_of_the_package() -> None:
    assert issubclass(ProvisionError, FastensorError)
