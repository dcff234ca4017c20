"""``fastensor convert``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Literal

from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import RemotePath, locate
from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
from fastensor.checkpoint.tools.conversion.sources import what_shares_memory
from fastensor.checkpoint.tools.convert import convert_by
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.cli.output import OK, print_json, printable
from fastensor.errors import FastensorError
from fastensor.files.progress_bar import progress_bar
from fastensor.files.words import human_seconds, human_size, some_of

_SHOWN = 10
"""The most names of what is left out that are shown."""


def container_for(target: str) -> Literal["huggingface"] | None:
    """The container of a directory; None if the target is a file, or a distributed checkpoint."""
    is_directory = target.endswith("/") or (os.path.isdir(target) and not metadata_names(target))
    return "huggingface" if is_directory else None


def run(source: str, target: str, settings: ConvertSettings, *, force: bool, json: bool) -> int:
    """Convert, unless that would destroy or lose something that was not given up."""
    settings = settings.checked(target)
    _check_target(target, force=force)
    lost: list[str] = []

    def check(names: Sequence[str], ties: Mapping[str, Sequence[Sequence[str]]]) -> None:
        lost.extend(names)
        _check_losses(source, lost, ties, settings)

    with progress_bar(printable(target)) as progress:
        report = convert_by(source, target, replace(settings, drop=True), progress, check=check)
    if json:
        print_json({**asdict(report), "container": settings.container, "left_out": lost})
    else:
        _print(target, settings, report, lost)
    return OK


def _check_target(target: str, *, force: bool) -> None:
    """
    Raises:
        FastensorError: the target is there, and is not to be replaced.
    """
    if _holds_something(target) and not force:
        raise FastensorError(f"{target}: it is there already; --force replaces it, or choose another target")


def _holds_something(target: str) -> bool:
    """True if there is a file, or a directory with a distributed checkpoint in it."""
    found = locate(target)
    if isinstance(found, RemotePath):
        return bool(found.filesystem.exists(found.path))
    if isinstance(found, str) and os.path.isdir(found):
        return bool(metadata_names(found))  # a folder with a model in it is refused when it is written to
    return isinstance(found, str) and os.path.lexists(found)


def _check_losses(
    source: str, lost: Sequence[str], ties: Mapping[str, Sequence[Sequence[str]]], settings: ConvertSettings
) -> None:
    """
    Raises:
        FastensorError: something would be left out without ``--drop``, or shared memory lost without ``--copy-ties``.
    """
    refusals = []
    if lost and not settings.drop:
        refusals.append(f"{source}: the conversion leaves out: {_in_words(lost)}; --drop converts the rest")
    if ties and not settings.copy_ties:
        refusals.append(what_shares_memory(ties))
    if refusals:
        raise FastensorError(". Also, ".join(refusals))


def _in_words(names: Sequence[str]) -> str:
    return some_of(names, _SHOWN, printable)


def _print(target: str, settings: ConvertSettings, report: SaveReport, lost: Sequence[str]) -> None:
    moved = f"{human_size(report.nbytes)} in {human_seconds(report.seconds)} ({human_size(report.bytes_per_second)}/s)"
    print(printable(f"{target}: {settings.container}, {moved}"))
    if lost:
        print(f"left out: {_in_words(lost)}")
