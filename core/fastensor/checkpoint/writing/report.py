"""The report of a save."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastensor.backends.registry import Fallback
from fastensor.files.shown import record_repr
from fastensor.files.words import human_seconds, human_size


@dataclass(slots=True, eq=False)
class Freeing:
    """Progress of freeing the space of a file that has lost its name."""

    nbytes: int = 0
    """Bytes that are freed afterwards. 0 if the file has other names, was missing, or is so small that it is freed at
    once."""
    seconds: float | None = None
    """Seconds that freeing took; None until it is done."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The report of one save. ``print`` shows it in words."""

    path: str
    """The file that was written: symlinks followed."""
    nbytes: int
    """Size of the file."""
    backend: str
    """Backend that moved the bytes."""
    reason: str
    """Reason for the choice of the backend."""
    durable: bool
    """True if file and name were on stable storage when the save returned."""
    atomic: bool
    """True if the file got its name in one instant, so that no reader can see, and no crash can leave, a part of it.
    False for what is written in place: open files, pipes, devices, and files that cannot be replaced."""
    plan_seconds: float
    """Pickling the object and laying out the file."""
    write_seconds: float
    """Copying, checksumming and writing."""
    sync_seconds: float
    """``fsync`` of the file; 0 if not durable."""
    publish_seconds: float
    """Rename, and ``fsync`` of the directory if durable."""
    seconds: float
    """The whole save, from the call until the file is in place."""
    stall_seconds: float
    """Seconds that the caller waited: all of ``seconds``, unless the save was asynchronous."""
    fallbacks: tuple[Fallback, ...] = ()
    """Ways that were not possible, in the order in which they failed."""
    wait_seconds: float = 0.0
    """The part of ``write_seconds`` in which the save waited for the space of replaced files to be freed."""
    shared_nbytes: int = 0
    """Bytes that were not written, because they have not changed: the file shares them with an earlier one, by its
    blocks or as a hard link."""
    freeing: Freeing = field(default_factory=Freeing, compare=False, repr=False)
    """The work left when the save was done: a thread frees the space of the replaced file. That keeps the disk busy,
    and a later save waits for it if it needs the space, or if 32 MiB are not freed yet."""

    __repr__ = record_repr

    def __str__(self) -> str:
        from fastensor.checkpoint.report import moved  # few saves are printed

        kind = f"{'durable' if self.durable else 'not durable'}, {'atomic' if self.atomic else 'written in place'}"
        shared = f"; {human_size(self.shared_nbytes)} unchanged and shared" * (self.shared_nbytes > 0)
        waited = f"; the program waited {human_seconds(self.stall_seconds)}" * (self.stall_seconds != self.seconds)
        return "\n".join(
            (
                f"{moved(self, 'saved')}; {kind}{shared}{waited}",
                f"planned {human_seconds(self.plan_seconds)}, written {human_seconds(self.write_seconds)}, synced "
                f"{human_seconds(self.sync_seconds)}, published {human_seconds(self.publish_seconds)}",
                *map(str, self.fallbacks),
            )
        )

    @property
    def bytes_per_second(self) -> float:
        """Size over whole duration."""
        return self.nbytes / self.seconds
