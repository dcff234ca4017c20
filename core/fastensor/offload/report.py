"""Reports of a schedule's plan for the saved tensors of a step, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastensor.files.shown import record_repr
from fastensor.files.words import human_seconds, human_size
from fastensor.offload.planner import UNKNOWN_BANDWIDTH, PlannedForm
from fastensor.offload.scheduler import Prediction
from fastensor.offload.statistics import SECONDS_PER_DAY, drive_days

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that a forward pass saves, and where it is until it is needed."""

    number: int
    """In the order in which tensors are saved, from 0."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    made_by: str
    """The name of the autograd node that has made the tensor; empty for inputs of the step."""
    saved_at: float
    """Seconds since the forward pass began."""
    idle_seconds: float
    """Seconds from the time when the tensor is saved until it is needed; infinity if it never is."""
    leaves: bool
    """True if the tensor leaves memory."""

    def __str__(self) -> str:
        dtype, made_by = str(self.dtype).removeprefix("torch."), self.made_by or "input"
        where = "leaves" if self.leaves else "stays"
        return f"{self.number}: {dtype} {self.shape} of {made_by}, {human_size(self.nbytes)}, {where}"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan for forward passes of the latest kind. ``print`` shows it as a table."""

    tensors: tuple[PlannedTensor, ...]
    limit_bytes: int
    """The most bytes that may stay."""
    forward_seconds: float
    backward_seconds: float
    """Measured seconds of the step without offloading: without the time in hooks."""
    prediction: Prediction

    __repr__ = record_repr

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in memory."""
        return sum(one.nbytes for one in self.tensors if not one.leaves)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave memory."""
        return sum(one.nbytes for one in self.tensors if one.leaves)

    @property
    def slowdown(self) -> float:
        """The predicted time of a step, relative to a step without offloading."""
        alone = self.forward_seconds + self.backward_seconds
        return self.prediction.step_seconds / alone if alone else 1.0

    def __str__(self) -> str:
        leaving = [one for one in self.tensors if one.leaves]
        lines = [
            f"{len(self.tensors)} tensors of {human_size(self.kept_bytes + self.offloaded_bytes)} are saved in a "
            f"forward pass of {human_seconds(self.forward_seconds)}, and needed in a backward pass of "
            f"{human_seconds(self.backward_seconds)}",
            self._what_stays(),
        ]
        if leaving:
            lines += [
                f"{human_size(self.offloaded_bytes)} leave memory, which is predicted to make a step "
                f"{100 * (self.slowdown - 1):.1f} % longer: {human_seconds(self.prediction.wait_to_write_seconds)} "
                f"waiting for writes, {human_seconds(self.prediction.wait_to_read_seconds)} for reads, "
                f"{human_seconds(self.prediction.slowdown_seconds)} for hooks and what transfers take of the CPU",
                *_table(leaving),
            ]
        return "\n".join(lines)

    def _what_stays(self) -> str:
        kept, limit = human_size(self.kept_bytes), human_size(self.limit_bytes)
        if not self.offloaded_bytes:
            return f"{kept} stay: all fit into the {limit} that may stay"
        if not self.kept_bytes:
            return f"Nothing stays: {limit} may stay"
        return f"{kept} stay: what fits into the {limit} that may stay, and would cost the most to move"


@dataclass(frozen=True, slots=True)
class OffloadEstimate:
    """Expected time and memory of training with an offload. ``print`` shows it."""

    plan: PlanReport
    write_bandwidth: float
    """Bytes per second, as measured; 0 if nothing was written, so that the plan is a guess."""
    read_bandwidth: float
    """Bytes per second."""
    drive_days: float
    """Days until the drives have been given ``drive_tbw``; infinity if nothing is written, or ``drive_tbw`` is None."""

    def __str__(self) -> str:
        lines = [str(self.plan)]
        if self.write_bandwidth:
            lines.append(
                f"measured here: {human_size(int(self.write_bandwidth))}/s written, "
                f"{human_size(int(self.read_bandwidth))}/s read"
            )
        elif self.plan.offloaded_bytes:
            lines.append(f"nothing has moved so far: {human_size(int(UNKNOWN_BANDWIDTH))}/s are assumed")
        step = self.plan.prediction.step_seconds
        if step and (moved := self.plan.prediction.moved_bytes):
            a_day = int(moved / step * SECONDS_PER_DAY)
            worn = "" if math.isinf(self.drive_days) else f": the drives last {self.drive_days:.0f} days"
            lines.append(f"{human_size(a_day)} are written in a day of training{worn}")
        return "\n".join(lines)


def report_of(form: PlannedForm) -> PlanReport:
    """The report of a plan."""
    profile = form.profile
    tensors = tuple(
        PlannedTensor(
            number,
            noted.nbytes,
            noted.dtype,
            tuple(noted.shape),
            noted.device,
            noted.made_by,
            measured.saved_at,
            profile.forward_seconds - measured.saved_at + measured.needed_at,
            number in form.plan.out,
        )
        for number, (noted, measured) in enumerate(zip(form.record.tensors, profile.tensors, strict=True))
        if noted.nbytes
    )
    return PlanReport(
        tensors,
        sum(form.limits.values()),
        profile.forward_seconds,
        profile.backward_seconds,
        form.plan.prediction,
    )


def estimate_of(plan: PlanReport, write_bandwidth: float, read_bandwidth: float, tbw: float | None) -> OffloadEstimate:
    """The estimate of a plan, on transfers as fast as those of the dry run."""
    days = drive_days(plan.prediction.moved_bytes, plan.prediction.step_seconds, tbw)
    return OffloadEstimate(plan, write_bandwidth, read_bandwidth, days)


def _table(leaving: Sequence[PlannedTensor]) -> list[str]:
    rows = [("tensor", "made by", "dtype", "shape", "size", "saved after", "unused for")]
    for one in leaving[:_MOST_ROWS]:
        unused = "ever" if math.isinf(one.idle_seconds) else human_seconds(one.idle_seconds)
        rows.append((
            str(one.number), one.made_by or "input", str(one.dtype).removeprefix("torch."),
            " × ".join(map(str, one.shape)), human_size(one.nbytes), human_seconds(one.saved_at), unused,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(leaving) > _MOST_ROWS:
        lines.append(f"and {len(leaving) - _MOST_ROWS} more")
    return lines
