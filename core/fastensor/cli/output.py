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
) -> None:
    """Print rows under a head, columns aligned.

    Args:
        head: titles of the columns.
        rows: one text for each column.
        right: numbers of the columns that are aligned to the right.
        styles: styles of Rich by the texts of cells.
    """
    widths = [max(len(printable(row[column])) for row in (head, *rows)) for column in range(len(head))]
    table = GrowingTable(head, widths, right=right, styles=styles)
    for row in rows:
        table.add(row)


class GrowingTable:
    """A table whose rows are printed as they come. The head has been printed when it is made.

    Args:
        head: titles of the columns.
        widths: of the columns, in characters. A text that is longer moves what follows it.
        right, styles: as for :func:`print_table`.
    """

    def __init__(
        self,
        head: Sequence[str],
        widths: Sequence[int],
        *,
        right: Sequence[int] = (),
        styles: Mapping[str, str] = _NO_STYLES,
    ) -> None:
        self._widths = [max(width, len(title)) for width, title in zip(widths, head, strict=True)]
        self._right = right
        self._styles = styles
        self._print(head, ["bold"] * len(head))

    def add(self, row: Sequence[str]) -> None:
        """Print a row."""
        self._print(row, [self._styles.get(text, "") for text in row])
        sys.stdout.flush()

    def _print(self, row: Sequence[str], styles: Sequence[str]) -> None:
        pieces = []
        for column, (text, width) in enumerate(zip(map(printable, row), self._widths, strict=True)):
            cell = text.rjust(width) if column in self._right else text.ljust(width)
            pieces.append((cell if column == len(row) - 1 else f"{cell}  ", styles[column]))
        print_styled(*pieces)


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
