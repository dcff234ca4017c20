"""The backends by name: those of this package, and those of other packages; and why one is not used.

This is the one place where a backend is added. The rest of the package asks :func:`names`, and the protocols that a
backend implements. A backend of this package is imported when it is first asked for by its name. Another package adds a
backend by an entry point of the group ``fastensor.backends``, which names a class, or another callable without
arguments::

    [project.entry-points."fastensor.backends"]
    mine = "my_package.backend:MyBackend"

Such a backend is imported by the first call that asks for all names, or for an unknown one. If that fails, a warning
says why, and the other backends stay usable.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastensor.backends.base import Backend, SlotBackend
from fastensor.errors import UnknownBackendError
from fastensor.files.arguments import nearest
from fastensor.files.forks import lock_of
from fastensor.files.garbage import without_collection
from fastensor.files.importing import entry_points_of

if TYPE_CHECKING:
    from fastensor.stitch.source import Source

AUTO = "auto"
PAPER_NAMES = {"cpy": "gds", "npy": "numpy", "pt": "torch"}
"""The names of the Fastensor paper (section 4) for the same tools."""

GROUP = "fastensor.backends"
"""The group of entry points."""

BUILT_IN = tuple(
    EntryPoint(name, f"fastensor.backends.{name}:{kind}", GROUP)
    for name, kind in {
        "direct": "DirectBackend",
        "gds": "GdsBackend",
        "numpy": "NumpyBackend",
        "torch": "TorchBackend",
    }.items()
)
"""The backends of this package, the preferred one first. Add a backend here."""
_NEEDED = {"gds": ("kvikio", "Fastensor's extra cuda12 or cuda13 brings it")}
"""Packages without which a backend is not even imported, and where they come from."""
_logger = logging.getLogger("fastensor")
_backends: dict[str, Backend | EntryPoint] = {point.name: point for point in BUILT_IN}
"""The backends by name; those of this package that were not asked for yet by their entry points."""
_others_wanted = True
"""True until the backends of other packages have been imported."""
_lock = lock_of(sys.modules[__name__])
"""Held while backends of other packages are imported."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A backend that was tried or chosen first, and why another one was used."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} is not used: {self.reason}"


@cache
def announce(backend: str, reason: str) -> None:
    """Log a fallback, once per process for the same backend and reason."""
    _logger.warning("%s is not used: %s", backend, reason)


def record_fallback(fallbacks: list[Fallback], what: str, reason: str) -> None:
    """Log a fallback, and add it to the fallbacks of a report."""
    announce(what, reason)
    fallbacks.append(Fallback(what, reason))


def register(backend: Backend) -> None:
    """Make a backend available under its name.

    Raises:
        ValueError: the name is taken.
    """
    if backend.name in (AUTO, *PAPER_NAMES, *_backends):
        raise ValueError(f"a backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend


def get(name: str) -> Backend:
    """The backend with this name, or with this name in the paper.

    Raises:
        UnknownBackendError: no backend has the name.

    >>> get("npy").name
    'numpy'
    """
    wanted = PAPER_NAMES.get(name, name)
    if wanted not in _backends and wanted not in names():
        known = (AUTO, *_backends)
        raise UnknownBackendError(f"no backend is named {name!r}{nearest(name, known)}")
    found = _backends[wanted]
    if isinstance(found, EntryPoint):
        found = _backends[wanted] = _make(found)
    return found


def names() -> tuple[str, ...]:
    """The names of all backends, those of this package first."""
    global _others_wanted
    with _lock:
        if _others_wanted:
            _others_wanted = False  # first, because a module that is imported here may ask for names, too
            _register_others()
        return tuple(_backends)


def names_with_slots() -> tuple[str, ...]:
    """The names of the backends that move parts of files, in the same order."""
    return tuple(name for name in names() if isinstance(get(name), SlotBackend))


def why_unavailable(name: str) -> str:
    """Reason for which a backend cannot work here; empty if it can. An exception that the backend raises is one."""
    package, source = _NEEDED.get(name, ("", ""))
    try:
        if package and find_spec(package) is None:
            return f"{package} is not installed: {source}"
        return str(get(name).why_unavailable())
    except Exception as error:  # noqa: BLE001  # whatever a backend of another package raises
        return f"asked whether it is available, it raised {error!r}"


def available_names() -> tuple[str, ...]:
    """The backends that can work here."""
    return tuple(name for name in names() if not why_unavailable(name))


def can_write(name: str, source: Source) -> bool:
    """True if a backend says that it can write a source. False, with a warning, if the backend raises."""
    try:
        return get(name).can_write(source)
    except Exception as error:  # noqa: BLE001  # whatever a backend of another package raises: others may write the file
        announce(name, f"it raised {error!r} when asked whether it can write a file")
        return False


def _register_others() -> None:
    try:
        points = entry_points_of(GROUP)
    except Exception as error:  # noqa: BLE001  # the metadata of some package is damaged
        _logger.warning("other packages cannot be asked for backends: %r", error)
        return
    for point in points:
        try:
            register(_make(point))
        except Exception as error:  # noqa: BLE001  # the other packages must stay usable
            _logger.warning("the backend %s (%s) is left out: %r", point.name, point.value, error)


def _make(point: EntryPoint) -> Backend:
    with without_collection():
        made = point.load()()
    if not isinstance(made, Backend):
        raise TypeError(f"expected a fastensor.backends.base.Backend, found {type(made).__name__}")
    return made
