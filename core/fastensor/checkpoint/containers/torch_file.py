"""The zip archives that ``torch.save`` writes: a :class:`~fastensor.checkpoint.containers.FileContainer`. They are
loaded through our verifying reader; ``archive.py`` reads what they hold."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastensor.backends.registry import announce, record_fallback
from fastensor.checkpoint.reading.archive import (
    foreign_code,
    read_archive,
    read_catalog,
    read_pickle,
    to_compare,
    verify_compressed,
)
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, named_in_errors
from fastensor.checkpoint.reading.placement import (
    MapLocation,
    check_destination,
    may_be_filled_at_once,
)
from fastensor.checkpoint.reading.reader import open_reader
from fastensor.checkpoint.reading.request import MAPPED, ArchivePart, Loaded, LoadRequest
from fastensor.checkpoint.reading.storages import (
    NotOrdinaryError,
    Storages,
    are_wanted,
    in_reading_order,
    is_known,
    rebuild,
    small_records,
)
from fastensor.errors import (
    CorruptCheckpointError,
    FastensorError,
    NotACheckpointError,
    caught_as,
)
from fastensor.files.garbage import without_collection
from fastensor.stitch.torch_records import TorchArchive

__all__ = ["foreign_code", "load", "read_catalog", "to_compare"]
_ALL = ArchivePart(set())
_logger = logging.getLogger("fastensor")
_FINAL = (FastensorError, MemoryError, torch.OutOfMemoryError)
"""Another attempt would raise these again."""
_MAPS_EMPTY_STORAGES = torch.__version__ >= "2.15"
"""True if ``torch.load(mmap=True)`` keeps the dtypes of several tensors that share an empty storage."""


def load(file: OpenedFile, request: LoadRequest) -> Loaded:
    archive = _archive_of(file)
    if request.mmap and (reason := _why_not_mapped(file, archive)):
        record_fallback(request.fallbacks, "mapping", reason)
        request = request._replace(mmap=False)
    if request.mmap or archive.why_torch:
        compare = request.checked and archive.compressed
        if compare:
            verify_compressed(file)
        if archive.why_torch:
            record_fallback(request.fallbacks, "the verifying reader", archive.why_torch)
        result = load_with_torch(file, request, is_zip=True)
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


def _select(file: OpenedFile, archive: TorchArchive, keys: Iterable[str], request: LoadRequest) -> ArchivePart | None:
    """The selection by ``keys``; None if the whole file has to be read to find out."""
    from fastensor.checkpoint.containers.selecting import select  # a load of all needs nothing of it

    return select(file, archive, keys, request)


def _load_some(file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: ArchivePart) -> Loaded:
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
        from fastensor.checkpoint.containers.selecting import has_all, selected

        if has_all(selection, loaded.result, file.where):
            return loaded._replace(result=selected(selection, loaded.result))
        reason = "its keys are of classes that are known to Python only"
    record_fallback(request.fallbacks, "partial reading", reason)
    return _load_all(file, archive, request)


def _load_all(file: OpenedFile, archive: TorchArchive, request: LoadRequest) -> Loaded:
    """Load the whole file, and drop what ``keys`` do not choose."""
    loaded = _load_archive(file, archive, request, _ALL)
    return loaded._replace(result=_chosen_of(loaded.result, request, file))


def _chosen_of(result: Any, request: LoadRequest, file: OpenedFile) -> Any:
    if request.keys is None:
        return result
    from fastensor.checkpoint.containers.selecting import chosen_by

    return chosen_by(request.keys, result, file.where)


def _load_archive(file: OpenedFile, archive: TorchArchive, request: LoadRequest, selection: ArchivePart) -> Loaded:
    """Let torch rebuild the object, in the fastest way that suits the file and the request."""
    if may_be_filled_at_once(request.map_location) and not archive.swapped:
        from fastensor.checkpoint.reading.checked_file import load_through_torch

        try:
            return load_through_torch(file, archive, request, selection, fills_devices=True)
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
    from fastensor.checkpoint.reading.checked_file import load_through_torch

    return load_through_torch(file, archive, request, selection, fills_devices=False)


def _load_together(file: OpenedFile, archive: TorchArchive, request: LoadRequest) -> Loaded:
    """Let torch's restricted unpickler rebuild the object from storages that are read together."""
    small, parts = in_reading_order(small_records(archive), archive.wanted())
    with without_collection(len(parts)), open_reader(file, parts, request, keep=True) as reader:
        storages = Storages(archive, reader, request.map_location)
        try:
            result = rebuild(small, reader, storages)
        finally:
            if file.borrowed is not None and storages.end:
                file.borrowed.stopped_at = storages.end
        return Loaded(result, reader.backend, reader.reason, request.checked and archive.checked)


def load_with_torch(file: OpenedFile, request: LoadRequest, *, is_zip: bool) -> Any:
    """Let torch read the file; what ``keys`` choose of it."""

    def attempt(where: Any, map_location: MapLocation) -> Any:
        with named_in_errors(file):
            return torch.load(where, map_location, weights_only=request.weights_only, mmap=request.mmap)

    try:
        with _for_torch(file, request) as where:
            result = attempt(where, request.map_location)
    except Exception as error:
        from fastensor.checkpoint.reading.torch_errors import explain

        on_host = None if is_zip else lambda: attempt(FileView(file), "cpu")
        explain(error, file, request, rebuild_on_host=on_host)
        raise
    return _chosen_of(result, request, file)


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
