"""Options that several commands have, and parsing their values. Imports nothing heavy, so that errors come at once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from fastensor.cli.app import note_json
from fastensor.files.words import human_size, nbytes_in

Json: TypeAlias = Annotated[bool, typer.Option("--json", callback=note_json, help="Print JSON.")]
Folder: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder; default: this one.", show_default=False)
]
Files: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE", help="Path or URL of a file, of a model in several files, or of a distributed checkpoint."
    ),
]


# values


LEAST_NBYTES, MOST_NBYTES = 4 << 10, 4 << 30
"""Sizes that can be measured."""


def size_in(text: str, flag: str) -> int:
    """The bytes in the value of a flag.

    Raises:
        typer.BadParameter: it is no size.
    """
    try:
        return nbytes_in(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{flag}'") from error


def pairs_in(texts: list[str], flag: str, form: str) -> dict[str, str]:
    """The values of a flag that is given several times, each ``KEY=TEXT``.

    Raises:
        typer.BadParameter: one has no equals sign, or two have one key.
    """
    if wrong := [text for text in texts if "=" not in text]:
        raise typer.BadParameter(f"expected {form}, found {wrong[0]!r}", param_hint=f"'{flag}'")
    pairs: dict[str, str] = {}
    for key, _, value in (text.partition("=") for text in texts):
        if key in pairs:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint=f"'{flag}'")
        pairs[key] = value
    return pairs


def sizes_in(text: str) -> tuple[int, ...]:
    """The sizes in the value of ``--sizes``.

    Raises:
        typer.BadParameter: one is none, or cannot be measured.

    >>> sizes_in("5000,64K,1.5MiB,64KB")
    (5000, 65536, 1572864, 64000)
    """
    try:
        sizes = [nbytes_in(one) for one in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(LEAST_NBYTES <= size <= MOST_NBYTES for size in sizes):
        expected = f"sizes from {human_size(LEAST_NBYTES)} to {human_size(MOST_NBYTES)}, such as 64K,64M"
        raise typer.BadParameter(f"expected {expected}, found {text!r}", param_hint="'--sizes'")
    return tuple(sizes)
