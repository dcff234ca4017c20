"""``fastensor diff``."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict

from fastensor.checkpoint.tools.diff import Difference, diff
from fastensor.cli.output import FAILED, OK, print_json, print_table, printable, without_middle
from fastensor.files.progress_bar import progress_bar
from fastensor.files.words import counted

_MANY = 100
"""The most rows that are shown."""
_NAME, _VALUE = 60, 40
"""The most characters that are shown of a name and of a value."""
_STYLES = {"only in A": "red", "only in B": "green", "differs": "yellow"}


def run(first: str, second: str, *, rtol: float, atol: float, values: bool, everything: bool, json: bool) -> int:
    """Compare two checkpoints."""
    with progress_bar("comparing") as progress:
        found = diff(first, second, rtol=rtol, atol=atol, values=values, progress=progress)
    if json:
        shown = asdict(found)
        for one in shown["tensors"]:
            if not math.isfinite(one["largest"]):
                one["largest"] = None  # JSON has no other numbers
        print_json(shown)
    else:
        _print(found, everything=everything, values=values)
    return OK if found.is_empty else FAILED


def _print(found: Difference, *, everything: bool, values: bool) -> None:
    short = (lambda text, longest: text) if everything else without_middle
    rows = [["only in A", name, ""] for name in found.only_first]
    rows += [["only in B", name, ""] for name in found.only_second]
    for one in found.tensors:
        if one.elements:
            what = f"{counted(one.elements, 'elements')} of {one.first}, by {one.largest:g} at most"
        else:
            what = f"{one.first} in A, {one.second} in B"
        rows.append(["differs", one.name, what])
    rows += [
        ["differs", name, f"{short(first, _VALUE)} in A, {short(second, _VALUE)} in B"]
        for name, (first, second) in found.others.items()
    ]
    if rows:
        shown = [[how, short(name, _NAME), what] for how, name, what in rows]
        print_table(["", "name", ""], shown, styles=_STYLES, most=sys.maxsize if everything else _MANY)
    for name in found.not_compared:
        print(printable(f"not compared: {name}, which is no checkpoint"))
    how = "" if values else " (values were not compared)"
    print(f"{counted(len(rows), 'differences')}, {found.same} the same{how}")
