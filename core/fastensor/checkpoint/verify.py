"""``fastensor.verify``: comparing a whole checkpoint with its checksums, in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Literal, TypeVar, cast

from fastensor.backends import registry
from fastensor.checkpoint.archive import read_archive, verify_compressed
from fastensor.checkpoint.catalog import read_catalog
from fastensor.checkpoint.directories import BESIDE_SHARDS, metadata_names, nbytes_in_directory
from fastensor.checkpoint.folders import (
    OTHER_KINDS,
    Entry,
    Member,
    OtherKind,
    entries_at,
    folder_at,
    main_entry,
    members_of,
    name_in,
)
from fastensor.checkpoint.foreign_code import foreign_code
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.opened import OpenedFile, container_of, opened, read_exactly
from fastensor.checkpoint.progress import Progress, reporting, tell_part
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.checkpoint.reader import PartReader, extents_of
from fastensor.checkpoint.safetensors_file import read_header
from fastensor.checkpoint.sharded import check_holds, files_of
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import counted, human_rate, human_seconds, human_size, some_of
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.containers import Container
from fastensor.stitch.parts import Damage, Part
from fastensor.stitch.zip_directory import LOCAL_HEADER

_SHOWN = 5
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a :func:`verify`."""

    path: str
    container: Container | Literal["dcp", "huggingface", "folder", "index"] | OtherKind
    """``torch``, ``safetensors``, ``legacy`` for files of torch before 1.6, ``dcp`` for a distributed checkpoint,
    ``huggingface`` for a model in several files, or ``folder`` for any other folder of several files. Where the command
    line shows single files: what a file is that is no checkpoint."""
    nbytes: int
    """Size of the file, or of all files that are checkpoints."""
    compared: int
    """How many parts were compared with a checksum."""
    compared_bytes: int
    """Size of these parts."""
    uncompared: int
    """How many parts carry no checksum. What is neither a checkpoint, nor a text, nor a link to a directory in the
    folder, counts as one."""
    seconds: float
    damage: tuple[Damage, ...] = ()
    """The parts that do not match."""
    code: tuple[str, ...] = ()
    """Functions and classes that the file names and ``weights_only=True`` refuses: what it was built to run, or what it
    needs. Checksums say nothing about them. Not looked for in a damaged file."""
    not_compared: tuple[str, ...] = ()
    """The files of a folder that were not compared, or not wholly: their paths in it. Texts, such as ``config.json``,
    and links to directories in the folder are among them, though they do not make the report incomplete."""

    @property
    def is_of_checkpoint(self) -> bool:
        """Whether this is not only the name of a file that is no checkpoint."""
        return self.container not in ("index", *OTHER_KINDS)

    __repr__ = record_repr

    def __str__(self) -> str:
        """The result for people, in a line or several."""
        state = "damaged" if self.damage else "intact" if self.complete else "no damage found"
        rate = human_rate(self.compared_bytes, self.seconds)
        lines = [
            f"{without_secrets(self.path)}: {state}; {counted(self.compared, 'parts')} of "
            f"{human_size(self.compared_bytes)} compared in {human_seconds(self.seconds)}{f' ({rate})' if rate else ''}"
        ]
        if not self.complete:
            lines.append(f"{counted(self.uncompared, 'parts')} without checksum")
        lines += map(str, self.damage[:_SHOWN])
        if len(self.damage) > _SHOWN:
            lines.append(f"and {len(self.damage) - _SHOWN} more")
        if self.not_compared:
            lines.append(f"not compared, or not wholly: {some_of(self.not_compared, _SHOWN)}")
        if self.code:
            lines.append(f"names code that weights_only=True refuses: {some_of(self.code, _SHOWN)}")
        return "\n".join(lines)

    @property
    def complete(self) -> bool:
        """Whether every part has a checksum, but for texts. If False, there may be damage that no reader can see."""
        return self.uncompared == 0


class DamagedCheckpointError(CorruptCheckpointError):
    """Parts of a checkpoint do not match their checksums. ``report.damage`` lists all of them. Raised by
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


@checks_keywords
def verify(path: Location, *, backend: BackendChoice = registry.AUTO, progress: Progress | None = None) -> VerifyReport:
    """Read a checkpoint and compare all of it with its checksums, in bounded memory and without rebuilding anything.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`; or
            ``*.index.json`` of a model in several files; or a folder of this machine, of which all is read, with its
            folders: models, states of Accelerate, checkpoints of a Trainer, checkpoints of
            ``torch.distributed.checkpoint``; or the directory of one of these at a URL. Links to files are
            followed, links to directories are not.
        backend: as for :func:`fastensor.load`.
        progress: called after every few MiB with the bytes done and the bytes to do.

    Returns:
        How much was compared. If ``complete`` is False, parts of the file carry no checksum: of these, only the
        structure is known to be intact, and of a legacy file not even that, nor that it holds the tensors that the
        index of its model expects in it. ``not_compared`` names the files of a folder of which that is true, and all
        that are no checkpoints. A file that is intact is not safe for that reason: ``code`` lists what it names beyond
        what ``weights_only=True`` allows.

    Raises:
        FileNotFoundError: there is no such file, or one of the files of a model is missing.
        DamagedCheckpointError: parts do not match; the error's ``report.damage`` lists all of them. All files of a
            folder are read before any error is raised. Notes of the error (``__notes__``) say which other files could
            not be verified, and why. Damage is raised first, then what is wrong with the first file.
        CorruptCheckpointError: the structure of a file is damaged, or it lacks a tensor that the index of its model
            expects in it.
        NotACheckpointError: the file is something else than a checkpoint; or one in a folder is, whose name ends in
            ``.ckpt``, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``, and which is no pickle either.
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes; or there is
            no checkpoint in the folder.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = fastensor.save({"weight": torch.ones(5)}, path)
    >>> report = fastensor.verify(path)
    >>> report.complete, report.compared
    (True, 2)
    """
    check_choice(backend)
    with reporting(progress) as tell:
        entries = entries_at(path)
        members = _members_of(entries)
        if len(members) == 1:
            return verify_member(members[0], backend, tell)
        return _verify_each(path, _empty_report(path, entries), members, backend, tell)


def members_at(path: Location) -> list[Member]:
    """The files that :func:`verify` reads one by one, and those that it names only."""
    return _members_of(entries_at(path))


def _members_of(entries: Sequence[Entry]) -> list[Member]:
    """The files of entries, but for those that are read with a distributed checkpoint."""
    if len(entries) == 1:
        return members_of(entries)
    beside = {Path(str(entry.path)) / BESIDE_SHARDS for entry in entries if metadata_names(entry.path)}
    return members_of([entry for entry in entries if entry.path not in beside])


def verify_member(member: Member, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for one of :func:`members_at`. Of an index, only that it is one is known."""
    if member.kind == "checkpoint":
        return verify_part(member.path, member.expected, backend, progress)
    where = str(member.path)
    if member.kind == "index":
        files_of(Path(where))
    uncompared = 0 if member.kind in ("index", "text", "link") else 1
    return VerifyReport(where, member.kind, member.nbytes, 0, 0, uncompared, 0.0)


def verify_part(path: Location, expected: Set[str] | None, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for a file or a distributed checkpoint.

    Args:
        path: of one of :func:`members_at`.
        expected: the names of tensors that the file must hold, if not None; a distributed checkpoint is no such file.
            Legacy files do not say what they hold.
        backend, progress: as there.
    """
    if expected is None and metadata_names(path):
        from fastensor.checkpoint.dcp.catalog import verify_directory  # loads torch.distributed.checkpoint

        return verify_directory(cast(str, path), backend, progress)
    with opened(path) as file:
        report = verify_opened(file, backend, progress)
        if expected is not None and report.container != "legacy":
            check_holds(file.where, read_catalog(file, verify=False).tensors, expected)
        return report


def _verify_each(
    path: Location, empty: VerifyReport, members: Sequence[Member], backend: BackendChoice, progress: Progress
) -> VerifyReport:
    """One report of the files of a model, or of a folder."""
    started = time.perf_counter()
    folder = folder_at(path)
    reports: list[tuple[str, VerifyReport]] = []
    failures: list[Exception] = []
    named = ((member, progress) for member in members if member.kind != "checkpoint")
    read = [member for member in members if member.kind == "checkpoint"]
    for member, tell in chain(named, with_progress(read, attrgetter("path"), progress)):
        try:
            report = verify_member(member, backend, tell)
        except DamagedCheckpointError as error:
            report = error.report
        except (CorruptCheckpointError, NotACheckpointError, UnsupportedContentError, OSError) as error:
            failures.append(error)
            continue
        reports.append((name_in(folder, member.path), report))
    joined = replace(_joined(empty, reports), seconds=time.perf_counter() - started)
    if joined.damage:
        failures.insert(0, DamagedCheckpointError(joined))
    if not failures:
        return joined
    first, *others = failures
    whole = "model" if joined.container == "huggingface" else "folder"
    for other in others:
        first.add_note(f"another file of the {whole} could not be verified: {other}")
    raise first


def _empty_report(path: Location, entries: Sequence[Entry]) -> VerifyReport:
    """The report of a model or folder of which nothing was read."""
    main = main_entry(path, entries)
    if main is not None and main.kind == "index":
        return VerifyReport(str(main.path), "huggingface", 0, 0, 0, 0, 0.0)
    return VerifyReport(name_of(path), "dcp" if metadata_names(path) else "folder", 0, 0, 0, 0, 0.0)


def with_progress(
    items: Sequence[_T], path_of: Callable[[_T], Location], progress: Progress
) -> Iterator[tuple[_T, Progress]]:
    """Files, and for each one the progress that it is to call, which counts as a part of that of all files."""
    if len(items) == 1:  # it may be remote
        yield items[0], progress
        return
    sizes = [_nbytes_of(Path(str(path_of(item)))) for item in items]
    done, total = 0, sum(sizes)
    for item, nbytes in zip(items, sizes, strict=True):
        yield item, partial(tell_part, progress, done, total)
        done += nbytes
        progress(done, total)


def _nbytes_of(path: Path) -> int:
    """The size of a file, or of those in a directory; 0 if it cannot be had: whoever opens it says why."""
    try:
        return nbytes_in_directory(str(path)) if path.is_dir() else path.stat().st_size
    except OSError:
        return 0


def _joined(empty: VerifyReport, reports: Sequence[tuple[str, VerifyReport]]) -> VerifyReport:
    """The report of the files of a folder, from those of each by its path there."""
    return replace(
        empty,
        nbytes=sum(report.nbytes for _, report in reports if report.is_of_checkpoint),
        compared=sum(report.compared for _, report in reports),
        compared_bytes=sum(report.compared_bytes for _, report in reports),
        uncompared=sum(report.uncompared for _, report in reports),
        damage=tuple(replace(one, part=f"{name}: {one.part}") for name, report in reports for one in report.damage),
        code=tuple(dict.fromkeys(name for _, report in reports for name in report.code)),
        not_compared=tuple(sorted(one for name, report in reports for one in _not_compared(report, name))),
    )


def _not_compared(report: VerifyReport, name: str) -> Iterator[str]:
    """The files of a folder that were not compared, or not wholly, of a file or distributed checkpoint in it."""
    if report.not_compared:
        yield from (os.path.normpath(os.path.join(name, one)) for one in report.not_compared)
    elif not (report.complete and report.is_of_checkpoint):
        yield name


def verify_opened(file: OpenedFile, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for a file that is open already, and stays so."""
    started = time.perf_counter()
    container = container_of(file)
    compared = _ComparedParts()
    parts = _PARTS[container](file, compared)
    _compare(file, parts, compared, backend, progress)
    report = VerifyReport(
        path=file.where,
        container=container,
        nbytes=file.nbytes,
        compared=compared.compared,
        compared_bytes=compared.compared_bytes,
        uncompared=compared.uncompared,
        seconds=time.perf_counter() - started,
        damage=tuple(compared.damage),
    )
    if report.damage:
        raise DamagedCheckpointError(report)
    return replace(report, code=foreign_code(file))


@dataclass(slots=True)
class _ComparedParts:
    """Counts of the parts that have been compared so far."""

    compared: int = 0
    compared_bytes: int = 0
    uncompared: int = 0
    damage: list[Damage] = field(default_factory=list)

    def add_compared(self, nbytes: int) -> None:
        self.compared += 1
        self.compared_bytes += nbytes


def _parts_of_safetensors(file: OpenedFile, compared: _ComparedParts) -> Sequence[Part]:
    header = read_header(file, verify=True)
    if header.checked:
        compared.add_compared(header.nbytes)
    else:
        compared.uncompared += 1
    return header.tensors


def _parts_of_torch(file: OpenedFile, compared: _ComparedParts) -> Sequence[Part]:
    archive = read_archive(file)
    if not archive.compressed:
        return archive.parts
    verify_compressed(file)
    for part in archive.parts:
        if part.nbytes:
            compared.add_compared(part.nbytes)
    return ()


def _parts_of_legacy(file: OpenedFile, compared: _ComparedParts) -> Sequence[Part]:
    compared.uncompared = 1
    return ()


_PARTS: dict[Container, Callable[[OpenedFile, _ComparedParts], Sequence[Part]]] = {
    "torch": _parts_of_torch,
    "safetensors": _parts_of_safetensors,
    "legacy": _parts_of_legacy,
}
"""The parts to compare, by container. What these functions compare themselves they add to the counts."""


def _compare(
    file: OpenedFile, parts: Sequence[Part], compared: _ComparedParts, backend: BackendChoice, progress: Progress
) -> None:
    """Compare the parts that are not empty, in the order of the file."""
    for part in parts:
        if part.header_nbytes and not part.nbytes:
            _check_name(part, read_exactly(file, part.begin, part.header_nbytes), file.where)
    ordered = sorted((part for part in parts if part.nbytes), key=attrgetter("begin"))
    total = sum(part.end - part.begin for part in ordered)
    done = 0
    with PartReader(file, extents_of(ordered), ReadOptions(backend), verify=True) as reader:
        for part in ordered:
            header = bytearray(part.header_nbytes)
            reader.data_begin(part, memoryview(header) if header else None)  # raises if the local header is damaged
            _check_name(part, header, file.where)
            if part.crc32 is None:
                compared.uncompared += 1
                continue
            damage = reader.find_damage(part, partial(_add_progress, progress, done, total))
            done += part.end - part.begin
            progress(done, total)
            compared.add_compared(part.nbytes)
            compared.damage += [damage] if damage else []


def _check_name(part: Part, header: bytes | bytearray, where: str) -> None:
    """
    Raises:
        CorruptCheckpointError: a record has another name in front of it than in the directory. No checksum covers
            names, and a record of another name is not found when the file is loaded.
    """
    name = bytes(header[LOCAL_HEADER.size :])
    if header and name != part.name.encode():
        raise CorruptCheckpointError(
            f"{where}: the local header at offset {part.begin} names the record {name!r}, the directory {part.name!r}: "
            f"the file was damaged after it was written"
        )


def _add_progress(progress: Progress, before: int, total: int, read: int) -> None:
    progress(before + read, total)
