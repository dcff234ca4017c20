"""``fastensor doctor|placement|tune``"""

from __future__ import annotations

from typing import Annotated

import typer

from fastensor.cli.app import app
from fastensor.cli.commands.options import Folder, Json, sizes_in


@app.command(
    epilog="Exit status: 0 if files can be saved there, whatever the warnings; 1 if not, or if they do not come back."
)
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


@app.command(epilog="Exit status: 0; 1 if there is no such GPU, or the system says what makes no sense.")
def placement(
    gpu: Annotated[
        int | None,
        typer.Argument(
            help="Print the variables for this GPU, for a shell. Counted from 0 in the order of PCI addresses."
        ),
    ] = None,
) -> int:
    """Show which network card and processors are next to each GPU.

    From the PCIe tree. UCX uses the network card that is next to GPU 0 after: eval "$(fastensor placement 0)". CUDA
    counts GPUs in this order if CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    from fastensor.cli import placement as command

    return command.run(gpu)


@app.command(epilog="Exit status: 0 if something was learned; 1 if nothing could be measured.")
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
