"""Choosing the engine that reads a file fastest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

from fastensor.data.coalescing import Merging
from fastensor.data.engines.base import Engine
from fastensor.data.engines.buffered import BufferedEngine
from fastensor.data.engines.direct import DirectEngine
from fastensor.data.engines.kvikio import KvikioEngine
from fastensor.data.engines.mapped import MappedEngine
from fastensor.data.staggering import StaggeredEngine, Staggering
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.files.budgets import available_memory

EngineName: TypeAlias = Literal["mapped", "pread", "willneed", "direct", "kvikio"]
"""A way to read a file."""
EngineOrAuto: TypeAlias = EngineName | Literal["auto"]
"""A way to read a file, or that the fastest is to be chosen."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_RESIDENT = 0.998
"""A file of which at least this part is in the page cache is mapped. In an epoch, the values that are missing are those
that come next, and a fault for each of their pages costs more than the copies of many others."""
LARGE_NBYTES = 64 << 10
"""From this mean length on, cold values arrive sooner by direct I/O: one copy less outweighs the work of threads."""
_logger = logging.getLogger("fastensor")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Engine and options for reading the values of a file."""

    engine: EngineOrAuto = "auto"
    merging: Merging = Merging()  # noqa: RUF009  # frozen
    """Limits of reads that bring several values."""
    staggering: Staggering | None = None
    """Turns of processes that read the file; None if all may read at once."""

    def __post_init__(self) -> None:
        if self.engine != "auto" and self.engine not in ENGINES:
            raise _unknown(self.engine)

    def open(self, fd: int, mean_nbytes: float) -> Engine:
        """The engine, chosen now if it is not named.

        Args:
            fd: open for reading, of a file that is not empty. The caller keeps ownership, and keeps it open while the
                engine is.
            mean_nbytes: the mean length of the values.

        Raises:
            BackendUnavailableError: the engine cannot read this file, or cannot work on this machine.
            OSError: the file cannot be read, or the store for staggering cannot be reached.
        """
        if self.engine == "auto":
            engine = open_chosen(fd, mean_nbytes, self.merging)
        else:
            engine = open_engine(self.engine, fd, self.merging)
        return engine if self.staggering is None else StaggeredEngine(engine, self.staggering)


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
    if name not in _OPENED:
        raise _unknown(name)
    return _OPENED[name](fd, merging)


_OPENED: dict[EngineName, Callable[[int, Merging], Engine]] = {
    "mapped": lambda fd, merging: MappedEngine(fd),
    "pread": partial(BufferedEngine, advise=False),
    "willneed": partial(BufferedEngine, advise=True),
    "direct": DirectEngine,
    "kvikio": KvikioEngine,
}


def _unknown(name: str) -> ValueError:
    return ValueError(f"engine is 'auto' or one of {ENGINES}, found {name!r}")


def choose_engine(fd: int, mean_nbytes: float) -> EngineName:
    """The fastest engine for a file as it is now: ``mapped`` if the page cache has it. Otherwise ``direct`` if values
    are large, and the file is larger than memory, so that the page cache could not keep it. Else ``willneed``.

    The order of reading makes no difference: engines read in order what is merged, and that is fast with all of them.

    Args:
        fd: the file.
        mean_nbytes: the mean length of its values.
    """
    nbytes = os.fstat(fd).st_size
    if posix.resident_fraction(fd, nbytes) >= _RESIDENT:
        return "mapped"
    return "direct" if mean_nbytes >= LARGE_NBYTES and nbytes > available_memory() else "willneed"


def open_chosen(fd: int, mean_nbytes: float, merging: Merging) -> Engine:
    """The engine of :func:`choose_engine`; or ``willneed``, if that one cannot be used: the file has no direct I/O, or
    cannot be mapped."""
    name = choose_engine(fd, mean_nbytes)
    try:
        return open_engine(name, fd, merging)
    except (BackendUnavailableError, OSError) as error:
        _logger.info("the engine %s cannot read the dataset (%s); willneed does", name, error)
        return open_engine("willneed", fd, merging)
