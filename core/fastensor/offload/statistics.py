"""What an offload has done, as numbers, and what that does to a drive."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

_TERABYTE = 10**12
_SECONDS_PER_DAY = 86_400
WRITE_AMPLIFICATION = 1.0
"""What a drive writes for each byte that it is given. Writes are sequential and large, for which the FlashNeuron paper
(section 3.4) takes nearly one."""


WRITTEN_BY = "written by "
"""What counts by backend begin with."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What is counted on the way, with the mover's lock held."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """That threads of the training have waited."""

    def note_peak(self, what: str, nbytes: int) -> None:
        self.counts[what] = max(self.counts[what], nbytes)


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """What an :class:`ActivationOffload` has done. Sizes are in bytes, times in seconds."""

    steps: int
    """How many ``step()`` blocks were entered."""
    packed: int
    """Tensors that autograd has saved in them."""
    offloaded: int
    """Ranges of memory that were taken over, each for one or several saved tensors."""
    offloaded_nbytes: int
    """Of these."""
    shared_nbytes: int
    """Of saved tensors whose memory was offloaded already for another one."""
    written_nbytes: int
    """What has gone to SSDs."""
    read_nbytes: int
    """What has come back from there."""
    taken_back_nbytes: int
    """What was needed before its write had begun, so that it was not written."""
    kept: Mapping[str, int]
    """Bytes that were left in memory, by the reason: ``parameter``, ``small``, ``alive anyway``, or ``not moved``
    because a disk is full or fails, and others."""
    failed_writes: int
    """Ranges that stay in memory because there was no space, or the disk has failed."""
    prefetch_hits: int
    """Ranges that were there when they were needed first, having been moved out."""
    prefetch_late: int
    """Those that were still being read."""
    misses: int
    """Those that nobody had begun to read."""
    waited_to_write: float
    """That forward passes have waited for the SSD."""
    waited_to_read: float
    """That backward passes have."""
    hook_seconds: float
    """That threads of the training have spent here, waiting included."""
    peak_pending_nbytes: int
    """The most that was saved and not on an SSD yet."""
    peak_resident_nbytes: int
    """The most that was read, or being read, and not let go of yet."""
    peak_resting_nbytes: int
    """The most that was left in host memory because ``dram_bytes`` allow it."""
    peak_ssd_nbytes: int
    """The most that was in use of the SSDs."""
    reserved_ssd_nbytes: int
    """What the files take there now."""
    written_by: Mapping[str, int]
    """Bytes by backend."""
    drive_days: float
    """How long the drives last at this pace; infinity if nothing is written, or their ``drive_tbw`` is not known."""

    @property
    def stall_seconds(self) -> float:
        """That the training has waited for SSDs."""
        return self.waited_to_write + self.waited_to_read

    def __str__(self) -> str:
        moved = f"{_human(self.offloaded_nbytes)} offloaded ({_human(self.written_nbytes)} written, "
        moved += f"{_human(self.read_nbytes)} read)"
        wanted = self.prefetch_hits + self.prefetch_late + self.misses
        lines = [
            f"{self.steps} steps: {moved}, {_human(self.shared_nbytes)} shared",
            f"stalled {self.stall_seconds:.2f} s, in hooks {self.hook_seconds:.2f} s; "
            f"{self.prefetch_hits} of {wanted} were there in time",
            f"at most {_human(self.peak_pending_nbytes)} on the way out, {_human(self.peak_resident_nbytes)} on the "
            f"way in, {_human(self.peak_ssd_nbytes)} on SSDs",
            "kept: " + (", ".join(f"{why} {_human(count)}" for why, count in self.kept.items()) or "nothing"),
        ]
        if math.isfinite(self.drive_days):
            lines.append(f"at this pace the drives last {self.drive_days:.0f} days")
        return "\n".join(lines)


def drive_days(written_nbytes: int, seconds: float, terabytes: float | None) -> float:
    """How many days drives last that may be given so many terabytes.

    >>> round(drive_days(3 * 10**9, 1.0, 1400.0), 1)
    5.4
    >>> drive_days(0, 1.0, 1400.0)
    inf
    """
    if terabytes is None or not written_nbytes or seconds <= 0:
        return math.inf
    return terabytes * _TERABYTE / (written_nbytes / seconds * WRITE_AMPLIFICATION) / _SECONDS_PER_DAY


def _human(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
