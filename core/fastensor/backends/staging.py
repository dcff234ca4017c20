"""Producing a file window by window: storages are copied into buffers, and their CRC32s are taken on the way.

The CRC32 of a block is taken right after the block was copied. So a load notices bytes that changed later, in the
buffer or behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol, Self, TypeVar

from fastensor.backends.buffers import BUFFER_NBYTES, Buffer, transfer_buffers
from fastensor.backends.copier import Checksums, Copier, Window, copy_header
from fastensor.backends.snapshot import Snapshot
from fastensor.backends.streams import wait_for
from fastensor.files.arguments import checks_keywords
from fastensor.stitch.image import Header, Payload, Piece
from fastensor.stitch.source import FileBytes, Plan, Source

_BLOCK_NBYTES = 512 << 10
"""Copied and checksummed at a time, so that the second pass finds the bytes in the processor's cache."""
W = TypeVar("W")


class Stager(Protocol[W]):
    """Produces the windows of one file, from front to back, in memory of the host or of a device.

    One thread calls :meth:`begin` and :meth:`finish` for each window, both in the order of the windows. Any thread
    calls :meth:`release` as soon as the window's bytes are where they belong; :meth:`begin` may wait for that. Up to
    ``BUFFER_COUNT`` windows may be held at a time. No window crosses a multiple of ``BUFFER_NBYTES`` in the file.
    """

    @property
    def asynchronous(self) -> bool:
        """True if copies go on after :meth:`begin` has returned, so that it pays to begin the next window first."""

    @property
    def checksums(self) -> tuple[int, ...]:
        """The CRC32 of each storage's bytes in the finished windows; 0 for empty storages."""

    def begin(self, offset: int, nbytes: int) -> W:
        """Start to produce the file's bytes ``[offset, offset + nbytes)``.

        Raises:
            StateChangedError: a storage has another size than when the file was planned.
        """

    def finish(self, window: W) -> None:
        """Wait until the window is complete."""

    def release(self, window: W) -> None:
        """Let the window's buffer be used for another window."""

    def fail(self, failure: BaseException) -> None:
        """Raise ``failure`` from a :meth:`begin` that waits for windows: one of them will not be released."""


@checks_keywords
def open_stager(source: Source) -> HostStager:
    """Stager that produces the windows of a source in host memory, in a ``with`` block."""
    if not isinstance(source, Plan | Snapshot):
        raise TypeError(f"expected a plan or a snapshot, found {type(source).__name__}")
    return HostStager(source)


class HostStager:
    """Copies what a plan borrows into buffers, or hands out the buffers of a snapshot. See :class:`Stager`.

    No copy is in flight any more when the ``with`` block is left.
    """

    def __init__(self, source: Plan | Snapshot) -> None:
        self._snapshot = None if isinstance(source, Plan) else source
        plan = source if isinstance(source, Plan) else source.layout
        self._image = plan.image
        self.progress = plan.progress
        """Called with the bytes that have been staged."""
        self._copier = Copier(plan.storages)
        self._checksums = Checksums(len(plan.storages) if self._snapshot is None else self._snapshot.storage_count)
        self._resources = ExitStack()
        self._lent: list[Buffer] = []
        self._free: list[Buffer] = []
        """Lent buffers that no window uses."""
        self.asynchronous = self._copier.asynchronous

    @property
    def checksums(self) -> tuple[int, ...]:
        return self._checksums.values

    def __enter__(self) -> Self:
        if self._snapshot is not None:
            self._snapshot.begin_moving()
        self._lent = self._resources.enter_context(transfer_buffers.lending())
        self._resources.callback(self._copier.synchronize)
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def begin(self, offset: int, nbytes: int) -> Window:
        if self._snapshot is not None:
            window = self._snapshot.window(offset, nbytes)
            window.late += self._image.pieces(offset, offset + nbytes)
            return window
        if nbytes > BUFFER_NBYTES:
            raise ValueError(f"a window of {nbytes} bytes does not fit into a buffer of {BUFFER_NBYTES}")
        buffer = self._free.pop() if self._free else transfer_buffers.take(self._lent)
        buffer.prepare(self._copier.device)
        window = Window(buffer, 0, offset, nbytes)
        with self._copier.entered():
            self._fill(window)
            window.events = self._copier.events()
        return window

    def finish(self, window: Window) -> None:
        wait_for(window.events)
        self._checksums.take(window.late, window.data)
        self.progress(window.offset + window.nbytes)

    def release(self, window: Window) -> None:
        if self._snapshot is not None:
            self._snapshot.give_back(window)
        else:
            self._free.append(window.buffer)

    def fail(self, failure: BaseException) -> None:
        """Only a snapshot makes :meth:`begin` wait. Otherwise a buffer is free, or too many windows are held."""
        if self._snapshot is not None:
            self._snapshot.moving_failed(failure)

    def _fill(self, window: Window) -> None:
        data = window.data
        for piece in self._image.pieces(window.offset, window.offset + window.nbytes):
            segment = piece.segment
            if isinstance(segment, Header):
                copy_header(piece, segment, data)
                if self.asynchronous:
                    window.late.append(piece)
                elif segment.blanks:
                    self._checksums.fill_in(piece, segment, data)
            elif piece.nbytes <= _BLOCK_NBYTES and self._copier.is_on_host(segment):
                self._copier.copy(piece, segment, window.buffer)
                self._checksums.add(piece, segment, data)
            else:
                self._copy(window, data, piece, segment)

    def _copy(self, window: Window, data: memoryview, piece: Piece, payload: Payload) -> None:
        if self._copier.is_on_host(payload):
            for block in _blocks(piece):
                self._copier.copy(block, payload, window.buffer)
                self._checksums.add(block, payload, data)
        elif (file := self._copier.file(payload)) is not None:
            self._copy_from_file(data, piece, payload, file)
        else:
            self._copier.copy(piece, payload, window.buffer)
            if self.asynchronous:
                window.late.append(piece)
            else:
                self._checksums.add(piece, payload, data)

    def _copy_from_file(self, data: memoryview, piece: Piece, payload: Payload, file: FileBytes) -> None:
        crc32 = file.readinto(payload.before + piece.begin, data[piece.position : piece.position + piece.nbytes])
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
