"""Windows of a file in buffers of the host: copying storages into them, and taking the CRC32s of what was copied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from isal import isal_zlib

from fastensor.backends.buffers import Buffer
from fastensor.backends.memory import copy_memory
from fastensor.backends.to_device import entered, stream_behind_current
from fastensor.files.arguments import checks_keywords
from fastensor.stitch.image import CHECKSUM_NBYTES, Header, Payload, Piece
from fastensor.stitch.source import FileBytes, check_size


@checks_keywords
@dataclass(slots=True)
class Window:
    """A part of the file in a buffer. Complete once :meth:`fastensor.backends.staging.Stager.finish` has returned."""

    buffer: Buffer
    begin: int
    """Offset of the window in the buffer."""
    offset: int
    """Offset of the window in the file."""
    nbytes: int
    late: list[Piece] = field(default_factory=list)
    """Pieces that are left to ``finish``: payload whose CRC32 is to be taken, and headers whose blanks depend on it."""
    events: list[torch.cuda.Event] = field(default_factory=list)
    """Reached when devices have copied their bytes to the buffer."""

    @property
    def data(self) -> memoryview:
        return self.buffer.view[self.begin : self.begin + self.nbytes]

    def padded(self, alignment: int) -> memoryview:
        """The data, and zeros behind it up to a multiple of the alignment, which divides the buffer's size."""
        end = self.begin + self.nbytes
        stop = -(-end // alignment) * alignment
        self.buffer.array[end:stop] = 0
        return self.buffer.view[self.begin : stop]


def copy_header(piece: Piece, header: Header, window: memoryview) -> None:
    """Put a part of a header into a window. The header's blanks stay as they are."""
    _, begin, count, at = piece
    window[at : at + count] = header.data if count == len(header.data) else header.data[begin : begin + count]


class Copier:
    """Copies parts of storages into memory of the host. Several threads may use it at once.

    CUDA storages are copied on streams of this object's own, ordered behind the work that was queued on the devices'
    current streams when the object was made. Storages of other devices are copied synchronously.

    Args:
        storages: what payload segments refer to; borrowed, neither resized nor written while they are copied.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage | FileBytes]) -> None:
        self._storages = storages
        self._addresses = [_address(storage) for storage in storages]
        self._streams = streams_behind_current(
            {storage.device for storage in storages if isinstance(storage, torch.UntypedStorage)}, "save"
        )
        self.asynchronous = bool(self._streams)
        """Whether copies go on after :meth:`copy` has returned, until an event that is recorded later is reached."""
        self.device = next(iter(self._streams), None)
        """A CUDA device that copies come from, for which buffers are to be pinned."""

    def is_on_host(self, payload: Payload) -> bool:
        return bool(self._addresses[payload.storage])

    def file(self, payload: Payload) -> FileBytes | None:
        """The file that the payload comes from; None if the payload is in memory."""
        storage = self._storages[payload.storage]
        return None if isinstance(storage, torch.UntypedStorage) else storage

    def copy(self, piece: Piece, payload: Payload, buffer: Buffer, begin: int) -> None:
        """Start copying a part of a storage into the window that begins at ``begin`` of the buffer.

        Raises:
            StateChangedError: the storage has another size than when the file was planned.
        """
        storage = self._storages[payload.storage]
        assert isinstance(storage, torch.UntypedStorage)
        check_size(storage, payload)
        start, at = payload.before + piece.begin, begin + piece.position
        if address := self._addresses[payload.storage]:
            copy_memory(buffer.address + at, address + start, piece.nbytes)
            return
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        stream = self._streams.get(storage.device)
        with nullcontext() if stream is None else entered(stream):
            buffer.as_tensor()[at : at + piece.nbytes].copy_(
                source[start : start + piece.nbytes], non_blocking=stream is not None
            )

    def record_events(self) -> list[torch.cuda.Event]:
        """One event for each device, reached when all copies started so far are done."""
        events = []
        for device, stream in self._streams.items():
            with torch.cuda.device(device):
                events.append(stream.record_event())
        return events

    def synchronize(self) -> None:
        """Return when no copy is in flight."""
        for stream in self._streams.values():
            stream.synchronize()


class Checksums:
    """The CRC32s of the storages of one image, added up from its windows in order."""

    def __init__(self, count: int) -> None:
        self._values = [0] * count

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(self._values)

    def take(self, pieces: Iterable[Piece], window: memoryview) -> None:
        """Add the payload among complete pieces of a window, and fill in the blanks of the headers."""
        for piece in pieces:
            if isinstance(piece.segment, Header):
                self.fill_in(piece, piece.segment, window)
            else:
                self.add(piece, piece.segment, window)

    def add(self, piece: Piece, payload: Payload, window: memoryview) -> None:
        data = window[piece.position : piece.position + piece.nbytes]
        self._values[payload.storage] = isal_zlib.crc32(data, self._values[payload.storage])

    def combine(self, index: int, crc32: int, nbytes: int) -> int:
        """Add bytes of which only the CRC32 is known. Returns the CRC32 of all bytes of the storage so far."""
        self._values[index] = isal_zlib.crc32_combine(self._values[index], crc32, nbytes)
        return self._values[index]

    def fill_in(self, piece: Piece, header: Header, window: memoryview) -> None:
        """Write the checksums into a part of a header. The part may begin or end within a blank."""
        _, begin, count, at = piece
        blanks = header.blanks
        for position, storage in blanks[bisect_left(blanks, (begin - CHECKSUM_NBYTES + 1, 0)) :]:
            if position >= begin + count:
                break
            crc32 = self._values[storage].to_bytes(CHECKSUM_NBYTES, "little")
            if begin <= position <= begin + count - CHECKSUM_NBYTES:
                target = at + position - begin
                window[target : target + CHECKSUM_NBYTES] = crc32
                continue
            start, stop = max(position, begin), min(position + CHECKSUM_NBYTES, begin + count)
            if start < stop:
                target = at + start - begin
                window[target : target + stop - start] = crc32[start - position : stop - position]


def _address(storage: torch.UntypedStorage | FileBytes) -> int:
    """Address of a storage in host memory; 0 if the storage is elsewhere."""
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
        return storage.data_ptr()
    return 0


def streams_behind_current(devices: Iterable[torch.device], purpose: str) -> dict[torch.device, torch.cuda.Stream]:
    """The stream of each CUDA device for a purpose, ordered behind the work that is queued on its current stream."""
    return {device: stream_behind_current(device, purpose) for device in set(devices) if device.type == "cuda"}
