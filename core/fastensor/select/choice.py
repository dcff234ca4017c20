"""Explanations of what selectors choose; the fastest backend by each dictionary of the paper (section 4). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from fastensor.files.shown import record_repr
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.select.context import STAGED, Choice, Context, size_of
from fastensor.select.dictionary import Dictionary, Key, Timing

PAPER_ORDER = ("gds", "numpy", "torch", "direct")
"""The order in which backends are tried (section 4.1, step 5). Other backends come after these."""
Mode: TypeAlias = Literal["write", "read", "write_read"]
"""The paper's dictionary that decides by which backend files are written: WDic, RDic or WRDic."""


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


def in_order(candidates: Iterable[str]) -> tuple[str, ...]:
    """The candidates in the order in which they are tried.

    >>> in_order(["mine", "direct", "numpy"])
    ('numpy', 'direct', 'mine')
    """
    ranks = {name: rank for rank, name in enumerate(PAPER_ORDER)}
    return tuple(sorted(candidates, key=lambda name: ranks.get(name, len(ranks))))


def seconds_to_read(dictionary: Dictionary, key: Key) -> Mapping[str, float]:
    """Seconds to read what each backend writes now, from the page cache or not, whichever was measured more often for
    the backend: bytes that were written around the page cache are not in it when they are read.

    Bytes are read to the device that they come from; or to another device if none was ever read to that one, because
    checkpoints are often loaded to the CPU first.
    """
    own = "cpu" if key.context.device == STAGED else key.context.device
    if any(map(dictionary.within, _reads(own))):
        return _usual_seconds(dictionary, own, key.bucket)
    others = {context.device for context in dictionary.contexts() if context.operation == "read"}
    return max([{}, *(_usual_seconds(dictionary, device, key.bucket) for device in sorted(others))], key=len)


def _reads(device: str) -> tuple[Context, ...]:
    return tuple(Context("read", device, warm) for warm in (False, True))


def _usual_seconds(dictionary: Dictionary, device: str, bucket: int) -> dict[str, float]:
    usual: dict[str, Timing] = {}
    for context in _reads(device):
        for name, timing in dictionary.at(Key(context, bucket)).timings.items():
            if name not in usual or timing.count > usual[name].count:
                usual[name] = timing
    return {name: timing.seconds for name, timing in usual.items()}


def winners(dictionary: Dictionary, key: Key) -> tuple[str | None, ...]:
    """The fastest backends of a key: in WDic, or for a read; in RDic; and in WRDic."""
    entry = dictionary.at(key)
    reads = seconds_to_read(dictionary, key) if key.context.operation == "write" else {}
    known = [name for name in entry.timings if name in reads]
    to_read = min(known, key=reads.__getitem__, default=None)
    both = min(known, key=lambda name: entry.timings[name].seconds + reads[name], default=None)
    return entry.best, to_read, both
