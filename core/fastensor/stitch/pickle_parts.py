"""Cutting out of a pickle what nobody asked for: the same program, with an empty tuple in its place. Pure."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from fastensor.stitch.torch_pickle import Program, Range


def cut(program: Program, unwanted: Iterable[int]) -> bytes | None:
    """The bytes of a pickle that makes the same, with () for what is unwanted; None if that cannot be told.

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
        pieces += (data[at:begin], pickle.EMPTY_TUPLE)
        at = end
    return b"".join((*pieces, data[at:]))


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


def _removed(program: Program, ranges: list[Range]) -> tuple[list[Range], set[Range]]:
    """What can go; and the texts and globals therein that what stays takes from the memo."""
    pending = _got_outside(program, ranges)
    kept: set[Range] = set()
    moved: set[Range] = set()
    while pending:
        put = program.puts[pending.pop()]
        found = _around(put, ranges)
        if found is None or found in kept:
            continue
        if put in program.atoms:
            moved.add((program.atoms[put], put + (2 if program.data[put : put + 1] == pickle.BINPUT else 5)))
        else:
            kept.add(found)
            pending += _got_in(program, found)
    return [one for one in ranges if one not in kept], moved


def _got_outside(program: Program, ranges: list[Range]) -> list[int]:
    """The numbers of what is taken from the memo outside of all ranges."""
    found: list[int] = []
    at = 0
    for begin, end in ranges:
        found += program.got[at : bisect_left(program.gets, begin, at)]
        at = bisect_left(program.gets, end, at)
    return [*found, *program.got[at:]]


def _got_in(program: Program, one: Range) -> list[int]:
    begin, end = (bisect_left(program.gets, at) for at in one)
    return list(program.got[begin:end])


def _moved_to_the_front(program: Program, removed: list[Range], moved: set[Range]) -> Iterator[bytes]:
    """Texts and globals that are to be in the memo, and the other globals. They stay at the bottom of the stack."""
    places = sorted({**dict(program.named), **dict(moved)}.items())
    pieces = (program.data[begin:end] for begin, end in places if _around(begin, removed))
    yield from dict.fromkeys(pieces)
