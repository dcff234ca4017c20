"""Cutting out of a pickle what nobody asked for: the same program, with None in its place. Pure."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from fastensor.stitch.torch_pickle import Program, Range


def cut(program: Program, unwanted: Iterable[int]) -> bytes | None:
    """The bytes of a pickle that makes the same, with None for what is unwanted; None if that cannot be told.

    All that is kept are the file's own bytes, so an unpickler does with them what it did before. All globals are still
    named, so one that refuses some of them refuses them here, too.

    Args:
        program: the pickle.
        unwanted: identities of tensors and unknown objects of its structure. One that something else in the pickle
            refers to is kept all the same.

    Returns:
        No more bytes than the pickle has.
    """
    if not program.can_be_cut:
        return None
    ranges, moved = _removed(program, _outermost(program.made[one] for one in unwanted if one in program.made))
    data = program.data
    at = 2 if data[:1] == pickle.PROTO else 0
    pieces = [data[:at], *_moved_to_the_front(program, ranges, moved)]
    for begin, end in ranges:
        pieces += (data[at:begin], pickle.NONE)
        at = end
    return b"".join((*pieces, data[at:]))


def _outermost(ranges: Iterable[Range]) -> list[Range]:
    """Those that are in no other, in order."""
    found: list[Range] = []
    for begin, end in sorted(ranges, key=lambda one: (one[0], -one[1])):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def _around(at: int, ranges: list[Range]) -> Range | None:
    """The range that a byte is in."""
    index = bisect_right(ranges, at, key=lambda one: one[0]) - 1
    return ranges[index] if index >= 0 and at < ranges[index][1] else None


def _removed(program: Program, ranges: list[Range]) -> tuple[list[Range], set[Range]]:
    """What can go; and the texts and globals therein that what stays takes from the memo."""
    pending = _gets_outside(program, ranges)
    kept: set[Range] = set()
    moved: set[Range] = set()
    while pending:
        put = program.puts[pending.pop()[1]]
        found = _around(put, ranges)
        if found is None or found in kept:
            continue
        if put in program.atoms:
            moved.add((program.atoms[put][0], put + (2 if program.data[put : put + 1] == pickle.BINPUT else 5)))
        else:
            kept.add(found)
            pending += _gets_in(program, found)
    return [one for one in ranges if one not in kept], moved


def _gets_outside(program: Program, ranges: list[Range]) -> list[Range]:
    found: list[Range] = []
    at = 0
    for one in ranges:
        found += program.gets[at : _first_get(program, one[0], at)]
        at = _first_get(program, one[1], at)
    return [*found, *program.gets[at:]]


def _gets_in(program: Program, one: Range) -> list[Range]:
    return list(program.gets[_first_get(program, one[0]) : _first_get(program, one[1])])


def _first_get(program: Program, begin: int, start: int = 0) -> int:
    """The index of the first that is not before a byte, given one that is not behind it."""
    return bisect_left(program.gets, (begin, 0), start)


def _moved_to_the_front(program: Program, removed: list[Range], moved: set[Range]) -> Iterator[bytes]:
    """Texts and globals that are to be in the memo, and the other globals. They stay at the bottom of the stack."""
    named = {begin: end for end, (begin, is_global) in program.atoms.items() if is_global}
    places = sorted({**named, **dict(moved)}.items())
    pieces = (program.data[begin:end] for begin, end in places if _around(begin, removed))
    yield from dict.fromkeys(pieces)
