"""Sources of conversions: a file, the files of a model, or a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from fastensor.checkpoint.containers import container_at
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.models.sharded import files_at, is_index, weights_at
from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.tools.catalog import TensorInfo, ties_in
from fastensor.checkpoint.tools.cataloged import open_files
from fastensor.checkpoint.tools.conversion.copying import InFile, SourceBytes, SourceTensors
from fastensor.checkpoint.tools.conversion.selection import renamed, select
from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.safetensors import beyond_format
from fastensor.stitch.source import FileBytes

_SHOWN = 5
ReadTensors: TypeAlias = Callable[[Sequence[str], Progress], Sequence[FileBytes]]
"""Gives the bytes of tensors, which are then read in this order; calls the progress with the bytes that have been read,
and those of all these tensors."""


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """Open source of a conversion."""

    where: str
    """Name in messages."""
    tensors: Mapping[str, TensorInfo]
    """By their new names."""
    read: ReadTensors
    left_out: tuple[str, ...]
    """Names of what is not converted."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The file of each tensor, by its new name, for messages. Those of a distributed checkpoint are not among them."""
    paths: tuple[Location, ...] = ()
    """Its files, and their index; all files in the directory of a distributed checkpoint."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata of the safetensors file, or that which all of the files have."""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Files without checksums, and why."""
    ties: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Names of tensors that share memory, by the files that have such."""
    build: Callable[[Mapping[str, torch.Tensor]], Any] = dict
    """Makes what is saved of its tensors, by name."""


def open_source(location: Location, settings: ConvertSettings, stack: ExitStack) -> ConversionSource:
    """Open the files of a source, and choose its tensors. Only directories are read, but for files of torch before 1.6.

    Args:
        location: a file; the index or folder of a model in several files; or the directory of a distributed checkpoint.
        settings: of the conversion.
        stack: closes the files.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: a file is damaged, or is not of the index.
        UnsupportedContentError: tensors cannot be chosen.
    """
    if container := container_at(location):
        return container.open_source(location, settings, stack)
    return _open_files(location, settings, stack)


def _open_files(location: Location, settings: ConvertSettings, stack: ExitStack) -> ConversionSource:
    weights = weights_at(location)
    index = weights if weights is not None and is_index(weights) else None
    if index is not None and settings.root is not None:
        raise UnsupportedContentError(
            f"{index}: a model in several files has no inner dicts, so leave root={settings.root!r} out"
        )
    files = open_files(files_at(location), stack, verify=settings.verify, rewrite=True)
    where = str(index or files[0].file.where)
    selections = [select(one.catalog, settings.root, drop=settings.drop, where=one.file.where) for one in files]
    found = {
        name: InFile(one.file, tensor)
        for one, selection in zip(files, selections, strict=True)
        for name, tensor in selection.tensors.items()
        if one.counts(name)
    }
    new = renamed(found, settings.rename, where)
    _check_contiguous(found)
    tensors = {new[name]: one for name, one in found.items()}
    metadata = _shared([one.catalog.metadata for one in files])
    lost = metadata_in_words(metadata) if settings.container == "torch" else []
    ties = {one.file.where: ties_in(selection.tensors) for one, selection in zip(files, selections, strict=True)}
    return ConversionSource(
        where=where,
        tensors={name: one.tensor.info for name, one in tensors.items()},
        read=partial(_read, tensors, settings, stack),
        files={name: one.file.where for name, one in tensors.items()},
        left_out=(*(name for one in selections for name in one.left_out), *lost),
        paths=(*([] if index is None else [index]), *(one.location for one in files)),
        metadata=metadata,
        unchecked={one.file.where: one.catalog.unchecked for one in files if not one.catalog.checked},
        ties={where: groups for where, groups in ties.items() if groups},
    )


def _check_contiguous(tensors: Mapping[str, InFile]) -> None:
    for name, one in tensors.items():
        if not one.tensor.on_meta().is_contiguous():
            raise UnsupportedContentError(
                f"{one.file.where}: {name!r} is not contiguous, so its bytes cannot be copied as they are; load it, "
                f"and save .contiguous()"
            )


def _read(
    tensors: Mapping[str, InFile],
    settings: ConvertSettings,
    stack: ExitStack,
    names: Sequence[str],
    progress: Progress,
) -> Sequence[FileBytes]:
    order = [tensors[name] for name in names]
    reader = SourceTensors(order, verify=settings.verify, backend=settings.backend, progress=progress)
    stack.callback(reader.close)
    return [SourceBytes(reader, one) for one in order]


def _shared(metadata: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The texts that all files have.

    >>> _shared([{"format": "pt", "part": "1"}, {"format": "pt", "part": "2"}])
    {'format': 'pt'}
    """
    first = metadata[0] if metadata else {}
    return {name: text for name, text in first.items() if all(one.get(name) == text for one in metadata)}


def metadata_in_words(metadata: Mapping[str, str]) -> list[str]:
    """Words for the metadata that are lost, as messages list them."""
    return [f"metadata {name!r}" for name in beyond_format(metadata)]


def what_shares_memory(ties: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Tensors that share memory, of the first file with such: a conversion refuses them without ``copy_ties``."""
    where, groups = next(iter(ties.items()))
    return (
        f"{where}: tensors share memory, which would be lost: {[[*group[:_SHOWN]] for group in groups[:_SHOWN]]}; pass "
        f"copy_ties=True to write each of them by itself"
    )
