"""Bytes of a file into memory of a device: by way of pinned memory of the host, a window at a time, or by the backend
itself if it can.

Copies go on a stream of this module's own. It begins behind what was queued on the device's current stream, which may
still use memory that has been freed and given out again; and what is queued there afterwards finds the bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from fastensor.backends.base import Reader
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.memory import BUFFER_NBYTES, Buffer, borrowed_ring

FILLED_AT_ONCE = {"cuda"}
"""Kinds of devices that bytes are read to without a tensor of theirs on the host."""
_LEAST_NBYTES = 256 << 10
"""What is smaller is copied at once, by way of memory that is not pinned."""
_BUFFERS = 3
"""One is read into while others are copied from."""


class DeviceTarget:
    """A part of a device's memory that is being filled, to be sliced like a memoryview. Not to be used elsewhere."""

    def __init__(self, values: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self.values = values
        """uint8, one-dimensional, contiguous."""
        self.stream = stream
        """That it is filled on; None if the device has none."""

    @property
    def nbytes(self) -> int:
        return self.values.numel()

    @property
    def device(self) -> torch.device | None:
        """That host memory is to be pinned for; None if for none."""
        return None if self.stream is None else self.values.device

    def __getitem__(self, part: slice) -> DeviceTarget:
        return DeviceTarget(self.values[part], self.stream)

    def checksum(self) -> int:
        """The CRC32 of what is there, computed there."""
        if self.stream is None:
            return PendingCrc32s([self.values]).values()[0]
        try:
            with entered(self.stream):
                pending = PendingCrc32s([self.values])
            self.stream.synchronize()
        except torch.OutOfMemoryError:
            return int(isal_zlib.crc32(self.values.cpu().numpy().data))
        return pending.values()[0]

    def begin_copy(self, source: memoryview) -> torch.cuda.Event | None:
        """Start to copy as many bytes from the host, which must stay there until the event has come."""
        found = torch.frombuffer(source, dtype=torch.uint8)
        if self.stream is None:
            self.values.copy_(found)
            return None
        with entered(self.stream):
            self.values.copy_(found, non_blocking=True)
            event: torch.cuda.Event = self.stream.record_event()
        return event

    def copy(self, source: memoryview, *, checksum: bool) -> int:
        """Copy as many bytes from the host; returns their CRC32, or 0 without ``checksum``. Any thread may."""
        event = self.begin_copy(source)
        try:
            return int(isal_zlib.crc32(source)) if checksum else 0
        finally:
            if event is not None:
                event.synchronize()


@contextmanager
def entered(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work goes on a stream, and afterwards on what it went on before. Leaving a stream alone would make the thread's
    former device current, which takes memory there if nothing was ever done on it."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def stream_behind_current(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A CUDA device's stream for a purpose, from now on behind the work that is queued on its current one.

    It is the same each time: torch keeps freed memory for the stream that it was used on.
    """
    key = (device, purpose)
    if key not in _streams:
        _streams.setdefault(key, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch gives no types
    stream = _streams[key]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


os.register_at_fork(after_in_child=_streams.clear)


@runtime_checkable
class DeviceReader(Protocol):
    """A reader that can fill memory of devices by itself."""

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        """As :meth:`fastensor.backends.base.Reader.readinto`."""


def is_filled_at_once(device: torch.device) -> bool:
    """Whether a storage there is filled without one like it on the host."""
    return device.type in FILLED_AT_ONCE


def storage_on(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """Memory of a device, or of the host, not touched yet."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]  # torch gives it no types


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage on the host. Keeps it alive."""
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array.data


class Filler:
    """Fills storages, wherever they are, from one file. Used by one thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def fill(self, storage: torch.UntypedStorage, offset: int, *, checksum: bool) -> int:
        """Fill a storage from an offset of the file; returns the CRC32 of the bytes, or 0 without ``checksum``.

        On a device, the bytes are there for work that is queued on its current stream from now on.

        Raises:
            OSError: the file cannot be read there; what the storage holds is undefined.
        """
        if not storage.nbytes():
            return 0
        if not is_filled_at_once(storage.device):
            return self._reader.readinto(offset, memory_of(storage), checksum=checksum)
        with torch.inference_mode(False):  # other threads may write to it, whatever mode this one is in
            values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if values.numel() < _LEAST_NBYTES:
            buffer = bytearray(values.numel())
            crc32 = self._reader.readinto(offset, memoryview(buffer), checksum=checksum)
            values.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
            return crc32
        stream = stream_behind_current(storage.device, "load") if storage.device.type == "cuda" else None
        target = DeviceTarget(values, stream)
        try:
            if isinstance(self._reader, DeviceReader):
                return self._reader.read_to_device(offset, target, checksum=checksum)
            return read_through_host(self._reader, offset, target, checksum=checksum)
        finally:
            if stream is not None:
                torch.cuda.current_stream(storage.device).wait_stream(stream)


def read_through_host(reader: Reader, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
    """Have a reader fill pinned buffers, which are copied to the device while the next one is filled."""
    crc32 = 0
    copying: deque[tuple[Buffer, torch.cuda.Event | None]] = deque()
    with borrowed_ring() as ring:
        free = ring.buffers()[:_BUFFERS]
        try:
            for at in range(0, target.nbytes, BUFFER_NBYTES):
                if not free:
                    free.append(_copied(copying))
                buffer, part = free.pop(), target[at : at + BUFFER_NBYTES]
                buffer.prepare(target.device)
                view = buffer.view[: part.nbytes]
                found = reader.readinto(offset + at, view, checksum=checksum)
                copying.append((buffer, part.begin_copy(view)))
                crc32 = isal_zlib.crc32_combine(crc32, found, part.nbytes) if checksum else 0
        finally:
            while copying:
                _copied(copying)
    return int(crc32)


def _copied(copying: deque[tuple[Buffer, torch.cuda.Event | None]]) -> Buffer:
    """The buffer that was the first to be copied from, when it has been."""
    buffer, event = copying.popleft()
    if event is not None:
        event.synchronize()
    return buffer
