"""``fastensor.load``: torch rebuilds the object, our reader brings it the bytes and checks them.

torch reads a checkpoint through a file object, asking for every record's bytes with one ``readinto`` straight into
the memory of the storage to be. That file object is ours: it fills the memory with a backend that runs ahead through
the file, checks the record's CRC32, and only then does the storage reach the unpickler. So every rule of ``torch.load``
(``map_location``, safe globals, ties, subclasses, byte order) is torch's own and holds.
"""

from __future__ import annotations

import errno
import io
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
from dataclasses import dataclass
from typing import IO, Any, TypeAlias, cast

import torch
from isal import isal_zlib

from fastensor.backends import posix, registry
from fastensor.backends.base import Extent, Reader
from fastensor.checkpoint.report import Fallback, LoadReport, announce
from fastensor.errors import (
    BackendUnavailableError,
    CheckpointReadError,
    CorruptCheckpointError,
    FastensorError,
    UnsafeCheckpointError,
    UnverifiedCheckpointWarning,
)
from fastensor.select.rule import choose_reader
from fastensor.stitch.zip_directory import (
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    Record,
    ZipDirectory,
    parse_directory,
)

MapLocation: TypeAlias = Any
"""As for ``torch.load``: a device, its name, a dict between names, a callable, or None."""


_GARBLED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, struct.error)


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

    Memory beyond the object: at most 32 MiB. The page cache is used if most of the file is in it, else left alone.

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
    fallbacks: list[Fallback] = []
    used, verified = "torch", False
    with _translated(where), _opened(where) as (fd, nbytes):
        resident = posix.resident_fraction(fd, nbytes)
        archive = None if mmap else _open_archive(fd, nbytes, where, fallbacks, verify=verify is not False)
        if archive is None:
            _warn_if_unverified(where, wanted=bool(verify))
            with _garbled(where, restricted=weights_only is not False):
                result = torch.load(where, map_location, weights_only=weights_only, mmap=mmap)
        else:
            checks = _Checks(archive, enabled=verify is not False)
            _warn_if_unverified(where, wanted=checks.enabled and not checks.payload)
            used, reader = _open_reader(fd, nbytes, archive, backend, resident, fallbacks)
            with closing(reader):
                result = _load_through(_CheckedFile(fd, nbytes, reader, checks, where), map_location, weights_only)
            verified = checks.payload
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
    if not stat.S_ISREG(os.stat(where).st_mode):
        kind = errno.EISDIR if os.path.isdir(where) else errno.EINVAL
        raise CheckpointReadError(kind, "cannot load: expected a checkpoint file, found something else", where)
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def _open_archive(fd: int, nbytes: int, where: str, fallbacks: list[Fallback], *, verify: bool) -> ZipDirectory | None:
    """The directory of a torch zip that our reader can serve; None if torch has to read the file by itself."""
    if nbytes == 0:
        raise CorruptCheckpointError(f"{where}: the file is empty; its save was interrupted or never happened")

    def read(offset: int, count: int) -> bytes:
        data = bytearray(count)
        if posix.read_fully(fd, memoryview(data), offset) != count:
            raise CorruptCheckpointError(f"{where}: the file ends before offset {offset + count}")
        return bytes(data)

    if read(0, min(nbytes, len(LOCAL_SIGNATURE))) != LOCAL_SIGNATURE:
        reason = "the file is not a zip archive (torch wrote such files before 1.6)"
    else:
        directory = parse_directory(read, nbytes, where=where)
        reason = _reason_against(directory)
        if verify and _is_compressed(directory):
            _verify_compressed(where)
        if not reason:
            _announce_byte_order(directory)
            return directory
    announce("the verifying reader", reason)
    fallbacks.append(Fallback("the verifying reader", reason))
    return None


def _reason_against(directory: ZipDirectory) -> str:
    """Why torch has to read an archive by itself; empty if it need not."""
    if any(record.name.endswith("/constants.pkl") for record in directory.records):
        return "the file is a TorchScript archive, which torch.jit loads"
    if _is_compressed(directory):
        return "the archive has been compressed, which torch never does"
    return ""


def _is_compressed(directory: ZipDirectory) -> bool:
    return any(record.compressed for record in directory.records)


def _verify_compressed(where: str) -> None:
    """Check every record, so that a damaged method field does not turn plain bytes into something else unnoticed."""
    try:
        with zipfile.ZipFile(where) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise CorruptCheckpointError(f"{where}: a compressed record is damaged ({error})") from error
    if damaged is not None:
        raise CorruptCheckpointError(f"{where}: record {damaged!r} does not match its CRC32")


def _announce_byte_order(directory: ZipDirectory) -> None:
    other = "big" if sys.byteorder == "little" else "little"
    if any(record.name.endswith("/byteorder") and record.nbytes == len(other) for record in directory.records):
        announce("loading without conversion", "the file was written with the other byte order; torch swaps it")


def _warn_if_unverified(where: str, *, wanted: bool) -> None:
    if wanted:
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
    order = _reading_order(archive)
    wanted = choose_reader(nbytes, resident) if backend == registry.AUTO else registry.get(backend).name
    for name in dict.fromkeys((wanted, "numpy", "torch")):
        candidate = registry.get(name)
        availability = candidate.availability()
        try:
            if not availability.available:
                raise BackendUnavailableError(availability.reason)
            return name, candidate.open_reader(fd, nbytes, order)
        except BackendUnavailableError as error:
            announce(name, str(error))
            fallbacks.append(Fallback(name, str(error)))
    raise BackendUnavailableError(f"no backend could read the file: {fallbacks}")


def _payload_records(archive: ZipDirectory) -> list[Record]:
    """The records that hold storages."""
    return [record for record in archive.records if record.name.split("/")[1:2] == ["data"] and record.nbytes]


def _reading_order(archive: ZipDirectory) -> list[Extent]:
    """Where the storages are, in the order in which the unpickler will ask for them.

    torch numbers storages in the order of the pickle. Files lie in that order, too, but before torch 2.1 they were
    sorted as text (0, 1, 10, 11, 2).
    """
    records = _payload_records(archive)
    keys = [record.name.rpartition("/")[2] for record in records]
    if all(key.isdecimal() for key in keys):
        records = [record for _, record in sorted(zip(keys, records, strict=True), key=lambda pair: int(pair[0]))]
    begins = sorted(record.header_offset for record in archive.records)
    ends = dict(zip(begins, [*begins[1:], archive.offset], strict=True))
    return [Extent(record.header_offset, ends[record.header_offset]) for record in records]


class _Checks:
    """Which records of an archive can be compared with a CRC32.

    torch can be told to leave CRC32s out: then they are zero everywhere. Files whose storages were filled in later
    (``skip_data``) have them for the other records only.
    """

    def __init__(self, archive: ZipDirectory, *, enabled: bool) -> None:
        payload = _payload_records(archive)
        others = [record for record in archive.records if record.nbytes and record not in payload]
        self.enabled = enabled
        self.payload = enabled and any(r.crc32 for r in payload or others)
        """Whether storages are compared."""
        compared = [group for group in (payload, others) if enabled and any(record.crc32 for record in group)]
        self._compared = {record.name for group in compared for record in group}
        begins = sorted(record.header_offset for record in archive.records)
        self._ends = dict(zip(begins, [*begins[1:], archive.offset], strict=True))
        self._records = {record.header_offset: record for record in archive.records}

    def open_record(self, header_offset: int, header: memoryview, where: str) -> _OpenRecord | None:
        """The record whose local header that is; None if no record begins there.

        Raises:
            CorruptCheckpointError: the local header contradicts the directory. A changed length in it would move the
                data to where other bytes are.
        """
        record = self._records.get(header_offset)
        if record is None or header.nbytes != LOCAL_HEADER.size:
            return None
        fields = LOCAL_HEADER.unpack(header)
        signature, name_nbytes, extra_nbytes = fields[0], fields[-2], fields[-1]
        begin = header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes
        expected_name = record.earliest_data_offset - header_offset - LOCAL_HEADER.size
        if (
            signature != LOCAL_SIGNATURE
            or name_nbytes != expected_name
            or begin + record.stored_nbytes > self._ends[header_offset]
        ):
            raise CorruptCheckpointError(
                f"{where}: the local header of record {record.name!r} at offset {header_offset} contradicts the "
                f"directory: the file was damaged after it was written"
            )
        return _OpenRecord(record, begin, record.name in self._compared)


@dataclass(frozen=True, slots=True)
class _OpenRecord:
    """The record that torch is reading: it reads the local header first, then the data."""

    record: Record
    begin: int
    """Where its data begins."""
    compared: bool

    def contains(self, offset: int, nbytes: int) -> bool:
        return nbytes > 0 and self.begin <= offset and offset + nbytes <= self.begin + self.record.nbytes


class _CheckedFile(io.RawIOBase):
    """The file as torch sees it: reads go to a backend, and a record's bytes are compared with its CRC32."""

    def __init__(self, fd: int, nbytes: int, reader: Reader, checks: _Checks, where: str) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._reader = reader
        self._checks = checks
        self._where = where
        self._position = 0
        self._current: _OpenRecord | None = None
        self.failure: BaseException | None = None
        """What went wrong in a read. torch calls from C code that exceptions must not cross, so it gets a short
        read instead and whoever called torch raises this."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self.failure is not None:
            return 0
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._position, 0)]
        try:
            self._fill(view)
        except BaseException as failure:  # noqa: BLE001  # raised again by _load_through
            self.failure = failure
            return 0
        self._position += view.nbytes
        return view.nbytes

    def _fill(self, view: memoryview) -> None:
        offset = self._position
        current = self._current
        checksum = current is not None and current.compared and current.contains(offset, view.nbytes)
        found = self._reader.readinto(offset, view, checksum=checksum)
        if current is None or not checksum:
            self._current = self._checks.open_record(offset, view, self._where) or current
            return
        record = current.record
        if view.nbytes != record.nbytes:
            found = self._checksum_of(current)
        if found != record.crc32:
            raise CorruptCheckpointError(
                f"{self._where}: record {record.name!r} ({record.nbytes} bytes at offset {current.begin}) has CRC32 "
                f"{found:08x}, expected {record.crc32:08x}: the file was damaged after it was written. Load an older "
                f"checkpoint, or pass verify=False to get the damaged values"
            )

    def _checksum_of(self, current: _OpenRecord) -> int:
        """The CRC32 of a whole record, for a read of a part of it."""
        nbytes = current.record.nbytes
        block = memoryview(bytearray(min(nbytes, 1 << 20)))
        crc32 = 0
        for at in range(0, nbytes, block.nbytes):
            part = block[: nbytes - at]
            posix.read_fully(self._fd, part, current.begin + at)
            crc32 = isal_zlib.crc32(part, crc32)
        return crc32


def _load_through(file: _CheckedFile, map_location: MapLocation, weights_only: bool | None) -> Any:
    try:
        return torch.load(cast(IO[bytes], file), map_location, weights_only=weights_only, mmap=False)
    except Exception as error:
        if file.failure is not None:
            raise file.failure from error
        raise


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Errors of torch and of the operating system as ours, where ours say more."""
    try:
        yield
    except (FastensorError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno == errno.ENODATA:
            raise CorruptCheckpointError(f"{where}: {error.strerror}; it was cut off") from error
        raise CheckpointReadError(error.errno, f"cannot read the checkpoint ({error.strerror})", where) from error
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_globals(where, str(error))
        if not unsafe:
            raise CorruptCheckpointError(f"{where}: its pickle is damaged or not one of torch's: {error}") from error
        raise UnsafeCheckpointError(_refusal(where, unsafe)) from error
    except EOFError as error:
        raise CorruptCheckpointError(f"{where}: its pickle is cut off ({error})") from error
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):
            raise CorruptCheckpointError(f"{where}: {error}") from error
        raise


@contextmanager
def _garbled(where: str, *, restricted: bool) -> Iterator[None]:
    """What torch's restricted unpickler raises when it is given bytes that are no pickle.

    An unrestricted one runs code of the user's, whose errors are passed on.
    """
    try:
        yield
    except _GARBLED as error:
        if not restricted:
            raise
        raise CorruptCheckpointError(f"{where}: torch cannot make sense of the file ({error!r})") from error


def _unsafe_globals(where: str, message: str) -> list[str]:
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(where)
    except Exception:  # noqa: BLE001  # a file that cannot be scanned: the message has to do
        found = []
    pattern = r"GLOBAL (\S+) was not an allowed global|whose module (\S+) is blocked"
    return found or [name for groups in re.findall(pattern, message) for name in groups if name]


def _refusal(where: str, unsafe: list[str]) -> str:
    names = ", ".join(unsafe)
    return (
        f"{where}: weights_only=True does not allow {names}, which the file contains. If you trust the file, either "
        f"allow them (torch.serialization.add_safe_globals([{names}]), or the context manager "
        f"torch.serialization.safe_globals), or load with weights_only=False, which lets the file run any code"
    )
