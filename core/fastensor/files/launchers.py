"""Rank, world size and job from ``torch.distributed``, and the environment variables of torchrun, SLURM, Open MPI and
other MPIs."""

from __future__ import annotations

import os
import re

_LOCAL_PROCESSES = (
    "LOCAL_WORLD_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
)
"""Variables in which launchers say how many processes of the job they have started on this machine."""
_PER_MACHINE = re.compile(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", re.ASCII)
"""``8``, or SLURM's ``8(x2),4``: 8 on each of two machines, and 4 on another."""


def local_processes() -> int:
    """The number of processes of this job on this machine.

    If SLURM gives different numbers for the machines of a job, the largest counts. Without a launcher, 1.
    """
    for name in _LOCAL_PROCESSES:
        found = _PER_MACHINE.fullmatch(os.environ.get(name, "").strip())
        if found and (most := max(int(number) for number in re.findall(r"(?:^|,)(\d+)", found[0]))):
            return most
    return 1


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process, and the number of ranks: those of ``torch.distributed``; before it is initialised, from
    ``RANK`` and ``WORLD_SIZE``; without these, 0 and 1.

    SLURM's and MPI's own numbers are left alone: a batch script that runs one process has them, too.

    Raises:
        ValueError: a variable is no number.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not (rank and world_size):
        return 0, 1
    if not (rank.isdecimal() and world_size.isdecimal()):
        raise ValueError(f"RANK and WORLD_SIZE are whole numbers, found {rank!r} and {world_size!r}")
    return int(rank), int(world_size)


def store_address() -> str | None:
    """``host:port`` of the job's store of ``torch.distributed``, from ``MASTER_ADDR`` and ``MASTER_PORT``; None without
    these."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else None


def job() -> str | None:
    """Identifier that all ranks of this job share, and no other job on the machine; None without a launcher."""
    store = store_address()
    return None if store is None else f"{store} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
