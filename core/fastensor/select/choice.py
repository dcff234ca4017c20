"""Decisions of a selector, and their reasons in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from fastensor.files.shown import record_repr
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.select.context import Context
from fastensor.select.dictionary import Timing
from fastensor.select.sizes import size_of

Mode: TypeAlias = Literal["write", "read", "write_read"]
"""The paper's dictionary that decides by which backend files are written: WDic, RDic or WRDic."""


class Choice(NamedTuple):
    """The chosen backend, and the reason for the choice."""

    backend: str
    reason: str
    exploring: bool = False
    """True if the backend is tried to measure it, rather than known to be the fastest."""
    best_seconds: float | None = None
    """Expected seconds of the best backend, for a try. A longer transfer has cost the difference."""
    prior_seconds: float | None = None
    """The time that the prior is expected to take; None if the prior was chosen."""
    risk_seconds: float = 0.0
    """Expected seconds of a try beyond those of the best backend."""
    compared: tuple[str, ...] = ()
    """The backends with which it was compared: the best one, and the prior."""

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SelectorStatistics:
    """Counts of what a :class:`Selector` has done."""

    explored: int = 0
    """Transfers by a backend that was being tried."""
    exploited: int = 0
    """Transfers by the backend that was believed to be the fastest."""
    failed: int = 0
    """Transfers that a backend could not do."""
    seconds: float = 0.0
    """Time of all measured transfers, those of earlier processes in the dictionary included."""
    extra_seconds: float = 0.0
    """The part of ``seconds`` that exploring has cost: how much longer tries took than the best backend would have."""

    def __str__(self) -> str:
        cost, total = human_seconds(self.extra_seconds), human_seconds(self.seconds)
        tries = counted(self.explored, "tries", one="try")
        return (
            f"{counted(self.exploited, 'transfers')} by the backend that is believed to be the fastest, {tries}, "
            f"{self.failed} failed; exploring has cost {cost} of {total} in all transfers"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Timings and choice of a selector for one size. ``str()`` gives a table."""

    nbytes: int
    """The largest size that the explanation holds for."""
    context: Context
    choice: Choice
    timings: Mapping[str, Timing]
    """Timings of the size by backend."""
    failed: Mapping[str, str]
    """Backends that could not move such bytes in this process, and why."""
    seconds: float
    """Time of all measured transfers, of every size and in every context."""
    extra_seconds: float
    """The part of ``seconds`` that exploring has cost."""

    __repr__ = record_repr

    def __str__(self) -> str:
        lines = [f"{self.context}, up to {human_size(self.nbytes)}: {self.choice.backend} ({self.choice.reason})"]
        for name, timing in sorted(self.timings.items(), key=lambda item: item[1].seconds):
            seconds, spread = human_seconds(timing.seconds), human_seconds(timing.spread / 2)
            lines.append(f"  {name}: {seconds} (± {spread}), measured {counted(timing.count, 'times')}")
        lines += [f"  {name}: not possible ({reason})" for name, reason in self.failed.items()]
        cost, total = human_seconds(self.extra_seconds), human_seconds(self.seconds)
        lines.append(f"  exploring has cost {cost} of {total} in all transfers")
        return "\n".join(lines)


@lru_cache(256)
def up_to(bucket: int) -> str:
    """The sizes of a bucket, in words."""
    return f"up to {human_size(size_of(bucket))}"
