"""Whoever is killed, each sample is given out once, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from programs import Program
from provision.conftest import has_ended, wait_until, workers_of
from provision.datasets import Killing, Numbers, logged, reads_in

from fastensor.data import EpochPlan, processes
from fastensor.data.connection import Connection
from fastensor.provision import DataService, ProvisionError
from fastensor.provision.embedded.forkserver import ForkServer

N = 60


@pytest.fixture
def service(folder: Path, warm_services: list[Program]) -> Iterator[DataService]:
    with DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=2) as service:
        yield service


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def rings_of(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return maps.count("memfd:fastensor-ring")


def test_a_worker_that_is_killed_by_a_sample_is_replaced(service: DataService, folder: Path) -> None:
    for position in (7, 23):
        (folder / f"kill-{position}").touch()
    loader = service.loader(8, seed=1)
    for epoch in range(2):
        assert ids(loader) == EpochPlan(N, seed=1).order(epoch).tolist()
    assert service.status()["workers_replaced"] == 2
    workers_of(service, 2)
    assert len(service.status()["workers"]) == 2
    assert loader.stats().repeated == 0


def test_workers_that_are_killed_at_any_time(service: DataService) -> None:
    loader, found = service.loader(3, seed=1), []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number % 5 == 0:
            os.kill(workers_of(service, 2)[number % 2], signal.SIGKILL)
    assert found == EpochPlan(N, seed=1).order(0).tolist()
    assert ids(loader) == EpochPlan(N, seed=1).order(1).tolist()


def test_a_sample_that_kills_every_worker_is_an_error(folder: Path, warm_services: list[Program]) -> None:
    order = EpochPlan(N, seed=1).order(0).tolist()
    with DataService.start(Killing(N, folder), cache_bytes=0, workers=1) as service:
        loader, found = service.loader(4, seed=1), []
        batches = (number for batch in loader for number in batch["id"].tolist())
        with pytest.raises(ProvisionError, match="3 workers have ended while they made it, the last one with -9"):
            found.extend(batches)
        assert found == order[: order.index(5) // 4 * 4]


def test_a_killed_server_is_started_again_and_no_sample_is_lost(
    service: DataService, folder: Path, warm_services: list[Program]
) -> None:
    loaders = [service.loader(4, seed=1, ranks=(rank, 2)) for rank in range(2)]
    found: list[int] = []
    seconds = []
    for _ in range(2):
        for number, pair in enumerate(zip(*loaders, strict=True)):
            found += ids(pair)
            if number == 2:
                pids = [*workers_of(service, 2), service.status()["forkserver"]]
                os.kill(service.status()["pid"], signal.SIGKILL)
                assert all(map(has_ended, pids))
                seconds.append(-time.monotonic())
            if number == 3:
                seconds[-1] += time.monotonic()
        assert sorted(found) == list(range(N))
        found = []
        assert loaders[0].state_dict() == loaders[1].state_dict()
    assert len(warm_services) == 3
    assert max(seconds) < 5
    assert loaders[0].stats().recoveries >= 2


def test_batches_that_had_come_before_the_server_was_killed_are_given_out_once(service: DataService) -> None:
    loader, found = service.loader(4, seed=1), []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number == 1:
            wait_until(lambda: service.status()["loaders"][0]["ahead"] == 8)
            os.kill(service.status()["pid"], signal.SIGKILL)
    assert found == EpochPlan(N, seed=1).order(0).tolist()
    assert loader.stats().recoveries == 1


def test_a_server_that_hangs_is_killed_and_replaced(service: DataService, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastensor.provision import loader as loaders
    from fastensor.provision.embedded import client

    monkeypatch.setattr(client, "_HEALTH_SECONDS", 2.0)
    monkeypatch.setattr(loaders, "_CHECK_SECONDS", 0.1)
    loader, found = service.loader(4, seed=1), []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number == 1:
            os.kill(service.status()["pid"], signal.SIGSTOP)
    assert found == EpochPlan(N, seed=1).order(0).tolist()


def test_damaged_samples_are_read_again(service: DataService, folder: Path) -> None:
    """One byte in 4096 of the cache is changed."""
    loader = service.loader(8, seed=1)
    assert sorted(ids(loader)) == list(range(N))
    wait_until(lambda: service.status()["loaders"][0]["ahead"] == 8)
    wait_until(lambda: not any(one["tasks"] for one in service.status()["workers"]))
    assert service.status()["cached_samples"] == N
    pid = service.status()["workers"][0]["pid"]
    (line,) = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:fastensor-cache" in line]
    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for address in range(begin + 100, end, 4096):
            memory.seek(address)
            memory.write(b"\xa5")
    for batch in [*loader, *loader]:  # those of the first epoch were made before
        assert (batch["bytes"].numpy() == (batch["id"].numpy() % 251)[:, None]).all()
    assert service.status()["damaged"] > 0
    assert sum(reads_in(folder).values()) > N


def test_a_forkserver_that_is_killed_is_replaced(service: DataService) -> None:
    loader, found = service.loader(4, seed=1), []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number in (1, 3):
            workers = workers_of(service, 2)
            before = service.status()["forkserver"]
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: service.status()["forkserver"] != before)  # noqa: B023
            os.kill(workers[0], signal.SIGKILL)
            wait_until(lambda: workers[0] not in workers_of(service, 2))  # noqa: B023
    assert found == EpochPlan(N, seed=1).order(0).tolist()
    assert service.status()["workers_replaced"] == 2
    workers_of(service, 2)
    assert len(service.status()["workers"]) == 2


def test_a_forkserver_that_has_nothing_to_do_may_be_killed_often(service: DataService) -> None:
    workers, server = workers_of(service, 2), service.status()["pid"]
    for _ in range(4):
        before = service.status()["forkserver"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: service.status()["forkserver"] != before)  # noqa: B023
    os.kill(workers[0], signal.SIGKILL)
    wait_until(lambda: workers[0] not in workers_of(service, 2))
    assert sorted(ids(service.loader(4))) == list(range(N))
    assert service.status()["pid"] == server


def never(connection: Connection, *, place: int) -> NoReturn:
    os._exit(1)


def test_many_workers_are_asked_for_before_the_forkserver_listens() -> None:
    with tempfile.TemporaryFile() as spec:
        forkserver = ForkServer(lambda: never, spec.fileno(), prepares=False)
        os.kill(forkserver.pid, signal.SIGSTOP)
        forkserver.ask(range(2000))
        assert not forkserver.connection.has_unsent
        assert forkserver.awaited == set(range(2000))
        forkserver.end()


SCRIPT = """
import os, socket, threading
from pathlib import Path
with Path({imports!r}).open("a") as file:
    file.write(__name__ + " ")
if {wish!r} == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
elif {wish!r} == "opens a file":
    log = Path({imports!r} + "-log").open("ab", buffering=0)
elif {wish!r} == "opens a socket":
    sockets = socket.socketpair()
elif {wish!r} == "opens what has no state":
    null = open("/dev/null", "wb")
elif {wish!r} == "ends":
    os._exit(7)
elif {wish!r} == "raises":
    raise ValueError("a bad script")
"""


@pytest.mark.parametrize(
    ("wish", "least", "most", "error"),
    [
        ("", 1, 1, ""),
        ("threads", 2, 4, ""),
        ("opens a file", 2, 4, ""),
        ("opens a socket", 2, 4, ""),
        ("opens what has no state", 1, 1, ""),
        ("ends", 4, 100, "3 workers have ended while they made it, the last one with 7"),
        ("raises", 2, 100, "ValueError: a bad script"),
    ],
)
def test_the_script_is_imported_once_for_all_workers(
    folder: Path,
    warm_services: list[Program],
    monkeypatch: pytest.MonkeyPatch,
    wish: str,
    least: int,
    most: int,
    error: str,
) -> None:
    """Unless it starts threads, leaves something open or ends, which each worker has to find out."""
    script, imports = folder / "script.py", folder / "imports"
    script.write_text(SCRIPT.format(imports=str(imports), wish=wish))
    as_if_started = {"sys_path": sys.path, "init_main_from_path": str(script)}
    monkeypatch.setattr("multiprocessing.spawn.get_preparation_data", lambda name: as_if_started)
    with DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=3) as service:
        loader = service.loader(2)
        if error:
            with pytest.raises(ProvisionError, match=error):
                ids(loader)
        else:
            assert sorted(ids(loader)) == list(range(N))
    imported = imports.read_text().split()
    assert set(imported) == {"__mp_main__"}
    assert least <= len(imported) <= most


LOGGING_SCRIPT = """
from pathlib import Path
from provision import datasets
log = Path({log!r}).open("ab", buffering=0)
null = open("/dev/null", "wb", buffering=0)
datasets.LOG = lambda number: (null.write(b"-"), log.write(b"%d " % number))
"""


def test_what_the_script_opens_stays_open_in_workers(
    folder: Path, warm_services: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, log = folder / "script.py", folder / "log"
    script.write_text(LOGGING_SCRIPT.format(log=str(log)))
    as_if_started = {"sys_path": sys.path, "init_main_from_path": str(script)}
    monkeypatch.setattr("multiprocessing.spawn.get_preparation_data", lambda name: as_if_started)
    with DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=3, before_cache=logged) as service:
        for batch in service.loader(2):
            assert (batch["bytes"].numpy() == (batch["id"].numpy() % 251)[:, None]).all()
    assert sorted(map(int, log.read_text().split())) == list(range(N))


CLIENT = """
import sys
from fastensor.provision import DataService
service = DataService.connect(sys.argv[1])
loader = service.loader(4, seed=1)
for number, batch in enumerate(loader):
    if number == 2:
        print("at work", flush=True)
        sys.stdin.read()
"""


def test_a_killed_client_frees_its_ring(service: DataService) -> None:
    pid = service.status()["pid"]
    with Program("-c", CLIENT, service.address, provision=True) as client:
        assert client.stdout.readline() == "at work\n"
        assert len(service.status()["loaders"]) == 1
        assert rings_of(pid) == 1
        client.kill()
        client.wait()
    wait_until(lambda: not service.status()["loaders"])
    wait_until(lambda: rings_of(pid) == 0)
    workers = workers_of(service, 2)
    wait_until(lambda: not any(map(rings_of, workers)))
    assert sorted(ids(service.loader(7))) == list(range(N))


RANK = """
import os, sys
from contextlib import suppress
from pathlib import Path
sys.path[:] = sys.argv[3:]
from provision.datasets import Numbers
from fastensor.provision import DataService
with DataService.start(Numbers(60, Path(sys.argv[1])), cache_bytes=1 << 20, workers=1) as service:
    loader = service.loader(4, ranks=(int(sys.argv[2]), 2), seed=1)
    for number, batch in enumerate(loader):
        if number == 2:
            print(service.status()["pid"], service.status()["workers"][0]["pid"], flush=True)
            if sys.stdin.readline() == "":
                sys.exit("abandoned")
        print(*batch["id"].tolist(), flush=True)
"""


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_ranks_start_one_service_restart_it_and_leave_nothing(folder: Path, killed: bool) -> None:
    """The service is started as users start it."""
    before = set(os.listdir("/dev/shm"))
    name = f"ranks-{os.getpid()}"
    ranks = [
        Program("-c", RANK, folder, rank, *sys.path, provision=True, FASTENSOR_DATA_SERVICE=name, OMP_NUM_THREADS="1")
        for rank in range(2)
    ]
    found: list[int] = []
    pids: set[tuple[int, ...]] = set()
    for rank in ranks:
        found += [int(number) for _ in range(2) for number in rank.stdout.readline().split()]
        pids.add(tuple(map(int, rank.stdout.readline().split())))
    ((server, worker),) = pids
    assert ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (server, worker)] == [False, True]
    if killed:
        os.kill(server, signal.SIGKILL)
        assert has_ended(worker)
    for rank in ranks:  # the service has the error output of the rank that has started it, as long as others use it
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    found += [int(number) for out, _ in outputs for number in out.split()]
    assert sorted(found) == list(range(N))
    assert has_ended(server)
    name_of_socket = processes.name_of_service("provision", name, "numbers-60-1000", "")
    wait_until(lambda: name_of_socket not in Path("/proc/net/unix").read_text())
    assert not {entry for entry in set(os.listdir("/dev/shm")) - before if "fastensor" in entry}


def test_the_service_ends_with_its_last_client_however_it_ends(folder: Path, warm_services: list[Program]) -> None:
    service = DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=1)
    status, workers = service.status(), workers_of(service, 1)
    with Program("-c", CLIENT, service.address, provision=True) as client:
        assert client.stdout.readline() == "at work\n"
        service.stop()
        del service
        gc.collect()
        assert not has_ended(status["pid"], 0.1)
        client.kill()
        client.wait()
    assert all(map(has_ended, [status["pid"], status["forkserver"], *workers]))


@pytest.mark.torture
def test_everything_is_killed_again_and_again(service: DataService) -> None:
    chance = np.random.default_rng(0)
    loaders = [service.loader(3, seed=1, ranks=(rank, 2)) for rank in range(2)]
    for _ in range(20):
        found: list[int] = []
        for pair in zip(*loaders, strict=True):
            found += ids(pair)
            match chance.integers(12):
                case 0:
                    os.kill(service.status()["pid"], signal.SIGKILL)
                case 1 | 2 | 3:
                    with suppress(ProcessLookupError):  # the server has been killed just before
                        os.kill(workers_of(service, 2)[0], signal.SIGKILL)
                case 4:
                    with suppress(ProcessLookupError):
                        os.kill(service.status()["forkserver"], signal.SIGKILL)
                case 5:
                    loaders[0].close()
        assert sorted(found) == list(range(N))
    assert max(loader.stats().given.waits.longest for loader in loaders) < 5
