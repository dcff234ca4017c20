"""The zip archives that ``torch.save`` writes: a :class:`~fastensor.checkpoint.containers.FileContainer`. They are
loaded through our verifying reader; ``archive.py`` reads what they hold."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch

from fastensor.backends.memory import is_filled_at_once, storage_on
from fastensor.backends.registry import announce, record_fallback
from fastensor.checkpoint.models.names import choose, nodes, resolve
from fastensor.checkpoint.reading.archive import (
    foreign_code,
    read_archive,
    read_catalog,
    read_pickle,
    to_compare,
    verify_compressed,
)
from fastensor.checkpoint.reading.checked_file import CheckedFile
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, named_in_errors
from fastensor.checkpoint.reading.placement import (
    MapLocation,
    check_destination,
    destination,
    may_be_filled_at_once,
    place,
)
from fastensor.checkpoint.reading.reader import open_reader
from fastensor.checkpoint.reading.request import MAPPED, Loaded, LoadRequest
from fastensor.checkpoint.reading.storages import NotOrdinaryError, Storages, are_wanted, is_known, rebuild
from fastensor.errors import (
    CorruptCheckpointError,
    FastensorError,
    NotACheckpointError,
    caught_as,
)
from fastensor.stitch.parts import Part
from fastensor.stitch.torch_records import TorchArchive

__all__ = ["foreign_code", "load", "read_catalog", "to_compare"]
_logger = logging.getLogger("fastensor")
_FINAL = (FastensorError, MemoryError, torch.OutOfMemoryError)
"""Another attempt would raise these again."""
_MAPS_EMPTY_STORAGES = torch.__version__ >= "2.15"
"""True if ``torch.load(mmap=True)`` keeps the dtypes of several tensors that share an empty storage."""


def load(file: OpenedFile, request: LoadRequest) -> Loaded:
    archive = _archive_of(file)
    if request.mmap and (reason := _why_not_mapped(file, archive)):
        record_fallback(request.fallbacks, "mapping", reason)
        request = replace(request, mmap=False)
    if request.mmap or archive.why_torch:
        compare = request.checked and archive.compressed
        if compare:
            verify_compressed(file)
        if archive.why_torch:
            record_fallback(request.fallbacks, "the verifying reader", archive.why_torch)
        result = chosen_of(load_with_torch(file, request, is_zip=True), request, file)
        return Loaded(result, "torch", archive.why_torch or MAPPED, compare)
    if archive.swapped:
        announce("loading without conversion", "the file was written with the other byte order; torch swaps it")
    if archive.storages and request.keys is None and isinstance(request.map_location, str | torch.device):
        check_destination("cpu", request.map_location, file.where)  # or each way to load would fail on it in turn
    selection = None if request.keys is None else _select(file, archive, request.keys, request)
    try:
        return _load_all(file, archive, request) if selection is None else _load_some(file, archive, request, selection)
    except Exception as error:
        from fastensor.checkpoint.reading.torch_errors import explain  # only a failure needs what it imports

        explain(error, file, request)
        raise


def _archive_of(file: OpenedFile) -> TorchArchive:
    """The archive's directory. A damaged one leaves an open file where it leaves it for ``torch.load``."""
    try:
        return read_archive(file)
    except (CorruptCheckpointError, NotACheckpointError) as error:
        from fastensor.checkpoint.reading.torch_errors import refusal_of_archive

        raise caught_as(error, refusal_of_archive(file)) from error.__cause__


def _why_not_mapped(file: OpenedFile, archive: TorchArchive) -> str:
    """Reason for which the file cannot be mapped by ``torch.load``; empty if it can. Mapped, an empty storage has an
    address, by which torch before 2.15 takes the storage for loaded, and gives all tensors in it the dtype of the first
    one."""
    empty = {key for key, part in archive.storages.items() if not part.nbytes}
    if not empty or archive.why_torch or _MAPS_EMPTY_STORAGES:
        return ""
    from fastensor.stitch.pickle_records import storages_in  # a load of all into memory needs nothing of it
    from fastensor.stitch.torch_pickle import read_program

    try:
        structure = read_program(read_pickle(file, archive, verify=False), where=file.where).structure
    except CorruptCheckpointError:  # torch's own unpickler may know what to make of it
        return ""
    named = {(one.key, one.dtype) for one in storages_in(structure) if one.key in empty}
    twice = len(named) > len({key for key, _ in named})
    return (
        "an empty storage has tensors of several dtypes, of which this torch.load(mmap=True) keeps one" if twice else ""
    )


@dataclass(frozen=True, slots=True)
class _Selection:
    """The part of an archive that is loaded."""

    names: set[str]
    """Names of the branches and leaves that were asked for."""
    skipped: Collection[str] = ()
    """Names of the records that they do not need. Tensors in these records come on the meta device."""
    pickle: bytes | None = None
    """A pickle without most of what they do not need, padded to the size of the file's own; None for the file's own."""


_ALL = _Selection(set())


def _select(file: OpenedFile, archive: TorchArchive, keys: Iterable[str], request: LoadRequest) -> _Selection | None:
    """Selection by ``keys``; None if the whole file has to be read to find out."""
    from fastensor.stitch.pickle_parts import cut  # a load without keys needs nothing of it
    from fastensor.stitch.pickle_records import PickledStorage, all_in
    from fastensor.stitch.torch_pickle import read_program

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
    return _Selection(names, skipped, None if short is None else short.ljust(archive.pickle.nbytes, b"\0"))


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


def _load_some(file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: _Selection) -> Loaded:
    """Load the selection without reading the rest of the file, unless torch needs the rest."""
    try:
        loaded = _load_archive(file, archive, request, selection)
    except _FINAL:
        raise
    except Exception as error:  # if values were not missing, loading all of the file raises it again
        from fastensor.checkpoint.reading.torch_errors import is_refused_global

        if is_refused_global(error):
            raise
        reason = f"torch cannot rebuild the rest without its values ({error!r})"
    else:
        if selection.names <= {node.name for node in nodes(loaded.result, file.where)}:
            return replace(loaded, result=choose(loaded.result, selection.names.__contains__))
        reason = "its keys are of classes that are known to Python only"
    record_fallback(request.fallbacks, "partial reading", reason)
    return _load_all(file, archive, request)


def _load_all(file: OpenedFile, archive: TorchArchive, request: LoadRequest) -> Loaded:
    """Load the whole file, and drop what ``keys`` do not choose."""
    loaded = _load_archive(file, archive, request, _ALL)
    return replace(loaded, result=chosen_of(loaded.result, request, file))


def _load_archive(file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: _Selection) -> Loaded:
    """Let torch rebuild the object, in the fastest way that suits the file and the request."""
    if may_be_filled_at_once(request.map_location) and not archive.swapped:
        try:
            return _load_through_torch(file, archive, request, selection, fills_devices=True)
        except (*_FINAL, pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  # the next attempt raises it again, unless filling was the reason
            reason = f"torch cannot rebuild the object that way ({error!r})"
            record_fallback(request.fallbacks, "filling devices at once", reason)
    if request.restricted and selection is _ALL and is_known() and are_wanted(request.map_location):
        try:
            return _load_together(file, archive, request)
        except FastensorError:
            raise
        except (NotOrdinaryError, pickle.UnpicklingError) as error:
            from fastensor.checkpoint.reading.torch_errors import is_refused_global

            if is_refused_global(error):
                raise
            _logger.debug("%s: torch.load has to load it: %s", file.where, error)
    return _load_through_torch(file, archive, request, selection, fills_devices=False)


def _load_together(file: OpenedFile, archive: TorchArchive, request: LoadRequest) -> Loaded:
    """Let torch's restricted unpickler rebuild the object from storages that are read together."""
    with open_reader(file, _wanted(archive, _ALL), request, keep=True) as reader:
        view = CheckedFile(file, reader, archive)
        with _failures_raised(view):
            result = rebuild(view, Storages(archive, reader, request.map_location))
        return Loaded(result, reader.backend, reader.reason, request.checked and archive.checked)


def _load_through_torch(
    file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: _Selection, *, fills_devices: bool
) -> Loaded:
    """Let ``torch.load`` rebuild the object from our file object.

    Args:
        fills_devices: whether storages that go to a device are read straight into its memory.
    """
    with open_reader(file, _wanted(archive, selection), request) as reader:
        view = CheckedFile(file, reader, archive, selection.skipped, selection.pickle, postpones=fills_devices)
        placing: MapLocation = request.map_location
        if selection.skipped:
            placing = _place_skipped_on_meta(view, placing)
        if fills_devices:
            placing = _fill_on_device(view, placing, request.map_location)
        with _failures_raised(view):
            result = torch.load(cast(IO[bytes], view), placing, weights_only=request.weights_only, mmap=False)
        view.check_none_postponed()
        return Loaded(result, reader.backend, reader.reason, request.checked and archive.checked)


def _wanted(archive: TorchArchive, selection: _Selection) -> list[Part]:
    """The records of storages that are read, in the order of the file's directory."""
    return [part for part in archive.storages.values() if part.nbytes and part.name not in selection.skipped]


def _place_skipped_on_meta(view: CheckedFile, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that puts storages that were not read on the meta device."""

    def place_chosen(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if view.record is not None and view.record.name in view.skipped and storage.nbytes():
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        return place(storage, location, map_location)

    return place_chosen


def _fill_on_device(view: CheckedFile, otherwise: MapLocation, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that reads postponed storages straight to their device.

    Args:
        view: the file that torch reads.
        otherwise: the ``map_location`` for storages that were not postponed.
        map_location: the user's.
    """

    def fill(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        postponed = view.take_postponed()
        if postponed is None:
            return place(storage, location, otherwise)
        device = destination(location, map_location)
        if not is_filled_at_once(device):
            view.fill(postponed, storage)
            return place(storage, location, map_location)
        filled = storage_on(device, storage.nbytes())
        view.fill(postponed, filled)
        return filled

    return fill


@contextmanager
def _failures_raised(view: CheckedFile) -> Iterator[None]:
    """Raise the failure of a read in place of the exception that torch makes of it. It is noted where torch stops."""
    try:
        yield
    except Exception:
        _raise_failure(view)
        raise
    finally:
        view.note_stop()
    _raise_failure(view)


def _raise_failure(view: CheckedFile) -> None:
    failure, view.failure = view.failure, None  # its traceback holds the view, through the frames of torch's reader
    if failure is not None:
        raise failure


def _names_of(tree: Any, keys: Iterable[str], where: str) -> set[str]:
    """The names that ``keys`` choose."""
    return resolve(keys, [node.name for node in nodes(tree, where)], where)


def chosen_of(result: Any, request: LoadRequest, file: OpenedFile) -> Any:
    """Selection of a file's contents by the keys of a load."""
    if request.keys is None:
        return result
    return choose(result, _names_of(result, request.keys, file.where).__contains__)


def load_with_torch(file: OpenedFile, request: LoadRequest, *, is_zip: bool) -> Any:
    """Let torch read the file."""

    def attempt(where: Any, map_location: MapLocation) -> Any:
        with named_in_errors(file):
            return torch.load(where, map_location, weights_only=request.weights_only, mmap=request.mmap)

    try:
        with _for_torch(file, request) as where:
            return attempt(where, request.map_location)
    except Exception as error:
        from fastensor.checkpoint.reading.torch_errors import explain

        on_host = None if is_zip else lambda: attempt(FileView(file), "cpu")
        explain(error, file, request, rebuild_on_host=on_host)
        raise


@contextmanager
def _for_torch(file: OpenedFile, request: LoadRequest) -> Iterator[Any]:
    """File that torch reads. A file that the caller has opened is read as if the caller had given it to torch."""
    if file.path is not None and (request.mmap or file.borrowed is None):
        yield file.path
    elif file.borrowed is not None and hasattr(file.borrowed.file, "readline"):
        with file.borrowed.lent_to_torch() as borrowed:
            yield borrowed
    else:
        view = FileView(file)
        try:
            yield view
        finally:
            view.note_stop()
