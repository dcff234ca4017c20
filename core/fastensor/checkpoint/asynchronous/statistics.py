"""Counts of what an asynchronous writer has done so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from fastensor.files.words import counted, human_seconds, human_size


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """An :class:`~fastensor.AsyncWriter` at one instant. Saves are counted, unless a field says otherwise. ``print``
    shows it in words."""

    staging: int
    """Being copied right now; a call of ``save`` waits for it."""
    queued: int
    """Copied, and waiting for those before."""
    writing: int
    """Being written right now."""
    durable: int
    """Finished. Durable unless they were not meant to be."""
    failed: int
    cancelled: int
    skipped: int
    """Dropped because the writer was busy (``when_busy="skip"``)."""
    replaced: int
    """Dropped for later ones (``when_busy="latest"``, or a signal handler has saved to the same path)."""
    nbytes: int
    """Size of all files that were finished."""
    stall_seconds: float
    """Seconds that all calls of ``save`` took together."""
    staging_bytes: int
    """Memory that is kept for staging, used or not."""
    peak_staging_bytes: int
    """The most of it that was in use at any instant."""
    shared_nbytes: int = 0
    """Bytes of these files that were not written, because they have not changed (``share_unchanged``)."""

    def __str__(self) -> str:
        going_on = {"being copied": self.staging, "waiting": self.queued, "being written": self.writing}
        ended = {"failed": self.failed, "cancelled": self.cancelled, "skipped": self.skipped, "replaced": self.replaced}
        counts = "".join(f", {count} {what}" for what, count in {**going_on, **ended}.items() if count)
        shared = f", of which {human_size(self.shared_nbytes)} unchanged and shared" * (self.shared_nbytes > 0)
        return (
            f"{counted(self.durable, 'saves')} finished ({human_size(self.nbytes)}{shared}){counts}\n"
            f"the program waited {human_seconds(self.stall_seconds)} in all; {human_size(self.peak_staging_bytes)} of "
            f"{human_size(self.staging_bytes)} staging memory were in use at most"
        )


class SaveCounters:
    """The saves of one writer that have ended. Thread-safe."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        """Number of saves that have ended in each stage."""
        self.nbytes = self.shared_nbytes = 0
        self.stall_seconds = 0.0
        self._lock = threading.RLock()

    def count(self, stage: str, nbytes: int, shared_nbytes: int) -> None:
        """Count a save that has ended in ``stage``, with a file of ``nbytes`` bytes, of which so many are shared."""
        with self._lock:
            self.ends[stage] += 1
            self.nbytes += nbytes
            self.shared_nbytes += shared_nbytes

    def stall(self, seconds: float) -> None:
        """Add the time that a call of ``save`` took."""
        with self._lock:
            self.stall_seconds += seconds

    def forget_threads(self) -> None:
        """In a forked child: no thread holds the lock."""
        self._lock = threading.RLock()
