"""``fastensor.checkpoint.cooperative.load``: the ranks of a machine read a file from the disk once.

They share the page cache. Each rank of a machine has the kernel read another part of the file, all at a time, and then
loads the whole file from there, at the speed of memory. Nothing is copied between processes, and what does not fit into
the page cache is only read again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from fastensor.checkpoint.cooperative.options import DEFAULT_TIMEOUT_SECONDS, check_timeout
from fastensor.checkpoint.cooperative.ranks import Ranks
from fastensor.checkpoint.location import Location, locate
from fastensor.checkpoint.reading.load import load_with_report as load_alone
from fastensor.checkpoint.reading.placement import MapLocation
from fastensor.checkpoint.reading.request import check_arguments
from fastensor.checkpoint.report import LoadReport
from fastensor.errors import CheckpointReadError
from fastensor.files import posix
from fastensor.files.arguments import checks_keywords
from fastensor.files.job_store import has_others

_THROUGH_THE_PAGE_CACHE = "numpy"


@checks_keywords
def load(
    path: Location,
    map_location: MapLocation = None,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    keys: Iterable[str] | None = None,
    weights_only: bool | None = None,
    verify: bool | None = None,
) -> Any:
    """Load a checkpoint on all ranks of a group, as :func:`fastensor.load` does, reading it once per machine.

    All ranks call it, with the same path. Each one gets an object of its own. The first load of a group waits until all
    ranks have come; later ones do not wait, so each machine reads the file once if its ranks come at the same time.

    Args:
        path: as for :func:`fastensor.load`. What is no file of a local path, every rank reads by itself.
        map_location: as for :func:`fastensor.load`.
        group: the ranks that take part; None for all.
        timeout: how many seconds the first load of the group waits for the slowest rank to call, and each load for an
            answer of the store of ``torch.distributed``.
        keys, weights_only, verify: as for :func:`fastensor.load`.

    Raises:
        CheckpointReadError: as :func:`fastensor.load`; or a rank did not come in time, and the message names it.
        Exception: as :func:`fastensor.load`, on a rank that cannot load the file.
    """
    found, _ = load_with_report(
        path, map_location, group=group, timeout=timeout, keys=keys, weights_only=weights_only, verify=verify
    )
    return found


@checks_keywords
def load_with_report(
    path: Location,
    map_location: MapLocation = None,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    keys: Iterable[str] | None = None,
    weights_only: bool | None = None,
    verify: bool | None = None,
) -> tuple[Any, LoadReport]:
    """:func:`load`, and what it did on this rank."""
    check_arguments(map_location, keys, None, mmap=False, verify=verify)
    check_timeout(timeout)
    found = locate(path)
    if has_others(group) and isinstance(found, str):
        ranks = Ranks(group, f"loading {found}", timeout, CheckpointReadError, name="machines")
        number, count = _place_on_machine(ranks)
        if count > 1:
            with suppress(OSError):  # the load meets the error, too, and says more
                _begin_to_read(found, number, count)
            return load_alone(
                path, map_location, keys=keys, weights_only=weights_only, verify=verify, backend=_THROUGH_THE_PAGE_CACHE
            )
    return load_alone(path, map_location, keys=keys, weights_only=weights_only, verify=verify)


def _place_on_machine(ranks: Ranks) -> tuple[int, int]:
    """The number of this rank among those of its machine, and how many they are."""
    machines = ranks.exchange(_machine())
    own = machines[ranks.rank]
    return machines[: ranks.rank].count(own), machines.count(own)


def _machine() -> str:
    """Identifier that processes share if they share a page cache, whatever containers they are in."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return socket.gethostname()


def _begin_to_read(path: str, number: int, count: int) -> None:
    """Have the kernel read a part of a file into the page cache, if it is not there."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        begin, end = nbytes * number // count, nbytes * (number + 1) // count
        if end > begin:  # a length of 0 would mean all of the file
            posix.advise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
    finally:
        posix.close_read_only(fd)
