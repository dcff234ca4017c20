"""What is to be loaded, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.choosing import Wanted
from fastensor.checkpoint.placement import MapLocation, is_told, kind_of_device
from fastensor.select.transfer import BackendChoice

MAPPED = "the file is mapped"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one :func:`fastensor.load`."""

    map_location: MapLocation = None
    keys: Iterable[str] | None = None
    weights_only: bool | None = True
    mmap: bool = False
    checked: bool = True
    """Whether what is loaded is to be compared with its checksums."""
    backend: BackendChoice = "auto"
    fallbacks: list[Fallback] = field(default_factory=list)
    """Filled while loading."""

    @property
    def wanted(self) -> Wanted:
        """How the file is to be read."""
        learn = self.checked and is_told(self.map_location)
        return Wanted(self.backend, kind_of_device(self.map_location), learn=learn)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one container gave."""

    result: Any
    backend: str
    reason: str
    """Why that one."""
    verified: bool
    """Whether all of it matched a CRC32 in the file."""
