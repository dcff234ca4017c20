"""Trying one backend after the other, and saying why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.checkpoint.report import Fallback, announce
from fastensor.errors import BackendUnavailableError

T = TypeVar("T")


def why_unavailable(name: str) -> str:
    """Why a backend cannot work here; empty if it can. One of another package may raise."""
    try:
        found = registry.get(name).availability()
        return "" if found.available else str(found.reason) or "it does not say why"
    except Exception as error:  # noqa: BLE001  # it is a reason
        return f"asked whether it is available, it raised {error!r}"


def give_up(what: str, reason: str, fallbacks: list[Fallback]) -> None:
    """Log a fallback and add it to those that the report will show."""
    announce(what, reason)
    fallbacks.append(Fallback(what, reason))


def use_first(wanted: str, attempt: Callable[[Backend], T], fallbacks: list[Fallback]) -> tuple[str, T]:
    """The name and the outcome of the first backend that can: the wanted one, then those that always should.

    Raises:
        BackendUnavailableError: none could.
    """
    for name in dict.fromkeys((wanted, "numpy", "torch")):
        try:
            if reason := why_unavailable(name):
                raise BackendUnavailableError(reason)
            return name, attempt(registry.get(name))
        except BackendUnavailableError as error:
            give_up(name, str(error), fallbacks)
    raise BackendUnavailableError(f"no backend could do it: {fallbacks}")
