"""``fastensor convert A B``"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any, Literal

from fastensor.checkpoint.convert import MEMORY_NBYTES, convert
from fastensor.checkpoint.sharded import SHARD_NBYTES
from fastensor.cli.output import OK, print_json, progress_bar
from fastensor.files.words import human_seconds, human_size, nbytes_in


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "convert",
        help="write the tensors of a checkpoint in another form",
        description="Write a dict of tensors as .safetensors, as .ckpt or .pt for torch.load, as a model of Hugging "
        "Face in several files, or as a distributed checkpoint, in bounded memory and verified on the way. A file B is "
        "replaced atomically.",
    )
    parser.add_argument(
        "source",
        metavar="A",
        help="path or URL of the file or distributed checkpoint to read; for dcp also a model's *.index.json or folder",
    )
    parser.add_argument("target", metavar="B", help="path or URL of the file to write; its ending names the container")
    parser.add_argument("--root", metavar="KEY", help="the dict of tensors inside A, such as state_dict")
    parser.add_argument("--copy-ties", action="store_true", help="write each of the tensors that share memory")
    parser.add_argument(
        "--container",
        choices=["torch", "safetensors", "dcp", "huggingface"],
        help="the container, whatever the ending; huggingface if B is a directory, or ends in /",
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        default=str(SHARD_NBYTES),
        help="the most bytes of tensors in each file of huggingface, such as 5GB (the default) or 2GiB",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default=str(MEMORY_NBYTES),
        help="how much of a distributed checkpoint may be in memory at a time (default: 2GiB)",
    )
    parser.add_argument("--metadata", action="append", metavar="KEY=TEXT", help="for the metadata of safetensors")
    parser.add_argument("--backend", default="auto", help="the backend that writes B")
    parser.add_argument("--no-durable", action="store_true", help="do not wait until B survives a power failure")
    parser.add_argument("--no-checksums", action="store_true", help="write byte for byte the file of safetensors")
    parser.add_argument("--no-verify", action="store_true", help="do not compare A with its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _metadata(pairs: list[str] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--metadata takes KEY=TEXT, found {wrong[0]!r}")
    return {key: text for key, _, text in (pair.partition("=") for pair in pairs)}


def _container_of(target: str) -> Literal["huggingface"] | None:
    """The container of a directory; None if the target is a file."""
    return "huggingface" if target.endswith("/") or os.path.isdir(target) else None


def _run(options: argparse.Namespace) -> int:
    with progress_bar(options.target) as progress:
        report = convert(
            options.source,
            options.target,
            root=options.root,
            metadata=_metadata(options.metadata),
            container=options.container or _container_of(options.target),
            backend=options.backend,
            durable=not options.no_durable,
            checksums=not options.no_checksums,
            copy_ties=options.copy_ties,
            verify=not options.no_verify,
            shard_nbytes=nbytes_in(options.shard_size),
            memory_nbytes=nbytes_in(options.memory),
            progress=progress,
        )
    if options.json:
        print_json(asdict(report))
    else:
        rate = human_size(report.bytes_per_second)
        print(f"{options.target}: {human_size(report.nbytes)} in {human_seconds(report.seconds)} ({rate}/s)")
    return OK
