"""Reading a stored tensor: ``.npy`` files by any backend but torch's, ``.pt`` files by ``torch.load``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from fastensor.backends.base import Backend, Extent
from fastensor.backends.memory import fill, is_filled_at_once, storage_on
from fastensor.errors import CorruptCheckpointError, FastensorError, UnsafeCheckpointError
from fastensor.files import posix
from fastensor.stitch import npy
from fastensor.stitch.torch_records import read_archive, read_pickle
from fastensor.store.files import StoredFile
from fastensor.store.packing import elements
from fastensor.store.ref import TensorRef

_SHOWN_NBYTES = 60
"""Bytes of a header that messages show."""


def read_npy(backend: Backend, file: StoredFile, ref: TensorRef, device: torch.device, *, verify: bool) -> Tensor:
    """The elements of a tensor, on the device.

    Raises:
        CorruptCheckpointError: the file is damaged, or does not belong to the ref.
        BackendUnavailableError: the backend cannot read this file.
        OSError: the file cannot be read.
    """
    dtype = ref.torch_dtype()
    with closing(backend.open_reader(file.fd, file.nbytes, [Extent(0, file.nbytes)])) as reader:
        start = bytearray(min(npy.DATA_BEGIN, file.nbytes))
        if start:
            reader.readinto(0, memoryview(start), checksum=False)
        header = npy.NpyHeader.of(dtype, ref.shape, ref.stride)
        _check_header(bytes(start), file, header.encode(), ref.nbytes)
        data = storage_on(device if is_filled_at_once(device) else torch.device("cpu"), ref.nbytes)
        crc32 = fill(reader, data, npy.DATA_BEGIN, checksum=verify)
        if verify:
            _compare(crc32, ref, file.path)
    values = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data)
    return elements(values.to(device), header, dtype)


def _check_header(start: bytes, file: StoredFile, expected: bytes, nbytes: int) -> None:
    """Compare the start of a file, and its size, with what the store has written. Nothing of it is parsed."""
    if file.nbytes != len(expected) + nbytes:
        raise CorruptCheckpointError(
            f"{file.path}: {file.nbytes} bytes, expected {len(expected) + nbytes}: the file was cut off, or is that of "
            f"another tensor"
        )
    if start != expected:
        at = next(at for at, (found, wanted) in enumerate(zip(start, expected, strict=True)) if found != wanted)
        raise CorruptCheckpointError(
            f"{file.path}: found {start[at : at + _SHOWN_NBYTES]!r} at offset {at}, expected "
            f"{expected[at : at + _SHOWN_NBYTES]!r}: the file was damaged, or is that of another tensor"
        )


def read_pt(file: StoredFile, ref: TensorRef, device: torch.device, *, verify: bool) -> Tensor:
    """The tensor that ``torch.load(weights_only=True)`` finds in a file, on the device.

    Raises:
        CorruptCheckpointError: the file is damaged, or does not belong to the ref.
        UnsafeCheckpointError: the tensor is of a class that torch does not allow.
        OSError: the file cannot be read.
    """
    if verify:  # the pickle, too, which holds what the elements do not say, such as the scale of a quantized tensor
        read = partial(posix.read_exactly, file.fd)
        read_pickle(read, read_archive(read, file.nbytes, where=file.path), where=file.path, verify=True)
    crc32 = 0

    def keep_on_host(storage: Any, location: str) -> Any:
        nonlocal crc32
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data
        crc32 = isal_zlib.crc32(memory, crc32) if verify else 0
        return storage

    found = _load(file, ref, keep_on_host)
    if verify:
        _compare(crc32, ref, file.path)
    if not isinstance(found, Tensor) or (found.dtype, found.shape) != (ref.torch_dtype(), ref.shape):
        shown = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise CorruptCheckpointError(f"{file.path}: found {shown}, expected {ref.dtype} of shape {ref.shape}")
    return found.to(device)


def _load(file: StoredFile, ref: TensorRef, place: Callable[[Any, str], Any]) -> object:
    try:
        with open(file.fd, "rb", closefd=False) as opened:
            return torch.load(opened, place, weights_only=True)
    except (FastensorError, OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{file.path}: torch.load(weights_only=True) does not allow what this tensor needs ({ref.kind}). If you "
            f"trust it, allow the class by torch.serialization.add_safe_globals before you get it"
        ) from error
    except Exception as error:
        raise CorruptCheckpointError(f"{file.path}: torch cannot read it ({error!r}); it was damaged") from error


def stored_crc32(fd: int, nbytes: int, where: str) -> int:
    """The CRC32 of all storages of a ``.pt`` file in order, combined from those in the file's directory."""
    crc32 = 0
    for part in read_archive(partial(posix.read_exactly, fd), nbytes, where=where).storages.values():
        crc32 = isal_zlib.crc32_combine(crc32, part.crc32 or 0, part.nbytes)
    return crc32


def _compare(found: int, ref: TensorRef, where: str) -> None:
    if ref.crc32 is not None and found != ref.crc32:
        raise CorruptCheckpointError(
            f"{where}: the tensor ({ref.nbytes} bytes) has CRC32 {found:08x}, expected {ref.crc32:08x}: the file was "
            f"damaged after it was written; a store with verify=False returns the damaged values"
        )
