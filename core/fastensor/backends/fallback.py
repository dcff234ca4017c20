"""Fallbacks: which backends cannot be used, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastensor.backends import registry

if TYPE_CHECKING:
    from fastensor.stitch.source import Source

_NEEDED = {"gds": ("kvikio", "Fastensor's extra cuda12 or cuda13 brings it")}
"""Packages without which a backend is not even imported, and where they come from."""
_logger = logging.getLogger("fastensor")


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


def why_unavailable(name: str) -> str:
    """Reason for which a backend cannot work here; empty if it can. An exception that the backend raises is one."""
    package, source = _NEEDED.get(name, ("", ""))
    try:
        if package and find_spec(package) is None:
            return f"{package} is not installed: {source}"
        return str(registry.get(name).why_unavailable())
    except Exception as error:  # noqa: BLE001  # whatever a backend of another package raises
        return f"asked whether it is available, it raised {error!r}"


def available_names() -> tuple[str, ...]:
    """The backends that can work here."""
    return tuple(name for name in registry.names() if not why_unavailable(name))


def can_write(name: str, source: Source) -> bool:
    """True if a backend says that it can write a source. False, with a warning, if the backend raises."""
    try:
        return registry.get(name).can_write(source)
    except Exception as error:  # noqa: BLE001  # whatever a backend of another package raises: others may write the file
        announce(name, f"it raised {error!r} when asked whether it can write a file")
        return False
