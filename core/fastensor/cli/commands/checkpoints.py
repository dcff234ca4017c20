"""``fastensor verify|inspect|diff|convert``"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fastensor.cli.app import app
from fastensor.cli.commands.options import Files, Json, pairs_in, size_in


@app.command(
    epilog="Exit status: 0 if all files are intact; 1 if a file is damaged or cannot be read; 4 if none is, but "
    "one names code that torch.load refuses unless it is told to trust the file; 3 if none of that, but one that "
    "is no text has no checksums."
)
def verify(
    files: Files,
    json: Json = False,
    allow_unchecked: Annotated[
        bool, typer.Option("--allow-unchecked", help="Exit with 0 for files without checksums.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Exit with 0 for files that name code, whose makers you trust.")
    ] = False,
) -> int:
    """Compare files with their checksums, and flag code in them.

    Files of torch.save carry checksums, safetensors files only if Fastensor wrote them. A checksum says that a file is
    as it was written, not that it is safe: functions and classes that torch.load(weights_only=True) refuses are listed.
    All that is in a folder is read; what is no checkpoint is named.
    """
    from fastensor.cli import verify as command

    return command.run(files, json=json, allow_unchecked=allow_unchecked, allow_code=allow_code)


@app.command(epilog="Exit status: 0 if all files could be looked into; 1 if not.")
def inspect(
    files: Files,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Show only this name, branch or glob pattern.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sum tensors up by the first N parts of their names.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show each tensor and value, however many there are, and long names in full.")
    ] = False,
    json: Json = False,
) -> int:
    """Show what files hold: tensors, dtypes, parameters.

    No tensor is read, and no code of the files is run. Parameters are the elements of all tensors, those that share
    memory counted once. All that is in a folder is shown.
    """
    from fastensor.cli import inspect as command

    return command.run(files, keys=keys, depth=depth, everything=everything, json=json)


@app.command(
    epilog="Exit status: 0 if both hold the same; 1 if they differ, or one is damaged or cannot be read. In JSON, the "
    "largest difference is null if it is no finite number."
)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Path or URL, as for inspect.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one, which may be of another kind.")],
    rtol: Annotated[
        float, typer.Option(min=0, help="How much values may differ, as a part of that of B.", show_default=True)
    ] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="How much values may differ besides.")] = 0.0,
    no_values: Annotated[bool, typer.Option("--no-values", help="Compare only names, dtypes and shapes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show all differences, however many.")] = False,
    json: Json = False,
) -> int:
    """Compare two checkpoints: names, dtypes, shapes and values.

    All tensors are compared with their checksums on the way. Without tolerances, they are compared byte by byte. Two
    folders are compared file by file.
    """
    from fastensor.cli import diff as command

    return command.run(first, second, rtol=rtol, atol=atol, values=not no_values, everything=everything, json=json)


@app.command(epilog="Exit status: 0 if B was written; 1 if not: then B is as it was before.")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="A", help="Path or URL of a file or distributed checkpoint; or a model's folder or *.index.json."
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="B", help="Path or URL of the file to write; its ending names the container.")
    ],
    root: Annotated[
        str | None, typer.Option(metavar="KEY", help="The dict of tensors inside A, such as state_dict.")
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"] | None,
        typer.Option(help="What tensors of these dtypes become; others keep theirs."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="New names, such as 'model.*=encoder.*'. The first that matches counts."),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Leave out what B cannot hold, or --root does not name.")
    ] = False,
    copy_ties: Annotated[
        bool, typer.Option("--copy-ties", help="Write each of the tensors that share memory.")
    ] = False,
    container: Annotated[
        Literal["torch", "safetensors", "dcp", "huggingface"] | None,
        typer.Option(help="The container, whatever the ending; huggingface if B is a directory, or ends in /."),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="The most bytes of tensors in each file of huggingface, such as 2GiB."),
    ] = "5GB",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most that one tensor of a distributed checkpoint may take; default: half of what is available.",
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=TEXT", help="For the metadata of safetensors.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace B if it is there.")] = False,
    backend: Annotated[str, typer.Option(help="What moves the bytes; doctor lists what there is.")] = "auto",
    no_durable: Annotated[
        bool, typer.Option("--no-durable", help="Do not wait until B survives a power failure.")
    ] = False,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Write byte for byte the file of safetensors.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare A with its checksums.")] = False,
    json: Json = False,
) -> int:
    """Write the tensors of a checkpoint in another form.

    A dict of tensors becomes .safetensors, .ckpt or .pt for torch.load, a model of Hugging Face in several files and
    their index, or a distributed checkpoint; and each of these the others. It takes bounded memory, and is verified on
    the way. A file is replaced atomically, with --force; a directory that holds a model never.
    """
    names = pairs_in(rename or [], "--rename", "OLD=NEW")
    texts = None if metadata is None else pairs_in(metadata, "--metadata", "KEY=TEXT")
    shard_nbytes = size_in(shard_size, "--shard-size")
    memory_nbytes = None if memory is None else size_in(memory, "--memory")
    import torch

    from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
    from fastensor.cli import convert as command

    settings = ConvertSettings(
        root=root,
        dtype=None if dtype is None else getattr(torch, dtype),
        rename=names,
        drop=drop,
        copy_ties=copy_ties,
        container=container or command.container_for(target),
        shard_nbytes=shard_nbytes,
        memory_nbytes=memory_nbytes,
        metadata=texts,
        backend=backend,
        durable=not no_durable,
        checksums=not no_checksums,
        verify=not no_verify,
    )
    return command.run(source, target, settings, force=force, json=json)
