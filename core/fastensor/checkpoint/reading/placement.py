"""Devices that ``map_location`` chooses for storages, and if these are read to the host first."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch

from fastensor.backends.memory import FILLED_AT_ONCE, is_filled_at_once, storage_on
from fastensor.errors import PlacementError, caught_as
from fastensor.files.words import unended

_HOST = torch.device("cpu")
_KINDS = ("cpu", "cuda", "meta", "mps", "xpu", "hpu", "xla")
_ADVICE_OF_TORCH = r"\. (If you are running on a|Please use torch\.load with map_location).*"
_OFTEN_MEANT = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}
"""Torch's names for kinds of devices, by other words for them."""
MapLocation: TypeAlias = Any
"""The argument of ``torch.load``: a device, its name, a dict between names, a callable, or None."""


def kind_of_device(map_location: MapLocation) -> str:
    """The kind of device that most storages will go to, as far as ``map_location`` names one.

    >>> kind_of_device("cuda:1"), kind_of_device(torch.device("cpu")), kind_of_device({"cuda:0": "cuda:1"})
    ('cuda', 'cpu', 'cpu')
    """
    if isinstance(map_location, torch.device):
        return map_location.type
    return map_location.partition(":")[0] if isinstance(map_location, str) else "cpu"


def may_be_filled_at_once(map_location: MapLocation) -> bool:
    """True if storages may be read straight into a device's memory. A user's callable gets them filled, from the host.

    >>> may_be_filled_at_once("cuda"), may_be_filled_at_once("cpu"), may_be_filled_at_once(lambda storage, _: storage)
    (True, False, False)
    """
    if is_users(map_location):
        return False
    if map_location is None or isinstance(map_location, dict):
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch gives it no types
    return kind_of_device(map_location) in FILLED_AT_ONCE


def is_users(map_location: MapLocation) -> bool:
    """True if ``map_location`` is a user's callable."""
    return callable(map_location) and not isinstance(map_location, torch.device)


def check_map_location(map_location: MapLocation) -> None:
    """Refuse what can name no device. Whether this machine has the device is found out when something is put there.

    Raises:
        TypeError: it is of a type that ``torch.load`` does not take.
        ValueError: it is a text that names no kind of device that torch knows.

    >>> check_map_location("gpu:1")
    Traceback (most recent call last):
    ValueError: map_location='gpu:1' names no device; did you mean 'cuda:1'?
    """
    if not isinstance(map_location, str):
        if not (map_location is None or isinstance(map_location, torch.device | dict) or callable(map_location)):
            raise TypeError(
                f"map_location is a device, its name, a dict of names or a function, found {map_location!r}"
            )
        return
    try:
        torch.device(map_location)
    except RuntimeError as error:
        if not _is_registered(map_location):
            kind, colon, number = map_location.partition(":")
            near = _OFTEN_MEANT.get(kind.lower()) or next(iter(get_close_matches(kind, _KINDS, 1)), "")
            hint = f"did you mean {near + colon + number!r}?" if near else "expected one such as 'cpu' or 'cuda:1'"
            refused = ValueError(f"map_location={map_location!r} names no device; {hint}")
            raise caught_as(refused, RuntimeError) from error


def _is_registered(location: str) -> bool:
    """True if a library has told torch how to load to a place of this name (``register_package``)."""
    try:
        destination(location, location)
    except Exception:  # noqa: BLE001  # whatever a library raises, it does not know the place
        return False
    return True


def kind_is_known(map_location: MapLocation) -> bool:
    """True if the kind of device is known before the file is read: then :func:`kind_of_device` is right.

    >>> kind_is_known("cuda:1"), kind_is_known(torch.device("cpu"))
    (True, True)
    """
    return isinstance(map_location, str | torch.device) or not may_be_filled_at_once(map_location)


def begin_to_use(map_location: MapLocation) -> None:
    """Initialise CUDA if a load will do so anyway. Some backends are available only afterwards."""
    if kind_of_device(map_location) == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types


def destination(location: str, map_location: MapLocation) -> torch.device:
    """The device that a storage saved from ``location`` will go to. Raises what ``torch.load`` would raise."""
    return place(storage_on(_HOST, 0), location, map_location).device


def check_destination(location: str, map_location: MapLocation, where: str) -> None:
    """Make sure that torch can put storages where ``map_location`` says. A callable is not called.

    Raises:
        PlacementError: torch refuses; its error is the context.
    """
    if is_users(map_location):
        return
    try:
        destination(location, map_location)
    except Exception as error:  # noqa: BLE001  # our error says all that torch's says, and is of its type
        raise caught_as(refusal_to_place(error, where), type(error)) from None


def refusal_to_place(error: Exception, where: str) -> PlacementError:
    """The error for a place that torch refuses. Its advice takes the place of torch's, about ``torch.load``."""
    found = re.sub(_ADVICE_OF_TORCH, "", str(error), flags=re.DOTALL)
    return PlacementError(f"{where}: {unended(found)}. map_location='cpu' loads it to the host")


def place(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Put a storage where ``torch.load`` would.

    Args:
        storage: filled, on the host.
        location: where it was saved from, such as ``cpu`` or ``cuda:0``.
        map_location: as for ``torch.load``.
    """
    restore: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] = torch.serialization.default_restore_location
    if is_users(map_location):
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
    """A filled storage where ``torch.load`` would put it. It is on the host before only if it has to be.

    Args:
        nbytes: its size.
        location: where it was saved from.
        map_location: as for ``torch.load``.
        fill: fills the storage, which may be on any device. Not called for an empty one.
    """
    final = destination(location, map_location) if may_be_filled_at_once(map_location) else _HOST
    at_once = is_filled_at_once(final)
    storage = storage_on(final if at_once else _HOST, nbytes)
    if nbytes:
        fill(storage)
    return storage if at_once else place(storage, location, map_location)
