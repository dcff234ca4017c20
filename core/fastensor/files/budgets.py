"""Memory budgets: what is free on this machine, within the limits of its cgroup and of this process."""

from __future__ import annotations

import re
from pathlib import Path

from fastensor.files.posix import text_of

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""The files of a limit and of what is in use, for both versions of cgroups. Above ``memory.high`` the kernel makes
processes wait."""
_PROCESS_LIMITS = (("data size", "VmData"), ("address space", "VmSize"))
"""Limits in ``/proc/self/limits``, and what counts against them in ``/proc/self/status``."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping. Limits of cgroups count, and those of the process
    (``ulimit -d``, ``ulimit -v``). 0 if the system does not say.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    found = [int(kib) << 10 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB", text_of(root / "proc/meminfo"), re.M)]
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
            folder = base / path.lstrip("/")
            # In a container the path may be the host's, and what is mounted the container's own.
            found += [free for one in (folder, *folder.parents) if one.is_relative_to(base) and (free := _free(one))]
    limits, status = text_of(root / "proc/self/limits"), text_of(root / "proc/self/status")
    for limit, use in _PROCESS_LIMITS:
        most = re.search(rf"^Max {limit}\s+(\d+)", limits, re.M)
        used = re.search(rf"^{use}:\s+(\d+) kB", status, re.M)
        if most and used:
            found.append(max(int(most[1]) - (int(used[1]) << 10), 1))
    return min(found, default=0)


def _free(cgroup: Path) -> int | None:
    """Bytes that a cgroup may still take, its page cache included, which it would give up; None without a limit."""
    found = []
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = text_of(cgroup / limit_file), text_of(cgroup / usage_file)
        if limit.isdigit() and usage.isdigit():
            # Version 1 also has what the group holds without the groups inside, which the usage counts.
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)", text_of(cgroup / "memory.stat"), re.M)
            found.append(max(int(limit) - int(usage) + max(map(int, cached), default=0), 1))
    return min(found, default=None)
