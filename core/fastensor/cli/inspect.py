"""``fastensor inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from fastensor.checkpoint.models.names import resolve
from fastensor.checkpoint.tools.catalog import Inspection, TensorInfo
from fastensor.checkpoint.tools.inspect import inspect_all
from fastensor.cli.errors import in_flags, print_error
from fastensor.cli.output import FAILED, OK, print_json, print_styled, print_table, printable, without_middle
from fastensor.cli.summary import Totals, dtype_name, grouped, patterns, prefix, rows, totals
from fastensor.errors import FastensorError
from fastensor.files.garbage import without_collection
from fastensor.files.words import counted, human_count, human_size

_MANY = 200
"""The most tensors and values that are shown one by one. More tensors are summarized, more values cut off."""
_GROUPS = ("tensors", "parameters", "dtype", "size")


@without_collection()
def run(files: Sequence[str], *, keys: Sequence[str] | None, depth: int | None, everything: bool, json: bool) -> int:
    """Show what files hold."""
    shown: list[Any] = []
    status = OK
    for number, file in enumerate(files):
        try:
            found, failures = inspect_all(file)
            chosen = _chosen(found, keys) if keys else found
        except (FastensorError, OSError) as error:
            print_error(str(error))
            shown.append({"path": file, "error": in_flags(str(error))})
            status = FAILED
            continue
        for failure in failures:
            print_error(str(failure))
            status = FAILED
        if json:
            errors = {"errors": [in_flags(str(failure)) for failure in failures]} if failures else {}
            shown.append(_as_json(chosen, depth) | errors)
        else:
            print("\n" if number else "", end="")
            _print_head(found)
            _print(chosen, depth, sys.maxsize if everything else _MANY)
    if json:
        print_json(shown[0] if len(files) == 1 else shown)
    return status


def _chosen(found: Inspection, keys: Sequence[str]) -> Inspection:
    """The same file, with the tensors and values alone whose keys match."""
    leaves = [*(tensor.name for tensor in found.tensors), *found.others]
    within = {leaf: {leaf, *_branches_above(leaf)} for leaf in leaves}
    named = resolve(keys, [*leaves, *set().union(*within.values()).difference(leaves)], found.path)
    chosen = {leaf for leaf, names in within.items() if names & named}
    return replace(
        found,
        tensors=tuple(tensor for tensor in found.tensors if tensor.name in chosen),
        others={name: text for name, text in found.others.items() if name in chosen},
    )


def _branches_above(name: str) -> Iterator[str]:
    """
    >>> list(_branches_above("a.b.c"))
    ['a', 'a.b']
    """
    return (name[:at] for at, character in enumerate(name) if character == ".")


def _as_json(found: Inspection, depth: int | None) -> dict[str, Any]:
    described = [
        {
            "name": tensor.name,
            "kind": tensor.kind,
            "dtype": dtype_name(tensor.dtype),
            "shape": tensor.shape,
            "part": tensor.part,
            "crc32": tensor.crc32,
            "nbytes": tensor.nbytes,
        }
        for tensor in found.tensors  # asdict() copies each value, which takes ten times as long
    ]
    shown = {
        "path": found.path,
        "container": found.container,
        "nbytes": found.nbytes,
        "checked": found.checked,
        "memory_nbytes": found.memory_bytes,
        "totals": asdict(totals(found.tensors, found.ties)),
        "dtypes": {name: asdict(one) for name, (one, _) in _by_dtype(found).items()},
        "tensors": described,
        "others": found.others,
        "metadata": dict(found.metadata),
        "ties": found.ties,
        "refused_by_weights_only": found.refused,
    }
    if found.files:
        shown["files"] = [_file_as_json(name, one) for name, one in found.files.items()]
    if depth is not None:
        shown["prefixes"] = {name: asdict(one) for name, (one, _) in _by_prefix(found, depth).items()}
    return shown


def _file_as_json(name: str, found: Inspection) -> dict[str, Any]:
    shown = {"path": name, "container": found.container, "nbytes": found.nbytes, "checked": found.checked}
    return {**shown, "totals": asdict(totals(found.tensors, found.ties)), "metadata": dict(found.metadata)}


def _by_dtype(found: Inspection) -> dict[str, tuple[Totals, str]]:
    return grouped(found.tensors, found.ties, (dtype_name(tensor.dtype) for tensor in found.tensors))


def _by_prefix(found: Inspection, depth: int) -> dict[str, tuple[Totals, str]]:
    return grouped(found.tensors, found.ties, (prefix(tensor.name, depth) for tensor in found.tensors))


def _print(found: Inspection, depth: int | None, most: int) -> None:
    """Print all but the head."""
    _print_files(found)
    _print_tensors(found, depth, most)
    for title, texts in (("value", found.others), ("metadata", found.metadata)):
        if texts:
            print()
            print_table([title, ""], [[_shortened(name, most), text] for name, text in texts.items()], most=most)
    if found.ties or found.refused:
        print()
    for names in found.ties:
        print(printable(f"share memory: {', '.join(names)}"))
    if found.refused:
        print(printable(f"weights_only=True refuses: {', '.join(found.refused)}"))


def _print_head(found: Inspection) -> None:
    checked = "with checksums" if found.checked else "without checksums"
    print_styled((printable(found.path), "bold"), (f": {found.container}, {human_size(found.nbytes)}, {checked}", ""))
    all_of_it = totals(found.tensors, found.ties)
    print(
        f"{counted(all_of_it.tensors, 'tensors')} of {human_size(all_of_it.nbytes)}, "
        f"{counted(all_of_it.parameters, 'parameters', human_count)}, {human_size(found.memory_bytes)} in memory; "
        f"{counted(len(found.others), 'other values')}"
    )


def _print_files(found: Inspection) -> None:
    """The files of a folder."""
    if not found.files:
        return
    print()
    table = [
        [
            name,
            one.container,
            str(len(one.tensors) or ""),
            human_size(one.nbytes),
            "checksums" if one.checked else "no checksums",
        ]
        for name, one in found.files.items()
    ]
    print_table(["file", "container", "tensors", "size", ""], table, right=(2, 3))


def _print_tensors(found: Inspection, depth: int | None, most: int) -> None:
    if len({tensor.dtype for tensor in found.tensors}) > 1:
        print()
        table = [
            [name, str(one.tensors), f"{one.parameters:,}", human_size(one.nbytes)]
            for name, (one, _) in _by_dtype(found).items()
        ]
        print_table(["dtype", "tensors", "parameters", "size"], table, right=(1, 2, 3))
    if not found.tensors:
        return
    print()
    if depth is not None:
        print_table(["prefix", *_GROUPS], rows(_by_prefix(found, depth)), right=(1, 2, 4), most=most)
    elif len(found.tensors) > most:
        groups = grouped(found.tensors, found.ties, patterns(found.tensors))
        print_table(["names", *_GROUPS], rows(groups), right=(1, 2, 4), most=most)
        print("\n--all shows each tensor; --depth N sums up by prefix; --key PATTERN shows those that match")
    else:
        _print_each(found.tensors, most)


def _print_each(tensors: Sequence[TensorInfo], most: int) -> None:
    table = [
        [
            _shortened(tensor.name, most),
            tensor.kind,
            dtype_name(tensor.dtype),
            " × ".join(map(str, tensor.shape)) or "scalar",
            human_size(tensor.nbytes),
            "" if tensor.crc32 is None else f"{tensor.crc32:08x}",
        ]
        for tensor in tensors
    ]
    print_table(["tensor", "kind", "dtype", "shape", "size", "CRC32"], table, right=(4,))


def _shortened(name: str, most: int) -> str:
    """A name as far as there is room for it, or all of it if everything is to be shown."""
    return name if most > _MANY else without_middle(name)
