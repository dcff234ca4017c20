"""``fastensor dictionary show|export|import|clear|plot``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fastensor.cli.app import group
from fastensor.cli.commands.options import Folder, Json

if TYPE_CHECKING:
    from fastensor.select.files import Kind

_Path = Annotated[
    str, typer.Argument(metavar="PATH", help="A file or folder on the filesystem in question; default: this folder.")
]
_MaybePath = Annotated[
    str | None,
    typer.Argument(metavar="PATH", help="A file or folder on the filesystem in question; default: this folder."),
]
_Tensors = Annotated[bool, typer.Option("--tensors", help="The dictionary of single tensors in a TensorStore.")]
_Activations = Annotated[bool, typer.Option("--activations", help="The dictionary of offloaded activations.")]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")]


_dictionary = group(
    "dictionary",
    "Show or move what was learned about speeds here.",
    epilog="There is one dictionary for each machine and kind of filesystem, one for single tensors, and one for "
    "offloaded activations; --all shows as well what torch.save has taken, with which saves are compared. The "
    "environment variable FASTENSOR_DICTIONARIES names the folder where they are.",
)


def _kind(tensors: bool, activations: bool) -> Kind:
    if tensors and activations:
        raise typer.BadParameter("--tensors and --activations are two dictionaries; name one of them")
    return "tensors" if tensors else "activations" if activations else "files"


def _path_or_all(path: str | None, everything: bool) -> str | None:
    """The path; None for all dictionaries."""
    if everything and path is not None:
        raise typer.BadParameter("--all is for the dictionaries of all paths; leave PATH out, or --all")
    return None if everything else path or "."


@_dictionary.command()
def show(
    path: _MaybePath = None,
    everything: Annotated[bool, typer.Option("--all", help="List all dictionaries and their machines.")] = False,
    tensors: _Tensors = False,
    activations: _Activations = False,
    json: Json = False,
) -> int:
    """Print the dictionary as a table."""
    from fastensor.cli import dictionary

    of, where = _kind(tensors, activations), _path_or_all(path, everything)
    return dictionary.show_all(json=json) if where is None else dictionary.show(where, of, json=json)


@_dictionary.command()
def export(
    path: _Path = ".",
    csv: Annotated[
        Literal["WDic", "RDic", "WRDic"] | None,
        typer.Option(help="A dictionary of the paper: for writing, reading or both."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The whole dictionary; the default.")] = False,
    device: Annotated[str, typer.Option(help="For CSV: kind of the device that bytes come from or go to.")] = "cpu",
    unsynced: Annotated[bool, typer.Option("--unsynced", help="For CSV: writes that need not be durable.")] = False,
    resident: Annotated[bool, typer.Option("--resident", help="For CSV: reads from the page cache.")] = False,
    output: _Output = "-",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace FILE if it is there.")] = False,
    tensors: _Tensors = False,
    activations: _Activations = False,
) -> int:
    """Write the dictionary, as JSON or as CSV of the paper.

    FILE - is the standard output. The JSON is for other machines, which import it.
    """
    from fastensor.cli import dictionary

    if json and csv is not None:
        raise typer.BadParameter("--json and --csv are two forms; choose one")
    form = None if csv is None else dictionary.CsvForm(csv, device, unsynced=unsynced, resident=resident)
    return dictionary.export(path, _kind(tensors, activations), form, output, force=force)


@_dictionary.command("import")
def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A dictionary of Fastensor, or CSV in the form of the paper.")
    ],
    path: _Path = ".",
    context: Annotated[
        str | None,
        typer.Option(help="For CSV: the context of the timings, such as 'write cpu durable' or 'read cuda cold'."),
    ] = None,
    tensors: _Tensors = False,
    activations: _Activations = False,
) -> int:
    """Take over the timings of a file.

    They take the place of known ones of the same size and context.
    """
    from fastensor.cli import dictionary

    return dictionary.import_(file, path, _kind(tensors, activations), context)


@_dictionary.command()
def clear(
    path: _MaybePath = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all dictionaries, those of other machines included.")
    ] = False,
    tensors: _Tensors = False,
    activations: _Activations = False,
) -> int:
    """Remove the dictionary: everything is learned anew."""
    from fastensor.cli import dictionary

    return dictionary.clear(_path_or_all(path, everything), _kind(tensors, activations))


@_dictionary.command()
def plot(
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Such as dictionary.png.")],
    path: Folder = ".",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace FILE if it is there.")] = False,
    tensors: _Tensors = False,
    activations: _Activations = False,
) -> int:
    """Draw the bandwidth of each backend by size.

    This needs matplotlib.
    """
    from fastensor.cli import dictionary

    return dictionary.draw(path, _kind(tensors, activations), output, force=force)
