"""``fastensor doctor|tune``"""

from __future__ import annotations

from typing import Annotated

import typer

from fastensor.cli.commands.options import Folder, Json
from fastensor.cli.values import sizes_in


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Exit status: 0 if files can be saved there, whatever the warnings; 1 if not, or if they do not come "
        "back."
    )(doctor)
    app.command(epilog="Exit status: 0 if something was learned; 1 if nothing could be measured.")(tune)


def doctor(
    path: Folder = ".",
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="SIZE,...",
            help="Sizes of the measured files, less if there is little space. KB is 1000 bytes, KiB or K 1024.",
        ),
    ] = "64K,64M",
    json: Json = False,
) -> int:
    """Show what is here, how fast it is, and what is wrong.

    Looks at the software, GPUs and GPUDirect Storage, at a folder and its filesystem, and at the backends; measures
    each of them with files in that folder, which are removed; and says what is wrong. Nothing is learned from that: the
    dictionary stays as it is. JSON is one object, as fastensor.cli.doctor.Checkup.
    """
    chosen = sizes_in(sizes)
    from fastensor.cli import doctor as command

    return command.run(path, chosen, quick=quick, json=json)


def tune(
    path: Folder = ".",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="SIZE,...",
            help="Sizes of the files, less if there is little space. KB is 1000 bytes, KiB or K 1024.",
        ),
    ] = "64K,1M,8M,64M,512M",
) -> int:
    """Measure a folder, and have backend="auto" go by that.

    Learns how fast each backend saves and loads files in a folder: backend="auto" chooses by that from then on, for all
    folders on the same kind of filesystem. Learns as well how long torch.save with fsync takes, with which a training
    compares its checkpoints when it ends. All of that takes some seconds, and the files are removed. Untuned, a rule by
    size decides, and other backends are tried as far as that costs next to nothing.
    """
    chosen = sizes_in(sizes)
    from fastensor.cli import tune as command

    return command.run(path, chosen)
