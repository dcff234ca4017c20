"""The ``gds`` backend: kvikio moves the bytes, between files and GPUs without host memory where the system has
GPUDirect Storage, and by its own threads and direct I/O where it has not, or where the bytes are in host memory.

It is ``cpy`` of the Fastensor paper (sections 3 and 4). Windows of the image are staged and written, and read ahead, as
the backend ``direct`` does it.
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
from importlib.util import find_spec
from typing import Any, cast

import torch

from fastensor.backends.base import Availability, Extent, Reader
from fastensor.backends.gather import ALIGNMENT, DeviceStager, DeviceWindow, gathering_device
from fastensor.backends.memory import BUFFER_COUNT, BUFFER_NBYTES
from fastensor.backends.numpy import BufferedReader
from fastensor.backends.pipeline import write_windows
from fastensor.backends.ring_reader import TRANSFERS_IN_FLIGHT, RingReader
from fastensor.backends.staging import Window, open_stager
from fastensor.backends.threads import NoThreadsError, finish, submit, uninterrupted_call
from fastensor.backends.to_device import DeviceTarget, read_through_host
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.stitch.source import Plan, Source

DRIVER = "libcuda.so.1"
_logger = logging.getLogger("fastensor")
_DEVICES = ("/proc/driver/nvidia/version", "/dev/dxg")
"""What is there if there is a driver of a GPU. (``/dev/nvidiactl`` is made by the library, where there is none.)"""
_ERRORS = {os.strerror(number): number for number in errno.errorcode}


class GdsBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "gds"

    def availability(self) -> Availability:
        reason = _kvikio.why_unavailable() or _why_not_yet()
        return Availability(not reason, reason)

    @property
    def extra_bytes(self) -> int:
        return BUFFER_COUNT * BUFFER_NBYTES + _bounce_nbytes()

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
            file = undo.enter_context(_opened(fd, "r"))
            read = partial(_read, file, nbytes)
            resources = ExitStack()
            reader = _GdsReader(read, ALIGNMENT, order, elsewhere=BufferedReader(fd), resources=resources)
            reader.file, reader.nbytes = file, nbytes
            resources.push(undo.pop_all())
        return reader

    def open_slots(self, fd: int) -> GdsSlots:
        with ExitStack() as undo:
            file = undo.enter_context(_opened(fd, "r+"))
            return GdsSlots(file, undo.pop_all())


class GdsSlots:
    """See :class:`fastensor.backends.base.DeviceSlots`. Whoever calls may be interrupted: not between the begin of a
    transfer and its end, where memory would be given back that is moved from, or to."""

    alignment = ALIGNMENT
    device_types = frozenset({"cuda"})

    def __init__(self, file: Any, resources: ExitStack) -> None:
        self._file = file
        self._resources = resources

    def write(self, data: memoryview, offset: int) -> None:
        uninterrupted_call(_write_part, self._file, data, offset)

    def read(self, buffer: memoryview, offset: int) -> None:
        posix.check_end(uninterrupted_call(_read_part, self._file, buffer, offset), buffer.nbytes, offset)

    def write_from_device(self, values: torch.Tensor, offset: int) -> None:
        _announce_mode()
        uninterrupted_call(_write_part, self._file, values, offset)

    def read_to_device(self, values: torch.Tensor, offset: int) -> None:
        _announce_mode()
        posix.check_end(uninterrupted_call(_read_part, self._file, values, offset), values.nbytes, offset)

    def close(self) -> None:
        self._resources.close()


def _write_all(source: Source, fd: int) -> Sequence[int]:
    device = gathering_device(source)
    with _opened(fd, "r+") as file:
        write = partial(_write, file)
        if device is None:
            return write_windows(source.nbytes, open_stager(source), write)
        _announce_mode()
        gathered = DeviceStager(cast(Plan, source), device, prepare=_register)
        return write_windows(source.nbytes, gathered, write)


class _GdsReader(RingReader):
    """Reads to devices without the ring."""

    file: Any
    nbytes: int
    _fills_devices = False

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        """Headers come before what may go to a device: they are no reason to read ahead into the ring."""
        if self._fills_devices or (buffer.nbytes <= ALIGNMENT and not self._started):
            return self._elsewhere.readinto(offset, buffer, checksum=checksum)
        return super().readinto(offset, buffer, checksum=checksum)

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        if offset + target.nbytes > self.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + target.nbytes}")
        _announce_mode()
        self._fills_devices = True
        if target.stream is not None:
            target.stream.synchronize()  # what uses the memory still; kvikio knows of no stream
        pieces: list[Future[int]] = []
        try:
            for at in range(0, target.nbytes, BUFFER_NBYTES):
                piece = target[at : at + BUFFER_NBYTES]
                pieces.append(submit(self._threads.reading, _read_part, self.file, piece.values, offset + at))
        except NoThreadsError:
            finish(pieces)
            return read_through_host(self._elsewhere, offset, target, checksum=checksum)
        finally:
            finish(pieces)  # nobody writes there any more when it is freed
        try:
            filled = sum(piece.result() for piece in pieces)
        except BackendUnavailableError as error:
            _logger.warning("kvikio cannot read to %s, which goes by way of the host: %s", target.values.device, error)
            return read_through_host(self._elsewhere, offset, target, checksum=checksum)
        if filled != target.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + target.nbytes}")
        return target.checksum() if checksum else 0


class _Kvikio:
    """The library, imported when it is wanted, and set up once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._module: Any = None

    def why_unavailable(self) -> str:
        """Empty if it can be used."""
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
            if find_spec("kvikio") is None:
                return "kvikio is not installed (pip install 'fastensor[cuda12]', or [cuda13])"
            ctypes.CDLL(DRIVER)
            self._module = import_module("kvikio")
            _set_up()
        except OSError as error:
            return f"the library of NVIDIA's driver cannot be loaded: {error}"
        except Exception as error:  # noqa: BLE001  # whatever a library that is not complete raises: it is the reason
            return f"kvikio cannot be used: {_first_line(error)}"
        return ""

    def forked(self) -> None:
        """In a child, which has none of the parent's threads: kvikio would wait for them for ever."""
        self.__init__()  # type: ignore[misc]  # nor whoever held the lock
        if "kvikio" in sys.modules:
            self._reason = "this process was forked from one that has loaded kvikio, whose threads it lacks"


_kvikio = _Kvikio()
os.register_at_fork(after_in_child=_kvikio.forked)


def _why_not_yet() -> str:
    """kvikio would begin to use CUDA, after which no forked process can: that is the program's to decide."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no types
    if in_use or not any(map(os.path.exists, _DEVICES)):
        return ""
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    return "this process does not use CUDA yet, and kvikio would begin to (torch.cuda.init() does as well)"


def _set_up() -> None:
    """What kvikio does not do by itself: several transfers at a time, around the page cache.

    Both are settings of the whole process. Those that the user has made by environment variables stay.
    """
    defaults = import_module("kvikio.defaults")
    if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & set(os.environ):
        defaults.set({"num_threads": max(int(defaults.get("num_threads")), TRANSFERS_IN_FLIGHT)})
    for way in ("read", "write"):
        if f"KVIKIO_AUTO_DIRECT_IO_{way.upper()}" not in os.environ:
            defaults.set({f"auto_direct_io_{way}": True})


def _register(memory: torch.Tensor) -> Callable[[], None]:
    """Have a device's buffers pinned for GPUDirect Storage, which is faster; kvikio does nothing where there is none.

    Returns what undoes it.
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
    except RuntimeError as error:  # what was written with it is written
        _logger.info("the buffers of %s are not deregistered: %s", memory.device, _first_line(error))


@cache
def _announce_mode() -> None:
    if compat := compat_reason():
        _logger.warning("kvikio is in compat mode, not using GPUDirect Storage: %s", compat)


def _bounce_nbytes() -> int:
    """What kvikio's threads hold of the host at most for bytes of a device that do not go around it."""
    if _kvikio.why_unavailable():
        return 0
    defaults = _kvikio.module.defaults
    return int(defaults.get("num_threads")) * int(defaults.get("bounce_buffer_size"))


def compat_reason() -> str:
    """Why bytes of GPUs go through host memory; empty if they do not.

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
def _opened(fd: int, flags: str) -> Iterator[Any]:
    """kvikio's view of an open file. It opens it again, by what the kernel calls the descriptor.

    Raises:
        BackendUnavailableError: that cannot be done.
    """
    kvikio = _kvikio.module
    try:
        file = kvikio.CuFile(f"/proc/self/fd/{fd}", flags)
    except RuntimeError as error:
        raise BackendUnavailableError(f"kvikio cannot open the file: {_first_line(error)}") from error
    try:
        yield file
    finally:
        file.close()


def _write(file: Any, window: Window | DeviceWindow) -> None:
    _write_part(file, window.padded(ALIGNMENT), window.offset)


def _write_part(file: Any, data: memoryview | torch.Tensor, offset: int) -> None:
    with _errors_told():
        written = file.pwrite(_for_kvikio(data), data.nbytes, offset, BUFFER_NBYTES).get()
    if written != data.nbytes:
        raise OSError(errno.EIO, f"kvikio has written {written} of {data.nbytes} bytes")


def _read_part(file: Any, buffer: memoryview | torch.Tensor, offset: int) -> int:
    with _errors_told():
        return int(file.pread(_for_kvikio(buffer), buffer.nbytes, offset, BUFFER_NBYTES).get())


def _for_kvikio(data: memoryview | torch.Tensor) -> Any:
    """The same memory, as kvikio takes it: it knows tensors of devices, and no others."""
    return data.numpy() if isinstance(data, torch.Tensor) and not data.is_cuda else data


def _read(file: Any, nbytes: int, buffer: memoryview, offset: int) -> int:
    """A read may not go beyond the end of the file."""
    wanted = min(buffer.nbytes, nbytes - offset)
    try:
        return _read_part(file, buffer[:wanted], offset)
    except posix.EndOfFile:  # it has become shorter; nobody knows how much was read
        return 0


@contextmanager
def _errors_told() -> Iterator[None]:
    """kvikio raises RuntimeError, whose text ends with the kernel's, if it is the kernel's.

    Raises:
        OSError: that is so.
        fastensor.files.posix.EndOfFile: the file is shorter.
        BackendUnavailableError: kvikio, CUDA or libcufile could not do it.
    """
    try:
        yield
    except RuntimeError as error:
        text = _first_line(error)
        if text.endswith(": EOF"):
            raise posix.EndOfFile("the file ends before it was to") from error
        number = next((number for name, number in _ERRORS.items() if text.endswith(f": {name}")), None)
        if number is None:
            raise BackendUnavailableError(text) from error
        raise OSError(number, text) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
