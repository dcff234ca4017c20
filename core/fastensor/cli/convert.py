"""``fastensor convert A B``"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fastensor.checkpoint.convert import convert
from fastensor.cli.output import OK, print_json, progress_bar
from fastensor.files.words import human_seconds, human_size


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "convert",
        help="write the tensors of a file as another container",
        description="Write a dict of tensors as .safetensors, or as .ckpt or .pt for torch.load, in bounded memory and "
        "verified on the way. B is replaced atomically.",
    )
    parser.add_argument("source", metavar="A", help="path or URL of the file or distributed checkpoint to read")
    parser.add_argument("target", metavar="B", help="path or URL of the file to write; its ending names the container")
    parser.add_argument("--root", metavar="KEY", help="the dict of tensors inside A, such as state_dict")
    parser.add_argument("--copy-ties", action="store_true", help="write each of the tensors that share memory")
    parser.add_argument(
        "--container", choices=["torch", "safetensors", "dcp"], help="the container, whatever the ending"
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


def _run(options: argparse.Namespace) -> int:
    with progress_bar(options.target) as progress:
        report = convert(
            options.source,
            options.target,
            root=options.root,
            metadata=_metadata(options.metadata),
            container=options.container,
            backend=options.backend,
            durable=not options.no_durable,
            checksums=not options.no_checksums,
            copy_ties=options.copy_ties,
            verify=not options.no_verify,
            progress=progress,
        )
    if options.json:
        print_json(asdict(report))
    else:
        rate = human_size(report.bytes_per_second)
        print(f"{options.target}: {human_size(report.nbytes)} in {human_seconds(report.seconds)} ({rate}/s)")
    return OK
