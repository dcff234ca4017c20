"""``fastensor inspect FILE``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from fastensor.checkpoint.catalog import TensorInfo
from fastensor.checkpoint.inspect import Inspection, inspect
from fastensor.checkpoint.names import resolve
from fastensor.cli.output import OK, human_size, print_json, print_table, printable

_MOST_LISTED = 500
"""Longer tables are summed up, or cut, unless ``--all`` is given."""
_MOST_BRANCHES = 100
_DEEPEST = 8
"""Parts of a name that branches are told apart by."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a file holds",
        description="Show what a checkpoint holds, without reading its tensors and without running any of its code.",
    )
    parser.add_argument("file", metavar="FILE", help="path or URL")
    parser.add_argument(
        "--key", action="append", dest="keys", metavar="KEY", help="show only this: a name, a branch or a glob pattern"
    )
    parser.add_argument("--all", action="store_true", help=f"list everything, also more than {_MOST_LISTED} entries")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = inspect(options.file)
    tensors, others = list(found.tensors), dict(found.others)
    if options.keys:
        leaves = [*(tensor.name for tensor in tensors), *others]
        within = {leaf: {leaf, *_branches_above(leaf)} for leaf in leaves}
        named = resolve(options.keys, [*leaves, *set().union(*within.values()).difference(leaves)], found.path)
        chosen = {leaf for leaf, names in within.items() if names & named}
        tensors = [tensor for tensor in tensors if tensor.name in chosen]
        others = {name: text for name, text in others.items() if name in chosen}
    if options.json:
        print_json(_as_json(found, tensors, others))
    else:
        _print(found, tensors, others, shorten=not options.all)
    return OK


def _as_json(found: Inspection, tensors: list[TensorInfo], others: dict[str, str]) -> dict[str, Any]:
    described = [{**asdict(tensor), "dtype": _dtype(tensor), "nbytes": tensor.nbytes} for tensor in tensors]
    return {
        "path": found.path,
        "container": found.container,
        "nbytes": found.nbytes,
        "checked": found.checked,
        "tensors": described,
        "others": others,
        "metadata": dict(found.metadata),
        "ties": found.ties,
        "refused_by_weights_only": found.refused,
    }


def _print(found: Inspection, tensors: list[TensorInfo], others: dict[str, str], *, shorten: bool) -> None:
    checked = "with checksums" if found.checked else "without checksums"
    print(f"{found.path}: {found.container}, {human_size(found.nbytes)}, {checked}")
    print(f"{len(found.tensors)} tensors of {human_size(found.tensor_nbytes)}, {len(found.others)} other values")
    most = _MOST_LISTED if shorten else sys.maxsize
    if tensors:
        print()
        print_tensors = _print_branches if len(tensors) > most else _print_tensors
        print_tensors(tensors)
    for title, texts in (("value", others), ("metadata", found.metadata)):
        if texts:
            print()
            print_table([title, ""], [[name, text] for name, text in islice(texts.items(), most)])
            _print_rest(len(texts) - most)
    if found.ties or found.refused:
        print()
    for names in found.ties[:most]:
        print(printable(f"share memory: {', '.join(names)}"))
    _print_rest(len(found.ties) - most)
    if found.refused:
        print(printable(f"weights_only=True refuses: {', '.join(found.refused)}"))


def _print_tensors(tensors: list[TensorInfo]) -> None:
    rows = [
        [
            tensor.name,
            tensor.kind,
            _dtype(tensor),
            " × ".join(map(str, tensor.shape)) or "scalar",
            human_size(tensor.nbytes),
            "" if tensor.crc32 is None else f"{tensor.crc32:08x}",
        ]
        for tensor in tensors
    ]
    print_table(["tensor", "kind", "dtype", "shape", "size", "CRC32"], rows, right=(4,))


def _print_branches(tensors: list[TensorInfo]) -> None:
    """Sum up the tensors by the branches that they are in."""
    branches = _group([tensor.name for tensor in tensors], most=_MOST_BRANCHES)
    rows = []
    for branch, positions in islice(branches.items(), _MOST_BRANCHES):
        within = [tensors[position] for position in positions]
        dtypes = ", ".join(sorted({_dtype(tensor) for tensor in within}))
        rows.append([branch, str(len(within)), dtypes, human_size(sum(tensor.nbytes for tensor in within))])
    print_table(["tensors in", "number", "dtypes", "size"], rows, right=(1, 3))
    _print_rest(len(branches) - _MOST_BRANCHES)
    print("--all lists every tensor, --key those of a branch or a pattern")


def _print_rest(count: int) -> None:
    if count > 0:
        print(f"and {count} more, which --all shows")


def _group(names: Sequence[str], *, most: int) -> dict[str, list[int]]:
    """Positions of names by their first parts: by as many of them as give at most so many groups, and at least one.

    >>> _group(["a.b.c", "a.b.d", "a.e.f", "g"], most=3)
    {'a.b': [0, 1], 'a.e': [2], 'g': [3]}
    >>> _group(["a.b.c", "a.b.d", "a.e.f", "g"], most=2)
    {'a': [0, 1, 2], 'g': [3]}
    """
    chosen = _group_at(names, 1)
    for depth in range(2, _DEEPEST + 1):
        deeper = _group_at(names, depth)
        if len(deeper) > most:
            break
        chosen = deeper
    return chosen


def _group_at(names: Sequence[str], depth: int) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        groups.setdefault(".".join(name.split(".", depth)[:depth]), []).append(position)
    return groups


def _branches_above(name: str) -> Iterator[str]:
    """
    >>> list(_branches_above("a.b.c"))
    ['a', 'a.b']
    """
    return (name[:at] for at, character in enumerate(name) if character == ".")


def _dtype(tensor: TensorInfo) -> str:
    return str(tensor.dtype).removeprefix("torch.")
