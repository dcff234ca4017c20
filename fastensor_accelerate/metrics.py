"""Costs of the saves of states, for trackers and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fastensor
from fastensor.files.words import counted, human_seconds, human_size


@dataclass(frozen=True, slots=True)
class StateCost:
    """Costs of one saved state."""

    nbytes: int
    """Bytes of the files that Fastensor has written in this process."""
    stall_seconds: float
    """Seconds that ``save_state`` took."""
    seconds: float
    """Seconds from the call until the state was published."""
    shared_nbytes: int = 0
    """The part of ``nbytes`` that was not written, because it has not changed."""

    def as_metrics(self) -> dict[str, float]:
        """The values that Accelerate's trackers get."""
        return {
            "checkpoint/stall_seconds": self.stall_seconds,
            "checkpoint/save_seconds": self.seconds,
            "checkpoint/save_bytes": float(self.nbytes),
            "checkpoint/shared_bytes": float(self.shared_nbytes),
            "checkpoint/save_bytes_per_second": self.nbytes / self.seconds,
        }


def summary(saved: Sequence[StateCost], loaded: Sequence[fastensor.LoadReport]) -> str:
    """One line for the end of a training; empty if nothing was saved or loaded."""
    parts = []
    if saved:
        size, seconds = sum(one.nbytes for one in saved), sum(one.seconds for one in saved)
        waited, shared_nbytes = sum(one.stall_seconds for one in saved), sum(one.shared_nbytes for one in saved)
        shared = f", of which {human_size(shared_nbytes)} unchanged and shared" * (shared_nbytes > 0)
        parts.append(
            f"saved {counted(len(saved), 'states')} ({human_size(size)}{shared}) in {human_seconds(seconds)}, of which "
            f"training waited {human_seconds(waited)}"
        )
    if loaded:
        size, seconds = sum(one.nbytes for one in loaded), sum(one.seconds for one in loaded)
        parts.append(f"loaded {human_size(size)} in {human_seconds(seconds)} ({human_size(size / seconds)}/s)")
    return "; ".join(parts)
