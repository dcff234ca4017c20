"""One transfer: its backend is chosen, others follow where that cannot, and the selector hears how long it took."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable
from typing import Self, TypeAlias, TypeVar

import torch

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.backends.fallback import why_unavailable
from fastensor.errors import BackendUnavailableError, FastensorError
from fastensor.select.choice import Choice, Mode
from fastensor.select.context import Context
from fastensor.select.current import current_selector
from fastensor.select.selector import Selector

T = TypeVar("T")
LAST_RESORTS = ("numpy", "torch")
"""What is used where a named backend cannot."""
WHOLE_FILES = ("torch",)
"""What writes and reads a file by ``torch.save`` and ``torch.load`` does it more slowly than by our own plan of it."""
_REFUSALS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
"""How the operating system says that something is not to be had here."""
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


class Transfer:
    """One transfer. Used by one thread at a time.

    Args:
        candidates: names of the backends that might do it; the first one is preferred if nobody chooses.
        nbytes: how much is moved.
        context: in which circumstances.
        selector: what chooses, and learns; None if a backend was asked for by its name.
        choose: whether the selector chooses; if not, it only learns.
        mode: what is written is for that; None means the selector's own.
        default: which of the candidates if nothing is known and nothing may be tried.
        learn: whether the selector is to hear how long it takes; if not, it tries nothing.
        fallbacks: those of the candidates that are used only where no other one can.

    Raises:
        BackendUnavailableError: there are no candidates.
    """

    def __init__(
        self,
        candidates: Iterable[str],
        nbytes: int,
        context: Context,
        selector: Selector | None = None,
        *,
        choose: bool = True,
        mode: Mode | None = None,
        default: str | None = None,
        learn: bool = True,
        fallbacks: Collection[str] = (),
    ) -> None:
        self._fallbacks = fallbacks
        self._left = list(dict.fromkeys(candidates))
        self._failed: dict[str, str] = {}
        self._unexpected: Exception | None = None
        """The first one that is no refusal."""
        self._nbytes = nbytes
        self._context = context
        self._selector = selector
        self._chooses = choose
        self._mode = mode
        self._default = default
        self._learn = learn
        self.choice = self._latest = self._choose()
        """The first one."""
        self.used = self.choice.backend
        self.started = 0.0
        """When the backend that does it was asked: ``time.perf_counter()``."""

    @classmethod
    def of_file(
        cls,
        choice: BackendChoice,
        path: str,
        nbytes: int,
        context: Context,
        candidates: Iterable[str],
        default: str,
        *,
        learn: bool,
    ) -> Self:
        """One of a file's bytes, by whatever the user wants to decide about it.

        Args:
            choice: what that is.
            path: of the file, or of another one on its filesystem.
            candidates: the backends that could do it if they are available.
            default: which of them if nothing is known and nothing may be tried.
            learn: whether its time will say something.
        """
        if isinstance(choice, str) and choice != registry.AUTO:
            return cls((registry.get(choice).name, *LAST_RESORTS), nbytes, context)
        selector = choice if isinstance(choice, Selector) else current_selector(path)
        available = [name for name in candidates if not why_unavailable(name)]
        return cls(available, nbytes, context, selector, default=default, learn=learn, fallbacks=WHOLE_FILES)

    @property
    def reason(self) -> str:
        """Why it was done by that backend."""
        return self.choice.reason if self.used == self.choice.backend else f"{self.choice.backend} could not do it"

    def run(self, attempt: Callable[[Backend], T], give_up: Callable[[str, str], None]) -> T:
        """Have it done, or begun, by the chosen backend, or else by the next one that can.

        A backend that raises something that nobody expects is a backend that cannot do it; what the disk or the state
        is to blame for is no reason to try another one.

        Args:
            attempt: what is to be done.
            give_up: told which backend could not do it, and why.

        Raises:
            BackendUnavailableError: none could.
            Exception: whatever else ``attempt`` raises.
        """
        while True:
            self.started = time.perf_counter()
            try:
                if reason := why_unavailable(self.used):
                    raise BackendUnavailableError(reason)
                return attempt(registry.get(self.used))
            except BaseException as error:
                if not isinstance(error, Exception) or not is_to_blame(error):
                    raise
                reason = str(error)
                if not isinstance(error, BackendUnavailableError):
                    self._unexpected = self._unexpected or error
                    reason = f"it raised {error!r}"
                self._failed[self.used] = reason
                give_up(self.used, reason)
                self.failed(reason)
                self._left.remove(self.used)
            self._latest = self._choose()
            self.used = self._latest.backend

    def done(self, seconds: float) -> None:
        """It has taken so long."""
        if self._selector is not None and self._learn:
            self._selector.record(self._nbytes, self._context, self.used, seconds, self._latest)

    def failed(self, reason: str) -> None:
        """The backend cannot do it, or has begun and cannot go on."""
        if self._selector is not None:
            seconds = time.perf_counter() - self.started if self.started else 0.0
            self._selector.failed(self._nbytes, self._context, self.used, reason, seconds, self._latest)

    def _choose(self) -> Choice:
        if not self._left:
            unexpected, self._unexpected = self._unexpected, None
            if unexpected is not None:
                try:
                    raise unexpected
                finally:
                    del unexpected  # it holds this frame
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._failed.items())
            raise BackendUnavailableError(f"no backend can do it ({reasons or 'none is available'})")
        if self._selector is None or not self._chooses:
            return Choice(self._left[0], "asked for")
        default = self._default if self._default in self._left else None
        contenders = [name for name in self._left if name not in self._fallbacks] or self._left
        return self._selector.choose(self._nbytes, self._context, contenders, self._mode, default, learn=self._learn)


def is_to_blame(error: Exception) -> bool:
    """Whether a backend that raises this is broken, or does not suit the file."""
    if isinstance(error, OSError):
        return error.errno in _REFUSALS
    return isinstance(error, BackendUnavailableError) or not isinstance(
        error, FastensorError | MemoryError | torch.OutOfMemoryError
    )
