"""A program with a cluster of three nodes of Ray on the loopback interface, one of which is lost in mid-epoch.

Prints on how many nodes there are servers before and after, and whether each sample was given out once per epoch.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from provision.datasets import Numbers
from ray.cluster_utils import Cluster

from fastensor.provision import DataService

N = 60
HOME = "127.0.0.1"
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 1000,
}
NODE: dict[str, Any] = {"node_ip_address": HOME, "num_cpus": 1, "object_store_memory": 80 << 20}


def nodes_of(service: DataService) -> set[str]:
    """The nodes of all servers, as soon as all answer."""
    while None in (nodes := {one["node"] for one in service.status()["servers"]}):
        pass
    return nodes


def main() -> None:
    folder = tempfile.mkdtemp(prefix="fr-")
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {**NODE, "include_dashboard": False, "temp_dir": folder, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        others = [cluster.add_node(**NODE) for _ in range(2)]
        dataset = Numbers(N, Path(sys.argv[1]))
        with DataService.start(
            dataset, engine="ray", address=cluster.address, cache_bytes=1 << 20, workers=3
        ) as service:
            loaders = [service.loader(4, seed=1, ranks=(rank, 2)) for rank in range(2)]
            for epoch in range(3):
                found = []
                for number, pair in enumerate(zip(*loaders, strict=True)):
                    if (epoch, number) == (0, 1):
                        print("servers on", len(nodes_of(service)), "nodes", flush=True)
                    if (epoch, number) == (1, 2):
                        cluster.remove_node(others[0], allow_graceful=False)
                    found += [sample for batch in pair for sample in batch["id"].tolist()]
                print("epoch", epoch, sorted(found) == list(range(N)), flush=True)
                if epoch == 1:
                    while len(nodes := nodes_of(service)) == 3:
                        pass  # a server goes on for a moment without its node
                    print("servers on", len(nodes), "nodes", flush=True)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
