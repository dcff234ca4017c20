"""Costs of one run's checkpoints, in a line for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import fastensor
from fastensor.files.words import human_seconds, human_size
from fastensor.select import torch_save


class SavedInRun:
    """The finished saves of one run. :meth:`add` may be called from any thread."""

    def __init__(self) -> None:
        self._reports: list[fastensor.SaveReport] = []
        self._has_no_equal = False
        """True if ``torch.save`` with ``fsync`` does not do such a save: not durable, remote, or a directory."""

    def add(self, report: fastensor.SaveReport) -> None:
        """Add a save that has just been finished."""
        self._reports.append(report)
        self._has_no_equal |= not (report.durable and os.path.isfile(report.path))

    def lines(self, waited_seconds: float, *, more: bool) -> Iterator[str]:
        """Lines for the end of the run; none if nothing was saved.

        Args:
            waited_seconds: how long the end of the run has waited for saves.
            more: whether to yield more than a line.
        """
        if not self._reports:
            return
        reports = tuple(self._reports)
        sizes = {} if self._has_no_equal else _sizes_by_folder(reports)
        by_torch = _seconds_by_torch(sizes)
        yield summary(reports, waited_seconds, by_torch)
        if more:
            yield _details(reports)
            if (folder := next((one for one in sizes if not torch_save.is_measured(one)), None)) is not None:
                yield f"`fastensor tune {folder}` measures what torch.save would take there"


def _sizes_by_folder(reports: Sequence[fastensor.SaveReport]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for one in reports:
        sizes.setdefault(os.path.dirname(one.path), []).append(one.nbytes)
    return sizes


def _seconds_by_torch(sizes: Mapping[str, Sequence[int]]) -> float | None:
    """Seconds that ``torch.save`` with ``fsync`` would take for files of these sizes by folder; None if one is
    unknown."""
    found = [torch_save.seconds_known(folder, in_it) for folder, in_it in sizes.items()]
    known = [seconds for seconds in found if seconds is not None]
    return sum(known) if found and len(known) == len(found) else None


def summary(reports: Sequence[fastensor.SaveReport], waited_seconds: float, by_torch: float | None) -> str:
    """The line.

    Args:
        reports: of the saves, at least one.
        waited_seconds: how long the end of the run has waited for them.
        by_torch: how long ``torch.save`` with ``fsync`` would take for all of them; None if that was not measured.
    """
    count, durable = len(reports), sum(one.durable for one in reports)
    saved = f"{count} checkpoint{'s' * (count > 1)} saved"
    how = {count: " durably", 0: ", not durably"}.get(durable, f", {durable} of them durably")
    size = human_size(sum(one.nbytes for one in reports))
    if shared_nbytes := sum(one.shared_nbytes for one in reports):
        size += f", of which {human_size(shared_nbytes)} unchanged and shared"
    each = human_seconds(median(one.seconds for one in reports)) + " each (median)" * (count > 1)
    still = human_seconds(sum(one.stall_seconds for one in reports) + waited_seconds)
    line = f"{saved}{how} ({size}), in {each}; training stood still for {still}"
    if any(one.stall_seconds < one.seconds for one in reports):
        line += f", {human_seconds(waited_seconds)} of it at the end"
    if by_torch is not None:
        line += f"; torch.save with fsync would have taken {human_seconds(by_torch)}, as fastensor tune has measured"
    return line


def _details(reports: Sequence[fastensor.SaveReport]) -> str:
    rate = sum(one.nbytes for one in reports) / sum(one.seconds for one in reports)
    longest, stall = max(one.seconds for one in reports), max(one.stall_seconds for one in reports)
    return (
        f"checkpoints were saved at {human_size(rate)}/s; the longest save took {human_seconds(longest)}; "
        f"training stood still for at most {human_seconds(stall)} at a time"
    )
