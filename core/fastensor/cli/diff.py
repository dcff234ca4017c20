"""``fastensor diff A B``"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

from fastensor.checkpoint.diff import Difference, diff
from fastensor.cli.output import FAILED, OK, print_json, print_table

_MANY = 100
"""The most rows that are shown."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare the tensors and other values of two checkpoints by their names: files, or directories of "
        "torch.distributed.checkpoint. All of them are compared with their checksums on the way.",
        epilog="Exit status: 0 if both hold the same; 1 if they differ, or one is damaged or cannot be read. In JSON, "
        "the largest difference is null if it is no finite number.",
    )
    parser.add_argument("first", metavar="A", help="path or URL of a file, or of the directory of a checkpoint")
    parser.add_argument("second", metavar="B", help="the other one, which may be of another kind")
    parser.add_argument("--all", action="store_true", help=f"show more than {_MANY} differences")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = diff(options.first, options.second)
    if options.json:
        shown = asdict(found)
        for one in shown["tensors"]:
            if not math.isfinite(one["largest"]):
                one["largest"] = None  # JSON has no other numbers
        print_json(shown)
    else:
        _print(found, show_all=options.all)
    return OK if found.is_empty else FAILED


def _print(found: Difference, *, show_all: bool) -> None:
    rows = [["only in A", name, ""] for name in found.only_first]
    rows += [["only in B", name, ""] for name in found.only_second]
    for one in found.tensors:
        if one.elements:
            what = f"{one.elements} elements of {one.first}, by {one.largest:g} at most"
        else:
            what = f"{one.first} in A, {one.second} in B"
        rows.append(["differs", one.name, what])
    rows += [["differs", name, f"{first} in A, {second} in B"] for name, (first, second) in found.others.items()]
    shown = rows if show_all else rows[:_MANY]
    if shown:
        print_table(["", "name", ""], shown)
    if len(rows) > len(shown):
        print(f"and {len(rows) - len(shown)} more, which --all shows")
    print(f"{len(rows)} differences, {found.same} the same")
