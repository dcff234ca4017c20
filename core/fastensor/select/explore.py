"""Which backend is to be tried next, and which is the best: Algorithms 1 and 2 of the Fastensor paper. Pure.

What the paper leaves out: trying has bounds. A backend that is clearly slower, here or at neighbouring sizes, is not
tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import Dictionary, Entry, Key, Timing
from fastensor.select.sizes import size_of

PAPER_ORDER = ("gds", "numpy", "torch", "direct")
"""In which order backends are tried (section 4.1, step 5); others come after."""
MOST_TRIES = 3
"""How often a backend is tried for one size and context, at most."""
HOPELESS = 2.0
"""A backend that takes so many times as long as the best one is not tried again."""
_CONTENDER = 1.5
"""One that takes less may yet turn out to be the best one, and is tried as often as is allowed."""
_NEIGHBOURS = 4
"""So many buckets away timings still say something: a factor of four in size."""


def in_order(candidates: Iterable[str]) -> tuple[str, ...]:
    """In the order in which they are tried.

    >>> in_order(["mine", "direct", "numpy"])
    ('numpy', 'direct', 'mine')
    """
    ranks = {name: rank for rank, name in enumerate(PAPER_ORDER)}
    return tuple(sorted(candidates, key=lambda name: ranks.get(name, len(ranks))))


def next_to_try(
    entry: Entry, tries: Mapping[str, int], slowness: Mapping[str, float], candidates: Sequence[str]
) -> str | None:
    """The backend to be tried next; None if it is known which is the best.

    Args:
        entry: what was measured at this size.
        tries: how often each was tried.
        slowness: how many times as long as the best each takes at a neighbouring size.
        candidates: in the order in which they are tried.
    """
    possible = [name for name in candidates if name not in entry.excluded]
    seconds = {name: timing.seconds for name in possible if (timing := entry.timings.get(name)) is not None}
    if not seconds and slowness:  # what is best at the neighbour's is likely to be best here
        possible.sort(key=lambda name: slowness.get(name, 1.0))
    fastest = min(seconds.values(), default=0.0)

    def is_worth_it(name: str) -> bool:
        times = seconds[name] / fastest if name in seconds and fastest else slowness.get(name, 1.0)
        tried = tries.get(name, 0)
        return tried < MOST_TRIES and times <= (HOPELESS if tried < 2 else _CONTENDER)

    return min(filter(is_worth_it, possible), key=lambda name: tries.get(name, 0), default=None)


def slowness_nearby(dictionary: Dictionary, key: Key) -> tuple[dict[str, float], int]:
    """How many times as long as the best each backend takes at the nearest size where several were measured, and that
    size; nothing if there is none near."""
    for distance in range(1, _NEIGHBOURS + 1):
        for bucket in (key.bucket - distance, key.bucket + distance):
            timings = dictionary.at(Key(key.context, bucket)).timings
            if len(timings) > 1:
                fastest = min(timing.seconds for timing in timings.values())
                return {name: timing.seconds / fastest for name, timing in timings.items() if fastest}, size_of(bucket)
    return {}, 0


def seconds_to_read(dictionary: Dictionary, key: Key) -> dict[str, float]:
    """How long each backend takes to read what is written now: in the page cache or not, whichever is usual for it.

    That is not the same for all of them: what one has written around the page cache is not in it when it is read.
    """
    device = "cpu" if key.context.device == STAGED else key.context.device
    usual: dict[str, Timing] = {}
    for warm in (False, True):
        entry = dictionary.at(Key(Context("read", device, warm), key.bucket))
        for name, timing in entry.timings.items():
            if name not in entry.excluded and (name not in usual or timing.count > usual[name].count):
                usual[name] = timing
    return {name: timing.seconds for name, timing in usual.items()}
