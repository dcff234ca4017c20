"""Producing an image window by window: storages are copied into a buffer and their CRC32s taken on the way.

CRC32s are checked against what left the storage, so bytes that change in the buffer or behind it are noticed at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from isal import isal_zlib

from fastensor.backends.memory import Buffer, copy_memory
from fastensor.stitch.image import CHECKSUM_NBYTES, Checksum, Header, Image, Payload, Piece

_BLOCK_NBYTES = 512 << 10
"""Copied and checksummed at a time, so that the second pass finds the bytes in the processor's cache."""


@dataclass(slots=True)
class Window:
    """A part of the image in a buffer. Complete once :meth:`Stager.finish` has returned."""

    buffer: Buffer
    offset: int
    nbytes: int
    late: list[Piece] = field(default_factory=list)
    """Pieces that need another look: checksums, and payload that comes from a device."""
    events: list[torch.cuda.Event] = field(default_factory=list)


class Stager:
    """Copies consecutive windows of one image into buffers. Used by one thread.

    Args:
        image: the layout.
        storages: what its payload segments refer to; borrowed, neither resized nor written until the last window is
            finished.

    Device storages are copied on a stream of this stager's own, ordered behind the work that was queued on the
    device's current stream when the stager was made.
    """

    def __init__(self, image: Image, storages: Sequence[torch.UntypedStorage]) -> None:
        self._image = image
        self._storages = storages
        self._addresses = [s.data_ptr() if s.device.type == "cpu" else 0 for s in storages]
        self._checksums = [0] * len(storages)
        self._streams = _streams_behind_current(storages)
        self.asynchronous = bool(self._streams)
        """Whether copies go on after :meth:`begin` has returned, so that beginning the next window first pays."""

    def begin(self, buffer: Buffer, offset: int, nbytes: int) -> Window:
        """Start copying the image's bytes ``[offset, offset + nbytes)`` into the buffer.

        Raises:
            RuntimeError: a storage has another size than when the image was planned.
        """
        window = Window(buffer, offset, nbytes)
        for piece in self._image.pieces(offset, offset + nbytes):
            match piece.segment:
                case Header(data=data):
                    buffer.view[piece.position : piece.position + piece.nbytes] = data[
                        piece.begin : piece.begin + piece.nbytes
                    ]
                case Payload():
                    self._begin_payload(window, piece, piece.segment)
                case Checksum():
                    window.late.append(piece)
        for device, stream in self._streams.items():
            with torch.cuda.device(device):
                window.events.append(stream.record_event())
        return window

    def finish(self, window: Window) -> memoryview:
        """Wait for the copies, fill in the checksums and return the window's bytes. In the order of the windows."""
        for event in window.events:
            event.synchronize()
        for piece in window.late:
            at = piece.position
            if isinstance(piece.segment, Checksum):
                crc32 = self._checksums[piece.segment.index].to_bytes(CHECKSUM_NBYTES, "little")
                window.buffer.view[at : at + piece.nbytes] = crc32[piece.begin : piece.begin + piece.nbytes]
            elif isinstance(piece.segment, Payload):
                self._add_to_checksum(piece.segment.index, window.buffer.view[at : at + piece.nbytes])
        return window.buffer.view[: window.nbytes]

    def _begin_payload(self, window: Window, piece: Piece, payload: Payload) -> None:
        storage = self._storages[payload.index]
        if storage.nbytes() != payload.nbytes:
            raise RuntimeError(
                f"a storage of {payload.nbytes} bytes was resized to {storage.nbytes()} while it was being saved; "
                f"keep the state unchanged until save returns"
            )
        if storage.device.type == "cpu":
            self._copy_from_host(window, piece, payload.index)
        else:
            self._copy_from_device(window, piece, storage)

    def _copy_from_host(self, window: Window, piece: Piece, index: int) -> None:
        source = self._addresses[index] + piece.begin
        at, end = piece.position, piece.position + piece.nbytes
        while at < end:
            count = min(_BLOCK_NBYTES, end - at)
            copy_memory(window.buffer.address + at, source, count)
            self._add_to_checksum(index, window.buffer.view[at : at + count])
            at += count
            source += count

    def _copy_from_device(self, window: Window, piece: Piece, storage: torch.UntypedStorage) -> None:
        target = window.buffer.as_tensor()[piece.position : piece.position + piece.nbytes]
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        stream = self._streams.get(storage.device)
        with torch.cuda.stream(stream):
            target.copy_(source[piece.begin : piece.begin + piece.nbytes], non_blocking=stream is not None)
        window.late.append(piece)

    def _add_to_checksum(self, index: int, data: memoryview) -> None:
        self._checksums[index] = isal_zlib.crc32(data, self._checksums[index])


def _streams_behind_current(
    storages: Sequence[torch.UntypedStorage],
) -> dict[torch.device, torch.cuda.Stream]:
    streams = {}
    for device in {s.device for s in storages if s.device.type == "cuda"}:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        stream.wait_stream(torch.cuda.current_stream(device))
        streams[device] = stream
    return streams
