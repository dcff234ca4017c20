"""Doing without a way that was wanted, and saying why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from fastensor.backends import registry
from fastensor.stitch.source import Source

_logger = logging.getLogger("fastensor")


@dataclass(frozen=True, slots=True)
class Fallback:
    """A way that was tried or chosen first, and why another one was taken."""

    backend: str
    reason: str


@cache
def announce(backend: str, reason: str) -> None:
    """Log a fallback, once per process for the same backend and reason."""
    _logger.warning("%s is not used: %s", backend, reason)


def record_fallback(fallbacks: list[Fallback], what: str, reason: str) -> None:
    """Log a fallback and add it to those that the report will show."""
    announce(what, reason)
    fallbacks.append(Fallback(what, reason))


def why_unavailable(name: str) -> str:
    """Why a backend cannot work here; empty if it can. One of another package may raise."""
    try:
        found = registry.get(name).availability()
        return "" if found.available else str(found.reason) or "it does not say why"
    except Exception as error:  # noqa: BLE001  # it is a reason
        return f"asked whether it is available, it raised {error!r}"


def available_names() -> tuple[str, ...]:
    """The backends that can work here."""
    return tuple(name for name in registry.names() if not why_unavailable(name))


def can_write(name: str, source: Source) -> bool:
    """Whether a backend says that it can write a file. One of another package may raise, which is logged."""
    try:
        return registry.get(name).can_write(source)
    except Exception as error:  # noqa: BLE001  # it is no reason to lose what is to be written
        announce(name, f"it raised {error!r} when asked whether it can write a file")
        return False
