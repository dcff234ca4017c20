"""Contents of a distributed checkpoint, and comparing all of it with its checksums. No code of it is run."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fastensor.checkpoint.catalog import TensorInfo
from fastensor.checkpoint.dcp.items import Item, ItemReader, is_safetensors, items_by_file
from fastensor.checkpoint.dcp.metadata import chunks_in, has_seal, read_metadata
from fastensor.checkpoint.dcp.storage import LocalDirectory, RemoteDirectory, directory_at
from fastensor.checkpoint.directories import BESIDE_SHARDS, metadata_names
from fastensor.checkpoint.foreign_code import foreign_code
from fastensor.checkpoint.inspect import Inspection
from fastensor.checkpoint.opened import OpenedFile, opened
from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.checkpoint.verify import DamagedCheckpointError, VerifyReport, verify, verify_opened
from fastensor.errors import CheckpointReadError, CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.parts import Damage
from fastensor.stitch.pickle_records import UnknownGlobal, UnknownObject, all_in


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a distributed checkpoint."""

    directory: LocalDirectory | RemoteDirectory
    metadata: Metadata
    """Contents of the only metadata file, or of the first one if each rank has its own."""
    files: Mapping[str, list[Item]]
    """The items of all ranks by file, in the order of each file."""
    metadata_nbytes: int
    """Size of the metadata files."""
    metadata_count: int
    """Number of metadata files: more than one if each rank has its own."""
    unsealed: tuple[str, ...]
    """The metadata files that carry no CRC32, as torch's own writer makes them."""


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read the metadata of a distributed checkpoint.

    Raises:
        FileNotFoundError: the directory holds none.
        CorruptCheckpointError: the metadata are damaged.
    """
    directory = directory_at(path)
    nbytes = 0
    found: list[Metadata] = []
    items: list[Item] = []
    unsealed = []
    for name in metadata_names(path):
        data = directory.read(name)
        nbytes += len(data)
        metadata = read_metadata(data, where=directory.name_of(name))
        unsealed += [] if has_seal(data) else [name]
        found.append(metadata)
        chunks = chunks_in(metadata)
        items += [
            Item.of(index, info, chunks.get((index.fqn, index.offset))) for index, info in metadata.storage_data.items()
        ]
    if not found:
        raise FileNotFoundError(f"{directory.path}: no complete distributed checkpoint is there")
    return Contents(directory, found[0], items_by_file(items), nbytes, len(found), tuple(unsealed))


def verify_directory(path: str | os.PathLike[str], backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`fastensor.verify` for a distributed checkpoint.

    Raises:
        DamagedCheckpointError: items do not match; the report lists them.
        CorruptCheckpointError: the metadata are damaged, or a file is cut off.
        CheckpointReadError: a file is missing, or could not be read.
    """
    started = time.perf_counter()
    contents = read_contents(path)
    comparison = _DirectoryComparison(progress, sum(item.nbytes for items in contents.files.values() for item in items))
    nbytes = contents.metadata_nbytes
    for name, items in contents.files.items():
        where = contents.directory.name_of(name)
        try:
            with contents.directory.open(name) as file:
                nbytes += file.nbytes
                if is_safetensors(file):
                    comparison.compare_safetensors(file, name, backend)
                    continue
                with ItemReader(file, items, ReadOptions(backend), verify=True) as reader:
                    for item in items:
                        comparison.compare(reader, item)
        except FileNotFoundError as error:
            raise CheckpointReadError(error.errno, "the metadata name this file, which is missing", where) from error
    nbytes += comparison.compare_file(contents.directory)
    report = VerifyReport(
        path=contents.directory.path,
        container="dcp",
        nbytes=nbytes,
        compared=comparison.compared,
        compared_bytes=comparison.compared_bytes,
        uncompared=comparison.uncompared + len(contents.unsealed),
        seconds=time.perf_counter() - started,
        damage=tuple(comparison.damage),
        code=tuple(dict.fromkeys((*_code_of_metadata(contents), *comparison.code))),
        not_compared=(*contents.unsealed, *comparison.not_compared),
    )
    if report.damage:
        raise DamagedCheckpointError(report)
    return report


class _DirectoryComparison:
    """Counts of the items that have been compared so far."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self.compared = 0
        self.compared_bytes = 0
        self.uncompared = 0
        self.damage: list[Damage] = []
        self.code: list[str] = []
        self.not_compared: dict[str, None] = {}
        """The files that were not compared, or not wholly, in order."""

    def compare(self, reader: ItemReader, item: Item) -> None:
        """Compare an item with its CRC32, or with those of its records."""
        title = f"{item.file}: item {item.fqn!r}"
        if item.crc32 is not None:
            found = reader.crc32_of(item, lambda done: self._progress(self._done + done, self._total))
            self._add(1, item.nbytes)
            if found != item.crc32:
                self.damage.append(Damage(title, item.offset, item.nbytes, found, item.crc32))
            elif item.shape is None:
                self.code += _code_in(reader.read(item))
        else:
            self._compare_records(reader, item, title)
        self._done += item.nbytes
        self._progress(self._done, self._total)

    def compare_safetensors(self, file: OpenedFile, name: str, backend: BackendChoice) -> None:
        """Compare a file of safetensors with its own checksums."""
        try:
            report = verify_opened(file, backend, lambda done, total: self._progress(self._done + done, self._total))
        except DamagedCheckpointError as error:
            report = error.report
        self._add_report(report, name, name, 0)
        self._done += report.compared_bytes

    def compare_file(self, directory: LocalDirectory | RemoteDirectory) -> int:
        """Compare the file of Lightning beside the shards. Returns its size; 0 if there is none."""
        try:
            report = verify(directory.name_of(BESIDE_SHARDS))
        except FileNotFoundError:
            return 0
        except DamagedCheckpointError as error:
            report = error.report
        self._add_report(report, BESIDE_SHARDS, BESIDE_SHARDS, 0)
        return report.nbytes

    def _compare_records(self, reader: ItemReader, item: Item, title: str) -> None:
        try:
            report = None if item.transforms else reader.verify_records(item)
        except DamagedCheckpointError as error:
            report = error.report
        if report is None:
            self._add_uncompared(item.file, 1)
            return
        self._add_report(report, item.file, title, item.offset)

    def _add_report(self, report: VerifyReport, file: str, title: str, offset: int) -> None:
        self._add(report.compared, report.compared_bytes)
        self._add_uncompared(file, report.uncompared)
        self.code += report.code
        self.damage += [replace(one, part=f"{title}: {one.part}", offset=offset + one.offset) for one in report.damage]

    def _add_uncompared(self, file: str, count: int) -> None:
        self.uncompared += count
        if count:
            self.not_compared[file] = None

    def _add(self, count: int, nbytes: int) -> None:
        self.compared += count
        self.compared_bytes += nbytes


def _code_in(data: bytes) -> tuple[str, ...]:
    """Code that the bytes of an object name. Bytes that a planner of the user's has made are not unpickled by torch."""
    try:
        with opened(io.BytesIO(data)) as file:
            return foreign_code(file)
    except (CorruptCheckpointError, NotACheckpointError):
        return ()


def _code_of_metadata(contents: Contents) -> Iterator[str]:
    """Code that the metadata name: torch's own reader unpickles them without restrictions."""
    for one in all_in(contents.metadata.planner_data):
        if isinstance(one, UnknownObject | UnknownGlobal) and "." in one.name:  # others are keys that take long to hash
            yield one.name


def inspect_directory(path: str | os.PathLike[str]) -> Inspection:
    """:func:`fastensor.inspect` for a distributed checkpoint.

    Raises:
        CorruptCheckpointError: the metadata are damaged.
        CheckpointReadError: a file could not be read.
    """
    return describe(read_contents(path))


def describe(contents: Contents) -> Inspection:
    """Words for the contents of a distributed checkpoint."""
    items = [item for found in contents.files.values() for item in found]
    places: dict[str, list[Item]] = {}
    for item in items:
        places.setdefault(item.fqn, []).append(item)
    tensors, others = [], {}
    for name, entry in contents.metadata.state_dict_metadata.items():
        where = places.get(name, [])
        if isinstance(entry, TensorStorageMetadata):
            part = ", ".join(dict.fromkeys(item.file for item in where))
            crc32 = where[0].crc32 if len(where) == 1 else None
            tensors.append(TensorInfo(name, "Tensor", entry.properties.dtype, tuple(entry.size), part, crc32))
        else:
            others[name] = f"<object of {sum(item.nbytes for item in where)} bytes>"
    return Inspection(
        path=contents.directory.path,
        container="dcp",
        nbytes=contents.metadata_nbytes + sum(item.nbytes for item in items),
        checked=all(item.crc32 is not None for item in items),
        tensors=tuple(tensors),
        others=others,
        metadata=_described(contents),
        refused=(),
        ties=(),
        memory_bytes=sum(tensor.nbytes for tensor in tensors),
    )


def _described(contents: Contents) -> dict[str, str]:
    meta: Any = contents.metadata.storage_meta
    texts = {
        "files": str(len(contents.files)),
        "version": contents.metadata.version,
        "save_id": getattr(meta, "save_id", None),
    }
    return {name: text for name, text in texts.items() if text is not None}


def check_single(contents: Contents) -> None:
    """Refuse a checkpoint in which each rank has metadata of its own.

    Raises:
        UnsupportedContentError: there are several metadata files.
    """
    if contents.metadata_count > 1:
        raise UnsupportedContentError(
            f"{contents.directory.path}: each rank has saved without the others ({contents.metadata_count} metadata "
            f"files), so what they hold cannot be joined; load it with as many ranks"
        )
