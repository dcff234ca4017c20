"""What a save or a load tells about itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.freeing import Freeing
from fastensor.errors import UnverifiedCheckpointWarning


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save did."""

    path: str
    """The file that was written: symlinks followed."""
    nbytes: int
    """Size of the file."""
    backend: str
    """Which backend moved the bytes."""
    reason: str
    """Why that one."""
    durable: bool
    """Whether file and name were on stable storage when the save returned."""
    atomic: bool
    """Whether the file got its place in one instant, so that nobody could see, or be left with, a part of it. False for
    what is written in place: open files, pipes, devices, and files that cannot be replaced."""
    plan_seconds: float
    """Pickling the object and laying out the file."""
    write_seconds: float
    """Copying, checksumming and writing."""
    sync_seconds: float
    """``fsync`` of the file; 0 if not durable."""
    publish_seconds: float
    """Rename, and ``fsync`` of the directory if durable."""
    seconds: float
    """All of it, from the call until this is true."""
    stall_seconds: float
    """How long the caller was held up: all of it, unless it was saved asynchronously."""
    fallbacks: tuple[Fallback, ...] = ()
    """Ways that were not possible, in the order in which they were given up."""
    wait_seconds: float = 0.0
    """How much of ``write_seconds`` it waited until the space of files that earlier saves had replaced was free."""
    freeing: Freeing = field(default_factory=Freeing, compare=False)
    """What was left to be done when this was true: the space of the file that it has replaced is freed by a thread.
    That keeps the disk busy, and the next save waits for it."""

    @property
    def bytes_per_second(self) -> float:
        """Size over whole duration."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load did."""

    path: str
    nbytes: int
    """Size of the file."""
    backend: str
    """Which backend brought the bytes; ``torch`` also where ``torch.load`` was given the whole file."""
    reason: str
    """Why that one."""
    verified: bool
    """Whether every byte that was loaded matched a CRC32 in the file."""
    resident_fraction: float
    """How much of the file was in the page cache beforehand, estimated."""
    seconds: float
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def bytes_per_second(self) -> float:
        """Size over whole duration."""
        return self.nbytes / self.seconds


def warn_unverified(where: str, why: str = "", *, stacklevel: int) -> None:
    """Warn that a file could not be verified, and why if there is more to be said. ``stacklevel`` 2 blames the caller
    of this."""
    because = f": {why}" if why else ""
    warnings.warn(
        f"{where}: the file carries no checksums that could be verified{because}; it is taken as it is. Saving or "
        f"converting it with Fastensor adds them",
        UnverifiedCheckpointWarning,
        stacklevel=stacklevel + 1,
    )
