"""Reading bytes of a file into the memory of a device: through pinned buffers of the host, or by the backend itself if
it can.

Copies run on a stream of this module's own. That stream waits for the work that was queued on the device's current
stream, which may still use memory that was freed and allocated again. Work that is queued on the current stream
afterwards finds the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from isal import isal_zlib

from fastensor.backends.base import Reader
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer, transfer_buffers
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.streams import Copies, Event, wait_for

_LEAST_NBYTES = 256 << 10
"""Smaller storages are copied in one step, through memory that is not pinned."""
_BUFFERS = 3
"""One is filled while the device copies from the others."""


class DeviceTarget:
    """A part of a device's memory that is being filled. It can be sliced like a memoryview."""

    def __init__(self, values: torch.Tensor, copies: Copies) -> None:
        self.values = values
        """uint8, one-dimensional, contiguous."""
        self._copies = copies

    @property
    def nbytes(self) -> int:
        return self.values.numel()

    @property
    def device(self) -> torch.device | None:
        """The device that buffers are pinned for; None if pinning has no use."""
        return self._copies.device

    def __getitem__(self, part: slice) -> DeviceTarget:
        return DeviceTarget(self.values[part], self._copies)

    def settle(self) -> None:
        """Wait until the memory is used by nothing that was queued before, and by no copy."""
        self._copies.synchronize()

    def checksum(self) -> int:
        """The CRC32 of the bytes, computed on the device."""
        try:
            with self._copies.entered():
                pending = PendingCrc32s([self.values])
            self._copies.synchronize()
        except torch.OutOfMemoryError:
            return int(isal_zlib.crc32(self.values.cpu().numpy().data))
        return pending.values()[0]

    def begin_copy(self, source: memoryview) -> Sequence[Event]:
        """Start to copy ``source`` here, which has the same size.

        Returns events; the source must stay unchanged until they are reached.
        """
        with self._copies.entered():
            self._copies.copy(self.values, torch.frombuffer(source, dtype=torch.uint8))
            return self._copies.events()

    def copy(self, source: memoryview, *, checksum: bool) -> int:
        """Copy ``source`` here, which has the same size. Returns the CRC32, or 0 without ``checksum``. Any thread may
        call this."""
        events = self.begin_copy(source)
        try:
            return int(isal_zlib.crc32(source)) if checksum else 0
        finally:
            wait_for(events)


@runtime_checkable
class DeviceReader(Protocol):
    """A reader that fills the memory of devices by itself."""

    def read_to_device(self, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
        """See :meth:`fastensor.backends.base.Reader.readinto`."""


def fill_device(reader: Reader, storage: torch.UntypedStorage, offset: int, *, checksum: bool) -> int:
    """:func:`fastensor.backends.memory.fill` for a storage on a device, which is not empty."""
    with torch.inference_mode(False):  # other threads may write to the storage, in other modes
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if values.numel() < _LEAST_NBYTES:
        buffer = bytearray(values.numel())
        crc32 = reader.readinto(offset, memoryview(buffer), checksum=checksum)
        values.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        return crc32
    copies = Copies([storage.device], "load").follow_current()
    target = DeviceTarget(values, copies)
    try:
        if isinstance(reader, DeviceReader):
            return reader.read_to_device(offset, target, checksum=checksum)
        return read_through_host(reader, offset, target, checksum=checksum)
    finally:
        copies.precede_current()


def read_through_host(reader: Reader, offset: int, target: DeviceTarget, *, checksum: bool) -> int:
    """Fill pinned buffers by a reader. The device copies from one buffer while the next one is filled."""
    crc32 = 0
    copying: deque[tuple[Buffer, Sequence[Event]]] = deque()
    with transfer_buffers.lending() as lent:
        free = [transfer_buffers.take(lent) for _ in range(min(_BUFFERS, -(-target.nbytes // BUFFER_NBYTES)))]
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


def _copied(copying: deque[tuple[Buffer, Sequence[Event]]]) -> Buffer:
    """Wait for the oldest copy. Returns its buffer."""
    buffer, events = copying.popleft()
    wait_for(events)
    return buffer
