"""Arguments in, exit status out."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from fastensor.cli.app import NAME, app
from fastensor.cli.commands import checkpoints, datasets, dictionaries, machine, services  # noqa: F401  # adds them
from fastensor.cli.output import FAILED
from fastensor.files.printed import output_errors
from fastensor.version import VERSION

_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is damaged, missing, refused or different; 2 for wrong arguments; 3 "
    "if a file has no checksums to verify; 4 if a file is intact, but names code that torch does not allow; 130 if "
    "interrupted; 141 if whatever read the output has closed it, as head does."
)


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
        with output_errors(NAME):
            command: Any = get_command(app)
            _spare_coercion(command)
            command.main(None if arguments is None else [*arguments], prog_name=NAME)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    return FAILED
