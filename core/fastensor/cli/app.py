"""The program, to which the modules in ``commands/`` add their commands."""

from __future__ import annotations

import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from fastensor.cli.errors import print_error, status_of
from fastensor.cli.output import INTERRUPTED
from fastensor.errors import FastensorError
from fastensor.files.printed import is_output_closed, output_errors

NAME = "fastensor"
_JSON = "fastensor.json"
"""Key of ``--json`` in Typer's contexts, where errors look for it."""


def note_json(ctx: typer.Context, wanted: bool) -> bool:
    """Have errors of the command be printed as JSON, too, if that is wanted."""
    ctx.meta[_JSON] = wanted
    return wanted


class _Group(TyperGroup):
    """Runs the command, and leaves with its status."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        # Here it prints help and the version. Typer has a status of its own for a closed pipe.
        with output_errors(NAME):
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with output_errors(NAME):
            raise typer.Exit(self._status(ctx))

    def _status(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the tables show the same
                return super().invoke(ctx)
        except (FastensorError, OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and is_output_closed():
                raise
            print_error(str(error), json=bool(ctx.meta.get(_JSON)))
            return status_of(error)
        except KeyboardInterrupt:
            return INTERRUPTED


app = typer.Typer(
    name=NAME,
    cls=_Group,
    no_args_is_help=False,
    rich_markup_mode=None,  # boxes take half of the time that help may take, and cannot be searched
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def group(name: str, about: str, epilog: str = "") -> typer.Typer:
    """A command that has commands."""
    made = typer.Typer(name=name, help=about, rich_markup_mode=None, no_args_is_help=False)
    app.add_typer(made, epilog=epilog)
    return made
