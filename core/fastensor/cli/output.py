"""Tables, JSON and exit statuses of the commands. Colours are for terminals (see NO_COLOR)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OK, FAILED, USAGE, UNCHECKED, FOREIGN_CODE, INTERRUPTED = 0, 1, 2, 3, 4, 130
_NO_STYLES: Mapping[str, str] = {}


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    styles: Mapping[str, str] = _NO_STYLES,
    most: int = sys.maxsize,
) -> None:
    """Print rows under a head, columns aligned.

    Args:
        head: titles of the columns.
        rows: one text for each column.
        right: numbers of the columns that are aligned to the right.
        styles: styles of Rich by the texts of cells.
        most: how many rows are printed. A line says how many more ``--all`` shows.
    """
    texts = [[*map(printable, row)] for row in (head, *rows[:most])]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        of_row = ["bold"] * len(head) if row is texts[0] else [styles.get(text, "") for text in row]
        print_styled(*zip([*(f"{cell}  " for cell in cells[:-1]), cells[-1]], of_row, strict=True))
    if len(rows) > most:
        print(f"and {len(rows) - most} more, which --all shows")


def print_styled(*pieces: tuple[str, str]) -> None:
    """Print a line of texts, each with a style of Rich or none. They must be printable."""
    line = "".join(text for text, _ in pieces).rstrip()
    if any(style for _, style in pieces) and sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, markup=False, emoji=False)
        console.print(Text.assemble(*((text, style) for text, style in pieces)), soft_wrap=True)
    else:
        print(line)


def printable(text: str) -> str:
    """A text without characters that move a terminal's cursor, or worse.

    >>> printable("a\\tb")
    'a\\\\tb'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def without_middle(text: str, longest: int = 60) -> str:
    """A text without its middle if it is long, so that a table fits the screen.

    Lightning, for one, writes all arguments of a callback into the name of its state.

    >>> without_middle("callbacks.Stopping{'mode': 'min', 'patience': 10, 'min_delta': 0.001}.best")
    "callbacks.Stopping{'mode': 'm…: 10, 'min_delta': 0.001}.best"
    """
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"


def print_json(value: Any) -> None:
    """Print a value for other programs."""
    print(json.dumps(value, indent=2))
