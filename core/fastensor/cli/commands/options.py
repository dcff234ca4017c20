"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

_JSON = "fastensor.json"
"""Key of ``--json`` in Typer's contexts, where errors look for it."""


def _note(ctx: typer.Context, wanted: bool) -> bool:
    ctx.meta[_JSON] = wanted
    return wanted


def wants_json(ctx: typer.Context) -> bool:
    """True if the command that runs, or has failed, was given ``--json``."""
    return bool(ctx.meta.get(_JSON))


Json: TypeAlias = Annotated[bool, typer.Option("--json", callback=_note, help="Print JSON.")]
Folder: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder; default: this one.", show_default=False)
]
Files: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE", help="Path or URL of a file, of a model in several files, or of a distributed checkpoint."
    ),
]


def group(name: str, about: str) -> typer.Typer:
    """A command that has commands."""
    return typer.Typer(name=name, help=about, rich_markup_mode=None, no_args_is_help=False)
