"""What is to be loaded, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastensor.checkpoint.placement import MapLocation
from fastensor.checkpoint.report import Fallback


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one :func:`fastensor.load`."""

    map_location: MapLocation = None
    keys: Iterable[str] | None = None
    weights_only: bool | None = True
    mmap: bool = False
    checked: bool = True
    """Whether what is loaded is to be compared with its checksums."""
    backend: str = "auto"
    fallbacks: list[Fallback] = field(default_factory=list)
    """Filled while loading."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one container gave."""

    result: Any
    backend: str
    verified: bool
    """Whether all of it matched a CRC32 in the file."""
