"""The ``gds`` backend: kvikio moves the bytes.

Where the system has GPUDirect Storage, bytes go between files and GPUs without host memory. Elsewhere, and for bytes in
host memory, kvikio uses its own threads and direct I/O. The Fastensor paper calls this backend ``cpy`` (sections 3 and
4). Windows are staged, written and read ahead as by the backend ``direct``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from fastensor.backends.base import Extent, Reader
from fastensor.backends.buffers import BUFFER_NBYTES, TRANSFERS_IN_FLIGHT
from fastensor.backends.copier import Window
from fastensor.backends.gather import ALIGNMENT, DeviceStager, DeviceWindow, gathering_device
from fastensor.backends.numpy import BufferedReader
from fastensor.backends.pipeline import write_windows
from fastensor.backends.ring_reader import RingReader
from fastensor.backends.staging import open_stager
from fastensor.backends.threads import NoThreadsError, finish, submit, uninterrupted_call
from fastensor.backends.to_device import DeviceTarget, read_through_host
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.files.forks import first_in_children
from fastensor.stitch.source import Plan, Source

DRIVER = "libcuda.so.1"
_logger = logging.getLogger("fastensor")
_DEVICES = ("/proc/driver/nvidia/version", "/dev/dxg")
"""Files that exist if a GPU's driver is loaded. (The library makes ``/dev/nvidiactl`` itself.)"""
_ERRORS = {os.strerror(number): number for number in errno.errorcode}


class GdsBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "gds"

    def why_unavailable(self) -> str:
        return _kvikio.why_unavailable() or _why_not_yet()

    def can_write(self, source: Source) -> bool:
        return True

    def write(self, source: Source, fd: int) -> Sequence[int]:
        try:
            checksums = _write_all(source, fd)
        except torch.OutOfMemoryError as error:
            raise BackendUnavailableError(f"the device has too little memory left for its buffers: {error}") from error
        posix.truncate(fd, source.nbytes)
        return checksums

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        with ExitStack() as undo:
            file = undo.enter_context(opened(fd, "r"))
            read = partial(_read, file, nbytes)
            resources = ExitStack()
            reader = _GdsReader(read, ALIGNMENT, order, elsewhere=BufferedReader(fd), resources=resources)
            reader.file, reader.nbytes = file, nbytes
            resources.push(undo.pop_all())
        return reader

    def open_slots(self, fd: int) -> GdsSlots:
        with ExitStack() as undo:
            file = undo.enter_context(opened(fd, "r+"))
            return GdsSlots(file, undo.pop_all())


class GdsSlots:
    """See :class:`fastensor.backends.base.DeviceSlots`. An interrupt of the caller does not cut a transfer short: the
    memory would be freed while kvikio uses it."""

    alignment = ALIGNMENT
    device_types = frozenset({"cuda"})

    def __init__(self, file: Any, resources: ExitStack) -> None:
        self._file = file
        self._resources = resources
        self._process = os.getpid()

    def write(self, data: memoryview, offset: int) -> None:
        uninterrupted_call(_write_part, self._file, data, offset)

    def read(self, buffer: memoryview, offset: int) -> None:
        posix.check_end(uninterrupted_call(_read_part, self._file, buffer, offset), buffer.nbytes, offset)

    def write_from_device(self, values: torch.Tensor, offset: int) -> None:
        announce_mode()
        uninterrupted_call(_write_part, self._file, values, offset)

    def read_to_device(self, values: torch.Tensor, offset: int) -> None:
        announce_mode()
        posix.check_end(uninterrupted_call(_read_part, self._file, values, offset), values.nbytes, offset)

    def close(self) -> None:
        if self._process == os.getpid():  # in a forked child, kvikio may wait for threads that do not exist there
            self._resources.close()


def _write_all(source: Source, fd: int) -> Sequence[int]:
    with opened(fd, "r+") as file:

        def write(window: Window | DeviceWindow) -> None:
            _write_part(file, window.padded(ALIGNMENT), window.offset)

        if isinstance(source, Plan) and (device := gathering_device(source)) is not None:
            announce_mode()
            return write_windows(source.nbytes, DeviceStager(source, device, prepare=_register), write)
        return write_windows(source.nbytes, open_stager(source), write)


class _GdsReader(RingReader):
    """Reads to devices without buffers of the host."""

    file: Any
    nbytes: int
    _fills_devices = False

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        """Headers are read before parts that may go to a device, so they do not start reading ahead."""
        if self._fills_devices or (buffer.nbytes <= ALIGNMENT and not self._started):
            return self._elsewhere.readinto(offset, buffer, checksum=checksum)
        return super().readinto(offset, buffer, checksum=checksum)

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        if offset + target.nbytes > self.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + target.nbytes}")
        announce_mode()
        self._fills_devices = True
        target.settle()  # queued work may use the memory, and kvikio knows no streams
        pieces: list[Future[int]] = []
        try:
            for at in range(0, target.nbytes, BUFFER_NBYTES):
                piece = target[at : at + BUFFER_NBYTES]
                pieces.append(submit(self._reading, _read_part, self.file, piece.values, offset + at))
        except NoThreadsError:
            finish(pieces)
            return read_through_host(self._elsewhere, offset, target, checksum=checksum)
        finally:
            finish(pieces)  # the memory may be freed when this returns
        try:
            filled = sum(piece.result() for piece in pieces)
        except BackendUnavailableError as error:
            _logger.warning("kvikio cannot read to %s, which goes by way of the host: %s", target.values.device, error)
            return read_through_host(self._elsewhere, offset, target, checksum=checksum)
        if filled != target.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + target.nbytes}")
        return target.checksum() if checksum else 0


class _Kvikio:
    """The library, imported and set up when it is first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._module: Any = None

    def why_unavailable(self) -> str:
        """Reason for which kvikio cannot be used; empty if it can."""
        with self._lock:
            if self._reason is None:
                self._reason = self._load()
            return self._reason

    @property
    def module(self) -> Any:
        if reason := self.why_unavailable():
            raise BackendUnavailableError(reason)
        return self._module

    def _load(self) -> str:
        try:
            ctypes.CDLL(DRIVER)
            self._module = import_module("kvikio")
            _set_up()
        except OSError as error:
            return f"the library of NVIDIA's driver cannot be loaded: {error}"
        except Exception as error:  # noqa: BLE001  # whatever an incomplete library raises
            return f"kvikio cannot be used: {_first_line(error)}"
        return ""

    def forked(self) -> None:
        """In a forked child: kvikio would wait for ever for the parent's threads."""
        self.__init__()  # type: ignore[misc]  # a thread that does not exist here may hold the lock
        if "kvikio" in sys.modules:
            self._reason = "this process was forked from one that has loaded kvikio, whose threads it lacks"


_kvikio = _Kvikio()
first_in_children(_kvikio.forked)


def _why_not_yet() -> str:
    """Reason for which kvikio is not used yet; empty if it is. kvikio initializes CUDA, after which forks fail: that is
    left to the program."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no types
    if in_use or not any(map(os.path.exists, _DEVICES)):
        return ""
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    return "this process does not use CUDA yet, and kvikio would begin to (torch.cuda.init() does as well)"


def _set_up() -> None:
    """Let kvikio move several transfers at a time, around the page cache.

    Both settings hold for the whole process. Settings from the user's environment variables stay.
    """
    defaults = import_module("kvikio.defaults")
    if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & set(os.environ):
        defaults.set({"num_threads": max(int(defaults.get("num_threads")), TRANSFERS_IN_FLIGHT)})
    for way in ("read", "write"):
        if f"KVIKIO_AUTO_DIRECT_IO_{way.upper()}" not in os.environ:
            defaults.set({f"auto_direct_io_{way}": True})


def _register(memory: torch.Tensor) -> Callable[[], None]:
    """Register a device's buffers with GPUDirect Storage, which is faster. Does nothing on systems without it.

    Returns the function that undoes this.
    """
    kvikio = _kvikio.module
    try:
        kvikio.memory_register(memory)
    except RuntimeError as error:
        _logger.info("the buffers of %s are not registered with libcufile: %s", memory.device, _first_line(error))
        return lambda: None
    return partial(_deregister, memory)


def _deregister(memory: torch.Tensor) -> None:
    try:
        _kvikio.module.memory_deregister(memory)
    except RuntimeError as error:  # the transfers are done
        _logger.info("the buffers of %s are not deregistered: %s", memory.device, _first_line(error))


@cache
def announce_mode() -> None:
    """Log once, if kvikio is in compat mode, that transfers do not use GPUDirect Storage, and why."""
    if compat := compat_reason():
        _logger.warning("kvikio is in compat mode, not using GPUDirect Storage: %s", compat)


def compat_reason() -> str:
    """Reason for which bytes of GPUs go through host memory; empty if they go directly.

    Raises:
        BackendUnavailableError: kvikio cannot be used at all.
    """
    kvikio = _kvikio.module
    if kvikio.defaults.is_compat_mode_preferred():
        return "libcufile is missing, /run/udev is not readable, or KVIKIO_COMPAT_MODE says so"
    if not import_module("kvikio.cufile_driver").properties.is_gds_available:
        return "libcufile does not reach the kernel module nvidia-fs"
    return ""


@contextmanager
def opened(fd: int, flags: str) -> Iterator[Any]:
    """kvikio's view of an open file, which kvikio opens again through ``/proc``.

    Raises:
        BackendUnavailableError: kvikio cannot open the file.
    """
    kvikio = _kvikio.module
    path = f"/proc/self/fd/{fd}"
    try:
        file = kvikio.CuFile(path, flags)
    except RuntimeError as error:
        reason = _first_line(error).replace(path, "it")
        raise BackendUnavailableError(f"kvikio cannot open the file: {reason}") from error
    try:
        yield file
    finally:
        file.close()


def _write_part(file: Any, data: memoryview | torch.Tensor, offset: int) -> None:
    with errors_translated():
        written = file.pwrite(_for_kvikio(data), data.nbytes, offset, BUFFER_NBYTES).get()
    if written != data.nbytes:
        raise OSError(errno.EIO, f"kvikio has written {written} of {data.nbytes} bytes")


def _read_part(file: Any, buffer: memoryview | torch.Tensor, offset: int) -> int:
    with errors_translated():
        return int(file.pread(_for_kvikio(buffer), buffer.nbytes, offset, BUFFER_NBYTES).get())


def _for_kvikio(data: memoryview | torch.Tensor) -> Any:
    """The same memory in a form that kvikio takes: tensors of devices, but arrays of the host."""
    return data.numpy() if isinstance(data, torch.Tensor) and not data.is_cuda else data


def _read(file: Any, nbytes: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer, or the part of it that lies before the file's end. Returns the number of bytes read."""
    wanted = min(buffer.nbytes, nbytes - offset)
    try:
        return _read_part(file, buffer[:wanted], offset)
    except posix.EndOfFile:  # the file has become shorter, by how much is unknown
        return 0


@contextmanager
def errors_translated() -> Iterator[None]:
    """Translate kvikio's ``RuntimeError``, whose text ends with the kernel's error, if there is one.

    Raises:
        OSError: the kernel's error.
        fastensor.files.posix.EndOfFile: the file ends earlier.
        BackendUnavailableError: kvikio, CUDA or libcufile could not do it.
    """
    try:
        yield
    except RuntimeError as error:
        text = _first_line(error)
        if text.endswith(": EOF"):
            raise posix.EndOfFile("the file ends before the bytes that were asked for") from error
        number = next((number for name, number in _ERRORS.items() if text.endswith(f": {name}")), None)
        if number is None:
            raise BackendUnavailableError(text) from error
        raise OSError(number, text) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
