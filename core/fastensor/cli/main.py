"""Arguments in, exit status out."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fastensor.cli.commands import checkpoints, datasets, dictionaries, machine, options, services
from fastensor.cli.errors import print_error, status_of
from fastensor.cli.output import FAILED, INTERRUPTED
from fastensor.errors import FastensorError
from fastensor.files.printed import is_output_closed, output_errors
from fastensor.version import VERSION

_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is damaged, missing, refused or different; 2 for wrong arguments; 3 "
    "if a file has no checksums to verify; 4 if a file is intact, but names code that torch does not allow; 130 if "
    "interrupted; 141 if whatever read the output has closed it, as head does."
)
_NAME = "fastensor"


class _Group(TyperGroup):
    """Runs the command, and leaves with its status."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        # Here it prints help and the version. Typer has a status of its own for a closed pipe.
        with output_errors(_NAME):
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with output_errors(_NAME):
            raise typer.Exit(self._status(ctx))

    def _status(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the tables show the same
                return super().invoke(ctx)
        except (FastensorError, OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and is_output_closed():
                raise
            print_error(str(error), json=options.wants_json(ctx))
            return status_of(error)
        except KeyboardInterrupt:
            return INTERRUPTED


app = typer.Typer(
    name=_NAME,
    cls=_Group,
    no_args_is_help=False,
    rich_markup_mode=None,  # boxes take half of the time that help may take, and cannot be searched
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _add in (checkpoints.add_to, dictionaries.add_to, machine.add_to, datasets.add_to, services.add_to):
    _add(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastensor {VERSION}")
        raise typer.Exit


@app.callback(epilog=_STATUSES)
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look into checkpoints and datasets, convert them, and see how fast they are moved here."""


def _spare_coercion(command: Any, parent: Any = None) -> None:
    """Give the flags that Typer makes itself a default. They have none, which is no bool: to find that, Typer would
    import Pydantic, which takes as long as all the rest of a help text."""
    context = command.context_class(command, parent=parent, **command.context_settings)
    for parameter in command.get_params(context):
        if parameter.name in ("help", "install_completion", "show_completion"):
            parameter.default = False
    for inner in getattr(command, "commands", {}).values():
        _spare_coercion(inner, context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        0 if all is well; 1 if something is damaged, missing, refused or different; 2 for wrong arguments; 3 if a file
        has no checksums to verify; 4 if a file is intact, but names code that torch does not allow; 130 if interrupted;
        141 if whatever read the output has closed it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold characters that the encoding lacks
    try:
        with output_errors(_NAME):
            command: Any = get_command(app)
            _spare_coercion(command)
            command.main(None if arguments is None else [*arguments], prog_name=_NAME)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    return FAILED
