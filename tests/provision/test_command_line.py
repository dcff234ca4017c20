"""``fastensor provision up``, ``status`` and ``down``."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from programs import command_line, run
from provision.conftest import SECONDS, has_ended, wait_until

from fastensor.cli import services
from fastensor.data import processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.provision import DataService

SAMPLES = """
class Samples:
    fingerprint = "samples"
    def __len__(self): return 40
    def __getitem__(self, position): return {"id": position}

print("imported")
def samples(): return Samples()
def doubled(sample): return {"id": 2 * sample["id"]}
"""


@pytest.fixture
def up(tmp_path: Path) -> Callable[..., str]:
    """Starts a service, and returns its address."""
    (tmp_path / "given.py").write_text(SAMPLES)

    def up(*options: str) -> str:
        arguments = ["given:samples", "--before-cache", "given:doubled", "--workers", "1", "--detach", *options]
        return run("-m", "fastensor", "provision", "up", *arguments, folder=tmp_path).stdout.strip()

    return up


def is_there(address: str) -> bool:
    with suppress(OSError):
        processes.reach(address.removeprefix("local:")).close()
        return True
    return False


def test_a_service_is_started_looked_at_and_ended(
    up: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address = up("--cache", "1MiB", "--name", str(os.getpid()))
    with DataService.connect(address) as service:
        assert sorted(number for batch in service.loader(8) for number in batch["id"].tolist()) == [*range(0, 80, 2)]
        gc.collect()
        loader = service.loader(8, ranks=(1, 2))
        assert len([*loader]) == 3
        status, out, err = command_line(capsys, "provision", "status", address)
        assert (status, err) == (0, "")
        lines = out.splitlines()
        assert re.fullmatch(rf"{re.escape(address)}: 40 samples, \d clients?, 1 loader", lines[0])
        assert lines[1].startswith("cache: 40 samples of ")
        assert "came from the cache" in lines[2]
        assert lines[3].endswith("1 worker; 0 were replaced")
        assert lines[5].split()[:3] == ["rank", "batches", "ahead"]
        assert lines[6].startswith("1 of 2 ")
        _, out, _ = command_line(capsys, "provision", "status", address, "--json")
        found = json.loads(out)
        assert (found["samples"], found["loaders"][0]["ranks"]) == (40, [1, 2])
    assert command_line(capsys, "provision", "down", address) == (0, "", "")
    assert not is_there(address)
    assert has_ended(found["pid"])
    status, _, err = command_line(capsys, "provision", "down", address)
    assert status == 1
    assert "no program of this machine keeps the data service" in err


def test_a_service_that_nobody_uses_is_started_again(up: Callable[..., str]) -> None:
    address = up("--cache", "1MiB", "--name", f"{os.getpid()}-idle")
    with DataService.connect(address) as service:
        pid = service.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    wait_until(lambda: is_there(address))
    with DataService.connect(address) as service:
        assert service.status()["pid"] != pid
        assert len(service) == 40
    run("-m", "fastensor", "provision", "down", address)


def test_down_says_that_a_service_goes_on_for_its_clients(
    up: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = up("--cache", "1MiB", "--name", f"{os.getpid()}-used")
    with DataService.connect(address) as service:
        monkeypatch.setattr(services, "_PATIENCE_SECONDS", 1)
        status, out, err = command_line(capsys, "provision", "down", address)
        assert (status, out) == (0, "")
        assert f"{address} goes on for its clients" in err
        assert len([*service.loader(8)]) == 5
    wait_until(lambda: not is_there(address))


def test_who_connects_and_says_nothing_holds_nobody_up(
    up: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = up("--cache", "1MiB", "--name", f"{os.getpid()}-silent")
    silent = [supervisor for _ in range(3) for supervisor, kept in services._supervisors() if kept == address]
    assert len(silent) == 3
    assert command_line(capsys, "provision", "down", address) == (0, "", "")
    assert all(supervisor.wait(0) for supervisor in silent)


class Kept:
    """Stands for a service."""

    def __init__(self, name: str) -> None:
        self.address = f"local:kept-{os.getpid()}-{name}"

    def status(self) -> None:
        pass


def test_an_interrupt_while_the_address_is_said_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted.py").write_text(SAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    source, said = "interrupted:samples", []

    def say(address: str) -> None:
        said.append(address)
        raise KeyboardInterrupt

    name = f"{os.getpid()}-interrupted"
    wanted = services.Wanted(source, 1 << 20, 1, None, None, 0, "", name, "embedded", "")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert services.up(wanted, say) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(said) == 1


@pytest.fixture
def keep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Thread, services._Supervisor]:
    """An address that is kept, the thread that keeps it, and what has the connections that it leaves open."""
    monkeypatch.setattr(services, "_PREFIX", f"fastensor-kept-{os.getpid()}-")  # no other test connects
    service: Any = Kept(request.function.__name__)
    supervisor = services._Supervisor(service.address)
    thread = Thread(target=supervisor.keep, args=[service], daemon=True)
    thread.start()
    return service.address, thread, supervisor


def supervisor_of(address: str) -> Connection:
    return next(supervisor for supervisor, kept in services._supervisors() if kept == address)


def is_lost(supervisor: Connection) -> bool:
    """Whether the other end has been closed."""
    assert supervisor.wait(SECONDS)
    try:
        supervisor.receive()
    except ConnectionLost:
        return True
    return False


def test_all_who_want_a_service_to_end_wait_until_it_was_left(keep: tuple[str, Thread, services._Supervisor]) -> None:
    address, thread, supervisor = keep
    one, other = supervisor_of(address), supervisor_of(address)
    one.send("end")
    thread.join(SECONDS)
    assert not thread.is_alive()
    other.send("end")
    assert not one.wait(0)
    assert not other.wait(0)
    supervisor.close()
    assert is_lost(one)
    assert is_lost(other)


def test_what_cannot_be_served_is_refused_at_once(
    up: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for source, expected in (("no_module:function", 2), (str(tmp_path / "*.none"), 1)):
        status, out, err = command_line(capsys, "provision", "up", source)
        assert (status, out) == (expected, "")
        assert err.startswith("fastensor: ")
    status, _, err = command_line(capsys, "provision", "up", "given:samples", "--cache", "much")
    assert status == 2
    assert "--cache" in err
    failed = run("-m", "fastensor", "provision", "up", "given:none", "--detach", check=False, folder=tmp_path)
    assert failed.returncode == 2
    assert "expected MODULE:FUNCTION that can be imported from here, found 'given:none'" in failed.stderr
