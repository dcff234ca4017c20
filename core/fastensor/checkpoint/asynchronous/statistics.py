"""What an asynchronous writer has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """An :class:`~fastensor.AsyncWriter` at one instant. Saves are counted, unless a field says otherwise."""

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
    """Dropped for later ones (``when_busy="latest"``)."""
    nbytes: int
    """Size of all files that were finished."""
    stall_seconds: float
    """How long calls of ``save`` took, all of them together."""
    staging_bytes: int
    """Memory that is kept for staging, used or not."""
    peak_staging_bytes: int
    """The most of it that was in use at any instant."""
