"""Costs of the saves of states, for trackers and for people."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import fastensor
from fastensor.files.words import counted, human_seconds, human_size


@dataclass(slots=True)
class StateMetrics:
    """One saved state."""

    nbytes: int = 0
    """Bytes of the files that Fastensor has written in this process."""
    stall_seconds: float = 0.0
    """Seconds that ``save_state`` took."""
    seconds: float = 0.0
    """Seconds from the call until the state was published."""

    def as_metrics(self) -> dict[str, float]:
        """The values that Accelerate's trackers get."""
        return {
            "checkpoint/stall_seconds": self.stall_seconds,
            "checkpoint/save_seconds": self.seconds,
            "checkpoint/save_bytes": float(self.nbytes),
            "checkpoint/save_bytes_per_second": self.nbytes / self.seconds,
        }


class StateTotals:
    """All saves and loads of states of one Accelerator in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states = 0
        self._nbytes = 0
        self._stall_seconds = self._seconds = 0.0
        self._files_loaded = self._loaded_nbytes = 0
        self._load_seconds = 0.0

    def add_state(self, state: StateMetrics) -> None:
        with self._lock:
            self._states += 1
            self._nbytes += state.nbytes
            self._stall_seconds += state.stall_seconds
            self._seconds += state.seconds

    def add_load(self, report: fastensor.LoadReport) -> None:
        with self._lock:
            self._files_loaded += 1
            self._loaded_nbytes += report.nbytes
            self._load_seconds += report.seconds

    def summary(self) -> str | None:
        """One line for the end of a training; None if nothing was saved or loaded."""
        parts = []
        if self._states:
            parts.append(
                f"saved {counted(self._states, 'states')} ({human_size(self._nbytes)}) in "
                f"{human_seconds(self._seconds)}, of which training waited {human_seconds(self._stall_seconds)}"
            )
        if self._files_loaded:
            parts.append(
                f"loaded {human_size(self._loaded_nbytes)} in {human_seconds(self._load_seconds)} "
                f"({human_size(self._loaded_nbytes / self._load_seconds)}/s)"
            )
        return "; ".join(parts) or None
