"""What ``map_location`` means: where a storage goes that has been read to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fastensor.backends.to_device import FILLED_AT_ONCE, storage_on

MapLocation: TypeAlias = Any
"""As for ``torch.load``: a device, its name, a dict between names, a callable, or None."""


def kind_of_device(map_location: MapLocation) -> str:
    """Where most of it will go, as far as that is said.

    >>> kind_of_device("cuda:1"), kind_of_device(torch.device("cpu")), kind_of_device({"cuda:0": "cuda:1"})
    ('cuda', 'cpu', 'cpu')
    """
    if isinstance(map_location, torch.device):
        return map_location.type
    return map_location.partition(":")[0] if isinstance(map_location, str) else "cpu"


def may_be_filled_at_once(map_location: MapLocation) -> bool:
    """Whether storages may go to a device that they can be read to. A callable of the user's gets them filled.

    >>> may_be_filled_at_once("cuda"), may_be_filled_at_once("cpu"), may_be_filled_at_once(lambda storage, _: storage)
    (True, False, False)
    """
    if callable(map_location) and not isinstance(map_location, torch.device):
        return False
    if map_location is None or isinstance(map_location, dict):
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch gives it no types
    return kind_of_device(map_location) in FILLED_AT_ONCE


def begin_to_use(map_location: MapLocation) -> None:
    """Initialise CUDA if a load will do so anyway: there are backends that wait for it."""
    if kind_of_device(map_location) == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types


def destination(location: str, map_location: MapLocation) -> torch.device:
    """Where a storage that was saved from ``location`` will go. Raises what ``torch.load`` would."""
    return place(storage_on(torch.device("cpu"), 0), location, map_location).device


def place(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Put a storage where ``torch.load`` would.

    Args:
        storage: filled, on the host.
        location: where it was saved from, such as ``cpu`` or ``cuda:0``.
        map_location: as for ``torch.load``.
    """
    restore: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] = torch.serialization.default_restore_location
    if callable(map_location) and not isinstance(map_location, torch.device):
        placed: torch.UntypedStorage | None = map_location(storage, location)
        return restore(storage, location) if placed is None else placed
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    return restore(storage, location)
