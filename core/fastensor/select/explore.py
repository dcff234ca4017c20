"""Which backend is to be tried next: Algorithms 1 and 2 of the Fastensor paper. Pure.

What the paper leaves out: trying has bounds. A backend that is clearly slower, here or at neighbouring sizes, is tried
less often, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import Dictionary, Entry, Key, Timing
from fastensor.select.sizes import size_of

PAPER_ORDER = ("gds", "numpy", "torch", "direct")
"""In which order backends are tried (section 4.1, step 5); others come after."""
MOST_TRIES = 3
"""How often a backend is tried for one size and context, at most."""
HOPELESS = 2.0
"""A backend that takes so many times as long as the best one at a neighbouring size is not tried here."""
_ENOUGH_TRIES = 2
"""The first use of a backend may take longer than later ones (section 3.4), so one timing rules nothing out."""
_CONTENDER = 1.5
"""One whose best timing is below that may yet turn out to be the best, and is tried as often as is allowed."""
_NEIGHBOURS = 4
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

    One timing is enough for a backend that is as slow as was known.

    Args:
        entry: what was measured at this size.
        tries: how often each was tried.
        slowness: how many times as long as the best each takes, as far as that is known from elsewhere.
        candidates: in the order in which they are tried.
        spare: whether those that are hopeless elsewhere are left out.
        withdrawn: how often each was tried in vain, which does not count, but then others come first.
    """
    fastest = min((entry.timings[name].seconds for name in candidates if name in entry.timings), default=None)

    def is_worth_it(name: str) -> bool:
        tried, timing = tries.get(name, 0), entry.timings.get(name)
        if not tried:
            return not (spare and slowness.get(name, 1.0) > HOPELESS)
        if timing is None or fastest is None:
            return tried < MOST_TRIES
        if tried < _ENOUGH_TRIES and slowness.get(name, 1.0) <= HOPELESS:
            return True
        return tried < MOST_TRIES and min(timing.samples) <= _CONTENDER * fastest

    worth = [name for name in candidates if is_worth_it(name)]
    if fastest is None:  # what is best elsewhere is likely to be best here
        worth.sort(key=lambda name: slowness.get(name, 1.0))
    return min(worth, key=lambda name: tries.get(name, 0) + withdrawn.get(name, 0), default=None)


def slowness_of(entry: Entry) -> dict[str, float]:
    """How many times as long as the best each backend takes, of those that were measured often enough to tell."""
    seconds = {name: timing.seconds for name, timing in entry.timings.items() if timing.count >= _ENOUGH_TRIES}
    fastest = min(seconds.values(), default=0.0)
    return {name: taken / fastest for name, taken in seconds.items()} if fastest else {}


def slowness_nearby(dictionary: Dictionary, key: Key) -> tuple[dict[str, float], int]:
    """:func:`slowness_of` the nearest size where several were measured, and that size; nothing if none is near."""
    for distance in range(1, _NEIGHBOURS + 1):
        for bucket in (key.bucket - distance, key.bucket + distance):
            entry = dictionary.at(Key(key.context, bucket))
            if len(entry.timings) > 1 and len(slowness := slowness_of(entry)) > 1:
                return slowness, size_of(bucket)
    return {}, 0


def seconds_to_read(dictionary: Dictionary, key: Key) -> dict[str, float]:
    """How long each backend takes to read what is written now: in the page cache or not, whichever is usual for it.

    That is not the same for all of them: what one has written around the page cache is not in it when it is read.
    """
    device = "cpu" if key.context.device == STAGED else key.context.device
    usual: dict[str, Timing] = {}
    for warm in (False, True):
        for name, timing in dictionary.at(Key(Context("read", device, warm), key.bucket)).timings.items():
            if name not in usual or timing.count > usual[name].count:
                usual[name] = timing
    return {name: timing.seconds for name, timing in usual.items()}
