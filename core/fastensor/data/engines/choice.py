"""Which engine reads a file."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, get_args

from fastensor.data.coalescing import Merging
from fastensor.data.engines.base import Engine
from fastensor.data.engines.buffered import BufferedEngine
from fastensor.data.engines.direct import DirectEngine
from fastensor.data.engines.kvikio import KvikioEngine
from fastensor.data.engines.mapped import MappedEngine
from fastensor.files import posix

EngineName: TypeAlias = Literal["mapped", "pread", "willneed", "direct", "kvikio"]
"""A way to read a file."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_RESIDENT = 0.95
"""A file of which at least this part is in the page cache is mapped: rare page faults cost less than all the copies."""


def open_engine(name: EngineName, fd: int, merging: Merging) -> Engine:
    """An engine for an open file that is not empty.

    Args:
        name: of the engine.
        fd: open for reading. The caller keeps ownership, and keeps it open while the engine is.
        merging: what is read together.

    Raises:
        BackendUnavailableError: the engine cannot read this file, or cannot work on this machine.
        ValueError: there is no such engine.
    """
    match name:
        case "mapped":
            return MappedEngine(fd, os.fstat(fd).st_size)
        case "pread" | "willneed":
            return BufferedEngine(fd, merging, advise=name == "willneed")
        case "direct":
            return DirectEngine(fd, merging)
        case "kvikio":
            return KvikioEngine(fd, merging)
    raise ValueError(f"engine is 'auto' or one of {ENGINES}, found {name!r}")


def choose_engine(fd: int) -> EngineName:
    """The fastest engine for a file as it is now: ``mapped`` if the page cache has it, else ``willneed``.

    Sizes of values and the order of reading do not change the choice: ``willneed`` merges what lies close together, so
    it reads in order as fast as large reads do.
    """
    nbytes = os.fstat(fd).st_size
    return "mapped" if posix.resident_fraction(fd, nbytes) >= _RESIDENT else "willneed"
