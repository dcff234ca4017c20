"""What ``map_location`` means: where a storage goes, and whether it has to be on the host before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fastensor.backends.to_device import FILLED_AT_ONCE, is_filled_at_once, storage_on
from fastensor.errors import PlacementError

_HOST = torch.device("cpu")
MapLocation: TypeAlias = Any
"""As for ``torch.load``: a device, its name, a dict between names, a callable, or None."""


def kind_of_device(map_location: MapLocation) -> str:
    """The kind of device that most storages will go to, as far as ``map_location`` names one.

    >>> kind_of_device("cuda:1"), kind_of_device(torch.device("cpu")), kind_of_device({"cuda:0": "cuda:1"})
    ('cuda', 'cpu', 'cpu')
    """
    if isinstance(map_location, torch.device):
        return map_location.type
    return map_location.partition(":")[0] if isinstance(map_location, str) else "cpu"


def may_be_filled_at_once(map_location: MapLocation) -> bool:
    """Whether storages may be read straight into a device's memory. A callable of the user's gets them filled.

    >>> may_be_filled_at_once("cuda"), may_be_filled_at_once("cpu"), may_be_filled_at_once(lambda storage, _: storage)
    (True, False, False)
    """
    if _is_users(map_location):
        return False
    if map_location is None or isinstance(map_location, dict):
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch gives it no types
    return kind_of_device(map_location) in FILLED_AT_ONCE


def _is_users(map_location: MapLocation) -> bool:
    """Whether ``map_location`` is a callable of the user's."""
    return callable(map_location) and not isinstance(map_location, torch.device)


def kind_is_known(map_location: MapLocation) -> bool:
    """Whether :func:`kind_of_device` is right: the kind of device is known before anything is read.

    >>> kind_is_known("cuda:1"), kind_is_known(torch.device("cpu"))
    (True, True)
    """
    return isinstance(map_location, str | torch.device) or not may_be_filled_at_once(map_location)


def begin_to_use(map_location: MapLocation) -> None:
    """Initialise CUDA if a load will do so anyway: there are backends that wait for it."""
    if kind_of_device(map_location) == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types


def destination(location: str, map_location: MapLocation) -> torch.device:
    """Where a storage that was saved from ``location`` will go. Raises what ``torch.load`` would."""
    return place(storage_on(_HOST, 0), location, map_location).device


def check_destination(location: str, map_location: MapLocation, where: str) -> None:
    """
    Raises:
        PlacementError: torch refuses to put a storage there; its error is the cause. A callable is not asked.
    """
    if _is_users(map_location):
        return
    try:
        destination(location, map_location)
    except Exception as error:
        raise PlacementError(f"{where}: {error}. map_location='cpu' loads it to the host") from error


def place(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Put a storage where ``torch.load`` would.

    Args:
        storage: filled, on the host.
        location: where it was saved from, such as ``cpu`` or ``cuda:0``.
        map_location: as for ``torch.load``.
    """
    restore: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] = torch.serialization.default_restore_location
    if _is_users(map_location):
        placed: torch.UntypedStorage | None = map_location(storage, location)
        return restore(storage, location) if placed is None else placed
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    return restore(storage, location)


def filled(
    nbytes: int, location: str, map_location: MapLocation, fill: Callable[[torch.UntypedStorage], object]
) -> torch.UntypedStorage:
    """A storage where ``torch.load`` would put it; on its way it is on the host only if it has to be.

    Args:
        nbytes: its size.
        location: where it was saved from.
        map_location: as for ``torch.load``.
        fill: called with the storage, wherever it is, unless it is empty.
    """
    final = destination(location, map_location) if may_be_filled_at_once(map_location) else _HOST
    at_once = is_filled_at_once(final)
    storage = storage_on(final if at_once else _HOST, nbytes)
    if nbytes:
        fill(storage)
    return storage if at_once else place(storage, location, map_location)
