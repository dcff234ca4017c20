"""Producing a file window by window: storages are copied into buffers and their CRC32s taken on the way.

The CRC32 of a block is taken right after it was copied: bytes that change later, in the buffer or behind it, are
noticed at load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar, cast

import torch
from isal import isal_zlib

from fastensor.backends.memory import Buffer, borrowed_ring, copy_memory
from fastensor.backends.to_device import entered, stream_behind_current
from fastensor.stitch.image import CHECKSUM_NBYTES, Header, Payload, Piece
from fastensor.stitch.source import FileBytes, Plan, Source, check_size

_BLOCK_NBYTES = 512 << 10
"""Copied and checksummed at a time, so that the second pass finds the bytes in the processor's cache."""


@dataclass(slots=True)
class Window:
    """A part of the file in a buffer. Complete once :meth:`Stager.finish` has returned."""

    buffer: Buffer
    begin: int
    """Where in the buffer it begins."""
    offset: int
    """Where in the file it begins."""
    nbytes: int
    late: list[Piece] = field(default_factory=list)
    """Pieces that need another look once the device has copied: its payload, and headers, whose blanks depend on it."""
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def data(self) -> memoryview:
        return self.buffer.view[self.begin : self.begin + self.nbytes]

    def padded(self, alignment: int) -> memoryview:
        """The data, and zeros behind it up to a multiple of the alignment, which divides the buffer's size."""
        end = self.begin + self.nbytes
        stop = -(-end // alignment) * alignment
        self.buffer.array[end:stop] = 0
        return self.buffer.view[self.begin : stop]


W = TypeVar("W")


class Stager(Protocol[W]):
    """Produces the windows of one file, from front to back, in memory of the host or of a device.

    One thread calls :meth:`begin` and :meth:`finish` for each window, each of them in the order of the windows. Any
    thread calls :meth:`release` as soon as the window's bytes are where they belong: beginning another one may have to
    wait for that. Up to ``BUFFER_COUNT`` windows may be held at a time. The end of a buffer of ``BUFFER_NBYTES`` bytes
    is the end of a window, if buffers are counted from the file's start.
    """

    @property
    def asynchronous(self) -> bool:
        """Whether copies go on after :meth:`begin` has returned, so that beginning the next window first pays."""

    @property
    def checksums(self) -> tuple[int, ...]:
        """The CRC32 of each storage's part, as far as windows are finished; 0 for those that are empty."""

    def begin(self, offset: int, nbytes: int) -> W:
        """Start to produce the file's bytes ``[offset, offset + nbytes)``.

        Raises:
            StateChangedError: a storage has another size than when the file was planned.
        """

    def finish(self, window: W) -> None:
        """Wait until the window is complete."""

    def release(self, window: W) -> None:
        """Its buffer may be used for another one."""

    def fail(self, failure: BaseException) -> None:
        """A window's bytes cannot be moved, so it will not be released: whoever waits for that is to raise this."""


class StagedSource(Source, Protocol):
    """A source that has been staged by somebody else."""

    def open_stager(self) -> AbstractContextManager[Stager[Window]]:
        """What hands over its windows."""


def open_stager(source: Source) -> AbstractContextManager[Stager[Window]]:
    """What produces the windows of a source."""
    return RingStager(source) if isinstance(source, Plan) else cast(StagedSource, source).open_stager()


class RingStager:
    """Copies what a plan borrows through a ring of buffers. See :class:`Stager`.

    No copy is in flight any more when its ``with`` block is left.
    """

    def __init__(self, plan: Plan) -> None:
        self._image = plan.image
        self._copier = Copier(plan.storages)
        self._checksums = Checksums(len(plan.storages))
        self._resources = ExitStack()
        self._buffers: list[Buffer] = []
        self.asynchronous = self._copier.asynchronous

    @property
    def checksums(self) -> tuple[int, ...]:
        return self._checksums.values

    def __enter__(self) -> Self:
        ring = self._resources.enter_context(borrowed_ring())
        self._resources.callback(self._copier.synchronize)
        self._buffers = ring.buffers()[::-1]
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def begin(self, offset: int, nbytes: int) -> Window:
        buffer = self._buffers.pop()
        buffer.prepare(self._copier.device)
        if nbytes > buffer.nbytes:
            raise ValueError(f"a window of {nbytes} bytes does not fit into a buffer of {buffer.nbytes}")
        window = Window(buffer, 0, offset, nbytes)
        data = window.data
        for piece in self._image.pieces(offset, offset + nbytes):
            segment = piece.segment
            if isinstance(segment, Header):
                copy_header(piece, segment, data)
                if self.asynchronous:
                    window.late.append(piece)
                elif segment.blanks:
                    self._checksums.fill_in(piece, segment, data)
            elif piece.nbytes <= _BLOCK_NBYTES and self._copier.is_on_host(segment):
                self._copier.copy(piece, segment, buffer, 0)
                self._checksums.add(piece, segment, data)
            else:
                self._copy(window, data, piece, segment)
        window.events += self._copier.record_events()
        return window

    def finish(self, window: Window) -> None:
        for event in window.events:
            event.synchronize()
        self._checksums.take(window.late, window.data)

    def release(self, window: Window) -> None:
        self._buffers.append(window.buffer)

    def fail(self, failure: BaseException) -> None:
        """Nobody waits: a buffer is free, or too many windows are held."""

    def _copy(self, window: Window, data: memoryview, piece: Piece, payload: Payload) -> None:
        if self._copier.is_on_host(payload):
            for block in _blocks(piece):
                self._copier.copy(block, payload, window.buffer, window.begin)
                self._checksums.add(block, payload, data)
        elif (file := self._copier.file(payload)) is not None:
            self._copy_from_file(window, piece, payload, file)
        else:
            self._copier.copy(piece, payload, window.buffer, window.begin)
            if self.asynchronous:
                window.late.append(piece)
            else:
                self._checksums.add(piece, payload, data)

    def _copy_from_file(self, window: Window, piece: Piece, payload: Payload, file: FileBytes) -> None:
        crc32 = file.readinto(payload.before + piece.begin, window.data[piece.position : piece.position + piece.nbytes])
        total = self._checksums.combine(payload.storage, crc32, piece.nbytes)
        if piece.begin + piece.nbytes == payload.nbytes:
            file.check(total)


def _blocks(piece: Piece) -> Iterable[Piece]:
    if piece.nbytes <= _BLOCK_NBYTES:
        return (piece,)
    return (
        Piece(piece.segment, piece.begin + at, min(_BLOCK_NBYTES, piece.nbytes - at), piece.position + at)
        for at in range(0, piece.nbytes, _BLOCK_NBYTES)
    )


def copy_header(piece: Piece, header: Header, window: memoryview) -> None:
    """Put a part of a header where it belongs. Its blanks are left as they are."""
    _, begin, count, at = piece
    window[at : at + count] = header.data if count == len(header.data) else header.data[begin : begin + count]


class Copier:
    """Copies parts of storages into memory of the host. Used by several threads at once.

    CUDA storages are copied on streams of this object's own, ordered behind the work that was queued on the devices'
    current streams when it was made. Storages of other devices are copied synchronously.

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
        """Whether copies go on after :meth:`copy` has returned: until events recorded behind them have come."""
        self.device = next(iter(self._streams), None)
        """A CUDA device that copies come from, for which buffers are to be pinned."""

    def is_on_host(self, payload: Payload) -> bool:
        return bool(self._addresses[payload.storage])

    def file(self, payload: Payload) -> FileBytes | None:
        """Where the payload comes from if it is not in memory."""
        storage = self._storages[payload.storage]
        return None if isinstance(storage, torch.UntypedStorage) else storage

    def copy(self, piece: Piece, payload: Payload, buffer: Buffer, begin: int) -> None:
        """Start copying a part of a storage into the window that begins at ``begin`` of the buffer.

        Raises:
            StateChangedError: the storage has another size than when the file was planned.
        """
        storage = cast(torch.UntypedStorage, self._storages[payload.storage])
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
        """Events that come when all copies started so far are done, one per device."""
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
    """The CRC32s of the storages of one image, whose windows are gone through in order."""

    def __init__(self, count: int) -> None:
        self._values = [0] * count

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(self._values)

    def take(self, pieces: Iterable[Piece], window: memoryview) -> None:
        """Go through complete pieces of a window: add what is payload, and fill in the blanks of headers."""
        for piece in pieces:
            if isinstance(piece.segment, Header):
                self.fill_in(piece, piece.segment, window)
            else:
                self.add(piece, piece.segment, window)

    def add(self, piece: Piece, payload: Payload, window: memoryview) -> None:
        data = window[piece.position : piece.position + piece.nbytes]
        self._values[payload.storage] = isal_zlib.crc32(data, self._values[payload.storage])

    def combine(self, index: int, crc32: int, nbytes: int) -> int:
        """Add bytes of which only the CRC32 is known; returns that of all so far."""
        self._values[index] = isal_zlib.crc32_combine(self._values[index], crc32, nbytes)
        return self._values[index]

    def fill_in(self, piece: Piece, header: Header, window: memoryview) -> None:
        """Write the checksums into a part of a header; a blank may be cut by its ends."""
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
    """Where a storage is on the host; 0 if it is not."""
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
        return storage.data_ptr()
    return 0


def streams_behind_current(devices: Iterable[torch.device], purpose: str) -> dict[torch.device, torch.cuda.Stream]:
    """The stream of each CUDA device for a purpose, behind the work that is queued on its current one."""
    return {device: stream_behind_current(device, purpose) for device in set(devices) if device.type == "cuda"}
