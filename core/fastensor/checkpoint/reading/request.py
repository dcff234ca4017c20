"""The arguments of a load, and its result."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from fastensor.backends.registry import Fallback
from fastensor.checkpoint.reading.opened import ReadOptions
from fastensor.checkpoint.reading.placement import MapLocation, check_map_location, kind_is_known, kind_of_device
from fastensor.files.arguments import check_flags, check_optional_flags
from fastensor.select.transfer import BackendChoice

if TYPE_CHECKING:
    from fastensor.checkpoint.progress import Meter

MAPPED = "the file is mapped"
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
NOT_FORCED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_YES = ("1", "y", "yes", "true")
"""The values of these environment variables that torch takes for a yes."""
_TORCH_TAKES_CAPITALS = torch.__version__ >= "2.13"
"""True if torch takes ``YES``, too. A torch that does not stays restricted, and so do we."""


def is_restricted(weights_only: bool | None) -> bool:
    """True if ``torch.load`` uses its restricted unpickler, environment variables considered.

    Raises:
        TypeError: it is neither True nor False nor None.
        RuntimeError: both variables are set. ``torch.load`` raises the same.
    """
    check_optional_flags(weights_only=weights_only)
    forced = os.environ.get(FORCED, "").lower() in _YES
    lifting = os.environ.get(NOT_FORCED, "")
    not_forced = (lifting.lower() if _TORCH_TAKES_CAPITALS else lifting) in _YES
    if forced and not_forced:
        raise RuntimeError(f"Only one of `{FORCED}` or `{NOT_FORCED}` should be set, but both were set.")
    return forced or (not not_forced if weights_only is None else weights_only)


def listed(keys: Iterable[str] | None) -> Iterable[str] | None:
    """The keys, which may come from a generator, as a tuple. A single text is left for an error of its own.

    Raises:
        TypeError: they are no names.
    """
    if keys is None or isinstance(keys, str):
        return keys
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys is a list of names and patterns, found {keys!r}")
    return tuple(keys)


def check_verify(verify: bool | Literal["first"] | None) -> None:
    """
    Raises:
        TypeError: it is none of these.
    """
    if not (verify is None or verify == "first" or isinstance(verify, bool)):
        raise TypeError(f"verify is True, False, 'first' or None, found {verify!r}")


def check_arguments(
    map_location: MapLocation,
    keys: Iterable[str] | None,
    into: Mapping[str, Any] | None,
    *,
    mmap: bool,
    verify: bool | Literal["first"] | None,
) -> None:
    """
    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or arguments contradict each other.
    """
    check_flags(mmap=mmap)
    check_verify(verify)
    check_map_location(map_location)
    if mmap and verify:
        raise ValueError(
            "mmap=True and verify=True contradict: a mapped file is read when its tensors are used; "
            "load without mmap to verify"
        )
    if into is not None and (mmap or keys is not None or map_location is not None):
        raise ValueError("into says what is loaded and where it goes, so leave keys, map_location and mmap out")
    if verify == "first" and into is None:
        raise ValueError("verify='first' is for into; everything else is verified before it is returned anyway")


class LoadRequest(NamedTuple):
    """The arguments of one :func:`fastensor.load`."""

    fallbacks: list[Fallback]
    """Ways that were not possible. The load adds to this list."""
    map_location: MapLocation = None
    keys: Iterable[str] | None = None
    weights_only: bool | None = None
    mmap: bool = False
    checked: bool = True
    """Compare everything that is loaded with its checksums."""
    backend: BackendChoice = "auto"
    meter: Meter | None = None
    """Counts what is read; None if nobody wants to know."""

    @property
    def restricted(self) -> bool:
        """True if torch's restricted unpickler reads the pickle."""
        return is_restricted(self.weights_only)

    @property
    def options(self) -> ReadOptions:
        """The options for reading the file."""
        learn = self.checked and kind_is_known(self.map_location)
        return ReadOptions(self.backend, kind_of_device(self.map_location), learn=learn)


class Loaded(NamedTuple):
    """The result of loading one container."""

    result: Any
    backend: str
    reason: str
    """Reason for the choice of the backend."""
    verified: bool
    """True if every byte of the result matched a CRC32 in the file."""
    unchecked: str = ""
    """Reason for which ``verified`` is False, if there is more to say than that the file carries no checksums."""


class ArchivePart(NamedTuple):
    """The part of an archive that is loaded."""

    names: set[str]
    """Names of the branches and leaves that were asked for."""
    skipped: Collection[str] = ()
    """Names of the records that they do not need. Tensors in these records come on the meta device."""
    pickle: bytes | None = None
    """A pickle without most of what they do not need, padded to the size of the file's own; None for the file's own."""
