"""The settings of an asynchronous writer."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias, get_args

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.files.arguments import as_nbytes, check_seconds, check_word
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes

WhenBusy: TypeAlias = Literal["wait", "skip", "latest"]
_SHARE = 2
"""Staging may take one half of the memory that is available when staging begins: the program wants to grow, too."""


@dataclass(frozen=True)
class WriterSettings:
    """The keywords of :class:`~fastensor.AsyncWriter`, which says what they mean.

    Sizes may be texts (``"2GiB"``), which become numbers.

    Raises:
        TypeError, ValueError: a value is of the wrong kind, or out of range.
    """

    staging_bytes: int | None = None
    when_busy: WhenBusy = "wait"
    max_bytes_per_second: float | None = None
    exit_seconds: float = 600.0
    preemption_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.staging_bytes is not None:
            staging = as_nbytes(self.staging_bytes, "staging_bytes", at_least=BUFFER_NBYTES)
            object.__setattr__(self, "staging_bytes", staging)
        check_word(self.when_busy, "when_busy", get_args(WhenBusy))
        check_seconds(self.exit_seconds, "exit_seconds", zero=True)
        check_seconds(self.preemption_seconds, "preemption_seconds", optional=True)
        rate = self.max_bytes_per_second
        if isinstance(rate, str):
            rate = float(as_nbytes(rate, "max_bytes_per_second"))
            object.__setattr__(self, "max_bytes_per_second", rate)
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, Real)):
            raise TypeError(f"max_bytes_per_second is a number, or a text such as '500MB', found {rate!r}")
        if rate is not None and not rate > 0:  # refuses NaN, too
            raise ValueError(f"max_bytes_per_second is positive or None, found {rate}")

    def staging_budget(self) -> int:
        """The most bytes that staging may take: ``staging_bytes``, or a share of the memory that is available now."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        return staging_limit(available_memory(), local_processes())


def staging_limit(available_nbytes: int, processes: int) -> int:
    """The most bytes that this process may take for staging: at least a buffer.

    >>> staging_limit(16 << 30, 4) >> 20
    2048
    """
    return max(available_nbytes // (_SHARE * processes), BUFFER_NBYTES)
