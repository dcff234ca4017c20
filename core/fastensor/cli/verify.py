"""``fastensor verify``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastensor.backends import registry
from fastensor.checkpoint.tools.comparing import DamagedCheckpointError, VerifyReport
from fastensor.checkpoint.tools.folders import FolderEntry
from fastensor.checkpoint.tools.verify import members_at, verify_member
from fastensor.cli.errors import in_flags
from fastensor.cli.output import FAILED, FOREIGN_CODE, OK, UNCHECKED, print_json, print_table, printable
from fastensor.errors import FastensorError
from fastensor.files.progress_bar import progress_bar
from fastensor.files.words import human_size, some_of

_STYLES = {
    "intact": "green",
    "intact, names code": "yellow",
    "no checksums": "yellow",
    "partly checked": "yellow",
    "not compared": "yellow",
    "damaged": "bold red",
    "unreadable": "bold red",
}
_SHOWN = 5
"""The most names of code that are shown of a file."""


def run(files: Sequence[str], *, json: bool, allow_unchecked: bool, allow_code: bool) -> int:
    """Verify files."""
    results = [one for file in files for one in _verify_all(file)]
    if json:
        print_json(results)
    else:
        _print(results)
    statuses = {status for one in results for status in _statuses(one)}
    statuses -= ({UNCHECKED} if allow_unchecked else set()) | ({FOREIGN_CODE} if allow_code else set())
    return next((status for status in (FAILED, FOREIGN_CODE, UNCHECKED) if status in statuses), OK)


def _verify_all(file: str) -> Iterator[dict[str, Any]]:
    """The results of a file, or of the files of a model or folder."""
    try:
        members = members_at(file)
    except (FastensorError, OSError) as error:
        yield {"path": file, "result": "unreadable", "error": str(error)}
        return
    for member in members:
        yield _verify(str(member.path), member)


def _verify(file: str, member: FolderEntry) -> dict[str, Any]:
    try:
        with progress_bar(printable(file)) as progress:
            report = verify_member(member, registry.AUTO, progress)
    except DamagedCheckpointError as error:
        return {"result": "damaged", "error": _said(error), **asdict(error.report), "path": file}
    except (FastensorError, OSError) as error:
        return {"path": file, "result": "unreadable", "error": _said(error)}
    return {"result": _describe(report), **asdict(report), "path": file}


def _said(error: Exception) -> str:
    """The message of an error, and its notes, which are of other files."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _describe(report: VerifyReport) -> str:
    if not report.is_of_checkpoint:
        return "not compared"
    if not report.complete:
        return "partly checked" if report.compared_bytes else "no checksums"
    return "intact"


def _statuses(one: dict[str, Any]) -> Iterator[int]:
    """Everything that is wrong with a file."""
    if one["result"] in ("damaged", "unreadable"):
        yield FAILED
    elif one["uncompared"]:
        yield UNCHECKED
    if one.get("code"):
        yield FOREIGN_CODE


def _print(results: Sequence[dict[str, Any]]) -> None:
    rows = [_row(one) for one in results]
    print_table(["result", "container", "size", "compared", "speed", "file"], rows, right=(2, 3, 4), styles=_STYLES)
    for one in results:
        _print_details(one)


def _row(one: dict[str, Any]) -> list[str]:
    result = f"{one['result']}, names code" if one.get("code") else one["result"]
    if "nbytes" not in one:
        return [result, "", "", "", "", one["path"]]
    rate = human_size(one["compared_bytes"] / max(one["seconds"], 1e-9))
    parts = one["compared"] + one["uncompared"]
    compared = f"{one['compared']} of {parts} parts" if parts else ""
    speed = f"{rate}/s" if one["compared"] else ""
    return [result, one["container"], human_size(one["nbytes"]), compared, speed, one["path"]]


def _print_details(one: dict[str, Any]) -> None:
    for damage in one.get("damage", ()):
        print(
            printable(
                f"{one['path']}: {damage['part']} ({damage['nbytes']} bytes at offset {damage['offset']}) has CRC32 "
                f"{damage['found']:08x}, expected {damage['expected']:08x}"
            )
        )
    if code := one.get("code"):
        print(
            printable(
                f"{one['path']}: names code that weights_only=True refuses: {some_of(code, _SHOWN)}; load it "
                f"with weights_only=False only if you trust who made it"
            )
        )
    if one["result"] == "unreadable":
        print(printable(in_flags(one["error"])))
