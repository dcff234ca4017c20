"""The report of a load, and what reports of saves share with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastensor.backends.registry import Fallback
from fastensor.errors import UnverifiedCheckpointWarning
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import human_rate, human_seconds, human_size

if TYPE_CHECKING:
    from fastensor.checkpoint.writing.report import SaveReport


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of one load. ``print`` shows it in words."""

    path: str
    nbytes: int
    """Size of the file."""
    backend: str
    """Backend that brought the bytes; ``torch`` also where ``torch.load`` was given the whole file."""
    reason: str
    """Reason for the choice of the backend."""
    verified: bool
    """True if every byte that was loaded matched a CRC32 in the file."""
    resident_fraction: float
    """Part of the file that was in the page cache before the load, estimated."""
    seconds: float
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def bytes_per_second(self) -> float:
        """Size over whole duration."""
        return self.nbytes / self.seconds

    __repr__ = record_repr

    def __str__(self) -> str:
        checked = "verified" if self.verified else "not verified"
        cached = f"{100 * self.resident_fraction:.0f} % were in the page cache"
        return "\n".join((f"{moved(self, 'loaded')}; {checked}; {cached}", *map(str, self.fallbacks)))


def moved(report: SaveReport | LoadReport, done: str) -> str:
    """The first line of a report."""
    rate = human_rate(report.nbytes, report.seconds)
    took = f"in {human_seconds(report.seconds)}{f' ({rate})' if rate else ''}"
    where = without_secrets(report.path)
    return f"{where}: {human_size(report.nbytes)} {done} {took} by {report.backend}: {report.reason}"


def warn_unverified(where: str, why: str = "") -> None:
    """Warn the program that a file could not be verified.

    Args:
        where: the file's name.
        why: the reason, if there is more to say than that the file carries no checksums.
    """
    from fastensor.files.warning import warn_caller

    because = f": {why}" if why else ""
    warn_caller(
        f"{where}: the file carries no checksums that could be verified{because}; it is taken as it is. Saving or "
        f"converting it with Fastensor adds them",
        UnverifiedCheckpointWarning,
    )
