"""Loads of a part of an archive of torch, by names: which records it needs, and what is taken of the result."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from fastensor.backends.registry import record_fallback
from fastensor.checkpoint.models.names import choose, nodes, resolve
from fastensor.checkpoint.reading.archive import read_pickle
from fastensor.checkpoint.reading.opened import OpenedFile
from fastensor.checkpoint.reading.request import ArchivePart, LoadRequest
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.pickle_parts import cut
from fastensor.stitch.pickle_records import PickledStorage, all_in
from fastensor.stitch.torch_pickle import read_program
from fastensor.stitch.torch_records import TorchArchive


def select(file: OpenedFile, archive: TorchArchive, keys: Iterable[str], request: LoadRequest) -> ArchivePart | None:
    """The selection by ``keys``; None if the whole file has to be read to find out."""
    data = read_pickle(file, archive, verify=request.checked)
    try:
        program = read_program(data, where=file.where)
    except CorruptCheckpointError as error:  # torch's own unpickler may know what to make of it
        record_fallback(request.fallbacks, "partial reading", str(error))
        return None
    names = _names_of(program.structure, keys, file.where)
    needed = list(all_in(choose(program.structure, names.__contains__)))
    needed_keys = {one.key for one in needed if isinstance(one, PickledStorage)}
    skipped = {part.name for key, part in archive.storages.items() if key not in needed_keys and part.nbytes}
    aside, leading_keys = _beside(program.structure, names, file.where)
    kept = {id(one) for one in (*needed, *all_in(leading_keys))}
    short = cut(program, (one for one in all_in(aside) if id(one) not in kept))
    return ArchivePart(names, skipped, None if short is None else short.ljust(archive.pickle.nbytes, b"\0"))


def _beside(tree: Any, names: Collection[str], where: str) -> tuple[list[Any], list[Any]]:
    """Branches of a tree beside those that lead to chosen values.

    Args:
        tree: what a pickle makes.
        names: of the chosen values.
        where: the file's name, for messages.

    Returns:
        All other values, the chosen ones among them; and the keys of the branches that lead to chosen values.
    """
    leading = {name[:at] for name in names for at, character in enumerate(name) if character == "."}
    aside, keys = [], [*tree] if isinstance(tree, dict) else []
    for node in nodes(tree, where):
        if node.is_leaf or node.name not in leading:
            aside.append(node.value)
        elif isinstance(node.value, dict):
            keys += dict.keys(node.value)
    return aside, keys


def _names_of(tree: Any, keys: Iterable[str], where: str) -> set[str]:
    """The names that ``keys`` choose."""
    return resolve(keys, [node.name for node in nodes(tree, where)], where)


def chosen_by(keys: Iterable[str], result: Any, where: str) -> Any:
    """The part of what was loaded that ``keys`` choose."""
    return choose(result, _names_of(result, keys, where).__contains__)


def has_all(selection: ArchivePart, result: Any, where: str) -> bool:
    """True if all selected names are in what was loaded."""
    return selection.names <= {node.name for node in nodes(result, where)}


def selected(selection: ArchivePart, result: Any) -> Any:
    """The selected part of what was loaded."""
    return choose(result, selection.names.__contains__)
