"""``fastensor data index`` and ``inspect``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from fastensor.cli.output import OK, print_json, print_table, printable
from fastensor.data.index import LmdbIndex
from fastensor.data.inspect import LmdbInspection, inspect_lmdb
from fastensor.files.progress_bar import progress_bar
from fastensor.files.words import counted, human_size

_PERCENTILES = (0, 50, 99, 100)


def index(path: str, db: str | None, output: str | None, *, json: bool) -> int:
    """Index a dataset."""
    page_nbytes = inspect_lmdb(path).page_size
    with progress_bar(printable(path)) as show:
        found = LmdbIndex.open(
            path, db, output or "auto", progress=lambda done, total: show(done * page_nbytes, total * page_nbytes)
        )
    with found:
        if json:
            print_json(_as_json(found, db))
        else:
            _print_index(found)
    return OK


def _as_json(index: LmdbIndex, db: str | None) -> dict[str, Any]:
    found = {"path": index.path, "db": db, "records": len(index), "sidecar": index.sidecar}
    nbytes = int(index.lengths.sum())
    return {**found, "fingerprint": index.fingerprint, "nbytes": nbytes, "sizes": _sizes(index)}


def _print_index(index: LmdbIndex) -> None:
    print(f"{index.path}: {counted(len(index), 'records')} of {human_size(int(index.lengths.sum()))}")
    if sizes := _sizes(index):
        low, middle, high, most = (human_size(size) for size in sizes.values())
        print(f"sizes: from {low} to {most}, half up to {middle}, 99 % up to {high}")
    print(f"the index is kept as {index.sidecar}" if index.sidecar else "the index could not be kept")


def _sizes(index: LmdbIndex) -> dict[str, int]:
    """The bytes of a value, by percentile."""
    if not len(index):
        return {}
    found = np.percentile(index.lengths, _PERCENTILES, method="lower")
    return {str(percentile): int(size) for percentile, size in zip(_PERCENTILES, found, strict=True)}


def inspect(path: str, *, json: bool) -> int:
    """Show what a dataset holds."""
    found = inspect_lmdb(path)
    if json:
        print_json(asdict(found))
    else:
        _print(found)
    return OK


def _print(found: LmdbInspection) -> None:
    used = human_size(found.used_pages * found.page_size)
    print(f"{found.path}: LMDB, data version {found.data_version}, {human_size(found.nbytes)}")
    pages = counted(found.used_pages, "pages")
    print(f"{pages} of {human_size(found.page_size)} ({used}), transaction {found.transaction}\n")
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
