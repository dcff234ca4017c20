"""``fastensor.verify``: read a whole checkpoint in bounded memory and compare it with its checksums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

from isal import isal_zlib

from fastensor.backends import registry
from fastensor.backends.base import Extent
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import OpenedFile, container_of, explained, opened
from fastensor.checkpoint.safetensors_file import checked_entry, read_header
from fastensor.checkpoint.torch_file import (
    open_record,
    read_directory,
    read_pickle,
    verify_compressed,
)
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.containers import Container
from fastensor.stitch.torch_records import Checks

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done, and those to do in all, after every few MiB."""
_BLOCK_NBYTES = 4 << 20
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file whose bytes are not those that were saved."""

    part: str
    """Such as ``record 'archive/data/0'``."""
    offset: int
    """Where it begins in the file."""
    nbytes: int
    found: int
    """The CRC32 that its bytes have."""
    expected: int

    def __str__(self) -> str:
        return Checked(self.part, self.offset, self.nbytes, self.expected).describe(self.found)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared."""

    path: str
    container: Container
    """``torch``, ``safetensors``, or ``legacy`` for files of torch before 1.6."""
    nbytes: int
    """Size of the file."""
    compared: int
    """How many parts were compared with a checksum."""
    compared_nbytes: int
    uncompared: int
    """How many parts carry no checksum."""
    seconds: float
    damage: tuple[Damage, ...] = ()
    """Parts that do not match."""

    @property
    def complete(self) -> bool:
        """Whether everything in the file has a checksum. False means that damage could be there and not be seen."""
        return self.uncompared == 0


class DamagedCheckpointError(CorruptCheckpointError):
    """Parts of a checkpoint do not match their checksums; ``report.damage`` lists them all. Raised by
    :func:`fastensor.verify`."""

    def __init__(self, report: VerifyReport) -> None:
        lines = [str(one) for one in report.damage[:_SHOWN]]
        more = len(report.damage) - len(lines)
        super().__init__(
            f"{report.path}: {'; '.join(lines)}{f'; and {more} more' if more else ''}: the file was damaged after it "
            f"was written. fastensor.load(..., keys=...) still gives what is not damaged"
        )
        self.report = report


def verify(path: Location, *, backend: str = registry.AUTO, progress: Progress | None = None) -> VerifyReport:
    """Read a checkpoint and compare all of it with its checksums, in bounded memory and without rebuilding anything.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`.
        backend: as for :func:`fastensor.load`.
        progress: called now and then with the bytes done and those to do.

    Returns:
        What was compared. If ``report.complete`` is False, the file carries no checksums for parts of it: then only its
        structure is known to be sound, and of a legacy file not even that.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpointError: parts do not match; the error's ``report.damage`` lists all of them.
        CorruptCheckpointError: the structure of the file is damaged, or it is not a checkpoint.
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = fastensor.save({"weight": torch.ones(5)}, path)
    >>> report = fastensor.verify(path)
    >>> report.complete, report.compared
    (True, 2)
    """
    started = time.perf_counter()
    if backend != registry.AUTO:
        registry.get(backend)
    with opened(path) as file:
        container = container_of(file)
        parts = _PARTS[container](file)
        damage = tuple(_compare(file, parts.to_compare, backend, progress or (lambda done, total: None)))
    report = VerifyReport(
        path=file.where,
        container=container,
        nbytes=file.nbytes,
        compared=parts.compared + len(parts.to_compare),
        compared_nbytes=parts.compared_nbytes + sum(part.nbytes for part in parts.to_compare),
        uncompared=parts.uncompared,
        seconds=time.perf_counter() - started,
        damage=damage,
    )
    if damage:
        raise DamagedCheckpointError(report)
    return report


@dataclass(slots=True)
class _Parts:
    """The parts of a file, by what can be said about them."""

    to_compare: list[Checked] = field(default_factory=list)
    compared: int = 0
    compared_nbytes: int = 0
    uncompared: int = 0


def _of_safetensors(file: OpenedFile) -> _Parts:
    header = read_header(file, verify=True)
    filled = [entry for entry in header.entries if entry.nbytes]
    if not header.checked:
        return _Parts(uncompared=len(filled) + 1)
    return _Parts([checked for entry in filled if (checked := checked_entry(entry))], 1, header.nbytes)


def _of_torch(file: OpenedFile) -> _Parts:
    archive = read_directory(file)
    read_pickle(file, archive, verify=True)
    parts = _Parts()
    filled = [record for record in archive.records if record.nbytes]
    if verify_compressed(file, archive):
        return _Parts(compared=len(filled), compared_nbytes=sum(record.nbytes for record in filled))
    checks = Checks(archive, enabled=True)
    for record in filled:
        with explained(file.where):
            opened_record = open_record(file, checks, record)
        if opened_record.compared:
            parts.to_compare.append(Checked.of_record(opened_record))
        else:
            parts.uncompared += 1
    return parts


def _of_legacy(file: OpenedFile) -> _Parts:
    return _Parts(uncompared=1)


_PARTS: dict[Container, Callable[[OpenedFile], _Parts]] = {
    "torch": _of_torch,
    "safetensors": _of_safetensors,
    "legacy": _of_legacy,
}


def _compare(file: OpenedFile, parts: list[Checked], backend: str, progress: Progress) -> Iterator[Damage]:
    """Read the parts in the order of the file and yield those that do not match."""
    ordered = sorted(parts, key=lambda part: part.begin)
    total = sum(part.nbytes for part in ordered)
    block = memoryview(bytearray(min(_BLOCK_NBYTES, max((part.nbytes for part in ordered), default=0))))
    done = 0
    with explained(file.where):
        _, reader = file.open_reader([Extent(part.begin, part.begin + part.nbytes) for part in ordered], backend, [])
        with closing(reader):
            for part in ordered:
                found = 0
                for at in range(0, part.nbytes, _BLOCK_NBYTES):
                    piece = block[: part.nbytes - at]
                    found = isal_zlib.crc32_combine(
                        found, reader.readinto(part.begin + at, piece, checksum=True), piece.nbytes
                    )
                    done += piece.nbytes
                    progress(done, total)
                if found != part.crc32:
                    yield Damage(part.name, part.begin, part.nbytes, found, part.crc32)
