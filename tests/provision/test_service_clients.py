"""A client that sends nonsense is dropped, and disturbs no other one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import Program
from provision.datasets import Numbers

from fastensor.data import EpochPlan, processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.provision import DataService, ProvisionError
from fastensor.provision.embedded.protocol import Credit, Hello, Register
from fastensor.provision.engine import Registration, Start
from fastensor.provision.work import Done

N = 40
NOTHING: Any = None


@pytest.fixture
def service(folder: Path, warm_services: list[Program]) -> Iterator[DataService]:
    with DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=1) as service:
        yield service


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def is_dropped(connection: Connection) -> bool:
    try:
        while (message := connection.awaited(10)).fd is not None:
            os.close(message.fd)
    except ConnectionLost:
        connection.close()
        return True
    return False


REGISTER = Register(Registration(), b"")
NONSENSE = {
    "no message": [99],
    "a message of a worker": [Done(0, 0, *[np.zeros(0, np.int64)] * 3)],
    "credit of a loader that is not registered": [Credit(0, 0, 0.0, [])],
    "a slot that is free": [REGISTER, Credit(0, 0, 0.0, [7])],
    "a loader without numbers": [Register(Registration(buffer_nbytes=NOTHING), b"")],
    "a number of batches that is none": [Register(Registration(ahead=NOTHING), b"")],
    "more batches ahead than may be": [Register(Registration(ahead=1 << 40), b"")],
    "a second loader": [REGISTER, REGISTER],
    "a slot that was not sent": [REGISTER, Start(EpochPlan(N, batch_size=8), 0, 0), Credit(0, 0, 0.0, [0])],
    "a place in other samples": [REGISTER, Start(EpochPlan(10 * N), 0, 0)],
    "no place": [REGISTER, Start(EpochPlan(N), 0, NOTHING)],
    "a plan of other samples": [Start(EpochPlan(N + 1), 0, 0)],
    "no plan": [Start(NOTHING, 0, 0)],
}


@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE)
def test_a_client_that_sends_nonsense_is_dropped_alone(service: DataService, sent: list[Any]) -> None:
    batches = iter(service.loader(8))
    found = next(batches)["id"].tolist()
    other = processes.reach(service.address.removeprefix("local:"))
    for content in sent:
        other.send(content)
    assert is_dropped(other)
    assert sorted(found + ids(batches)) == list(range(N))
    assert service.status()["clients"] == 2


@pytest.mark.parametrize("said", [None, "hello", Hello(1, NOTHING)[:1]])
def test_what_another_program_says_is_no_service(said: object) -> None:
    name = f"no-service-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, ThreadPoolExecutor(1) as thread:
        other.bind(f"\0{name}")
        other.listen()

        def answer() -> None:
            connection = Connection(other.accept()[0])
            connection.send(said)
            assert is_dropped(connection)

        answered = thread.submit(answer)
        with pytest.raises(ProvisionError, match=f"there is no data service at local:{name}"):
            DataService.connect(f"local:{name}", timeout=0.01)
        answered.result()
