"""``fastensor verify FILE...``"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fastensor.checkpoint.verify import DamagedCheckpointError, VerifyReport, verify
from fastensor.cli.output import FAILED, OK, UNCHECKED, print_json, print_table, progress_bar
from fastensor.errors import FastensorError
from fastensor.files.words import human_size

_STATUS = {"sound": OK, "no checksums": UNCHECKED, "partly checked": UNCHECKED, "damaged": FAILED, "unreadable": FAILED}


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="compare files with their checksums",
        description="Read checkpoints and compare them with their checksums. Files of torch.save carry checksums, "
        "safetensors files only if Fastensor wrote them.",
        epilog="Exit status: 0 if all files are sound; 1 if a file is damaged or cannot be read; 3 if none is, but one "
        "has no checksums.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="path or URL of a file, or of the directory of a distributed checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--allow-unchecked", action="store_true", help="exit with 0 for files without checksums")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    results = [_verify(file) for file in options.files]
    if options.json:
        print_json(results)
    else:
        _print(results)
    statuses = {_STATUS[result["result"]] for result in results}
    if options.allow_unchecked:
        statuses.discard(UNCHECKED)
    return next((status for status in (FAILED, UNCHECKED) if status in statuses), OK)


def _verify(file: str) -> dict[str, Any]:
    try:
        with progress_bar(file) as progress:
            report = verify(file, progress=progress)
    except DamagedCheckpointError as error:
        return {"result": "damaged", "error": str(error), **asdict(error.report), "path": file}
    except (FastensorError, OSError) as error:
        return {"path": file, "result": "unreadable", "error": str(error)}
    return {"result": _describe(report), **asdict(report), "path": file}


def _describe(report: VerifyReport) -> str:
    if report.complete:
        return "sound"
    return "partly checked" if report.compared_bytes else "no checksums"


def _print(results: list[dict[str, Any]]) -> None:
    rows = []
    for one in results:
        if "nbytes" in one:
            rate = human_size(one["compared_bytes"] / max(one["seconds"], 1e-9))
            compared = f"{one['compared']} of {one['compared'] + one['uncompared']} parts"
            cells = [one["container"], human_size(one["nbytes"]), compared, f"{rate}/s" if one["compared"] else ""]
        else:
            cells = ["", "", "", ""]
        rows.append([one["result"], *cells, one["path"]])
    print_table(["result", "container", "size", "compared", "speed", "file"], rows, right=(2, 3, 4))
    for one in results:
        for damage in one.get("damage", ()):
            print(
                f"{one['path']}: {damage['part']} ({damage['nbytes']} bytes at offset {damage['offset']}) has CRC32 "
                f"{damage['found']:08x}, expected {damage['expected']:08x}"
            )
        if one["result"] == "unreadable":
            print(one["error"])
