"""``fastensor.verify``: comparing a whole checkpoint with its checksums, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal, cast

from fastensor.backends import registry
from fastensor.checkpoint.archive import read_archive, verify_compressed
from fastensor.checkpoint.catalog import read_catalog
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.foreign_code import foreign_code
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import OpenedFile, container_of, opened
from fastensor.checkpoint.progress import Progress, reporting, tell_part
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.checkpoint.reader import PartReader, extents_of
from fastensor.checkpoint.safetensors_file import read_header
from fastensor.checkpoint.sharded import check_holds, files_at, weights_at
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.containers import Container
from fastensor.stitch.parts import Damage, Part

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a :func:`verify`."""

    path: str
    container: Container | Literal["dcp", "huggingface"]
    """``torch``, ``safetensors``, ``legacy`` for files of torch before 1.6, ``dcp`` for a distributed checkpoint, or
    ``huggingface`` for a model in several files."""
    nbytes: int
    """Size of the file, or of all files."""
    compared: int
    """How many parts were compared with a checksum."""
    compared_bytes: int
    """Size of these parts."""
    uncompared: int
    """How many parts carry no checksum."""
    seconds: float
    damage: tuple[Damage, ...] = ()
    """The parts that do not match."""
    code: tuple[str, ...] = ()
    """Functions and classes that the file names and ``weights_only=True`` refuses: what it was built to run, or what it
    needs. Checksums say nothing about them. Not looked for in a damaged file."""

    @property
    def complete(self) -> bool:
        """Whether every part of the file has a checksum. If False, there may be damage that no reader can see."""
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
            ``*.index.json`` of a model in several files, or its folder; or the directory of a checkpoint of
            ``torch.distributed.checkpoint``. Of a model's folder only the weights of that one model are read. Give the
            other files one by one, such as optimizers, random states and further models in a state of Accelerate.
        backend: as for :func:`fastensor.load`.
        progress: called after every few MiB with the bytes done and the bytes to do.

    Returns:
        How much was compared. If ``complete`` is False, parts of the file carry no checksum: of these, only the
        structure is known to be intact, and of a legacy file not even that, nor that it holds the tensors that the
        index of its model expects in it. A file that is intact is not safe for
        that reason: ``code`` lists what it names beyond what ``weights_only=True`` allows.

    Raises:
        FileNotFoundError: there is no such file, or one of the files of a model is missing.
        DamagedCheckpointError: parts do not match; the error's ``report.damage`` lists all of them. All files of a
            model are read before any error is raised. Notes of the error (``__notes__``) say which other files could
            not be verified, and why. Damage is raised first, then what is wrong with the first file.
        CorruptCheckpointError: the structure of a file is damaged, or it lacks a tensor that the index of its model
            expects in it.
        NotACheckpointError: a file is something else than a checkpoint.
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = fastensor.save({"weight": torch.ones(5)}, path)
    >>> report = fastensor.verify(path)
    >>> report.complete, report.compared
    (True, 2)
    """
    check_choice(backend)
    with reporting(progress) as tell:
        files = files_at(path)
        if [*files.values()] == [None]:
            return verify_part(next(iter(files)), None, backend, tell)
        return _verify_each(str(weights_at(path)), files, backend, tell)


def verify_part(path: Location, expected: set[str] | None, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for a file or a distributed checkpoint.

    Args:
        path: one of those that :func:`fastensor.checkpoint.sharded.files_at` gives.
        expected: the names of tensors that the file must hold, if not None. Legacy files do not say what they hold.
        backend, progress: as there.
    """
    if metadata_names(path):
        from fastensor.checkpoint.dcp.catalog import verify_directory  # loads torch.distributed.checkpoint

        return verify_directory(cast(str, path), backend, progress)
    with opened(path) as file:
        report = verify_opened(file, backend, progress)
        if expected is not None and report.container != "legacy":
            check_holds(file.where, read_catalog(file, verify=False).tensors, expected)
        return report


def _verify_each(
    where: str, files: Mapping[Location, set[str] | None], backend: BackendChoice, progress: Progress
) -> VerifyReport:
    """One report of the files of a model."""
    started = time.perf_counter()
    joined = VerifyReport(where, "huggingface", 0, 0, 0, 0, 0.0)
    failures: list[Exception] = []
    for path, expected, tell in with_progress(files, progress):
        try:
            report = verify_part(path, expected, backend, tell)
        except DamagedCheckpointError as error:
            report = error.report
        except (CorruptCheckpointError, NotACheckpointError, UnsupportedContentError, OSError) as error:
            failures.append(error)
            continue
        joined = _with_file(joined, report, cast(Path, path).name)
    joined = replace(joined, seconds=time.perf_counter() - started)
    if joined.damage:
        failures.insert(0, DamagedCheckpointError(joined))
    if not failures:
        return joined
    first, *others = failures
    for other in others:
        first.add_note(f"another file of the model could not be verified: {other}")
    raise first


def with_progress(
    files: Mapping[Location, set[str] | None], progress: Progress
) -> Iterator[tuple[Location, set[str] | None, Progress]]:
    """The files of a checkpoint, as :func:`fastensor.checkpoint.sharded.files_at` gives them, and for each one the
    progress that it is to call, which counts as a part of that of all files."""
    if None in files.values():  # it stands for itself, and may be remote
        yield from ((path, expected, progress) for path, expected in files.items())
        return
    sizes = [_nbytes_of(cast(Path, path)) for path in files]
    done, total = 0, sum(sizes)
    for (path, expected), nbytes in zip(files.items(), sizes, strict=True):
        yield path, expected, partial(tell_part, progress, done, total)
        done += nbytes
        progress(done, total)


def _nbytes_of(path: Path) -> int:
    """The size of a file; 0 if it cannot be had: whoever opens the file says why."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _with_file(joined: VerifyReport, report: VerifyReport, name: str) -> VerifyReport:
    return replace(
        joined,
        nbytes=joined.nbytes + report.nbytes,
        compared=joined.compared + report.compared,
        compared_bytes=joined.compared_bytes + report.compared_bytes,
        uncompared=joined.uncompared + report.uncompared,
        damage=(*joined.damage, *(replace(one, part=f"{name}: {one.part}") for one in report.damage)),
        code=tuple(dict.fromkeys((*joined.code, *report.code))),
    )


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
    ordered = sorted((part for part in parts if part.nbytes), key=attrgetter("begin"))
    total = sum(part.end - part.begin for part in ordered)
    done = 0
    with PartReader(file, extents_of(ordered), ReadOptions(backend), verify=True) as reader:
        for part in ordered:
            reader.data_begin(part)  # raises if the local header is damaged
            if part.crc32 is None:
                compared.uncompared += 1
                continue
            damage = reader.find_damage(part, partial(_add_progress, progress, done, total))
            done += part.end - part.begin
            progress(done, total)
            compared.add_compared(part.nbytes)
            compared.damage += [damage] if damage else []


def _add_progress(progress: Progress, before: int, total: int, read: int) -> None:
    progress(before + read, total)
