"""Contents of torch's zip archives, read from an opened file without running it: the part of
``containers/torch_file.py`` that its errors need, too."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from fastensor.checkpoint.containers import ToCompare
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, read_exactly
from fastensor.errors import CorruptCheckpointError, FastensorError, UnsupportedContentError
from fastensor.files.garbage import without_collection
from fastensor.files.os_errors import read_error
from fastensor.stitch import torch_records
from fastensor.stitch.parts import Part
from fastensor.stitch.torch_records import TorchArchive

if TYPE_CHECKING:
    from fastensor.checkpoint.tools.catalog import Catalog
    from fastensor.stitch.pickle_records import PickledTensor

_LEAST_RECORD_NBYTES = 128
"""A record takes more of an archive, with its headers."""


def read_archive(file: OpenedFile) -> TorchArchive:
    """The archive's directory, checked. See :func:`fastensor.stitch.torch_records.read_archive`."""
    with without_collection(file.nbytes // _LEAST_RECORD_NBYTES):
        return torch_records.read_archive(partial(read_exactly, file), file.nbytes, where=file.where)


def read_pickle(file: OpenedFile, archive: TorchArchive, *, verify: bool) -> bytes:
    """The bytes of ``data.pkl``. See :func:`fastensor.stitch.torch_records.read_pickle`."""
    return torch_records.read_pickle(partial(read_exactly, file), archive, where=file.where, verify=verify)


def verify_compressed(file: OpenedFile) -> None:
    """Compare every record of an archive with compressed records.

    Call this before torch reads the archive: torch would take a damaged compression method for a sound one.

    Raises:
        CorruptCheckpointError: a record is damaged.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], FileView(file))) as opened:
            damaged = opened.testzip()
    except FastensorError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 raises OSError without errno for damaged data
            raise read_error(error, file.where) from error
        raise CorruptCheckpointError(f"{file.where}: a compressed record is damaged ({error})") from error
    if damaged is not None:
        raise CorruptCheckpointError(f"{file.where}: record {damaged!r} does not match its CRC32")


def to_compare(file: OpenedFile) -> ToCompare:
    archive = read_archive(file)
    if not archive.compressed:
        return ToCompare(archive.parts)
    sizes = [part.nbytes for part in archive.parts if part.nbytes]
    return ToCompare((), sizes, compare_others=partial(verify_compressed, file))


def foreign_code(file: OpenedFile) -> tuple[str, ...]:
    from fastensor.checkpoint.tools.catalog import refused_globals  # a load needs nothing of it
    from fastensor.stitch.torch_pickle import read_program

    archive = read_archive(file)
    if any(part.name.endswith("/constants.pkl") for part in archive.others):
        return ("the program of a TorchScript archive",)
    try:
        return refused_globals(read_program(_pickle_of(file, archive), where=file.where).naming_globals())
    except CorruptCheckpointError as error:  # torch's unpickler might still run it
        return (f"the pickle ({error})",)


def _pickle_of(file: OpenedFile, archive: TorchArchive) -> bytes:
    if not archive.compressed:
        return read_pickle(file, archive, verify=False)
    with zipfile.ZipFile(cast(IO[bytes], FileView(file))) as opened:
        return opened.read(archive.pickle.name)


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    from fastensor.checkpoint.models.names import walk  # a load needs nothing of these
    from fastensor.checkpoint.tools.catalog import Catalog, Located, TensorInfo
    from fastensor.stitch.pickle_records import PickledTensor
    from fastensor.stitch.torch_pickle import read_program

    archive = read_archive(file)
    if archive.why_torch:
        raise UnsupportedContentError(f"{file.where}: {archive.why_torch}; load it whole")
    program = read_program(read_pickle(file, archive, verify=verify), where=file.where)
    tensors: dict[str, TensorInfo] = {}
    located: dict[str, Located] = {}
    values: dict[str, Any] = {}
    by_identity: dict[int, Located] = {}
    seen: dict[str, int] = {}
    is_swapped = archive.swapped
    for path, value in walk(program.structure, file.where):
        seen[path] = count = seen.get(path, 0) + 1
        name = path if count == 1 else f"{path}#{count}"
        if not isinstance(value, PickledTensor):
            values[name] = value
            continue
        part = _part_of(value, name, archive.storages, file.where)
        crc32 = part.crc32 if part else None
        info = TensorInfo(name, value.kind, value.dtype, value.shape, part.name if part else "", crc32)
        tensors[name] = info
        if part is not None and value.plain and not is_swapped:
            located[name] = by_identity[id(value)] = Located(info, part, value.offset, value.stride)
    return Catalog(
        "torch",
        tensors,
        located,
        values,
        {},
        archive.checked,
        "",
        program.structure,
        by_identity,
        program.naming_globals(),
    )


_EMPTY = Part("", 0, None, 0, 0)


def _part_of(tensor: PickledTensor, name: str, parts: Mapping[str, Part], where: str) -> Part | None:
    """The record that a tensor lies in; None if the tensor is not a view of one storage.

    Raises:
        CorruptCheckpointError: there is no such record, or the tensor reaches beyond it.
        UnsupportedContentError: the tensor had no memory any more when it was saved.
    """
    if tensor.storage is None:
        return None
    numel, reach = _numel_and_reach(tensor.shape, tensor.stride)
    end = tensor.offset + reach
    part = parts.get(tensor.storage.key, _EMPTY)
    if numel and part.nbytes == tensor.storage.nbytes == 0:
        raise UnsupportedContentError(
            f"{where}: tensor {name!r} was saved without its values: it needs {end * tensor.dtype.itemsize} bytes, and "
            f"its storage, which had been freed, has 0. Load the others by their keys"
        )
    if numel and end * tensor.dtype.itemsize > part.nbytes:
        raise CorruptCheckpointError(
            f"{where}: tensor {name!r} needs {end * tensor.dtype.itemsize} bytes of record {tensor.storage.key!r}, "
            f"which has {part.nbytes}; the file was damaged, or is not one of torch's"
        )
    return part


@lru_cache(maxsize=4096)
def _numel_and_reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int]:
    """Number of a tensor's elements, and of its storage's from its first to its last one."""
    return torch.Size(shape).numel(), sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
