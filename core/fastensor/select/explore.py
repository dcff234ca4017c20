"""Which backend is to be tried next: Algorithms 1 and 2 of the Fastensor paper. Pure.

What the paper leaves out: trying has bounds. A backend that is clearly slower, here or at neighbouring sizes, is tried
less often, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import ENOUGH_TRIES, Dictionary, Entry, Key, Timing
from fastensor.select.sizes import size_of

PAPER_ORDER = ("gds", "numpy", "torch", "direct")
"""In which order backends are tried (section 4.1, step 5); others come after."""
MOST_TRIES = 3
"""How often a backend is tried for one size and context, at most."""
HOPELESS = 2.0
"""A backend that takes so many times as long as the best one at a neighbouring size is not tried here."""
_CONTENDER = 1.5
"""One that is not slower than that, here or elsewhere, may yet turn out to be the best, and is tried as often as is
allowed."""
_NEAREST_FIRST = (-1, 1, -2, 2, -3, 3, -4, 4)
"""So many buckets away timings still say something: a factor of four in size."""


def in_order(candidates: Iterable[str]) -> tuple[str, ...]:
    """In the order in which they are tried.

    >>> in_order(["mine", "direct", "numpy"])
    ('numpy', 'direct', 'mine')
    """
    return _in_order(tuple(candidates))


@lru_cache(256)
def _in_order(candidates: tuple[str, ...]) -> tuple[str, ...]:
    ranks = {name: rank for rank, name in enumerate(PAPER_ORDER)}
    return tuple(sorted(candidates, key=lambda name: ranks.get(name, len(ranks))))


def next_to_try(
    entry: Entry,
    tries: Mapping[str, int],
    slowness: Mapping[str, float],
    candidates: Sequence[str],
    *,
    spare: bool,
    withdrawn: Mapping[str, int],
) -> str | None:
    """The backend to be tried next; None if it is known which is the best.

    Args:
        entry: what was measured at this size.
        tries: how often each was tried.
        slowness: how many times as long as the best each takes, as far as that is known from elsewhere.
        candidates: in the order in which they are tried.
        spare: whether those that are hopeless elsewhere are left out.
        withdrawn: how often each was tried in vain, which does not count, but then others come first.
    """
    timings = entry.timings
    fastest = min([timings[name].seconds for name in candidates if name in timings], default=None) if timings else None

    def is_worth_it(name: str) -> bool:
        tried, timing = tries.get(name, 0), timings.get(name)
        if not tried:
            return not (spare and slowness.get(name, 1.0) > HOPELESS)
        if timing is None or fastest is None:
            return tried < MOST_TRIES
        if tried < ENOUGH_TRIES and not (spare and slowness.get(name, 1.0) > HOPELESS):
            return True
        contends = timing.seconds <= _CONTENDER * fastest or slowness.get(name, HOPELESS) <= _CONTENDER
        return tried < MOST_TRIES and contends

    def turn(name: str) -> tuple[int, float]:
        number = tries.get(name, 0) + withdrawn.get(name, 0)
        return number, slowness.get(name, 1.0) if fastest is None else 0.0  # what is best elsewhere may be best here

    return min(filter(is_worth_it, candidates), key=turn, default=None)


def slowness_nearby(dictionary: Dictionary, key: Key) -> tuple[Mapping[str, float], int]:
    """How many times as long as the best each backend takes at the nearest sizes where several were measured, and the
    nearest of these; nothing if none is near."""
    sizes = dictionary.within(key.context)
    found: dict[str, float] = {}
    nearest = 0
    for distance in _NEAREST_FIRST if sizes else ():
        entry = sizes.get(key.bucket + distance)
        if entry is not None and len(entry.slowness) > 1:
            nearest = nearest or size_of(key.bucket + distance)
            found = {**entry.slowness, **found}
    return found, nearest


def relative_to(names: Sequence[str], slowness: Mapping[str, float]) -> Mapping[str, float]:
    """The same, relative to the best of some backends, if they are not the best of all."""
    least = min([slowness[name] for name in names if name in slowness], default=1.0)
    return slowness if least == 1.0 else {name: times / least for name, times in slowness.items()}


def seconds_to_read(dictionary: Dictionary, key: Key) -> Mapping[str, float]:
    """How long each backend takes to read what is written now: in the page cache or not, whichever is usual for it.

    That is not the same for all of them: what one has written around the page cache is not in it when it is read.
    Bytes are read to the device that they come from, or, if nothing ever is, to another one: checkpoints are often
    loaded to the CPU first.
    """
    own = "cpu" if key.context.device == STAGED else key.context.device
    if any(map(dictionary.within, _reads(own))):
        return _usual_seconds(dictionary, own, key.bucket)
    others = {context.device for context in dictionary.contexts() if context.operation == "read"}
    return max([{}, *(_usual_seconds(dictionary, device, key.bucket) for device in sorted(others))], key=len)


@lru_cache(64)
def _reads(device: str) -> tuple[Context, ...]:
    return tuple(Context("read", device, warm) for warm in (False, True))


def _usual_seconds(dictionary: Dictionary, device: str, bucket: int) -> dict[str, float]:
    usual: dict[str, Timing] = {}
    for context in _reads(device):
        for name, timing in dictionary.at(Key(context, bucket)).timings.items():
            if name not in usual or timing.count > usual[name].count:
                usual[name] = timing
    return {name: timing.seconds for name, timing in usual.items()}


class Winners(NamedTuple):
    """The fastest backends for one key: in WDic, or of a read; in RDic; and in WRDic."""

    alone: str | None
    to_read: str | None
    to_write_and_read: str | None


def winners(dictionary: Dictionary, key: Key) -> Winners:
    """Those of what is known."""
    entry = dictionary.at(key)
    reads = seconds_to_read(dictionary, key) if key.context.operation == "write" else {}
    known = [name for name in entry.timings if name in reads]
    to_read = min(known, key=reads.__getitem__, default=None)
    both = min(known, key=lambda name: entry.timings[name].seconds + reads[name], default=None)
    return Winners(entry.best, to_read, both)
