"""The settings of an asynchronous writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes

WhenBusy: TypeAlias = Literal["wait", "skip", "latest"]
_SHARE = 2
"""Staging may take one half of the memory that is available when staging begins: the program wants to grow, too."""


@dataclass(frozen=True)
class WriterSettings:
    """The keywords of :class:`~fastensor.AsyncWriter`, which says what they mean.

    Raises:
        ValueError: a value is out of range.
    """

    staging_bytes: int | None = None
    when_busy: WhenBusy = "wait"
    max_bytes_per_second: float | None = None
    exit_seconds: float = 600.0
    preemption_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.staging_bytes is not None and self.staging_bytes < BUFFER_NBYTES:
            raise ValueError(f"staging_bytes is at least {BUFFER_NBYTES} (one buffer), found {self.staging_bytes}")
        if self.when_busy not in get_args(WhenBusy):
            raise ValueError(f"when_busy is one of {get_args(WhenBusy)}, found {self.when_busy!r}")
        if not self.exit_seconds >= 0:  # refuses NaN, too
            raise ValueError(f"exit_seconds is not negative, found {self.exit_seconds}")
        for name in ("max_bytes_per_second", "preemption_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is positive or None, found {value}")

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
