"""``fastensor.verify``: read a whole checkpoint in bounded memory and compare it with its checksums."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

from isal import isal_zlib

from fastensor.backends import registry
from fastensor.backends.base import Extent, Reader
from fastensor.checkpoint.archive import (
    find_pickle,
    open_record,
    read_directory,
    verify_compressed,
)
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.choosing import Wanted
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import OpenedFile, container_of, explained, opened
from fastensor.checkpoint.safetensors_file import checked_entry, read_header
from fastensor.errors import CorruptCheckpointError
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.containers import Container
from fastensor.stitch.safetensors import Entry
from fastensor.stitch.torch_records import Checks, record_ends
from fastensor.stitch.zip_directory import Record

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

    def __reduce__(self) -> tuple[type[DamagedCheckpointError], tuple[VerifyReport]]:
        return type(self), (self.report,)


def verify(path: Location, *, backend: BackendChoice = registry.AUTO, progress: Progress | None = None) -> VerifyReport:
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
    check_choice(backend)
    with opened(path) as file:
        container = container_of(file)
        outcome = _compare(file, _PARTS[container](file), backend, progress or (lambda done, total: None))
    report = VerifyReport(
        path=file.where,
        container=container,
        nbytes=file.nbytes,
        compared=outcome.compared,
        compared_nbytes=outcome.compared_nbytes,
        uncompared=outcome.uncompared,
        seconds=time.perf_counter() - started,
        damage=tuple(outcome.damage),
    )
    if report.damage:
        raise DamagedCheckpointError(report)
    return report


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of bytes of the file, and where among them to look for what is compared."""

    extent: Extent
    compared_in: Callable[[Reader], Checked | None]
    """Finds out what to compare, reading what it takes from the extent; None if there is no checksum."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a file, by what can be said about them."""

    to_read: Sequence[_Part] = ()
    compared: int = 0
    compared_nbytes: int = 0
    uncompared: int = 0


def _of_safetensors(file: OpenedFile) -> _Parts:
    header = read_header(file, verify=True)
    filled = [entry for entry in header.entries if entry.nbytes]
    if not header.checked:
        return _Parts(uncompared=len(filled) + 1)
    return _Parts([_part_of_entry(entry) for entry in filled], 1, header.nbytes)


def _part_of_entry(entry: Entry) -> _Part:
    return _Part(Extent(entry.begin, entry.end), lambda reader: checked_entry(entry))


def _of_torch(file: OpenedFile) -> _Parts:
    archive = read_directory(file)
    find_pickle(archive, file.where)
    filled = [record for record in archive.records if record.nbytes]
    if verify_compressed(file, archive):
        return _Parts(compared=len(filled), compared_nbytes=sum(record.nbytes for record in filled))
    checks, ends = Checks(archive, enabled=True), record_ends(archive)
    return _Parts([_part_of_record(record, checks, ends, file.where) for record in filled])


def _part_of_record(record: Record, checks: Checks, ends: Mapping[int, int], where: str) -> _Part:
    def compared_in(reader: Reader) -> Checked | None:
        opened_record = open_record(reader, checks, record, where)
        return Checked.of_record(opened_record) if opened_record.compared else None

    return _Part(Extent(record.header_offset, ends[record.header_offset]), compared_in)


def _of_legacy(file: OpenedFile) -> _Parts:
    return _Parts(uncompared=1)


_PARTS: dict[Container, Callable[[OpenedFile], _Parts]] = {
    "torch": _of_torch,
    "safetensors": _of_safetensors,
    "legacy": _of_legacy,
}


@dataclass(slots=True)
class _Outcome:
    compared: int
    compared_nbytes: int
    uncompared: int
    damage: list[Damage] = field(default_factory=list)


def _compare(file: OpenedFile, parts: _Parts, backend: BackendChoice, progress: Progress) -> _Outcome:
    """Read the parts in the order of the file."""
    outcome = _Outcome(parts.compared, parts.compared_nbytes, parts.uncompared)
    ordered = sorted(parts.to_read, key=lambda part: part.extent.begin)
    total = sum(part.extent.end - part.extent.begin for part in ordered)
    block = memoryview(bytearray(_BLOCK_NBYTES))
    done = 0
    with explained(file.where):
        reader = file.open_reader([part.extent for part in ordered], Wanted(backend), []).reader
        with closing(reader):
            for part in ordered:
                checked = part.compared_in(reader)
                if checked is None:
                    outcome.uncompared += 1
                    continue
                found = 0
                for at in range(0, checked.nbytes, _BLOCK_NBYTES):
                    piece = block[: checked.nbytes - at]
                    crc32 = reader.readinto(checked.begin + at, piece, checksum=True)
                    found = isal_zlib.crc32_combine(found, crc32, piece.nbytes)
                    progress(done + at + piece.nbytes, total)
                done += part.extent.end - part.extent.begin
                progress(done, total)
                outcome.compared += 1
                outcome.compared_nbytes += checked.nbytes
                if found != checked.crc32:
                    outcome.damage.append(Damage(checked.name, checked.begin, checked.nbytes, found, checked.crc32))
    return outcome
