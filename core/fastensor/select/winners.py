"""The fastest backend by each of the paper's three dictionaries (section 4). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import Dictionary, Key, Timing

PAPER_ORDER = ("gds", "numpy", "torch", "direct")
"""The order in which backends are tried (section 4.1, step 5). Other backends come after these."""


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


class Winners(NamedTuple):
    """The fastest backends of one key: in WDic, or for a read; in RDic; and in WRDic."""

    alone: str | None
    to_read: str | None
    to_write_and_read: str | None


def winners(dictionary: Dictionary, key: Key) -> Winners:
    """The fastest backends of a key."""
    entry = dictionary.at(key)
    reads = seconds_to_read(dictionary, key) if key.context.operation == "write" else {}
    known = [name for name in entry.timings if name in reads]
    to_read = min(known, key=reads.__getitem__, default=None)
    both = min(known, key=lambda name: entry.timings[name].seconds + reads[name], default=None)
    return Winners(entry.best, to_read, both)
