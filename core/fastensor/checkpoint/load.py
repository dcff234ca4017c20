"""``fastensor.load``: torch rebuilds the object, our reader brings it the bytes and checks them.

torch reads a checkpoint through a file object, asking for every record's bytes with one ``readinto`` straight into
the memory of the storage to be. That file object is ours: it fills the memory with a backend that runs ahead through
the file, checks the record's CRC32, and only then does the storage reach the unpickler. So every rule of ``torch.load``
(``map_location``, safe globals, ties, subclasses, byte order) is torch's own and holds.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO, Any, TypeAlias, cast

import torch

from fastensor.backends import posix, registry
from fastensor.backends.base import Extent, Reader
from fastensor.checkpoint.checked_file import CheckedFile
from fastensor.checkpoint.fallback import give_up, use_first
from fastensor.checkpoint.report import Fallback, LoadReport, announce
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    FastensorError,
    UnsafeCheckpointError,
    UnverifiedCheckpointWarning,
)
from fastensor.select.rule import choose_reader
from fastensor.stitch.torch_records import Checks, payload_records, record_ends
from fastensor.stitch.zip_directory import LOCAL_SIGNATURE, ZipDirectory, parse_directory

MapLocation: TypeAlias = Any
"""As for ``torch.load``: a device, its name, a dict between names, a callable, or None."""


_GARBLED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    *(EOFError, struct.error),
)
_GLOBAL_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global|whose module (\S+) is blocked")


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = True,
    mmap: bool = False,
    verify: bool | None = None,
    backend: str = registry.AUTO,
) -> Any:
    """Load a checkpoint as ``torch.load`` does, at the speed of the disk or of the page cache, and verify it.

    Args:
        path: a file that :func:`fastensor.save` or ``torch.save`` wrote, with any version of torch.
        map_location: as for ``torch.load``, in all its forms.
        weights_only: as for ``torch.load``, None included. With False a crafted file can run any code; with True it
            is as safe as torch's restricted unpickler.
        mmap: as for ``torch.load``: map the file instead of reading it.
        verify: compare everything that is loaded with the CRC32s in the file. None means True, but False with
            ``mmap``, which reads nothing that could be compared. A file without checksums is loaded with an
            :class:`~fastensor.errors.UnverifiedCheckpointWarning`.
        backend: ``"auto"``, or the name of the backend that shall bring the bytes. One that cannot, on this file or
            machine, is replaced by another, which is logged.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged, cut off, or not a checkpoint.
        UnsafeCheckpointError: ``weights_only=True`` met a global that is not allow-listed.
        CheckpointReadError: the operating system failed to deliver the bytes.

    Memory beyond the object: a ring of 32 MiB, and one tensor on the host when loading to a device. The page cache is
    used if most of the file is in it, else left alone.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> _ = fastensor.save({"weight": torch.arange(3)}, path)
    >>> fastensor.load(path)
    {'weight': tensor([0, 1, 2])}
    """
    result, _ = load_with_report(
        path, map_location, weights_only=weights_only, mmap=mmap, verify=verify, backend=backend
    )
    return result


def load_with_report(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = True,
    mmap: bool = False,
    verify: bool | None = None,
    backend: str = registry.AUTO,
) -> tuple[Any, LoadReport]:
    """:func:`load`, and what it did."""
    started = time.perf_counter()
    if mmap and verify:
        raise ValueError(
            "mmap=True and verify=True contradict: a mapped file is read when its tensors are used; "
            "load without mmap to verify"
        )
    if backend != registry.AUTO:
        registry.get(backend)
    where = os.fspath(path)
    checked = verify is not False and not mmap
    fallbacks: list[Fallback] = []
    with _opened(where) as (fd, nbytes):
        with _explained(where):
            resident = posix.resident_fraction(fd, nbytes)
            archive = _read_directory(fd, nbytes, where) if _is_zip(fd, nbytes, where) else None
        reason = "" if mmap else _reason_for_torch(archive)
        if mmap or archive is None or reason:
            used, verified = "torch", checked and archive is not None and _verify_compressed(archive, where)
            _warn_if(checked and not verified, where)
            if reason:
                give_up("the verifying reader", reason, fallbacks)
            result = _load_with_torch(where, map_location, weights_only, mmap, is_zip=archive is not None)
        else:
            _announce_byte_order(archive)
            checks = Checks(archive, enabled=checked)
            verified = checks.payload
            _warn_if(checked and not verified, where)
            with _explained(where):
                used, reader = _open_reader(fd, nbytes, archive, backend, resident, fallbacks)
            with closing(reader):
                file = CheckedFile(fd, nbytes, reader, checks, where)
                result = _load_through(file, where, map_location, weights_only)
    return result, LoadReport(
        path=where,
        nbytes=nbytes,
        backend=used,
        verified=verified,
        resident_fraction=resident,
        seconds=time.perf_counter() - started,
        fallbacks=tuple(fallbacks),
    )


@contextmanager
def _opened(where: str) -> Iterator[tuple[int, int]]:
    """A descriptor of a regular file, and its size."""
    with _explained(where):
        if not stat.S_ISREG(os.stat(where).st_mode):
            kind = errno.EISDIR if os.path.isdir(where) else errno.EINVAL
            raise CheckpointReadError(kind, "cannot load: expected a checkpoint file, found something else", where)
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _explained(where):
            nbytes = os.fstat(fd).st_size
        yield fd, nbytes
    finally:
        os.close(fd)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Errors of the operating system as ours."""
    try:
        yield
    except (FastensorError, FileNotFoundError):
        raise
    except OSError as error:
        raise _failure(error, where) from error


def _failure(error: OSError, where: str) -> FastensorError:
    if isinstance(error, posix.EndOfFile):
        return CorruptCheckpointError(f"{where}: {error.strerror}; it was cut off")
    return CheckpointReadError(error.errno, f"cannot read the checkpoint ({error.strerror})", where)


def _read_exactly(fd: int, offset: int, nbytes: int, where: str) -> bytes:
    data = bytearray(nbytes)
    if posix.read_fully(fd, memoryview(data), offset) != nbytes:
        raise CorruptCheckpointError(f"{where}: the file ends before offset {offset + nbytes}")
    return bytes(data)


def _is_zip(fd: int, nbytes: int, where: str) -> bool:
    if nbytes == 0:
        raise CorruptCheckpointError(f"{where}: the file is empty; its save was interrupted or never happened")
    return _read_exactly(fd, 0, min(nbytes, len(LOCAL_SIGNATURE)), where) == LOCAL_SIGNATURE


def _read_directory(fd: int, nbytes: int, where: str) -> ZipDirectory:
    return parse_directory(lambda at, count: _read_exactly(fd, at, count, where), nbytes, where=where)


def _reason_for_torch(archive: ZipDirectory | None) -> str:
    """Why torch has to read a file by itself; empty if it need not."""
    if archive is None:
        return "the file is not a zip archive (torch wrote such files before 1.6)"
    if any(record.name.endswith("/constants.pkl") for record in archive.records):
        return "the file is a TorchScript archive, which torch.jit loads"
    if _is_compressed(archive):
        return "the archive has been compressed, which torch never does"
    return ""


def _is_compressed(archive: ZipDirectory) -> bool:
    return any(record.compressed for record in archive.records)


def _verify_compressed(archive: ZipDirectory, where: str) -> bool:
    """Check every record, so that a damaged method field does not turn plain bytes into something else unnoticed.

    Returns whether there was something to check.
    """
    if not _is_compressed(archive):
        return False
    try:
        with zipfile.ZipFile(where) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise CorruptCheckpointError(f"{where}: a compressed record is damaged ({error})") from error
    if damaged is not None:
        raise CorruptCheckpointError(f"{where}: record {damaged!r} does not match its CRC32")
    return True


def _announce_byte_order(archive: ZipDirectory) -> None:
    other = "big" if sys.byteorder == "little" else "little"
    if any(record.name.endswith("/byteorder") and record.nbytes == len(other) for record in archive.records):
        announce("loading without conversion", "the file was written with the other byte order; torch swaps it")


def _warn_if(unverified: bool, where: str) -> None:
    if unverified:
        warnings.warn(
            f"{where}: the file carries no checksums that could be verified; it is loaded as it is. "
            f"Saving it with fastensor.save adds them",
            UnverifiedCheckpointWarning,
            stacklevel=4,
        )


def _open_reader(
    fd: int, nbytes: int, archive: ZipDirectory, backend: str, resident: float, fallbacks: list[Fallback]
) -> tuple[str, Reader]:
    """The wanted backend's reader, or else that of the next one that can read the file."""
    ends = record_ends(archive)
    order = [Extent(record.header_offset, ends[record.header_offset]) for record in payload_records(archive)]
    wanted = choose_reader(nbytes, resident) if backend == registry.AUTO else registry.get(backend).name
    return use_first(wanted, lambda candidate: candidate.open_reader(fd, nbytes, order), fallbacks)


def _load_through(file: CheckedFile, where: str, map_location: MapLocation, weights_only: bool | None) -> Any:
    """Let torch rebuild the object from our file. What user code raises meanwhile is passed on as it is."""
    try:
        result = torch.load(cast(IO[bytes], file), map_location, weights_only=weights_only, mmap=False)
    except Exception as error:
        if file.failure is not None:
            raise _as_ours(file.failure, where) from error
        if isinstance(error, pickle.UnpicklingError) and weights_only is not False:
            raise _refusal(error, where) from error
        if isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error):
            raise CorruptCheckpointError(f"{where}: {error}") from error
        raise
    if file.failure is not None:
        raise _as_ours(file.failure, where)
    return result


def _as_ours(failure: BaseException, where: str) -> BaseException:
    if not isinstance(failure, OSError) or isinstance(failure, FastensorError):
        return failure
    ours = _failure(failure, where)
    ours.__cause__ = failure
    return ours


def _load_with_torch(
    where: str, map_location: MapLocation, weights_only: bool | None, mmap: bool, *, is_zip: bool
) -> Any:
    """Let torch read the file. Outside of zip archives any bytes may be in it, and torch trips over them anyhow."""
    try:
        return torch.load(where, map_location, weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        if weights_only is not False and (is_zip or _GLOBAL_REFUSED.search(str(error))):
            raise _refusal(error, where) from error
        raise CorruptCheckpointError(f"{where}: its pickle is damaged or not one of torch's: {error}") from error
    except _GARBLED as error:
        if is_zip or weights_only is False:
            raise
        raise CorruptCheckpointError(f"{where}: torch cannot make sense of the file ({error!r})") from error


def _refusal(error: pickle.UnpicklingError, where: str) -> UnsafeCheckpointError:
    """What torch's restricted unpickler refused, and what to do about it."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(where)
    except Exception:  # noqa: BLE001  # a pickle that cannot be scanned: torch's message has to do
        unsafe = []
    unsafe = unsafe or [name for groups in _GLOBAL_REFUSED.findall(str(error)) for name in groups if name]
    if not unsafe:
        return UnsafeCheckpointError(
            f"{where}: weights_only=True refuses the file's pickle ({error}). If you trust the file, load it with "
            f"weights_only=False, which lets it run any code"
        )
    names = ", ".join(unsafe)
    return UnsafeCheckpointError(
        f"{where}: weights_only=True does not allow {names}, which the file contains. If you trust the file, either "
        f"allow them (torch.serialization.add_safe_globals([{names}]), or the context manager "
        f"torch.serialization.safe_globals), or load with weights_only=False, which lets the file run any code"
    )
