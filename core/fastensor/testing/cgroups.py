"""Processes in limited memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes may bring so many bytes into memory from then on, page cache included: the kernel kills
    them if they want more. A process joins by writing its number to the file ``cgroup.procs``. None if no cgroup can be
    made here, which takes root, and a container that allows it. All processes have to be gone when the block ends.
    """
    folder, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not (folder / limit).exists():  # version 2
        folder, limit = Path("/sys/fs/cgroup"), "memory.max"
    group, is_made = folder / f"fastensor-{os.getpid()}", True
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError:
        is_made = False
    try:
        yield group if is_made else None
    finally:
        if group.exists():
            group.rmdir()
