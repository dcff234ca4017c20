"""What a selector decides, and how it says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

from fastensor.select.context import Context
from fastensor.select.dictionary import Timing
from fastensor.select.sizes import size_of

Mode: TypeAlias = Literal["write", "read", "write_read"]
"""Which of the paper's dictionaries decides what to write with: WDic, RDic or WRDic."""

_MODES = get_args(Mode)


def check_mode(mode: Mode) -> Mode:
    """The same mode.

    Raises:
        ValueError: it is none.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is one of {_MODES}, found {mode!r}")
    return mode


class Choice(NamedTuple):
    """A decision, and why."""

    backend: str
    reason: str
    exploring: bool = False
    """Whether it is tried to find out, rather than known to be the fastest."""
    best_seconds: float | None = None
    """What a try may take without having cost anything: as long as the best backend is expected to take."""
    prior_seconds: float | None = None
    """What it may take without having lost to the backend that the size recommends; None if that was chosen."""
    risk_seconds: float = 0.0
    """What a try is expected to take longer than the best backend."""


@dataclass(frozen=True, slots=True)
class SelectorStatistics:
    """What a :class:`Selector` has done."""

    explored: int = 0
    """Transfers by a backend that was tried."""
    exploited: int = 0
    """Transfers by one that was known to be the fastest."""
    failed: int = 0
    """How often a backend could not do it."""
    seconds: float = 0.0
    """What all transfers took that were measured, those included that the dictionary knew of already."""
    extra_seconds: float = 0.0
    """How much of that exploring has cost: how much longer what was tried has taken than the best would have."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a selector knows about one size, and what it makes of it. As text, a table."""

    nbytes: int
    """The largest size that it holds for."""
    context: Context
    choice: Choice
    timings: Mapping[str, Timing]
    """By backend, for that size."""
    failed: Mapping[str, str]
    """Backends that could not do it in this process, and why."""
    seconds: float
    """What all transfers took that were measured, of every size and in every context."""
    extra_seconds: float
    """How much of that exploring has cost."""

    def __str__(self) -> str:
        lines = [f"{self.context}, up to {human(self.nbytes)}: {self.choice.backend} ({self.choice.reason})"]
        for name, timing in sorted(self.timings.items(), key=lambda item: item[1].seconds):
            text = f"{shown(timing.seconds)} (± {shown(timing.spread / 2)}), measured {timing.count} times"
            lines.append(f"  {name}: {text}")
        lines += [f"  {name}: not possible ({reason})" for name, reason in self.failed.items()]
        lines.append(f"  exploring has cost {shown(self.extra_seconds)} of {shown(self.seconds)} in all transfers")
        return "\n".join(lines)


@lru_cache(256)
def up_to(bucket: int) -> str:
    """The sizes of a bucket, in words."""
    return f"up to {human(size_of(bucket))}"


@lru_cache(256)
def human(nbytes: int) -> str:
    """A size, in words.

    >>> human(4096), human(1 << 40), human(1 << 30), human(1065353216)
    ('4 KiB', '1024 GiB', '1 GiB', '1016 MiB')
    """
    shift, unit = (30, "GiB") if nbytes >= 1 << 30 else (20, "MiB") if nbytes >= 1 << 20 else (10, "KiB")
    amount = nbytes / (1 << shift)
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"


def shown(seconds: float) -> str:
    """A time, in words."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
