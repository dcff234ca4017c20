"""Windows of a file in buffers of the host: copying storages into them, and taking the CRC32s of what was copied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from isal import isal_zlib

from fastensor.backends import streams
from fastensor.backends.buffers import Buffer, Run
from fastensor.backends.memory import copy_memory
from fastensor.backends.streams import Copies, Event
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
    events: Sequence[Event] = ()
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
    """Copies parts of storages into memory of the host.

    Storages of devices with streams are copied behind the work that was queued on the devices' current streams when the
    object was made: what is queued there later may change them meanwhile, unless :meth:`let_go` is called.
    Several threads may use the object at once.

    Args:
        storages: what payload segments refer to; borrowed, neither resized nor written while they are copied.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage | FileBytes]) -> None:
        self._storages = storages
        self._sources: dict[int, torch.Tensor] = {}
        """Storages of devices as tensors of bytes, by their numbers."""
        devices = {storage.device for storage in storages if isinstance(storage, torch.UntypedStorage)}
        self._addresses = _addresses(storages, devices)
        self._copies = Copies(devices, "save").follow_current()
        self.device = self._copies.device
        """A device that copies come from, for which buffers are to be pinned."""
        self.asynchronous = self.device is not None
        """True if copies go on after :meth:`copy` has returned, until an event that is recorded later is reached."""
        self.host_nbytes = sum(one.nbytes() for one, address in zip(storages, self._addresses, strict=True) if address)
        """Bytes that :meth:`copy` copies itself."""
        self.entered = self._copies.entered
        """The block in which :meth:`copy` may be called."""
        self.events = self._copies.events
        """One event for each device, reached when all copies queued so far are done."""
        self.synchronize = self._copies.synchronize
        """Wait until no copy is under way."""

    def is_on_host(self, payload: Payload) -> bool:
        return bool(self._addresses[payload.storage])

    def file(self, payload: Payload) -> FileBytes | None:
        """The file that the payload comes from; None if the payload is in memory."""
        storage = self._storages[payload.storage]
        return None if isinstance(storage, torch.UntypedStorage) else storage

    def copy(self, piece: Piece, payload: Payload, memory: Buffer | Run) -> None:
        """Copy a part of a storage, or queue that, to its place in a window, with whose start the memory begins.

        Raises:
            StateChangedError: the storage has another size than when the file was planned.
        """
        storage = self._storages[payload.storage]
        assert isinstance(storage, torch.UntypedStorage)
        check_size(storage, payload)
        start, at = payload.before + piece.begin, piece.position
        if address := self._addresses[payload.storage]:
            copy_memory(memory.address + at, address + start, piece.nbytes)
            return
        source = self._source(payload.storage, storage)[start : start + piece.nbytes]
        self._copies.copy(memory.as_tensor()[at : at + piece.nbytes], source)

    def let_go(self) -> None:
        """Let the program change or free the storages now: what it queues on the devices' current streams follows the
        copies, and so does another use of their memory."""
        for source in self._sources.values():
            self._copies.keep(source)
        self._sources.clear()
        self._copies.precede_current()

    def _source(self, number: int, storage: torch.UntypedStorage) -> torch.Tensor:
        if number not in self._sources:
            self._sources[number] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._sources[number]


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


def _addresses(storages: Sequence[torch.UntypedStorage | FileBytes], devices: Iterable[torch.device]) -> list[int]:
    """Addresses of storages in host memory; 0 for those that are on other devices, or in files."""
    hosts = {device for device in devices if device.type == "cpu" and not streams.are_on(device)}
    return [
        storage.data_ptr() if isinstance(storage, torch.UntypedStorage) and storage.device in hosts else 0
        for storage in storages
    ]
