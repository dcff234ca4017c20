"""Servers of the data service that start at once: in processes that have imported torch."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import Program

from fastensor.data import processes
from fastensor.provision import DataService

SECONDS = 20
SERVER = """
import importlib, os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    listener.bind(chr(0) + sys.argv[1])
except OSError:
    print("taken", flush=True)
    sys.exit()
given = [os.open(path, os.O_RDWR) for path in sys.argv[3].split()]
listener.listen(100)
print("listens", flush=True)
sys.path[:] = sys.argv[4:]
importlib.import_module(sys.argv[2]).main(listener.fileno(), *given)
"""


@pytest.fixture
def warm_services(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """The servers that this process has started. They have to have ended when the test has, by themselves."""
    with warm_starts(monkeypatch) as started:
        yield started


@contextmanager
def warm_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Have services started in processes that have imported torch, until the context is left."""
    started: list[Program] = []

    def start(name: str, module: str, *given: int) -> bool:
        files = " ".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in given)
        program = Program("-c", SERVER, name, module, files, *sys.path, provision=True, OMP_NUM_THREADS="1")
        started.append(program)
        return program.stdout.readline() == "listens\n"

    monkeypatch.setattr(processes, "start", start)
    yield started
    for program in started:
        program.wait(SECONDS)
        program.communicate()


def has_ended(pid: int, seconds: float = SECONDS) -> bool:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(service: DataService, count: int) -> list[int]:
    """The process ids of the workers, when so many are there: they come after the service has started."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = [one["pid"] for one in service.status()["workers"]]
        return len(found) == count

    wait_until(are_there)
    return found


@pytest.fixture
def ended() -> Callable[[int], bool]:
    """Whether a process ends."""
    return has_ended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For :class:`provision.datasets.Numbers`."""
    return tmp_path
