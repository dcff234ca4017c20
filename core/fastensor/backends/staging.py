"""Producing an image window by window: storages are copied into a buffer and their CRC32s taken on the way.

The CRC32 of a block is taken right after it was copied: bytes that change later, in the buffer or behind it, are
noticed at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from isal import isal_zlib

from fastensor.backends.memory import Buffer, copy_memory
from fastensor.errors import StateChangedError
from fastensor.stitch.image import CHECKSUM_NBYTES, Header, Image, Payload, Piece
from fastensor.stitch.source import FileBytes

_BLOCK_NBYTES = 512 << 10
"""Copied and checksummed at a time, so that the second pass finds the bytes in the processor's cache."""


@dataclass(slots=True)
class Window:
    """A part of the image in a buffer. Complete once :meth:`Stager.finish` has returned."""

    buffer: Buffer
    offset: int
    nbytes: int
    late: list[Piece] = field(default_factory=list)
    """Pieces that need another look once the device has copied: its payload, and headers, whose blanks depend on it."""
    events: list[torch.cuda.Event] = field(default_factory=list)


class Stager:
    """Copies consecutive windows of one image into buffers. Used by one thread, in a ``with`` block.

    Args:
        image: the layout.
        storages: what its payload segments refer to; borrowed, neither resized nor written until the last window is
            finished.

    CUDA storages are copied on a stream of this stager's own, ordered behind the work that was queued on the device's
    current stream when the stager was made. No copy is in flight any more when the block is left. Storages of other
    devices are copied synchronously.
    """

    def __init__(self, image: Image, storages: Sequence[torch.UntypedStorage | FileBytes]) -> None:
        self._image = image
        self._storages = storages
        self._addresses = [_address(storage) for storage in storages]
        self._checksums = [0] * len(storages)
        self._streams = _streams_behind_current(storages)
        self.asynchronous = bool(self._streams)
        """Whether copies go on after :meth:`begin` has returned, so that beginning the next window first pays."""
        self.device = next(iter(self._streams), None)
        """A CUDA device that copies come from, for which buffers are to be pinned."""

    @property
    def checksums(self) -> tuple[int, ...]:
        """The CRC32 of each storage's part, as far as windows are finished; 0 for those that are empty."""
        return tuple(self._checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def begin(self, buffer: Buffer, offset: int, nbytes: int) -> Window:
        """Start copying the image's bytes ``[offset, offset + nbytes)`` into the buffer.

        Raises:
            StateChangedError: a storage has another size than when the image was planned.
            ValueError: the buffer is smaller than that.
        """
        if nbytes > buffer.nbytes:
            raise ValueError(f"a window of {nbytes} bytes does not fit into a buffer of {buffer.nbytes}")
        window = Window(buffer, offset, nbytes)
        for piece in self._image.pieces(offset, offset + nbytes):
            segment, begin, count, at = piece
            if isinstance(segment, Header):
                buffer.view[at : at + count] = (
                    segment.data if count == len(segment.data) else segment.data[begin : begin + count]
                )
                if self.asynchronous:
                    window.late.append(piece)
                else:
                    self._fill_in_blanks(window, segment, begin, count, at)
            else:
                self._check_size(segment)
                storage = self._storages[segment.index]
                if self._addresses[segment.index]:
                    self._copy_from_host(window, piece, segment)
                elif isinstance(storage, torch.UntypedStorage):
                    self._copy_from_device(window, piece, segment, storage)
                else:
                    self._copy_from_file(window, piece, segment, storage)
        for device, stream in self._streams.items():
            with torch.cuda.device(device):
                window.events.append(stream.record_event())
        return window

    def finish(self, window: Window) -> memoryview:
        """Wait for the copies, fill in what depends on them and return the window's bytes. In order of windows."""
        for event in window.events:
            event.synchronize()
        for segment, begin, count, at in window.late:
            if isinstance(segment, Header):
                self._fill_in_blanks(window, segment, begin, count, at)
            else:
                self._add_to_checksum(segment.index, window.buffer.view[at : at + count])
        return window.buffer.view[: window.nbytes]

    def _check_size(self, payload: Payload) -> None:
        nbytes = self._storages[payload.index].nbytes()
        if nbytes != payload.storage_nbytes:
            raise StateChangedError(
                f"a storage of {payload.storage_nbytes} bytes was resized to {nbytes} while it was being saved; "
                f"keep the state unchanged until save returns"
            )

    def _fill_in_blanks(self, window: Window, header: Header, begin: int, count: int, at: int) -> None:
        """Write the checksums into a part of a header that stands at ``at``; a blank may be cut by its ends."""
        for position, storage in header.blanks:
            start, stop = max(position, begin), min(position + CHECKSUM_NBYTES, begin + count)
            if start < stop:
                crc32 = self._checksums[storage].to_bytes(CHECKSUM_NBYTES, "little")
                target = at + start - begin
                window.buffer.view[target : target + stop - start] = crc32[start - position : stop - position]

    def _copy_from_host(self, window: Window, piece: Piece, payload: Payload) -> None:
        index = payload.index
        source = self._addresses[index] + payload.before + piece.begin
        at, end = piece.position, piece.position + piece.nbytes
        while at < end:
            count = min(_BLOCK_NBYTES, end - at)
            copy_memory(window.buffer.address + at, source, count)
            self._add_to_checksum(index, window.buffer.view[at : at + count])
            at += count
            source += count

    def _copy_from_file(self, window: Window, piece: Piece, payload: Payload, file: FileBytes) -> None:
        index = payload.index
        data = window.buffer.view[piece.position : piece.position + piece.nbytes]
        crc32 = file.readinto(payload.before + piece.begin, data)
        self._checksums[index] = isal_zlib.crc32_combine(self._checksums[index], crc32, piece.nbytes)
        if piece.begin + piece.nbytes == payload.nbytes:
            file.check(self._checksums[index])

    def _copy_from_device(self, window: Window, piece: Piece, payload: Payload, storage: torch.UntypedStorage) -> None:
        begin = payload.before + piece.begin
        target = window.buffer.as_tensor()[piece.position : piece.position + piece.nbytes]
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        stream = self._streams.get(storage.device)
        with torch.cuda.stream(stream):
            target.copy_(source[begin : begin + piece.nbytes], non_blocking=stream is not None)
        if stream is not None:
            window.late.append(piece)
        else:
            data = window.buffer.view[piece.position : piece.position + piece.nbytes]
            self._add_to_checksum(payload.index, data)

    def _add_to_checksum(self, index: int, data: memoryview) -> None:
        self._checksums[index] = isal_zlib.crc32(data, self._checksums[index])


def _address(storage: torch.UntypedStorage | FileBytes) -> int:
    """Where a storage is on the host; 0 if it is not."""
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
        return storage.data_ptr()
    return 0


def _streams_behind_current(
    storages: Sequence[torch.UntypedStorage | FileBytes],
) -> dict[torch.device, torch.cuda.Stream]:
    streams = {}
    devices = {storage.device for storage in storages if isinstance(storage, torch.UntypedStorage)}
    for device in {device for device in devices if device.type == "cuda"}:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        stream.wait_stream(torch.cuda.current_stream(device))
        streams[device] = stream
    return streams
