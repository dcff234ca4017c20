"""The data service on Ray gives batches to several machines, also when one of them is lost."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hosts.machines import PATIENCE_SECONDS, Machines, meet
from provision.datasets import Numbers

from fastensor.provision import DataService

N = 200


@contextmanager
def node_of_ray(machines: Machines, rank: int, folder: str) -> Iterator[str]:
    """A node of Ray on this machine; the first one makes the cluster. Gives the address of that."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}
    address = f"{machines.address(0)}:6379"
    first = ["--head", "--port=6379", "--include-dashboard=false", f"--system-config={json.dumps(quick)}"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1",
        f"--node-ip-address={machines.address(rank)}", f"--temp-dir={folder}", "--object-store-memory=80000000",
        *([f"--address={address}"] if rank else first),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as node:
        try:
            yield address
        finally:
            node.terminate()


@pytest.mark.torture
def test_ray(machines: Machines, tmp_path: Path) -> None:
    """A machine is lost in the second epoch. The others go on, and each sample is given out once."""
    with ExitStack() as folders:
        nodes = [tempfile.mkdtemp(prefix="fr-") for _ in range(3)]  # sockets need short paths
        for node in nodes:
            folders.callback(shutil.rmtree, node, ignore_errors=True)
        machines.run(range(3), _train_on_ray, machines, tmp_path, nodes)


def _train_on_ray(rank: int, machines: Machines, folder: Path, nodes: list[str]) -> None:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "74657374" * 8, "PYTHONPATH": os.pathsep.join(sys.path)}
    logging.getLogger("ray").setLevel(logging.ERROR)
    with ExitStack() as until:
        if rank:
            meet(folder, "begun", rank, 3)
        address = until.enter_context(node_of_ray(machines, rank, nodes[rank]))
        if not rank:
            _wait_for_nodes(address, 1)
            meet(folder, "begun", rank, 3)
            _wait_for_nodes(address, 3)
        meet(folder, "there", rank, 3)
        if rank < 2:
            _train_both(rank, machines, folder, address)
        meet(folder, "over", rank, 3)
    os._exit(0)


def _wait_for_nodes(address: str, count: int) -> None:
    import ray

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
            alive = sum(bool(one["Alive"]) for one in ray.nodes())
        except (ConnectionError, RuntimeError):
            alive = 0
        ray.shutdown()
        if alive >= count:
            return
        assert time.monotonic() < deadline, f"{alive} of {count} nodes are there"
        time.sleep(0.2)


def _train_both(rank: int, machines: Machines, folder: Path, address: str) -> None:
    dataset = Numbers(N, folder)
    with DataService.start(dataset, engine="ray", address=address, cache_bytes=1 << 20, workers=3) as service:
        batches = service.loader(4, seed=1, ranks=(rank, 2))
        for epoch in range(3):
            found = []
            for number, batch in enumerate(batches):
                found += batch["id"].tolist()
                if (rank, epoch, number) == (0, 1, 3):
                    machines.cut(2)
            (folder / f"ids-{epoch}-{rank}").write_text(json.dumps(found))
            meet(folder, f"epoch {epoch}", rank, 2)
            both = [json.loads((folder / f"ids-{epoch}-{one}").read_text()) for one in range(2)]
            assert sorted(both[0] + both[1]) == list(range(N))
