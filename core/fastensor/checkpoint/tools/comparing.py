"""Comparing files with their checksums, in bounded memory, and the reports of one file or of several together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from fastensor.checkpoint.containers import Container, container_in, container_of
from fastensor.checkpoint.progress import Progress, tell_part
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions, read_exactly
from fastensor.checkpoint.reading.reader import PartReader, extents_of
from fastensor.checkpoint.tools.folders import OTHER_KINDS, OtherKind
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import counted, human_rate, human_seconds, human_size, some_of
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.damage import Damage
from fastensor.stitch.parts import LOCAL_HEADER, Part

_SHOWN = 5
_Verified: TypeAlias = Container | Literal["dcp", "huggingface", "folder", "index"] | OtherKind


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a :func:`verify`."""

    path: str
    container: _Verified
    """``torch``, ``safetensors``, ``legacy`` for files of torch before 1.6, ``dcp`` for a distributed checkpoint,
    ``huggingface`` for a model in several files, or ``folder`` for any other folder of several files. Where the command
    line shows single files: what a file is that is no checkpoint."""
    nbytes: int
    """Size of the file, or of all files that are checkpoints."""
    compared: int
    """Number of parts that were compared with a checksum."""
    compared_bytes: int
    """Size of these parts."""
    uncompared: int
    """Number of parts that carry no checksum. What is neither a checkpoint, nor a text, nor a link to a directory in
    the folder, counts as one; so does a file that does not say whether it holds what the index of its model expects."""
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
        """True if this is not only the name of a file that is no checkpoint."""
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
        """True if every part has a checksum, but for texts. If False, there may be damage that no reader can see."""
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


@dataclass(slots=True)
class Comparison:
    """Counts of what was compared so far of a file, or of several."""

    nbytes: int = 0
    """Size of the files."""
    compared: int = 0
    compared_bytes: int = 0
    uncompared: int = 0
    damage: list[Damage] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    def add_part(self, nbytes: int, damage: Damage | None = None) -> None:
        """Count a part that was compared, and that is damaged if that is given."""
        self.compared += 1
        self.compared_bytes += nbytes
        self.damage += [] if damage is None else [damage]

    def add_report(self, report: VerifyReport, name: str, offset: int = 0) -> None:
        """Count what is in a part.

        Args:
            report: of the part.
            name: of the part, for damage in it.
            offset: where the part begins in the file.
        """
        self.compared += report.compared
        self.compared_bytes += report.compared_bytes
        self.uncompared += report.uncompared
        self.code += report.code
        self.damage += [replace(one, part=f"{name}: {one.part}", offset=offset + one.offset) for one in report.damage]

    def add_file(self, report: VerifyReport, name: str) -> None:
        """Count a file of a folder, or a distributed checkpoint in it, by its path in the folder."""
        self.add_report(report, name)
        self.nbytes += report.nbytes if report.is_of_checkpoint else 0
        self.not_compared += _not_compared(report, name)

    def report(self, path: str, container: _Verified) -> VerifyReport:
        """The report of all that was compared."""
        return VerifyReport(
            path=path,
            container=container,
            nbytes=self.nbytes,
            compared=self.compared,
            compared_bytes=self.compared_bytes,
            uncompared=self.uncompared,
            seconds=time.perf_counter() - self._started,
            damage=tuple(self.damage),
            code=tuple(dict.fromkeys(self.code)),
            not_compared=tuple(sorted(self.not_compared)),
        )


def _not_compared(report: VerifyReport, name: str) -> Iterator[str]:
    """The files of a folder that were not compared, or not wholly, of a file or distributed checkpoint in it."""
    if report.not_compared:
        yield from (os.path.normpath(os.path.join(name, one)) for one in report.not_compared)
    elif not (report.complete and report.is_of_checkpoint):
        yield name


class FileToVerify(NamedTuple):
    """A file of a folder that is compared by itself."""

    name: str
    """Its path in the folder."""
    nbytes: int
    """Its size, as far as it is read; 0 if it cannot be had: whoever opens the file says why."""
    compare: Callable[[Progress], VerifyReport]
    """Reads it. What it raises is raised when all other files were read."""


def compare_files(tasks: Sequence[FileToVerify], path: str, container: _Verified, progress: Progress) -> VerifyReport:
    """:func:`compare_each` for a file, or several. The report of a single one is returned as it is."""
    if len(tasks) == 1:  # its size may not be known
        return tasks[0].compare(progress)
    return compare_each(Comparison(), tasks, path, container, progress)


def compare_each(
    comparison: Comparison, tasks: Sequence[FileToVerify], path: str, container: _Verified, progress: Progress
) -> VerifyReport:
    """Compare files that belong together, and give one report of them.

    Args:
        comparison: what was compared before.
        tasks: the files.
        path, container: of all of them.
        progress: gets the bytes of all files.

    Raises:
        DamagedCheckpointError: files are damaged. Its notes say which others could not be compared.
        Exception: what the first of those files has raised, with the others as its notes.
    """
    failures: list[Exception] = []
    done, total = 0, sum(task.nbytes for task in tasks)
    for task in tasks:
        try:
            comparison.add_file(task.compare(partial(tell_part, progress, done, total)), task.name)
        except DamagedCheckpointError as error:
            comparison.add_file(error.report, task.name)
        except (CorruptCheckpointError, NotACheckpointError, UnsupportedContentError, OSError) as error:
            failures.append(error)
        done += task.nbytes
        if task.nbytes:
            progress(done, total)
    report = comparison.report(path, container)
    if report.damage:
        failures.insert(0, DamagedCheckpointError(report))
    if failures:
        raise with_notes(failures, f"another file of the {_WHOLE.get(container, container)} could not be verified")
    return report


_WHOLE = {"huggingface": "model", "dcp": "checkpoint"}
"""Words for the files of a container together, in messages."""


def with_notes(failures: Sequence[Exception], what: str) -> Exception:
    """The first of several failures, whose notes are the others, each behind what it means."""
    first, *others = failures
    for other in others:
        first.add_note(f"{what}: {other}")
    return first


def verify_opened(file: OpenedFile, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`fastensor.verify` for a file that is open already, and stays so."""
    container = container_in(file)
    comparison = Comparison(file.nbytes)
    found = container.to_compare(file)
    found.compare_others()
    comparison.uncompared = found.uncompared
    for nbytes in found.compared:
        comparison.add_part(nbytes)
    _compare(file, found.parts, comparison, backend, progress)
    report = comparison.report(file.where, container_of(file))
    if report.damage:
        raise DamagedCheckpointError(report)
    return replace(report, code=container.foreign_code(file))


def _compare(
    file: OpenedFile, parts: Sequence[Part], comparison: Comparison, backend: BackendChoice, progress: Progress
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
                comparison.uncompared += 1
                continue
            damage = reader.find_damage(part, partial(tell_part, progress, done, total))
            done += part.end - part.begin
            progress(done, total)
            comparison.add_part(part.nbytes, damage)


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
