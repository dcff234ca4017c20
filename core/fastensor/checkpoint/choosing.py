"""Having the backend of a transfer chosen, and telling the selector how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from fastensor.backends import registry
from fastensor.backends.base import Backend, Reader
from fastensor.checkpoint.fallback import use_first, why_unavailable
from fastensor.checkpoint.report import Fallback
from fastensor.errors import BackendUnavailableError
from fastensor.select.context import Context
from fastensor.select.current import current_selector
from fastensor.select.selector import Choice, Selector

T = TypeVar("T")
NO_LOCAL_FILE = "it is no file of this machine"
BackendChoice: TypeAlias = str | Selector
"""The name of a backend; ``"auto"`` for the one that measurements recommend; or what decides instead."""


def check_choice(choice: BackendChoice) -> None:
    """
    Raises:
        UnknownBackendError: no backend has that name.
        TypeError: it is neither a name nor a selector.
    """
    if isinstance(choice, str):
        if choice != registry.AUTO:
            registry.get(choice)
    elif not isinstance(choice, Selector):
        raise TypeError(f"backend is a name or a fastensor.Selector, found {type(choice).__name__}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a file is to be read."""

    backend: BackendChoice = registry.AUTO
    device: str = "cpu"
    """Kind of the device that the bytes go to."""
    learn: bool = False
    """Whether all of it is read, once and at once, so that its time says something."""


class OpenedReader(NamedTuple):
    """A way of reading that was found for a file."""

    backend: str
    reason: str
    """Why that one."""
    reader: Reader


class Transfer:
    """One transfer. Used by one thread at a time.

    Args:
        choice: who chooses.
        path: of the file, or of another one on its filesystem.
        nbytes: how much is moved.
        context: in which circumstances.
        candidates: the backends that can.
        default: which of them if nothing is known and nothing may be tried.
    """

    def __init__(
        self,
        choice: BackendChoice,
        path: str,
        nbytes: int,
        context: Context,
        candidates: Iterable[str],
        default: str,
    ) -> None:
        self._nbytes = nbytes
        self._context = context
        self._selector: Selector | None = None
        if isinstance(choice, str) and choice != registry.AUTO:
            self.choice = Choice(registry.get(choice).name, "asked for")
        else:
            self._selector = choice if isinstance(choice, Selector) else current_selector(path)
            names = [name for name in candidates if not why_unavailable(name)]
            self.choice = self._selector.choose(nbytes, context, names, default=default)
        self.used = self.choice.backend
        self.started = 0.0
        """When the backend that does it was asked: ``time.perf_counter()``."""

    @property
    def reason(self) -> str:
        """Why it was done by that backend."""
        return self.choice.reason if self.used == self.choice.backend else f"{self.choice.backend} could not do it"

    def run(self, attempt: Callable[[Backend], T], fallbacks: list[Fallback]) -> T:
        """Have it done, or begun, by the chosen backend, or else by the next one that can.

        Raises:
            BackendUnavailableError: none could.
        """

        def timed(backend: Backend) -> T:
            self.started = time.perf_counter()
            try:
                return attempt(backend)
            except BackendUnavailableError as error:
                if self._selector is not None:
                    self._selector.failed(self._nbytes, self._context, backend.name, str(error))
                raise

        self.used, result = use_first(self.choice.backend, timed, fallbacks)
        return result

    def done(self, seconds: float | None = None) -> None:
        """It has taken so long; None means since the backend that did it was asked."""
        if self._selector is not None:
            taken = time.perf_counter() - self.started if seconds is None else seconds
            self._selector.record(self._nbytes, self._context, self.used, taken)
