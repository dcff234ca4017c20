"""``fastensor data index|inspect``"""

from __future__ import annotations

from typing import Annotated

import typer

from fastensor.cli.app import group
from fastensor.cli.commands.options import Json

_Environment = Annotated[
    str, typer.Argument(metavar="PATH", help="The directory of an LMDB environment, or its data file.")
]


_data = group("data", "Index an LMDB dataset, or show what it holds. Files are read, never mapped.")


@_data.command()
def index(
    path: _Environment,
    db: Annotated[str | None, typer.Option(metavar="NAME", help="A named database; default: the main one.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The sidecar to write, in another place.")
    ] = None,
    json: Json = False,
) -> int:
    """Find where each record is, and keep that in a sidecar.

    Reads the pages of an LMDB file that say where its records are, and keeps that beside the file, or in the user's
    cache if its folder cannot be written to. An index of the file as it is now is used as it is.
    """
    from fastensor.cli import data

    return data.index(path, db, output, json=json)


@_data.command()
def inspect(path: _Environment, json: Json = False) -> int:
    """Show the databases of an LMDB file: version, pages, records."""
    from fastensor.cli import data

    return data.inspect(path, json=json)
