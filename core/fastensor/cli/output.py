"""Tables, JSON and progress bars of the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

OK, FAILED, UNCHECKED, INTERRUPTED = 0, 1, 3, 130
_LONG_NBYTES = 256 << 20
"""Work on fewer bytes is done before anyone has read a progress bar."""


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows under a head, columns aligned.

    Args:
        head: titles of the columns.
        rows: one text for each column.
        right: numbers of the columns that are aligned to the right.
    """
    shown = [[printable(text) for text in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    for row in shown:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """A text without characters that move a terminal's cursor, or worse.

    >>> printable("a\\tb")
    'a\\\\tb'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def print_json(value: Any) -> None:
    """Print a value for other programs."""
    print(json.dumps(value, indent=2))


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for the bytes done and the bytes in all, which shows a bar on a terminal if the work is long."""
    bar: Any = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and total >= _LONG_NBYTES and sys.stderr.isatty():
            bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
