"""What a client costs a data service: processor time of its one server thread, and memory, for 1 to 32 clients, which
get batches in shared memory.

The clients are loaders of one process, which take batches in turn and compute nothing, so the service is always busy.
Samples are small and in the cache, so that as much time as possible is the server's. All processes share the
processors of this machine: seconds of the clock say little, processor seconds of the server do.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measuring import describe_machine

from fastensor.provision import DataService

TICKS = os.sysconf("SC_CLK_TCK")
SAMPLES, BATCH = 4096, 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """Samples of one size, which cost nothing to read."""

    nbytes: int

    @property
    def fingerprint(self) -> str:
        return f"blocks-{self.nbytes}"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> Any:
        return np.full(self.nbytes, position % 251, np.uint8)


@dataclass(frozen=True, slots=True)
class Measured:
    """What so many clients have cost."""

    clients: int
    batches: int
    """How many batches all clients together have taken."""
    seconds: float
    server_cpu_seconds: float
    worker_cpu_seconds: float
    server_private_nbytes: int
    """Memory of the server that no other process has."""
    buffered_nbytes: int
    """Memory for batches of all clients that are on their way."""
    descriptors: int
    """Open files of the server."""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def private_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def measure(service: DataService, clients: int, seconds: float) -> Measured:
    """Take batches for so many seconds."""
    loaders = [service.loader(BATCH, ranks=(rank, clients)) for rank in range(clients)]
    iterators = [forever(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    status = service.status()
    server, worker = status["pid"], status["workers"][0]["pid"]
    before = cpu_seconds(server), cpu_seconds(worker)
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for iterator in iterators:
            next(iterator)
        batches += clients
    took = time.perf_counter() - began
    spent = cpu_seconds(server) - before[0], cpu_seconds(worker) - before[1]
    buffered = sum(one["buffered_nbytes"] for one in service.status()["loaders"])
    descriptors = len(os.listdir(f"/proc/{server}/fd"))
    found = Measured(clients, batches, took, *spent, private_nbytes(server), buffered, descriptors)
    for loader in loaders:
        loader.close()
    return found


def report(machine: dict[str, str], found: list[Measured], nbytes: int) -> str:
    """Everything as Markdown."""
    lines = ["# What a client of a data service costs", "", *(f"- {what}: {text}" for what, text in machine.items())]
    lines.append(f"- batches: {BATCH} samples of {nbytes} bytes, from the cache; one worker; clients compute nothing")
    lines += [
        "", "| clients | batches/s | server, µs of CPU a batch | worker, µs of CPU a batch "
        "| server, MB of its own | buffered batches, MB | descriptors |", "|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for one in found:
        lines.append(
            f"| {one.clients} | {one.batches / one.seconds:.0f} "
            f"| {one.server_cpu_seconds / one.batches * 1e6:.0f} "
            f"| {one.worker_cpu_seconds / one.batches * 1e6:.0f} | {one.server_private_nbytes / 1e6:.1f} "
            f"| {one.buffered_nbytes / 1e6:.1f} | {one.descriptors} |"
        )
    clients = [one.clients for one in found]
    per_batch = np.polyfit(clients, [one.server_cpu_seconds / one.batches * 1e6 for one in found], 1)
    private = np.polyfit(clients, [one.server_private_nbytes / 1e3 for one in found], 1)
    lines += [
        "",
        f"Fitted: {per_batch[1]:.0f} µs of the server for each batch, and {per_batch[0]:.2f} µs more for each client "
        f"that is connected; {private[0]:.0f} KB of its memory for each client.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="at least two numbers")
    parser.add_argument("--sample-bytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of clients")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/provision_clients"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(Path("."), "cpu")
    nbytes = options.sample_bytes
    room = SAMPLES * (nbytes + 1024) * 9 // 8
    with DataService.start(Blocks(nbytes), cache_bytes=room, workers=1, progress=False) as service:
        service.preload()
        while service.status()["cached_samples"] < SAMPLES:
            time.sleep(0.05)
        found = [measure(service, clients, options.seconds) for clients in options.clients]
    text = report(machine, found, nbytes)
    options.output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "measured": [asdict(one) for one in found]}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


if __name__ == "__main__":
    main()
