"""Cutting out of a pickle what is not to be loaded: an empty tuple takes the place of each such value. Pure."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fastensor.stitch.pickle_records import NOWHERE, PickledTensor, Range, UnknownGlobal, UnknownObject, all_in
from fastensor.stitch.torch_pickle import Program


def cut(program: Program, unwanted: Iterable[Any]) -> bytes | None:
    """The bytes of a pickle that makes the same structure, with () in place of what is unwanted; None if it cannot be
    cut.

    The bytes that are kept are the file's own, so an unpickler treats them as before. Unknown globals that only
    unwanted values name are not in the new pickle, so an unpickler that would refuse them does not meet them.

    Args:
        program: the pickle.
        unwanted: values of its structure, and what is in them; nothing of that is wanted elsewhere. Of these, tensors,
            objects of unknown classes, and unknown globals are cut out, unless something that stays in the pickle
            refers to them or to what is in them.

    Returns:
        No more bytes than the pickle has.
    """
    if not program.can_be_cut:
        return None
    values = [*unwanted]
    records = [one for one in values if isinstance(one, PickledTensor | UnknownObject) and one.made_by != NOWHERE]
    removed = _without_needed(program, _outermost(one.made_by for one in records))
    kept = [one for one in records if not _around(one.made_by[0], removed)]
    unnamed = _names_of_globals(values) - _names_of_globals(all_in(kept))
    data = program.data
    names = {one: data[one[0] + 1 : one[1] - 1].decode().replace("\n", ".") for one in program.globals}
    forgotten = [one for one, name in names.items() if name in unnamed]
    at = 2 if data[:1] == pickle.PROTO else 0
    pieces = [data[:at], *_texts_in(program, removed, forgotten)]
    for begin, end in sorted([*removed, *(one for one in forgotten if not _around(one[0], removed))]):
        pieces += (data[at:begin], pickle.EMPTY_TUPLE)
        at = end
    return b"".join((*pieces, data[at:]))


def _names_of_globals(values: Iterable[Any]) -> set[str]:
    return {one.name for one in values if isinstance(one, UnknownGlobal)}


def _outermost(ranges: Iterable[Range]) -> list[Range]:
    """Drop the ranges that lie within another one; returns the rest in order."""
    found: list[Range] = []
    for begin, end in sorted(ranges, key=lambda one: (one[0], -one[1])):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def _around(at: int, ranges: list[Range]) -> Range | None:
    """The range that a byte is in."""
    index = bisect_right(ranges, at, key=lambda one: one[0]) - 1
    return ranges[index] if index >= 0 and at < ranges[index][1] else None


def _without_needed(program: Program, ranges: list[Range]) -> list[Range]:
    """Drop the ranges that make values which the rest of the pickle takes from the memo."""
    needed: list[Range] = []
    needs: defaultdict[Range, list[Range]] = defaultdict(list)
    for at, number in program.gets:
        maker = _around(program.puts[number], ranges)
        if maker is not None:
            taker = _around(at, ranges)
            (needed if taker is None else needs[taker]).append(maker)
    kept: set[Range] = set()
    while needed:
        one = needed.pop()
        if one not in kept:
            kept.add(one)
            needed += needs[one]
    return [one for one in ranges if one not in kept]


def _texts_in(program: Program, removed: list[Range], forgotten: list[Range]) -> Iterator[bytes]:
    """The texts and globals in what is removed. The new pickle begins with them: that puts them into the memo, and
    leaves them at the bottom of the stack.

    Args:
        program: the pickle.
        removed: the ranges.
        forgotten: globals that are not to be named. An empty tuple takes the place of each.
    """
    data, ends = program.data, dict(forgotten)
    places = {**dict(program.globals), **dict(program.texts)}
    yield from dict.fromkeys(
        pickle.EMPTY_TUPLE + data[ends[begin] : end] if begin in ends else data[begin:end]
        for begin, end in places.items()
        if _around(begin, removed)
    )
