"""``fastensor inspect FILE``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastensor.checkpoint.catalog import TensorInfo
from fastensor.checkpoint.inspect import Inspection, inspect
from fastensor.checkpoint.names import resolve
from fastensor.cli.output import OK, print_json, print_table, printable
from fastensor.files.words import human_size

_MANY = 200
"""The most tensors and values that are shown one by one. More tensors are summarized, more values cut off."""
_MOST_GROUPS = 60


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a file holds",
        description="Show what a checkpoint holds, without reading its tensors and without running any of its code.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="path or URL of a file, or of the directory of a distributed checkpoint"
    )
    parser.add_argument(
        "--key", action="append", dest="keys", metavar="KEY", help="show only this name, branch or glob pattern"
    )
    parser.add_argument("--all", action="store_true", help=f"show each tensor and value, also of more than {_MANY}")
    parser.add_argument("--json", action="store_true", help="print JSON, with each tensor")
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
        _print(found, tensors, others, most=sys.maxsize if options.all else _MANY)
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


def _print(found: Inspection, tensors: list[TensorInfo], others: dict[str, str], *, most: int) -> None:
    checked = "with checksums" if found.checked else "without checksums"
    print(f"{found.path}: {found.container}, {human_size(found.nbytes)}, {checked}")
    print(f"{len(found.tensors)} tensors of {human_size(found.tensor_bytes)}, {len(found.others)} other values")
    if len(tensors) > most:
        print()
        _print_some(["tensors", "", "dtype", "size"], summarize(tensors), most, right=(1, 3))
        print("\n--all shows each tensor; --key PATTERN those that match")
    elif tensors:
        print()
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
    for title, texts in (("value", others), ("metadata", found.metadata)):
        if texts:
            print()
            _print_some([title, ""], [[name, text] for name, text in texts.items()], most)
    if found.ties or found.refused:
        print()
    for names in found.ties:
        print(printable(f"share memory: {', '.join(names)}"))
    if found.refused:
        print(printable(f"weights_only=True refuses: {', '.join(found.refused)}"))


def _print_some(header: list[str], rows: list[list[str]], most: int, right: Sequence[int] = ()) -> None:
    print_table(header, rows[:most], right=right)
    if len(rows) > most:
        print(f"and {len(rows) - most} more, which --all shows")


def summarize(tensors: Iterable[TensorInfo]) -> list[list[str]]:
    """A row for each group of tensors whose names differ only in numbers. If there are too many groups, those whose
    names begin alike are joined. The name of a group is a pattern for ``--key``."""
    names = {tensor: tuple("*" if one.isdecimal() else one for one in tensor.name.split(".")) for tensor in tensors}
    depth = max(map(len, names.values()))
    while depth > 1 and len({name[:depth] for name in names.values()}) > _MOST_GROUPS:
        depth -= 1
    groups: dict[str, list[TensorInfo]] = {}
    for tensor, name in names.items():
        groups.setdefault(".".join([*name[:depth], *(["*"] if len(name) > depth else [])]), []).append(tensor)
    return [
        [
            pattern,
            str(len(group)),
            ", ".join(sorted({_dtype(tensor) for tensor in group})),
            human_size(sum(tensor.nbytes for tensor in group)),
        ]
        for pattern, group in groups.items()
    ]


def _branches_above(name: str) -> Iterator[str]:
    """
    >>> list(_branches_above("a.b.c"))
    ['a', 'a.b']
    """
    return (name[:at] for at, character in enumerate(name) if character == ".")


def _dtype(tensor: TensorInfo) -> str:
    return str(tensor.dtype).removeprefix("torch.")
