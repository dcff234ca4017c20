"""Loading an archive to host memory with all of its storages read first, for states of very many small tensors.

Inside ``torch.load`` each storage costs several calls through a file object. Here neighbouring records are read
together, compared with their CRC32s and copied to storages of their own; then torch's own restricted unpickler rebuilds
the object, and finds every storage filled. That unpickler is not public: it is used with the versions of torch of which
it was looked at, and wherever something is unusual ``torch.load`` does it all.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.checkpoint.archive import find_pickle, open_record, read_pickle
from fastensor.checkpoint.checksums import Checked
from fastensor.checkpoint.opened import OpenedFile, explained
from fastensor.checkpoint.request import Loaded, LoadRequest
from fastensor.stitch.torch_records import Checks, payload_records
from fastensor.stitch.zip_directory import LOCAL_HEADER, Record, ZipDirectory

_KNOWN_TORCH = ((2, 13),)
"""Versions whose ``torch.serialization._load`` does what :func:`_rebuild` does."""
_FEW = 1000
"""Up to so many storages ``torch.load`` costs too little to matter."""
_WINDOW_NBYTES = 4 << 20
"""Neighbouring records are read together up to that."""
_LARGE_NBYTES = 256 << 10
"""A record from this size on is read by itself, straight to its storage."""


class UnusualError(Exception):
    """The archive has to be loaded by ``torch.load``: why."""


def is_worth_it(archive: ZipDirectory, request: LoadRequest) -> bool:
    """Whether an archive has very many storages, all of which go to host memory as they are."""
    return (
        len(archive.records) > _FEW
        and tuple(map(int, torch.__version__.split(".")[:2])) in _KNOWN_TORCH
        and request.keys is None
        and request.restricted
        and (request.map_location is None or str(request.map_location) == "cpu")
        and torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        and not _loading().skip_data
    )


def load_at_once(file: OpenedFile, archive: ZipDirectory, request: LoadRequest) -> Loaded:
    """
    Raises:
        CorruptCheckpointError: a record does not match its CRC32.
        CheckpointReadError: the operating system failed to deliver the bytes.
        UnusualError: it has to be loaded by ``torch.load``.
    """
    data = read_pickle(file, archive, verify=request.checked)
    checks = Checks(archive, enabled=request.checked)
    windows = list(_windows(payload_records(archive), checks))
    order = [Extent(window[0].header_offset, checks.end_of(window[-1])) for window in windows]
    with explained(file.where):
        used, why, reader = file.open_reader(order, request.wanted, request.fallbacks)
        with closing(reader):
            storages = dict(_read_storages(reader, windows, checks, file.where))
    try:
        result = _rebuild(data, f"{find_pickle(archive, file.where).name.partition('/')[0]}/data/", storages, request)
    except UnusualError:
        raise
    except Exception as error:
        raise UnusualError(repr(error)) from error
    return Loaded(result, used, why, checks.complete)


def _read_storages(
    reader: Reader, windows: Iterable[Sequence[Record]], checks: Checks, where: str
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Read and compare them; by the names of records."""
    scratch = bytearray(_WINDOW_NBYTES)
    for window in windows:
        if len(window) == 1:
            yield _read_large(reader, window[0], checks, where)
        else:
            yield from _read_small(reader, window, checks, where, scratch)


def _windows(records: Sequence[Record], checks: Checks) -> Iterator[Sequence[Record]]:
    """Small records that lie one behind the other, in groups that fit the scratch memory; any other by itself."""
    begin = 0
    while begin < len(records):
        first = records[begin].header_offset
        end, at = begin, first
        while end < len(records) and records[end].nbytes < _LARGE_NBYTES and records[end].header_offset == at:
            following = checks.end_of(records[end])
            if following - first > _WINDOW_NBYTES:
                break
            end, at = end + 1, following
        end = max(end, begin + 1)
        yield records[begin:end]
        begin = end


def _read_large(reader: Reader, record: Record, checks: Checks, where: str) -> tuple[str, torch.UntypedStorage]:
    opened = open_record(reader, checks, record, where)
    storage = _new_storage(record.nbytes)
    memory = (ctypes.c_ubyte * record.nbytes).from_address(storage.data_ptr())
    found = reader.readinto(opened.begin, memoryview(memory).cast("B"), checksum=opened.compared)
    if opened.compared:
        Checked.of_record(opened).compare(found, where)
    return record.name, storage


def _read_small(
    reader: Reader, window: Sequence[Record], checks: Checks, where: str, scratch: bytearray
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    begin = window[0].header_offset
    view = memoryview(scratch)[: checks.end_of(window[-1]) - begin]
    reader.readinto(begin, view, checksum=checks.payload)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(scratch))
    for record in window:
        at = record.header_offset - begin
        opened = checks.open_known_record(record, view[at : at + LOCAL_HEADER.size], where)
        at = opened.begin - begin
        if opened.compared:
            found = isal_zlib.crc32(view[at : at + record.nbytes])
            if found != record.crc32:
                Checked.of_record(opened).compare(found, where)
        storage = _new_storage(record.nbytes)
        ctypes.memmove(storage.data_ptr(), address + at, record.nbytes)
        yield record.name, storage


def _new_storage(nbytes: int) -> torch.UntypedStorage:
    """
    Raises:
        UnusualError: there is not so much memory; torch says so in its words.
    """
    make: Any = torch.UntypedStorage  # torch gives it no types
    try:
        found: torch.UntypedStorage = make(nbytes)
    except RuntimeError as error:
        raise UnusualError(str(error)) from error
    return found


def _rebuild(data: bytes, prefix: str, storages: Mapping[str, torch.UntypedStorage], request: LoadRequest) -> Any:
    """The object that a pickle describes, by torch's restricted unpickler, as ``torch.serialization._load`` has it.

    Args:
        data: the pickle.
        prefix: of the names of records that hold storages; behind it comes the pickle's key.
        storages: filled, by the names of records.

    Raises:
        UnusualError: a storage is not in host memory, or of another length than its record.
        Exception: whatever the unpickler raises.
    """
    typed: dict[str, Any] = {}
    restore_location: Any = torch.serialization.default_restore_location
    typed_storage: Any = torch.storage.TypedStorage

    def persistent_load(saved_id: Any) -> Any:
        kind, storage_type, key, location, numel = saved_id
        if key in typed:
            return typed[key]
        if kind != "storage" or location != "cpu":
            raise UnusualError(f"a {kind} on {location}")
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        nbytes = numel * dtype.itemsize
        storage = storages[f"{prefix}{key}"] if nbytes else _new_storage(0)
        if storage.nbytes() != nbytes:
            raise UnusualError(f"the pickle asks for {nbytes} of {storage.nbytes()} bytes of storage {key}")
        placed = restore_location(storage, location)
        found = typed_storage(wrap_storage=placed, dtype=dtype, _internal=True)
        if nbytes:
            typed[key] = found
        return found

    from torch import _weights_only_unpickler as restricted  # private: only of known versions

    unpickler: Any = restricted.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    with _located(request.map_location):
        result = unpickler.load()
    torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # torch gives it no types
    return result


@contextmanager
def _located(map_location: Any) -> Iterator[None]:
    """Tell tensors that are rebuilt from something else than storages where they go, as torch does."""
    before, _loading().map_location = _loading().map_location, map_location
    try:
        yield
    finally:
        _loading().map_location = before


def _loading() -> Any:
    """What ``torch.serialization`` knows of the thread's load."""
    return torch.serialization._serialization_tls
