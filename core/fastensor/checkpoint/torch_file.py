"""Loading torch's own containers: zip archives through our verifying reader, everything else by torch itself."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch

from fastensor.backends.base import Extent
from fastensor.backends.fallback import announce, give_up
from fastensor.backends.to_device import is_filled_at_once, storage_on
from fastensor.checkpoint.archive import (
    find_pickle,
    is_of_other_byte_order,
    read_directory,
    read_pickle,
    reason_for_torch,
    records_by_key,
    verify_compressed,
)
from fastensor.checkpoint.checked_file import CheckedFile
from fastensor.checkpoint.names import choose, nodes, resolve
from fastensor.checkpoint.opened import FileView, OpenedFile, explained
from fastensor.checkpoint.placement import MapLocation, destination, may_be_filled_at_once, place
from fastensor.checkpoint.request import MAPPED, Loaded, LoadRequest
from fastensor.checkpoint.storages import NotOrdinaryError, Storages, are_wanted, extents, is_known, rebuild
from fastensor.checkpoint.torch_errors import explain, is_refused_global
from fastensor.errors import CorruptCheckpointError, FastensorError
from fastensor.stitch.pickle_parts import cut
from fastensor.stitch.torch_pickle import StorageRef, all_in, read_program
from fastensor.stitch.torch_records import Checks, payload_records, record_ends
from fastensor.stitch.zip_directory import ZipDirectory

_logger = logging.getLogger("fastensor")


def load_legacy(file: OpenedFile, request: LoadRequest) -> Loaded:
    """Load what is not a zip archive: torch wrote such files before 1.6. They carry no checksums."""
    reason = "the file is not a zip archive (torch wrote such files before 1.6)"
    give_up(request.fallbacks, "the verifying reader", reason)
    return Loaded(_chosen(_load_with_torch(file, request, is_zip=False), request, file), "torch", reason, False)


def load_zip(file: OpenedFile, request: LoadRequest) -> Loaded:
    """Load a zip archive."""
    archive = read_directory(file)
    reason = reason_for_torch(archive)
    if request.mmap or reason:
        verified = request.checked and verify_compressed(file, archive)
        if reason:
            give_up(request.fallbacks, "the verifying reader", reason)
        result = _chosen(_load_with_torch(file, request, is_zip=True), request, file)
        return Loaded(result, "torch", reason or MAPPED, verified)
    find_pickle(archive, file.where)
    _announce_byte_order(archive)
    part = _find_part(file, archive, request)
    try:
        return _load_whole(file, archive, request) if part is None else _load_part(file, archive, request, part)
    except Exception as error:
        explain(error, file, request)
        raise


def _load_whole(file: OpenedFile, archive: ZipDirectory, request: LoadRequest) -> Loaded:
    loaded = _load_archive(file, archive, request, _NOTHING)
    return replace(loaded, result=_chosen(loaded.result, request, file))


_FINAL = (FastensorError, MemoryError, torch.OutOfMemoryError, pickle.UnpicklingError)
"""What another attempt would raise again."""


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """What torch does not get."""

    skipped: Collection[str]
    """Names of records that hold nothing of what was asked for. What lies in them is on the meta device, or ``()``."""
    replaced: Mapping[str, bytes]
    """Records that it gets in another form: the pickle, from which most of that has been cut out."""


_NOTHING = _LeftOut((), {})


@dataclass(frozen=True, slots=True)
class _Part:
    """What was asked for."""

    names: set[str]
    """Of branches and leaves."""
    left_out: _LeftOut


def _find_part(file: OpenedFile, archive: ZipDirectory, request: LoadRequest) -> _Part | None:
    """None if all has to be read."""
    if request.keys is None:
        return None
    data = read_pickle(file, archive, verify=request.checked)
    try:
        program = read_program(data, where=file.where)
    except CorruptCheckpointError as error:  # torch's own unpickler may know what to make of it
        give_up(request.fallbacks, "partial reading", str(error))
        return None
    names = _names_of(program.structure, request.keys, file.where)
    needed = list(all_in(choose(program.structure, names.__contains__)))
    keys = {one.key for one in needed if isinstance(one, StorageRef)}
    skipped = {record.name for key, record in records_by_key(archive, file.where).items() if key not in keys}
    identities = {id(one) for one in needed}
    leaves = (id(node.value) for node in nodes(program.structure, file.where) if node.is_leaf)
    short = cut(program, (leaf for leaf in leaves if leaf not in identities))
    record = find_pickle(archive, file.where)
    replaced = {} if short is None else {record.name: short.ljust(record.nbytes, b"\0")}
    return _Part(names, _LeftOut(skipped, replaced))


def _load_part(file: OpenedFile, archive: ZipDirectory, request: LoadRequest, part: _Part) -> Loaded:
    """Load it without the rest; or with it, if torch needs it."""
    try:
        loaded = _load_archive(file, archive, request, part.left_out)
    except (FastensorError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # it is raised again if it was not for the want of values
        if is_refused_global(error):
            raise
        reason = f"torch cannot rebuild the rest without its values ({error!r})"
    else:
        if part.names <= {node.name for node in nodes(loaded.result, file.where)}:
            return replace(loaded, result=choose(loaded.result, part.names.__contains__))
        reason = "its keys are of classes that are known to Python only"
    give_up(request.fallbacks, "partial reading", reason)
    return _load_whole(file, archive, request)


def _names_of(tree: Any, keys: Iterable[str], where: str) -> set[str]:
    """The names that are meant by the keys."""
    return resolve(keys, [node.name for node in nodes(tree, where)], where)


def _load_archive(file: OpenedFile, archive: ZipDirectory, request: LoadRequest, left_out: _LeftOut) -> Loaded:
    """Let torch rebuild the object from our file."""
    if may_be_filled_at_once(request.map_location) and not is_of_other_byte_order(archive):
        try:
            return _attempt(file, archive, request, left_out, _filling)
        except (*_FINAL, OSError):
            raise
        except Exception as error:  # noqa: BLE001  # it is raised again if it was not for that
            give_up(
                request.fallbacks, "filling devices at once", f"torch cannot rebuild the object that way ({error!r})"
            )
    if request.restricted and left_out is _NOTHING and is_known() and are_wanted(request.map_location):
        try:
            return _read_together(file, archive, request)
        except (NotOrdinaryError, pickle.UnpicklingError) as error:
            if is_refused_global(error):
                raise
            _logger.debug("%s: torch.load has to do it: %s", file.where, error)
    return _attempt(file, archive, request, left_out, _skipping)


def _read_together(file: OpenedFile, archive: ZipDirectory, request: LoadRequest) -> Loaded:
    """Have torch's restricted unpickler rebuild the object from storages that are read together."""
    checks = Checks(archive, enabled=request.checked)
    with explained(file.where):
        used, why, reader = file.open_reader(extents(checks), request.wanted, request.fallbacks)
    with closing(reader):
        storages = Storages(file, archive, reader, checks, request.map_location)
        view = CheckedFile(file, reader, checks)
        with _failures_raised(view):
            result = rebuild(view, storages)
    return Loaded(result, used, why, checks.complete)


def _extents(archive: ZipDirectory, left_out: _LeftOut) -> list[Extent]:
    """What will be read, in order."""
    ends = record_ends(archive)
    return [
        Extent(record.header_offset, ends[record.header_offset])
        for record in payload_records(archive)
        if record.name not in left_out.skipped
    ]


def _attempt(
    file: OpenedFile,
    archive: ZipDirectory,
    request: LoadRequest,
    left_out: _LeftOut,
    placing: Callable[[CheckedFile, MapLocation], MapLocation],
) -> Loaded:
    """
    Args:
        placing: makes the ``map_location`` that torch gets.
    """
    order = _extents(archive, left_out)
    checks = Checks(archive, enabled=request.checked)
    with explained(file.where):
        used, why, reader = file.open_reader(order, request.wanted, request.fallbacks)
    with closing(reader):
        postpones = placing is _filling
        view = CheckedFile(file, reader, checks, left_out.skipped, left_out.replaced, postpones=postpones)
        result = _rebuild(view, placing(view, request.map_location), request.weights_only)
        view.check_none_postponed()
    return Loaded(result, used, why, checks.complete)


def _filling(view: CheckedFile, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that reads what was postponed to where it goes."""
    skipping = _skipping(view, map_location)

    def fill(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        postponed = view.take_postponed()
        if postponed is None:
            return skipping(storage, location) if callable(skipping) else place(storage, location, map_location)
        device = destination(location, map_location)
        if not is_filled_at_once(device):
            view.fill(postponed, storage)
            return place(storage, location, map_location)
        filled = storage_on(device, storage.nbytes())
        view.fill(postponed, filled)
        return filled

    return fill


def _rebuild(view: CheckedFile, map_location: MapLocation, weights_only: bool | None) -> Any:
    with _failures_raised(view):
        return torch.load(cast(IO[bytes], view), map_location, weights_only=weights_only, mmap=False)


@contextmanager
def _failures_raised(view: CheckedFile) -> Iterator[None]:
    """What has gone wrong while torch read the view is raised in place of what torch makes of it."""
    try:
        yield
    except Exception:
        _raise_failure(view)
        raise
    _raise_failure(view)


def _raise_failure(view: CheckedFile) -> None:
    failure, view.failure = view.failure, None  # it knows the frames in which torch's reader holds the view: for ever
    if failure is not None:
        with explained(view.where):
            raise failure


def _skipping(view: CheckedFile, map_location: MapLocation) -> MapLocation:
    """A ``map_location`` that leaves no values where none were read."""
    if not view.skipped:
        return map_location

    def place_chosen(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if view.record is not None and view.record.name in view.skipped and storage.nbytes():
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        return place(storage, location, map_location)

    return place_chosen


def _chosen(result: Any, request: LoadRequest, file: OpenedFile) -> Any:
    if request.keys is None:
        return result
    return choose(result, _names_of(result, request.keys, file.where).__contains__)


def _announce_byte_order(archive: ZipDirectory) -> None:
    if is_of_other_byte_order(archive):
        announce("loading without conversion", "the file was written with the other byte order; torch swaps it")


def _load_with_torch(file: OpenedFile, request: LoadRequest, *, is_zip: bool) -> Any:
    """Let torch read the file."""

    def attempt(map_location: MapLocation) -> Any:
        where: Any = file.path or FileView(file)
        return torch.load(where, map_location, weights_only=request.weights_only, mmap=request.mmap)

    try:
        return attempt(request.map_location)
    except Exception as error:
        explain(error, file, request, rebuild_on_host=None if is_zip else lambda: attempt("cpu"))
        raise
