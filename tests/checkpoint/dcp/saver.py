"""Processes that save together until one of them kills itself. Run by ``test_kill.py``.

Arguments: the folder of the checkpoint, and how many processes there are. For each line of its input, ``FIRST RANK CALL
WAY``, as many children join a group and save the states of the steps from FIRST on, in the way ``save``, ``async`` or
``cooperative``. The child RANK kills itself before its CALL-th system call that changes something, and the others are
killed then. Their store is in a process of its own, as it is with torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first save of sharded tensors imports: once, not in each child
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastensor.checkpoint import cooperative
from fastensor.checkpoint.dcp import FastensorStorageWriter
from fastensor.testing.calls import intercepted

sys.path.insert(0, str(Path(__file__).parents[2]))
from checkpoints import join, save, stamped
from killer import Killer

NEVER = -1
STEPS = 3
CALLS = ("open", "pwrite", "fsync", "link", "rename", "renameat2", "mkdir", "unlink", "close")


def main() -> None:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    port = serve()
    for number, line in enumerate(sys.stdin):
        first, rank, call, way = line.split()
        children = []
        for one in range(world):
            pid = os.fork()
            if pid == 0:
                for stream in (sys.stdout, sys.stderr):  # Gloo says that it connects, those that live complain
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                fatal = int(call) if one == int(rank) else NEVER
                store = dist.PrefixStore(f"{number}", dist.TCPStore("127.0.0.1", port))
                run(store, folder, one, world, int(first), fatal, way)
                os._exit(0)
            children.append(pid)
        pid, status = os.waitpid(children[int(rank)], 0)
        for child in set(children) - {pid}:
            if status:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("dead", os.waitstatus_to_exitcode(status), flush=True)


def serve() -> int:
    """Start a store in a process that lives as long as this one. Returns its port."""
    lines, theirs = os.pipe()
    lives, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, f"{server.port}".encode())
        os.read(lives, 1)
        os._exit(0)
    os.close(theirs)
    return int(os.read(lines, 100))


def run(store: dist.Store, folder: Path, rank: int, world: int, first: int, fatal: int, way: str) -> None:
    mesh = join(folder, rank, world, store)
    writer = FastensorStorageWriter(folder)
    with intercepted(Killer(fatal, CALLS)):
        for step in range(first, first + STEPS):
            if way == "cooperative":
                cooperative.save(large_stamped(step), folder / "x.ckpt")
                continue
            state = sharded(mesh, step)
            if way == "async":
                future: Any = dcp.async_save(state, storage_writer=writer)
                future.result()
            else:
                save(state, writer, no_dist=False)
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, step: int) -> dict[str, Any]:
    state = stamped(step)
    state["large"] = distribute_tensor(state["large"], mesh, [Shard(0)], src_data_rank=None)
    for name, layer in state["layers"].items():
        state["layers"][name] = distribute_tensor(layer, mesh, [Shard(0)], src_data_rank=None)
    return state


def large_stamped(step: int) -> dict[str, Any]:
    """A part of it for each rank."""
    return {**stamped(step), "largest": torch.full((600_000,), step)}


if __name__ == "__main__":
    main()
