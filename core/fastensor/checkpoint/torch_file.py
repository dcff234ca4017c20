"""Loading torch's own containers: zip archives through our verifying reader, everything else by torch itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, cast

import torch

from fastensor.backends.base import Extent, Reader
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
from fastensor.checkpoint.torch_errors import explain
from fastensor.errors import CorruptCheckpointError, FastensorError
from fastensor.stitch.torch_pickle import read_structure, storages_in
from fastensor.stitch.torch_records import Checks, payload_records, record_ends
from fastensor.stitch.zip_directory import ZipDirectory


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
    if part is not None:
        try:
            return _load_part(file, archive, request, part)
        except (FastensorError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # it is raised again if it was not for the want of values
            give_up(
                request.fallbacks, "partial reading", f"torch cannot rebuild the rest without its values ({error!r})"
            )
    loaded = _load_archive(file, archive, request, frozenset())
    return replace(loaded, result=_chosen(loaded.result, request, file))


@dataclass(frozen=True, slots=True)
class _Part:
    """What was asked for."""

    names: set[str]
    """Of branches and leaves."""
    skipped: set[str]
    """Names of the records that hold nothing of it."""


def _find_part(file: OpenedFile, archive: ZipDirectory, request: LoadRequest) -> _Part | None:
    """None if all has to be read."""
    if request.keys is None:
        return None
    data = read_pickle(file, archive, verify=request.checked)
    try:
        structure = read_structure(data, where=file.where)
    except CorruptCheckpointError as error:  # torch's own unpickler may know what to make of it
        give_up(request.fallbacks, "partial reading", str(error))
        return None
    names = _names_of(structure, request.keys, file.where)
    needed = {storage.key for storage in storages_in(choose(structure, names.__contains__))}
    skipped = {record.name for key, record in records_by_key(archive, file.where).items() if key not in needed}
    return _Part(names, skipped)


def _load_part(file: OpenedFile, archive: ZipDirectory, request: LoadRequest, part: _Part) -> Loaded:
    """Load the rest as tensors on the meta device, and drop it.

    Raises:
        LookupError: torch gave the object other names than its pickle.
    """
    loaded = _load_archive(file, archive, request, part.skipped)
    if not part.names <= {node.name for node in nodes(loaded.result, file.where)}:
        raise LookupError("its keys are of classes that are known to Python only")
    return replace(loaded, result=choose(loaded.result, part.names.__contains__))


def _names_of(tree: Any, keys: Iterable[str], where: str) -> set[str]:
    """The names that are meant by the keys."""
    return resolve(keys, [node.name for node in nodes(tree, where)], where)


def _load_archive(file: OpenedFile, archive: ZipDirectory, request: LoadRequest, skipped: Collection[str]) -> Loaded:
    """Let torch rebuild the object from our file; the records to skip become tensors on the meta device."""
    if may_be_filled_at_once(request.map_location) and not is_of_other_byte_order(archive):
        try:
            return _attempt(file, archive, request, skipped, _filling)
        except (FastensorError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # it is raised again if it was not for that
            give_up(
                request.fallbacks, "filling devices at once", f"torch cannot rebuild the object that way ({error!r})"
            )
    return _attempt(file, archive, request, skipped, _skipping)


def _attempt(
    file: OpenedFile,
    archive: ZipDirectory,
    request: LoadRequest,
    skipped: Collection[str],
    placing: Callable[[CheckedFile, MapLocation], MapLocation],
) -> Loaded:
    """
    Args:
        placing: makes the ``map_location`` that torch gets.
    """
    ends = record_ends(archive)
    order = [
        Extent(record.header_offset, ends[record.header_offset])
        for record in payload_records(archive)
        if record.name not in skipped
    ]
    checks = Checks(archive, enabled=request.checked)
    with explained(file.where):
        used, why, reader = file.open_reader(order, request.wanted, request.fallbacks)
    with closing(reader):
        view = CheckedFile(file, reader, checks, skipped, postpones=placing is _filling)
        try:
            result = _rebuild(view, placing(view, request.map_location), request.weights_only)
            view.check_none_postponed()
        except Exception as error:
            if placing is not _filling:
                rebuild = partial(_rebuild_without_values, file, archive, reader)
                explain(error, file, request, is_zip=True, rebuild=rebuild)
            raise
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
    try:
        result = torch.load(cast(IO[bytes], view), map_location, weights_only=weights_only, mmap=False)
    except Exception:
        _raise_failure(view)
        raise
    _raise_failure(view)
    return result


def _raise_failure(view: CheckedFile) -> None:
    failure, view.failure = view.failure, None  # it knows the frames in which torch's reader holds the view: for ever
    if failure is not None:
        with explained(view.where):
            raise failure


def _rebuild_without_values(file: OpenedFile, archive: ZipDirectory, reader: Reader) -> object:
    """Find out whether the pickle is sound, on the host and without reading any tensor."""
    everything = {record.name for record in payload_records(archive)}
    return _rebuild(CheckedFile(file, reader, Checks(archive, enabled=False), everything), "cpu", True)


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
        explain(error, file, request, is_zip=is_zip, rebuild=lambda: attempt("cpu"))
        raise
