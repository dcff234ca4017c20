"""``fastensor data index|inspect``"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from fastensor.cli.output import OK, print_json, print_table, progress_bar
from fastensor.data.index import LmdbIndex
from fastensor.data.inspect import LmdbInspection, inspect_lmdb
from fastensor.files.words import human_size

_PERCENTILES = (0, 50, 99, 100)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "data",
        help="index an LMDB dataset, or show what it holds",
        description="Index LMDB datasets ahead of training, and show what they hold. Files are read, never mapped.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_index(actions)
    _add_inspect(actions)


def _add_index(actions: Any) -> None:
    index = actions.add_parser(
        "index",
        help="find where each record is, and keep that in a sidecar",
        description="Read the pages of an LMDB file that say where its records are, and keep that beside the file, or "
        "in the user's cache if its folder cannot be written to. An index of the file as it is now is used as it is.",
    )
    _add_path(index)
    index.add_argument("--db", metavar="NAME", help="a named database; default: the main one")
    index.add_argument("-o", "--output", metavar="FILE", help="the sidecar to write, in another place")
    index.add_argument("--json", action="store_true", help="print JSON")
    index.set_defaults(run=_index)


def _add_inspect(actions: Any) -> None:
    inspect = actions.add_parser(
        "inspect",
        help="show the databases of an LMDB file",
        description="Show the version, pages and databases of an LMDB file, from its meta pages and its main database.",
    )
    _add_path(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the directory of an LMDB environment, or its data file")


def _index(options: argparse.Namespace) -> int:
    page_nbytes = inspect_lmdb(options.path).page_size
    with progress_bar(options.path) as show:
        index = LmdbIndex.open(
            options.path,
            options.db,
            options.output or "auto",
            progress=lambda done, total: show(done * page_nbytes, total * page_nbytes),
        )
    with index:
        sizes = _sizes(index)
        if options.json:
            found = {"path": index.path, "db": options.db, "records": len(index), "sidecar": index.sidecar}
            print_json({**found, "fingerprint": index.fingerprint, "nbytes": int(index.lengths.sum()), "sizes": sizes})
        else:
            print(f"{index.path}: {len(index)} records of {human_size(int(index.lengths.sum()))}")
            if sizes:
                low, middle, high, most = (human_size(size) for size in sizes.values())
                print(f"sizes: from {low} to {most}, half up to {middle}, 99 % up to {high}")
            print(f"the index is kept as {index.sidecar}" if index.sidecar else "the index could not be kept")
    return OK


def _sizes(index: LmdbIndex) -> dict[str, int]:
    """The bytes of a value, by percentile."""
    if not len(index):
        return {}
    found = np.percentile(index.lengths, _PERCENTILES, method="lower")
    return {str(percentile): int(size) for percentile, size in zip(_PERCENTILES, found, strict=True)}


def _inspect(options: argparse.Namespace) -> int:
    found = inspect_lmdb(options.path)
    if options.json:
        print_json(asdict(found))
    else:
        _print(found)
    return OK


def _print(found: LmdbInspection) -> None:
    used = human_size(found.used_pages * found.page_size)
    print(f"{found.path}: LMDB, data version {found.data_version}, {human_size(found.nbytes)}")
    print(f"{found.used_pages} pages of {human_size(found.page_size)} ({used}), transaction {found.transaction}\n")
    rows = [
        [
            "the main database" if one.name is None else one.name,
            str(one.records),
            str(one.levels),
            str(one.branch_pages),
            str(one.leaf_pages),
            str(one.overflow_pages),
            " ".join(one.flags),
        ]
        for one in found.databases
    ]
    head = ["database", "records", "levels", "branch pages", "leaf pages", "overflow pages", "flags"]
    print_table(head, rows, right=(1, 2, 3, 4, 5))
