"""What is to be loaded, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.placement import MapLocation, kind_is_known, kind_of_device
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.select.transfer import BackendChoice

MAPPED = "the file is mapped"
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
NOT_FORCED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_YES = ("1", "y", "yes", "true")
"""What torch takes for a yes in them."""


def is_restricted(weights_only: bool | None) -> bool:
    """Whether ``torch.load`` uses its restricted unpickler, environment variables considered.

    Raises:
        RuntimeError: as ``torch.load``, because both variables are set.
    """
    forced, not_forced = (os.environ.get(name, "").lower() in _YES for name in (FORCED, NOT_FORCED))
    if forced and not_forced:
        raise RuntimeError(f"Only one of `{FORCED}` or `{NOT_FORCED}` should be set, but both were set.")
    return forced or (not not_forced if weights_only is None else weights_only)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one :func:`fastensor.load`."""

    map_location: MapLocation = None
    keys: Iterable[str] | None = None
    weights_only: bool | None = None
    mmap: bool = False
    checked: bool = True
    """Whether what is loaded is to be compared with its checksums."""
    backend: BackendChoice = "auto"
    fallbacks: list[Fallback] = field(default_factory=list)
    """Filled while loading."""

    @property
    def restricted(self) -> bool:
        """Whether torch's restricted unpickler reads it."""
        return is_restricted(self.weights_only)

    @property
    def options(self) -> ReadOptions:
        """How the file is to be read."""
        learn = self.checked and kind_is_known(self.map_location)
        return ReadOptions(self.backend, kind_of_device(self.map_location), learn=learn)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one container gave."""

    result: Any
    backend: str
    reason: str
    """Why that one."""
    verified: bool
    """Whether all of it matched a CRC32 in the file."""
    unchecked: str = ""
    """Why not, where there is more to be said than that the file has none."""
