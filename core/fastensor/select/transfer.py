"""One transfer: a backend is chosen for it, another one follows if that one fails, and the selector learns the time."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import torch

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.backends.registry import why_unavailable
from fastensor.errors import BackendUnavailableError, FastensorError
from fastensor.files.importing import imported
from fastensor.select.context import Choice, Context, by_rule, is_small

if TYPE_CHECKING:
    from fastensor.select.choice import Mode
    from fastensor.select.selector import Selector

T = TypeVar("T")
BY_SIZE = "by size"
"""Reason for a choice by the rule alone."""
LAST_RESORTS = ("numpy", "torch")
"""Backends that follow if a named backend fails."""
WHOLE_FILES = ("torch",)
"""Backends that use ``torch.save`` and ``torch.load``, which are slower than our own plan of the file."""
_REFUSALS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
"""Error numbers by which the operating system refuses an operation that it, or the filesystem, does not have."""
EXPLORE_VARIABLE = "FASTENSOR_EXPLORE"
"""Environment variable. With a no, no backend is tried and no timing is learned, so choices are always the same."""
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
for_all: Selector | None = None
"""What :func:`fastensor.use_selector` has set."""
if TYPE_CHECKING:
    BackendChoice: TypeAlias = str | Selector
else:
    BackendChoice = Any  # for get_type_hints; the class takes long to import
"""The name of a backend; ``"auto"`` for the one that measurements recommend; or the selector that decides."""


def check_choice(choice: BackendChoice) -> None:
    """Check that a choice names a backend, or is a selector.

    Raises:
        UnknownBackendError: no backend has that name.
        TypeError: the choice is neither a name nor a selector.
        ValueError: as :func:`explores`, which the choice depends on.
    """
    if choice == registry.AUTO:
        explores()
    elif isinstance(choice, str):
        registry.get(choice)
    else:
        from fastensor.select.selector import Selector  # few programs give one

        if not isinstance(choice, Selector):
            raise TypeError(f"backend is a name or a fastensor.Selector, found {choice!r}")


def rule_decides(choice: BackendChoice, nbytes: int, context: Context) -> bool:
    """True if a transfer is made as the rule says, and nothing is looked up or learned for it."""
    return choice == registry.AUTO and for_all is None and is_small(context, nbytes)


def explores() -> bool:
    """True if backends are tried: what ``FASTENSOR_EXPLORE`` says, by default yes.

    Raises:
        ValueError: it says neither yes nor no.
    """
    given = os.environ.get(EXPLORE_VARIABLE, "")
    if given.lower() not in ("", *_YES, *_NO):
        raise ValueError(
            f"the environment variable {EXPLORE_VARIABLE} is {given!r}; expected one of {', '.join(_YES)} to try "
            f"backends, which is the default, or one of {', '.join(_NO)} not to"
        )
    return given.lower() not in _NO


class Transfer:
    """One transfer. Use it in one thread at a time.

    Args:
        candidates: names of the backends that may move the bytes; the first one is preferred if no selector chooses.
        nbytes: the bytes to move.
        context: the circumstances.
        selector: the selector that chooses, and learns; None if a backend was asked for by its name.
        choose: whether the selector chooses; if not, it only learns.
        mode: what a file is written for; None means the selector's own mode.
        default: the candidate to use if nothing is known and nothing may be tried.
        learn: whether the selector learns the time; if not, it tries nothing.
        fallbacks: the candidates that are used only if no other one works.
        can: for candidates that nobody has named, whether one can be used. Others are left out without a word.
        reason: for the first candidate, if no selector chooses.

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
        can: Callable[[str], bool] | None = None,
        reason: str = "asked for",
    ) -> None:
        self._fallbacks = fallbacks
        self._can = can
        self._reason = reason
        self._left = list(dict.fromkeys(candidates))
        self._failed: dict[str, str] = {}
        self._unexpected: Exception | None = None
        """The first error that is no refusal."""
        self._nbytes = nbytes
        self._context = context
        self._selector = selector
        self._chooses = choose
        self._mode = mode
        self._default = default
        self._learn = learn
        self.choice = self._latest = self._choose()
        """The first choice."""
        self.used = self.choice.backend
        self.started = 0.0
        """Start of the backend that moves the bytes: ``time.perf_counter()``."""

    @classmethod
    def of_file(
        cls,
        choice: BackendChoice,
        path: str,
        nbytes: int,
        context: Context,
        candidates: Callable[[], Iterable[str]],
        *,
        learn: bool,
        can: Callable[[str], bool] = lambda name: True,
    ) -> Self:
        """The transfer of a file's bytes, by the backend or selector that the user has asked for.

        Args:
            choice: what the user has asked for.
            path: the file, or another one on its filesystem.
            nbytes, context: as for the class.
            candidates: gives the backends that may move the bytes.
            learn: whether the time says something about the backend.
            can: whether a backend that is available can move such bytes.
        """
        if isinstance(choice, str) and choice != registry.AUTO:
            return cls((registry.get(choice).name, *LAST_RESORTS), nbytes, context)
        if rule_decides(choice, nbytes, context):
            return cls((by_rule(context, nbytes), *LAST_RESORTS), nbytes, context, reason=BY_SIZE)
        imported("fastensor.select.current")  # without the garbage collector; small files need nothing of it
        from fastensor.select.current import current_selector

        selector = current_selector(path) if isinstance(choice, str) else choice
        return cls(
            candidates(), nbytes, context, selector, default=by_rule(context, nbytes), learn=learn,
            fallbacks=WHOLE_FILES, can=lambda name: not why_unavailable(name) and can(name),
        )  # fmt: skip

    @property
    def reason(self) -> str:
        """Reason for which the used backend has moved the bytes."""
        return self.choice.reason if self.used == self.choice.backend else f"{self.choice.backend} could not do it"

    def run(self, attempt: Callable[[Backend], T], record_fallback: Callable[[str, str], None]) -> T:
        """Call ``attempt`` with the chosen backend, or else with the next one that works.

        If a backend refuses, or raises an unexpected exception, the next backend is tried. An error of the disk or of
        the state is raised: another backend would meet it, too.

        Args:
            attempt: moves the bytes, or begins to.
            record_fallback: called with the name of a backend that has failed, and the reason.

        Returns:
            What ``attempt`` returns.

        Raises:
            BackendUnavailableError: no backend works.
            Exception: any other exception of ``attempt``.
        """
        while True:
            self.started = time.perf_counter()
            try:
                if self._can is None and (reason := why_unavailable(self.used)):
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
                record_fallback(self.used, reason)
                self.failed(reason)
                self._left.remove(self.used)
            self._latest = self._choose()
            self.used = self._latest.backend

    def done(self, seconds: float) -> None:
        """Have the selector learn the time of the transfer."""
        if self._selector is not None and self._learn:
            self._selector.record(self._nbytes, self._context, self.used, seconds, self._latest)

    def failed(self, reason: str) -> None:
        """Have the selector learn that the used backend has failed, at the beginning or later."""
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
            return Choice(self._left[0], self._reason)
        default = self._default if self._default in self._left else None
        contenders = [name for name in self._left if name not in self._fallbacks] or self._left
        can = self._can or (lambda name: True)
        try:
            return self._selector.choose(
                self._nbytes, self._context, contenders, self._mode, default, learn=self._learn, can=can
            )
        except BackendUnavailableError:  # none of them can
            self._left = [name for name in self._left if name not in contenders]
            return self._choose()


def is_to_blame(error: Exception) -> bool:
    """True if an error means that the backend is broken, or does not suit the file."""
    if isinstance(error, OSError):
        return error.errno in _REFUSALS
    return isinstance(error, BackendUnavailableError) or not isinstance(
        error, FastensorError | MemoryError | torch.OutOfMemoryError
    )
