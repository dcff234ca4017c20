"""A service on Ray, whoever is killed: each sample is given out once, and nothing is left of what has ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="the engine on Ray needs it: the extra ray brings it")

from programs import Program, run
from provision.conftest import has_ended, wait_until
from provision.datasets import Killing, Numbers, Refuses, mark_after, mark_before, reads_in
from provision.rays import local_ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from fastensor.data import EpochPlan
from fastensor.provision import DataService, ProvisionError
from fastensor.provision.engine import Facts, ServiceEngine
from fastensor.provision.making import UserObjects
from fastensor.provision.ray import names
from fastensor.provision.ray.client import RayEngine, joined
from fastensor.provision.sources import Source
from fastensor.testing import ProvisionTests
from fastensor.testing.provision import CountedSource, StartEngine

N = 60
NUMBERS = count()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


@pytest.fixture
def start(ray: Any, folder: Path) -> Iterator[Callable[..., DataService]]:
    """Starts services, which end with the test."""
    services: list[DataService] = []

    def start(source: Any = None, *, workers: int = 1, **options: Any) -> DataService:
        found = Numbers(N, folder) if source is None else source
        options = {"cache_bytes": 1 << 20, "name": str(next(NUMBERS)), **options}
        services.append(DataService.start(found, engine="ray", workers=workers, **options))
        return services[-1]

    yield start
    for service in services:
        service.stop()


@contextmanager
def engines_of(servers: int, names: Callable[[], str]) -> Iterator[StartEngine]:
    """Starts services, and leaves them in the end.

    Args:
        servers: of each service. They take seconds to start, because they import torch.
        names: what the next service is called. If it runs, it is used.
    """
    engines: list[ServiceEngine] = []

    def start(
        source: Source,
        *,
        cache_nbytes: int,
        before_cache: Callable[[Any], Any] | None = None,
        after_cache: Callable[[Any], Any] | None = None,
    ) -> ServiceEngine:
        facts = Facts(len(source), source.fingerprint(), cache_nbytes, workers=servers)
        contents = UserObjects(source, before_cache, after_cache)
        engines.append(joined(facts, contents, names(), address="", local_ray="none"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


class OnRay(ProvisionTests):
    """Engines on a Ray that is shared by all tests."""

    def kill(self, engine: ServiceEngine) -> None:
        """All actors, for good: Ray replaces a server by itself."""
        import ray

        assert isinstance(engine, RayEngine)
        for actor in (engine._supervisor, *engine._servers):
            ray.kill(actor)


class TestRay(OnRay):
    """The tests that one service can be used for, whatever it was used for before. All are below."""

    test_samples_are_read_once = None
    test_a_bad_sample_is_told_in_its_place = None
    test_broken_samples_are_left_out = None
    test_random_numbers_depend_on_sample_and_epoch = None
    test_the_cache_can_be_filled_before = None

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory) -> CountedSource:
        return CountedSource(tmp_path_factory.mktemp("source"))

    @pytest.fixture(scope="class")
    @classmethod
    def start(cls, ray: Any) -> Iterator[StartEngine]:
        with engines_of(1, lambda: "shared") as start:
            yield start


@pytest.mark.torture
class TestServersOfRay(OnRay):
    """Several servers, which need samples of each other."""

    @pytest.fixture
    def start(self, ray: Any) -> Iterator[StartEngine]:
        with engines_of(3, lambda: f"conformance-{next(NUMBERS)}") as start:
            yield start


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def test_two_servers_read_each_sample_once_and_replace_each_other(
    start: Callable[..., DataService], folder: Path
) -> None:
    service = start(workers=2, before_cache=mark_before, after_cache=mark_after)
    loaders = [service.loader(4, seed=1, ranks=(rank, 2)) for rank in range(2)]
    values: list[list[tuple[float, ...]]] = []
    seconds: list[float] = []
    for epoch in range(3):
        found = []
        for number, pair in enumerate(zip(*loaders, strict=True)):
            if epoch and number == 3:
                seconds[-1] += monotonic()
            for batch in pair:
                found += zip(*(batch[name].tolist() for name in ("id", "before", "after")), strict=True)
            if epoch and number == 2:
                wait_until(lambda: all(server["pid"] for server in service.status()["servers"]))
                pid = service.status()["servers"][epoch - 1]["pid"]
                os.kill(pid, signal.SIGKILL)
                assert has_ended(pid)
                seconds.append(-monotonic())
        values.append(sorted(found))
        if not epoch:
            assert set(reads_in(folder).values()) == {1}
    assert [[row[0] for row in rows] for rows in values] == [list(range(N))] * 3
    assert len({tuple(row[1] for row in rows) for rows in values}) == 1
    assert len({row[2] for rows in values for row in rows}) == 3 * N
    assert max(seconds) < 5
    assert loaders[0].state_dict() == loaders[1].state_dict()
    status = service.status()
    assert (status["clients"], len(status["servers"])) == (1, 2)
    assert {loader.stats().recoveries for loader in loaders} == {0}


def test_what_services_that_did_not_start_were_to_serve_is_dropped(
    start: Callable[..., DataService], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, actor = [RayError("no room")] * 2, names.actor

    def refuse_first(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return actor(*arguments, **options)

    monkeypatch.setattr(names, "actor", refuse_first)
    kept_before = kept_by_ray()
    service = start()
    assert not refusals
    assert len(kept_by_ray() - kept_before) == 1
    service.stop()
    wait_until(lambda: kept_by_ray() <= kept_before)


def test_what_a_service_that_never_starts_was_to_serve_is_dropped(
    ray: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RayError("no room")

    monkeypatch.setattr(names, "actor", refuse)
    kept_before = kept_by_ray()
    with pytest.raises(ProvisionError, match="no room"):
        RayEngine("never", address="none", spec=(Facts(N, "x", 0, workers=1), b"contents"), seconds=0.2)
    assert kept_by_ray() <= kept_before


def kept_by_ray() -> set[bytes]:
    return set(internal_kv._internal_kv_list("", namespace=names.NAMESPACE))


def test_batches_belong_to_the_trainer(start: Callable[..., DataService], folder: Path) -> None:
    nbytes = 50_000
    service = start(Numbers(N, folder, nbytes=nbytes))
    loader = service.loader(6, buffer_bytes=1 << 20)
    for _ in range(2):
        kept = []
        for batch in loader:
            batch["bytes"] += 1
            kept.append(batch)
        for batch in kept:
            assert torch.equal(batch["bytes"].long(), (batch["id"] % 251 + 1)[:, None].expand(-1, nbytes))
        assert sorted(ids(kept)) == list(range(N))
    arrays = next(iter(service.loader(4, collate_fn=list)))
    assert all(isinstance(one["bytes"], np.ndarray) and one["bytes"].flags.writeable for one in arrays)
    with pytest.raises(ProvisionError, match="ZeroDivisionError"):
        next(iter(service.loader(4, collate_fn=lambda samples: len(samples) / 0)))


@pytest.mark.torture
def test_a_sample_that_kills_its_server_once_is_read_again(start: Callable[..., DataService], folder: Path) -> None:
    (folder / "kill-7").touch()
    loader = start().loader(8, seed=1)
    assert ids(loader) == EpochPlan(N, seed=1).order(0).tolist()
    assert not (folder / "kill-7").exists()


@pytest.mark.torture
def test_a_sample_that_always_kills_its_server_is_an_error(start: Callable[..., DataService], folder: Path) -> None:
    order = EpochPlan(N, seed=1).order(0).tolist()
    deadly, found = start(Killing(N, folder), cache_bytes=0).loader(4, seed=1, ahead=1), []
    batches = (number for batch in deadly for number in batch["id"].tolist())
    with pytest.raises(ProvisionError, match="4 servers have ended while they made it"):
        found.extend(batches)
    assert found == order[: order.index(5) // 4 * 4]


CLIENT = """
import sys
sys.path[:] = sys.argv[2:]
from fastensor.provision import DataService
service = DataService.connect(sys.argv[1])
loader = service.loader(4, seed=1)
for number, batch in enumerate(loader):
    if number == 2:
        print("at work", flush=True)
        sys.stdin.read()
"""


def test_a_killed_client_is_forgotten_and_a_killed_supervisor_knows_the_others_again(
    start: Callable[..., DataService],
) -> None:
    service = start()
    with Program("-c", CLIENT, service.address, *sys.path, provision=True) as client:
        assert client.stdout.readline() == "at work\n"
        pid = service.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
        wait_until(lambda: service.status()["clients"] == 2)
        client.kill()
        client.wait()
    wait_until(lambda: service.status()["clients"] == 1)
    assert sorted(ids(service.loader(7))) == list(range(N))


def test_a_service_ends_with_its_last_client(start: Callable[..., DataService]) -> None:
    service = start()
    address = service.address
    name = address.rpartition("/")[2]
    other = DataService.connect(address)
    wait_until(lambda: service.status()["servers"][0]["pid"] is not None)
    pids = [service.status()["pid"], *(one["pid"] for one in service.status()["servers"])]
    assert ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids] == [False, True]
    service.stop()
    assert sorted(ids(other.loader(7))) == list(range(N))
    other.stop()
    assert all(has_ended(pid) for pid in pids)
    with pytest.raises(ValueError, match=name):
        names.supervisor_of(name)
    with pytest.raises(ProvisionError, match="stop"):
        service.status()
    with pytest.raises(ProvisionError, match="there is no data service"):
        DataService.connect(address, timeout=0.1)


def test_a_service_ends_in_silence(start: Callable[..., DataService], capfd: pytest.CaptureFixture[str]) -> None:
    """Batches are in the making, and servers wait for samples of each other: Ray says on the terminal which calls it
    repeats."""
    service = start(workers=2)
    next(batches := iter(service.loader(4, seed=1)))
    status = service.status()
    pids = [status["pid"], *(one["pid"] for one in status["servers"])]
    service.stop()
    assert all(has_ended(pid) for pid in pids)
    with pytest.raises(ProvisionError, match="stop"):
        next(batches)
    assert "Task " not in "".join(capfd.readouterr())


def test_broken_samples_are_left_out(start: Callable[..., DataService], folder: Path) -> None:
    """By servers that keep them, and by those that make batches of them."""
    order = EpochPlan(N, seed=1).order(0).tolist()
    bad = [*order[8:16], order[20], order[30]]
    for position in bad[:-1]:
        (folder / f"fail-{position}").touch()
    loader = start(workers=2, after_cache=Refuses("after", bad[-1])).loader(8, seed=1, on_error="skip")
    found = [batch["id"].tolist() for batch in loader]
    assert [len(batch) for batch in found] == [8, 1, 7, 7, 8, 8, 8, 4]
    assert [number for batch in (found[0], *found[2:]) for number in batch] == [
        number for number in order if number not in bad
    ]
    assert loader.skipped == loader.stats().given.skipped == len(bad)


def test_a_forked_child_is_told_that_it_cannot_use_ray(start: Callable[..., DataService]) -> None:
    service = start()
    loader = service.loader(4, seed=1)
    batches = iter(loader)
    found = ids([next(batches)])
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_errors_in_child, args=(service, batches, [loader], answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert all("Ray cannot be used in a forked child" in text for text in answers.get())
    assert found + ids(batches) == EpochPlan(N, seed=1).order(0).tolist()


def _errors_in_child(service: DataService, batches: Iterator[Any], held: list[Any], answers: Any) -> None:
    texts = []
    for use in (lambda: next(batches), service.status, lambda: next(iter(service.loader(4)))):
        try:
            use()
        except ProvisionError as error:
            texts.append(str(error))
    held.clear()
    gc.collect()
    service.stop()
    answers.put(texts if len(texts) == 3 else [f"only {len(texts)} errors"])


@pytest.mark.torture
def test_a_service_goes_on_when_a_machine_is_lost(folder: Path) -> None:
    program = Path(__file__).with_name("cluster_of_rays.py")
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    said = run(program, folder, cold=True, PYTHONPATH=os.pathsep.join(sys.path), **environment).stdout
    expected = ["servers on 3 nodes", "epoch 0 True", "epoch 1 True", "servers on 2 nodes", "epoch 2 True"]
    assert [line for line in said.splitlines() if line.startswith(("servers", "epoch"))] == expected


STRANGER = """
from fastensor.provision import DataService
try:
    DataService.start([1, 2], engine="ray", address="192.0.2.1:6379", cache_bytes=0)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_cluster_that_anybody_could_join_is_refused() -> None:
    with Program("-c", STRANGER, provision=True, RAY_AUTH_MODE="disabled") as stranger:
        said, _ = stranger.communicate()
    assert said.startswith("ProvisionError anybody who reaches 192.0.2.1 can join this cluster of Ray")
    assert "RAY_AUTH_MODE=token" in said


OPEN = """
import ray, sys
ray.init("local", include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.torture
def test_to_have_a_token_is_not_to_be_asked_for_it() -> None:
    with Program("-c", OPEN, RAY_AUTH_MODE="disabled") as cluster:
        address = cluster.stdout.readline().strip()
        if address.startswith("127."):
            pytest.skip("this machine has no address on a network")
        stranger = STRANGER.replace("192.0.2.1:6379", address)
        said = run("-c", stranger, cold=True, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex()).stdout
    assert "can join this cluster of Ray, which has no authentication" in said


RANK = """
import os, sys
sys.path[:] = sys.argv[3:]
from pathlib import Path
from provision.datasets import Numbers
from fastensor.provision import DataService
service = DataService.start(Numbers(60, Path(sys.argv[1])), engine="ray", cache_bytes=1 << 20, workers=1)
loader = service.loader(4, ranks=(int(sys.argv[2]), 2), seed=1)
for number, batch in enumerate(loader):
    if number == 2:
        print(service.status()["pid"], service.status()["servers"][0]["pid"], flush=True)
        if sys.stdin.readline() == "":
            sys.exit("abandoned")
    print(*batch["id"].tolist(), flush=True)
if sys.argv[2] == "1":
    sys.stdin.readline()
"""


@pytest.fixture
def temporary() -> Iterator[str]:
    """A folder for Ray, whose sockets need short paths."""
    with tempfile.TemporaryDirectory(prefix="fr-", ignore_cleanup_errors=True) as path:
        yield path


@pytest.mark.torture
def test_ranks_share_a_ray_of_this_machine_which_ends_with_the_last_one(folder: Path, temporary: str) -> None:
    """Rank 0, which has started it or not, ends first. Rank 1 is killed."""
    before = set(os.listdir("/dev/shm"))
    environment = {"FASTENSOR_DATA_SERVICE": f"ranks-{os.getpid()}", "RAY_AUTH_TOKEN": secrets.token_hex()}
    environment["TMPDIR"] = temporary
    ranks = [
        Program("-c", RANK, folder, rank, *sys.path, provision=True, **environment, OMP_NUM_THREADS="1")
        for rank in range(2)
    ]
    found: list[int] = []
    pids: set[int] = set()
    for rank in ranks:
        found += [int(number) for _ in range(2) for number in rank.stdout.readline().split()]
        pids |= set(map(int, rank.stdout.readline().split()))
    assert len(pids) == 2
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    found += [int(number) for rank in ranks for _ in range(6) for number in rank.stdout.readline().split()]
    assert sorted(found) == list(range(N))
    assert ranks[0].wait() == 0
    assert not has_ended(min(pids), 0.1)
    ranks[1].kill()
    for rank in ranks:  # the process that keeps Ray has the error output of the rank that has started it
        rank.communicate()
    assert all(map(has_ended, pids))
    wait_until(lambda: not os.listdir(temporary))
    wait_until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name})


def local_rays(job: str) -> list[int]:
    """The processes that keep a Ray for a job."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"fastensor.provision.ray.local_ray" in (process / "cmdline").read_bytes():
                found += [int(process.name)] * (job.encode() in (process / "environ").read_bytes())
    return found


@pytest.mark.torture
def test_a_ray_of_this_machine_that_is_killed_is_started_again(folder: Path, temporary: str) -> None:
    job = f"local-ray-{os.getpid()}"
    environment = {"FASTENSOR_DATA_SERVICE": job, "RAY_AUTH_TOKEN": secrets.token_hex(), "TMPDIR": temporary}
    with Program("-c", RANK, folder, 0, *sys.path, provision=True, **environment) as rank:
        found = [int(number) for _ in range(2) for number in rank.stdout.readline().split()]
        pids = [*map(int, rank.stdout.readline().split())]
        (local_ray,) = local_rays(job)
        os.kill(local_ray, signal.SIGKILL)
        assert all(map(has_ended, [local_ray, *pids]))
        rank.stdin.write("\n")
        out, err = rank.communicate()
    assert rank.returncode == 0, err
    found += [int(number) for number in out.split()]
    order = EpochPlan(N, seed=1, batch_size=4, world_size=2)
    assert found == [number for batch in order.batches(0) for number in batch.tolist()]
    wait_until(lambda: not local_rays(job))


@pytest.mark.torture
def test_a_server_that_hangs_is_replaced(start: Callable[..., DataService]) -> None:
    service = start()
    loader, found = service.loader(4, seed=1), []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number == 1:
            os.kill(service.status()["servers"][0]["pid"], signal.SIGSTOP)
    assert found == EpochPlan(N, seed=1).order(0).tolist()
    assert service.status()["servers_killed"] == 1
    assert loader.stats().recoveries == 0


@pytest.mark.torture
def test_ray_exports_what_servers_count(start: Callable[..., DataService], ray: Any) -> None:
    service = start(cache_bytes=1 << 12)  # for some of the samples
    loader = service.loader(4, seed=1)
    assert len(ids(loader)) == N
    assert len(ids(loader)) == N
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"

    def exported(name: str) -> list[float]:
        lines = [
            line for line in urlopen(url).read().decode().splitlines() if service.address.rpartition("/")[2] in line
        ]
        return [float(line.split()[-1]) for line in lines if line.startswith(f"ray_fastensor_provision_{name}{{")]

    names = ["batches_total", "read_bytes_total", "cache_samples", "wait_seconds_bucket"]
    wait_until(lambda: all(map(exported, names)))
    wait_until(lambda: exported("batches_total")[0] >= 2 * len(loader))
    (evictions,) = exported("cache_evictions_total")
    assert 0 < evictions <= service.status()["evictions"]


@pytest.mark.torture
def test_ray_data_is_a_source(start: Callable[..., DataService], ray: Any) -> None:
    import ray.data

    rows = ray.data.from_items([{"id": number, "image": np.full((2, 3), number)} for number in range(N)])
    loader = start(rows.repartition(4), workers=2, fingerprint="rows").loader(8, seed=1)
    for epoch in range(2):
        batches = [*loader]
        assert ids(batches) == EpochPlan(N, seed=1).order(epoch).tolist()
        for batch in batches:
            assert torch.equal(batch["image"], batch["id"][:, None, None].expand(-1, 2, 3))
    with pytest.raises(ValueError, match="expected engine='ray'"):
        DataService.start(rows, cache_bytes=0)
