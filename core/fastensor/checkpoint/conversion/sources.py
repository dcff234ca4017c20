"""The files that a conversion reads: one, or those of a model in several files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fastensor.checkpoint.catalog import Catalog, ties_in
from fastensor.checkpoint.conversion.copying import InFile
from fastensor.checkpoint.conversion.renames import renamed
from fastensor.checkpoint.conversion.selection import Selection, select
from fastensor.checkpoint.conversion.settings import ConvertSettings
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import OpenedFile, opened
from fastensor.checkpoint.rewriting import read_catalog_of_any
from fastensor.checkpoint.sharded import check_holds, files_of, is_index, weights_at
from fastensor.errors import UnsupportedContentError

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Source:
    """What is converted. The files are open."""

    where: str
    """What messages call it."""
    paths: tuple[Location, ...]
    """Its files, and their index."""
    tensors: Mapping[str, InFile]
    """By their new names."""
    metadata: Mapping[str, str]
    """The metadata of the safetensors file, or that which all of the files have."""
    unchecked: Mapping[str, str]
    """Files without checksums, and why."""
    left_out: tuple[str, ...]
    """Names of what is not converted."""
    ties: Mapping[str, Sequence[Sequence[str]]]
    """Names of tensors that share memory, by the files that have such."""
    only: tuple[Catalog, Selection] | None
    """The catalog of a source that is one file, and what is taken of it; None for several files."""


def open_source(location: Location, settings: ConvertSettings, stack: ExitStack) -> Source:
    """Open the files of a source, and choose its tensors. Only directories are read, but for files of torch before 1.6.

    Args:
        location: a file; or the index or folder of a model in several files.
        settings: of the conversion.
        stack: closes the files.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: a file is damaged, or is not of the index.
        UnsupportedContentError: tensors cannot be chosen.
    """
    found = weights_at(location)
    if found is not None and is_index(found):
        return _open_sharded(found, settings, stack)
    return _open_file(location if found is None else found, settings, stack)


def _open_file(location: Location, settings: ConvertSettings, stack: ExitStack) -> Source:
    file, catalog, selection = _open_one(location, settings, settings.root, stack)
    names = renamed(selection.tensors, settings.rename, file.where)
    return Source(
        where=file.where,
        paths=(location,),
        tensors={names[name]: InFile(file, one) for name, one in selection.tensors.items()},
        metadata=catalog.metadata,
        unchecked={} if catalog.checked else {file.where: catalog.unchecked},
        left_out=selection.left_out,
        ties=_ties({file.where: selection}),
        only=(catalog, selection),
    )


def _open_one(
    location: Location, settings: ConvertSettings, root: str | None, stack: ExitStack
) -> tuple[OpenedFile, Catalog, Selection]:
    file, catalog = read_catalog_of_any(stack.enter_context(opened(location)), stack, verify=settings.verify)
    return file, catalog, select(catalog, root, drop=settings.drop, where=file.where)


def _open_sharded(index: Path, settings: ConvertSettings, stack: ExitStack) -> Source:
    if settings.root is not None:
        raise UnsupportedContentError(
            f"{index}: a model in several files has no inner dicts, so leave root={settings.root!r} out"
        )
    tensors: dict[str, InFile] = {}
    metadata: list[Mapping[str, str]] = []
    unchecked: dict[str, str] = {}
    left_out: list[str] = []
    selections: dict[str, Selection] = {}
    files = files_of(index)
    for path, expected in files.items():
        file, catalog, selection = _open_one(path, settings, None, stack)
        check_holds(str(path), selection.tensors, expected)
        tensors |= {name: InFile(file, one) for name, one in selection.tensors.items() if name in expected}
        metadata.append(catalog.metadata)
        unchecked |= {} if catalog.checked else {file.where: catalog.unchecked}
        left_out += selection.left_out
        selections[file.where] = selection
    names = renamed(tensors, settings.rename, str(index))
    return Source(
        where=str(index),
        paths=(index, *files),
        tensors={names[name]: one for name, one in tensors.items()},
        metadata=_shared(metadata),
        unchecked=unchecked,
        left_out=tuple(left_out),
        ties=_ties(selections),
        only=None,
    )


def _shared(metadata: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The texts that all files have.

    >>> _shared([{"format": "pt", "part": "1"}, {"format": "pt", "part": "2"}])
    {'format': 'pt'}
    """
    first = metadata[0] if metadata else {}
    return {name: text for name, text in first.items() if all(one.get(name) == text for one in metadata)}


def _ties(selections: Mapping[str, Selection]) -> dict[str, Sequence[Sequence[str]]]:
    return {where: ties for where, one in selections.items() if (ties := ties_in(one.tensors))}


def what_shares_memory(ties: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Tensors that share memory, of the first file with such: a conversion refuses them without ``copy_ties``."""
    where, groups = next(iter(ties.items()))
    return (
        f"{where}: tensors share memory, which would be lost: {[[*group[:_SHOWN]] for group in groups[:_SHOWN]]}; pass "
        f"copy_ties=True to write each of them by itself"
    )
