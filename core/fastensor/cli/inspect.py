"""``fastensor inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastensor.checkpoint.catalog import Inspection, TensorInfo
from fastensor.checkpoint.inspect import inspect_all
from fastensor.checkpoint.names import resolve
from fastensor.cli.errors import in_flags, print_error
from fastensor.cli.output import FAILED, OK, print_json, print_styled, print_table, printable, without_middle
from fastensor.cli.summary import dtype_name, grouped, patterns, prefix, rows, totals
from fastensor.errors import FastensorError
from fastensor.files.words import counted, human_count, human_size

_MANY = 200
"""The most tensors and values that are shown one by one. More tensors are summarized, more values cut off."""
_GROUPS = ("tensors", "parameters", "dtype", "size")


@dataclass(frozen=True, slots=True)
class _View:
    """Tensors and values of a file that are shown."""

    found: Inspection
    tensors: list[TensorInfo]
    others: Mapping[str, str]
    depth: int | None
    """By how many parts of their names tensors are summed up; None for each tensor."""


def run(files: Sequence[str], *, keys: Sequence[str] | None, depth: int | None, everything: bool, json: bool) -> int:
    """Show what files hold."""
    shown: list[Any] = []
    status = OK
    for number, file in enumerate(files):
        try:
            found, failures = inspect_all(file)
            view = _view(found, keys, depth)
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
            shown.append(_as_json(view) | errors)
        else:
            print("\n" if number else "", end="")
            _print(view, most=sys.maxsize if everything else _MANY)
    if json:
        print_json(shown[0] if len(files) == 1 else shown)
    return status


def _view(found: Inspection, keys: Sequence[str] | None, depth: int | None) -> _View:
    """Choose the tensors and values of a file whose keys match."""
    if not keys:
        return _View(found, [*found.tensors], found.others, depth)
    leaves = [*(tensor.name for tensor in found.tensors), *found.others]
    within = {leaf: {leaf, *_branches_above(leaf)} for leaf in leaves}
    named = resolve(keys, [*leaves, *set().union(*within.values()).difference(leaves)], found.path)
    chosen = {leaf for leaf, names in within.items() if names & named}
    tensors = [tensor for tensor in found.tensors if tensor.name in chosen]
    return _View(found, tensors, {name: text for name, text in found.others.items() if name in chosen}, depth)


def _branches_above(name: str) -> Iterator[str]:
    """
    >>> list(_branches_above("a.b.c"))
    ['a', 'a.b']
    """
    return (name[:at] for at, character in enumerate(name) if character == ".")


def _as_json(view: _View) -> dict[str, Any]:
    found = view.found
    described = [{**asdict(tensor), "dtype": dtype_name(tensor), "nbytes": tensor.nbytes} for tensor in view.tensors]
    shown = {
        "path": found.path,
        "container": found.container,
        "nbytes": found.nbytes,
        "checked": found.checked,
        "memory_nbytes": found.memory_bytes,
        "totals": asdict(totals(view.tensors, found.ties)),
        "dtypes": {name: asdict(one) for name, (one, _) in grouped(view.tensors, found.ties, dtype_name).items()},
        "tensors": described,
        "others": view.others,
        "metadata": dict(found.metadata),
        "ties": found.ties,
        "refused_by_weights_only": found.refused,
    }
    if found.files:
        shown["files"] = [_file_as_json(name, one) for name, one in found.files.items()]
    if view.depth is not None:
        shown["prefixes"] = {name: asdict(one) for name, (one, _) in _by_prefix(view, view.depth).items()}
    return shown


def _file_as_json(name: str, found: Inspection) -> dict[str, Any]:
    shown = {"path": name, "container": found.container, "nbytes": found.nbytes, "checked": found.checked}
    return {**shown, "totals": asdict(totals(found.tensors, found.ties)), "metadata": dict(found.metadata)}


def _by_prefix(view: _View, depth: int) -> Any:
    return grouped(view.tensors, view.found.ties, lambda tensor: prefix(tensor.name, depth))


def _print(view: _View, *, most: int) -> None:
    _print_head(view)
    _print_files(view)
    _print_tensors(view, most)
    for title, texts in (("value", view.others), ("metadata", view.found.metadata)):
        if texts:
            print()
            print_table([title, ""], [[_shortened(name, most), text] for name, text in texts.items()], most=most)
    if view.found.ties or view.found.refused:
        print()
    for names in view.found.ties:
        print(printable(f"share memory: {', '.join(names)}"))
    if view.found.refused:
        print(printable(f"weights_only=True refuses: {', '.join(view.found.refused)}"))


def _print_head(view: _View) -> None:
    found = view.found
    checked = "with checksums" if found.checked else "without checksums"
    print_styled((printable(found.path), "bold"), (f": {found.container}, {human_size(found.nbytes)}, {checked}", ""))
    all_of_it = totals(found.tensors, found.ties)
    print(
        f"{counted(all_of_it.tensors, 'tensors')} of {human_size(all_of_it.nbytes)}, "
        f"{counted(all_of_it.parameters, 'parameters', human_count)}, {human_size(found.memory_bytes)} in memory; "
        f"{counted(len(found.others), 'other values')}"
    )


def _print_files(view: _View) -> None:
    """The files of a folder."""
    if not view.found.files:
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
        for name, one in view.found.files.items()
    ]
    print_table(["file", "container", "tensors", "size", ""], table, right=(2, 3))


def _print_tensors(view: _View, most: int) -> None:
    ties = view.found.ties
    dtypes = grouped(view.tensors, ties, dtype_name)
    if len(dtypes) > 1:
        print()
        table = [
            [name, str(one.tensors), f"{one.parameters:,}", human_size(one.nbytes)] for name, (one, _) in dtypes.items()
        ]
        print_table(["dtype", "tensors", "parameters", "size"], table, right=(1, 2, 3))
    if not view.tensors:
        return
    print()
    if view.depth is not None:
        print_table(["prefix", *_GROUPS], rows(_by_prefix(view, view.depth)), right=(1, 2, 4), most=most)
    elif len(view.tensors) > most:
        names = patterns(view.tensors)
        found = grouped(view.tensors, ties, lambda tensor: names[tensor.name])
        print_table(["names", *_GROUPS], rows(found), right=(1, 2, 4), most=most)
        print("\n--all shows each tensor; --depth N sums up by prefix; --key PATTERN shows those that match")
    else:
        _print_each(view.tensors, most)


def _print_each(tensors: Sequence[TensorInfo], most: int) -> None:
    table = [
        [
            _shortened(tensor.name, most),
            tensor.kind,
            dtype_name(tensor),
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
