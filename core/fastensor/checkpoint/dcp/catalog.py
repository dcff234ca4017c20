"""Contents of a distributed checkpoint, and comparing all of it with its checksums. No code of it is run."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fastensor.checkpoint.containers import container_in
from fastensor.checkpoint.dcp.items import Item, ItemReader, is_safetensors, items_by_file
from fastensor.checkpoint.dcp.metadata import chunks_in, has_seal, read_metadata
from fastensor.checkpoint.dcp.storage import Directory
from fastensor.checkpoint.directories import BESIDE_SHARDS, metadata_names
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.progress import Progress, tell_part
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions, opened
from fastensor.checkpoint.tools.catalog import Inspection, TensorInfo
from fastensor.checkpoint.tools.comparing import (
    Comparison,
    DamagedCheckpointError,
    FileToVerify,
    VerifyReport,
    compare_each,
    verify_opened,
)
from fastensor.errors import CorruptCheckpointError, NotACheckpointError
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.pickle_records import UnknownGlobal, UnknownObject, all_in


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a distributed checkpoint."""

    directory: Directory
    metadata: Metadata
    """Contents of the only metadata file, or of the first one if each rank has its own."""
    files: Mapping[str, list[Item]]
    """The items of all ranks by file, in the order of each file."""
    items: Mapping[str, list[Item]]
    """The items of all ranks by tensor, or other object."""
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
    directory = Directory(path)
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
    places: dict[str, list[Item]] = {}
    for item in items:
        places.setdefault(item.fqn, []).append(item)
    return Contents(directory, found[0], items_by_file(items), places, nbytes, len(found), tuple(unsealed))


def verify_directory(location: Location, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`fastensor.verify` for a distributed checkpoint."""
    contents = read_contents(cast(str, location))
    directory = contents.directory
    comparison = Comparison(contents.metadata_nbytes, uncompared=len(contents.unsealed))
    comparison.code += _code_of_metadata(contents)
    comparison.not_compared += contents.unsealed
    tasks = [
        FileToVerify(name, sum(item.nbytes for item in items), partial(_verify_file, directory, name, items, backend))
        for name, items in contents.files.items()
    ]
    if BESIDE_SHARDS in directory.names():
        tasks.append(FileToVerify(BESIDE_SHARDS, 0, partial(_verify_beside, directory, backend)))
    return compare_each(comparison, tasks, directory.path, "dcp", progress)


def _verify_file(
    directory: Directory,
    name: str,
    items: Sequence[Item],
    backend: BackendChoice,
    progress: Progress,
) -> VerifyReport:
    with directory.open(name) as file:
        if is_safetensors(file):
            return verify_opened(file, backend, progress)
        return _verify_items(file, items, backend, progress)


def _verify_beside(directory: Directory, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """Compare the file of Lightning beside the shards."""
    with directory.open(BESIDE_SHARDS) as file:
        return verify_opened(file, backend, progress)


def _verify_items(file: OpenedFile, items: Sequence[Item], backend: BackendChoice, progress: Progress) -> VerifyReport:
    """Compare items with their CRC32s, or with those of their records."""
    comparison = Comparison(file.nbytes)
    done, total = 0, sum(item.nbytes for item in items)
    with ItemReader(file, items, ReadOptions(backend), verify=True) as reader:
        for item in items:
            if item.crc32 is None:
                _add_records(comparison, reader, item)
            else:
                damage = reader.find_damage(item, partial(tell_part, progress, done, total))
                comparison.add_part(item.nbytes, damage)
                if damage is None and item.shape is None:
                    comparison.code += _code_in(reader.read(item))
            done += item.nbytes
            progress(done, total)
    return comparison.report(file.where, "dcp")


def _add_records(comparison: Comparison, reader: ItemReader, item: Item) -> None:
    try:
        report = None if item.transforms else reader.verify_records(item)
    except DamagedCheckpointError as error:
        report = error.report
    if report is None:
        comparison.uncompared += 1
    else:
        comparison.add_report(report, item.part.title, item.offset)


def _code_in(data: bytes) -> tuple[str, ...]:
    """Code that the bytes of an object name. Bytes that a planner of the user's has made are not unpickled by torch."""
    try:
        with opened(io.BytesIO(data)) as file:
            return container_in(file).foreign_code(file)
    except (CorruptCheckpointError, NotACheckpointError):
        return ()


def _code_of_metadata(contents: Contents) -> Iterator[str]:
    """Code that the metadata name: torch's own reader unpickles them without restrictions."""
    for one in all_in(contents.metadata.planner_data):
        if isinstance(one, UnknownObject | UnknownGlobal) and "." in one.name:  # others are keys that take long to hash
            yield one.name


def describe(contents: Contents) -> Inspection:
    """Words for the contents of a distributed checkpoint."""
    items = [item for found in contents.files.values() for item in found]
    tensors, others = [], {}
    for name, entry in contents.metadata.state_dict_metadata.items():
        where = contents.items.get(name, [])
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
