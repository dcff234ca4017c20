"""Producing a file window by window in the memory of a device, for transfers that go around the host.

Storages are copied into buffers on the device, on streams of this module's own, behind the work that is queued; the
CRC32s are taken there, of the copies. Headers come from the host, once the checksums that they hold are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeAlias, cast

import torch

from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.memory import BUFFER_COUNT, BUFFER_NBYTES, Shelf
from fastensor.backends.staging import Checksums, copy_header, streams_behind_current
from fastensor.backends.to_device import entered
from fastensor.stitch.image import Header, Payload, Piece
from fastensor.stitch.source import Plan, Source, check_size

ALIGNMENT = 4096
"""Of the buffers, and of what is padded: the size of a GPU's page, as GPUDirect Storage wants it."""


def gathering_device(source: Source) -> torch.device | None:
    """The CUDA device that most bytes of a source are on; None if most are in host memory, or in no memory."""
    if not isinstance(source, Plan) or source.throttled:
        return None
    nbytes: Counter[torch.device] = Counter()
    for storage in source.storages:
        nbytes[cast(torch.UntypedStorage, storage).device] += cast(torch.UntypedStorage, storage).nbytes()
    device = nbytes.most_common(1)[0][0] if nbytes else None
    return device if device is not None and device.type == "cuda" else None


Prepare: TypeAlias = Callable[[torch.Tensor], Callable[[], None]]


@dataclass(slots=True)
class DeviceWindow:
    """A part of the file in a buffer of a device. Complete once :meth:`DeviceStager.finish` has returned."""

    buffer: torch.Tensor
    offset: int
    """Where in the file it begins."""
    nbytes: int
    headers: list[Piece] = field(default_factory=list)
    payloads: list[Piece] = field(default_factory=list)
    checksums: PendingCrc32s | None = None
    """Of the payloads."""
    gathered: Callable[[], None] = lambda: None
    """Waits until the payloads are there."""

    def padded(self, alignment: int) -> torch.Tensor:
        """The data, and zeros behind it up to a multiple of the alignment, which divides ``ALIGNMENT``."""
        return self.buffer[: -(-self.nbytes // alignment) * alignment]


class DeviceStager:
    """Copies what a plan borrows into a ring of buffers on one device. See :class:`fastensor.backends.staging.Stager`.

    No copy is in flight any more when its ``with`` block is left. Besides the ring, the device holds eight times a
    window's bytes while their checksums are computed.

    Args:
        plan: what is written; all of it in memory, of any devices.
        device: where to.
        prepare: called with the memory of a ring when one is made; returns what is called when it goes.
    """

    asynchronous = True

    def __init__(self, plan: Plan, device: torch.device, *, prepare: Prepare = lambda memory: lambda: None) -> None:
        self._plan = plan
        self._prepare = prepare
        self._device = device
        self._sources: dict[int, torch.Tensor] = {}
        self._checksums = Checksums(len(plan.storages))
        self._resources = ExitStack()
        self._free: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._later: dict[torch.device, torch.cuda.Stream] = {}
        """For headers, which would wait for the next window's payload on the same stream."""

    @property
    def checksums(self) -> tuple[int, ...]:
        return self._checksums.values

    def __enter__(self) -> Self:
        ring = self._resources.enter_context(borrowed_device_ring(self._device, self._prepare))
        devices = {cast(torch.UntypedStorage, storage).device for storage in self._plan.storages} | {self._device}
        self._streams = streams_behind_current(devices, "gather")  # also behind what has used the ring's memory before
        self._later = streams_behind_current({self._device}, "headers")
        self._resources.callback(_synchronize, self._later)
        self._resources.callback(_synchronize, self._streams)
        self._free = list(ring.buffers)
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def begin(self, offset: int, nbytes: int) -> DeviceWindow:
        window = DeviceWindow(self._free.pop(), offset, nbytes)
        copies = []
        with _entered(self._streams):
            for piece in self._plan.image.pieces(offset, offset + nbytes):
                if isinstance(piece.segment, Header):
                    window.headers.append(piece)
                    continue
                copy = window.buffer[piece.position : piece.position + piece.nbytes]
                copy.copy_(self._source(piece, piece.segment), non_blocking=True)
                copies.append(copy)
                window.payloads.append(piece)
            window.buffer[nbytes : -(-nbytes // ALIGNMENT) * ALIGNMENT].zero_()
            window.checksums = PendingCrc32s(copies)
            if self._device in self._streams:
                window.gathered = self._streams[self._device].record_event().synchronize
        return window

    def finish(self, window: DeviceWindow) -> None:
        """Wait until the window is complete."""
        window.gathered()
        found = window.checksums.values() if window.checksums is not None else []
        for piece, crc32 in zip(window.payloads, found, strict=True):
            self._checksums.combine(cast(Payload, piece.segment).storage, crc32, piece.nbytes)
        window.checksums = None
        self._copy_headers(window)

    def release(self, window: DeviceWindow) -> None:
        self._free.append(window.buffer)

    def fail(self, failure: BaseException) -> None:
        """Nobody waits: a buffer is free, or too many windows are held."""

    def _source(self, piece: Piece, payload: Payload) -> torch.Tensor:
        storage = cast(torch.UntypedStorage, self._plan.storages[payload.storage])
        check_size(storage, payload)
        if payload.storage not in self._sources:
            self._sources[payload.storage] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = payload.before + piece.begin
        return self._sources[payload.storage][start : start + piece.nbytes]

    def _copy_headers(self, window: DeviceWindow) -> None:
        """All in one copy from the host, and from there to where they belong."""
        together = bytearray(sum(piece.nbytes for piece in window.headers))
        if not together:
            return
        at = 0
        for piece in window.headers:
            moved, header = piece._replace(position=at), cast(Header, piece.segment)
            copy_header(moved, header, memoryview(together))
            self._checksums.fill_in(moved, header, memoryview(together))
            at += piece.nbytes
        at = 0
        with _entered(self._later):
            source = torch.frombuffer(together, dtype=torch.uint8).to(self._device)
            for piece in window.headers:
                target = window.buffer[piece.position : piece.position + piece.nbytes]
                target.copy_(source[at : at + piece.nbytes], non_blocking=True)
                at += piece.nbytes
        _synchronize(self._later)


@contextmanager
def _entered(streams: dict[torch.device, torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams.values():
            stack.enter_context(entered(stream))
        yield


def _synchronize(streams: dict[torch.device, torch.cuda.Stream]) -> None:
    for stream in streams.values():
        stream.synchronize()


class DeviceRing:
    """The buffers of one transfer, in the memory of a device: in a pool of their own, since libcufile registers all of
    what torch has got from the driver at once."""

    def __init__(self, device: torch.device, prepare: Prepare) -> None:
        with torch.inference_mode(False):  # it is kept for when there is another mode
            self._pool = torch.cuda.MemPool() if device.type == "cuda" else None
            with torch.cuda.use_mem_pool(self._pool, device) if self._pool is not None else nullcontext():
                memory = torch.empty(BUFFER_COUNT * BUFFER_NBYTES + ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -memory.data_ptr() % ALIGNMENT
        used = memory[begin : begin + BUFFER_COUNT * BUFFER_NBYTES]
        self.buffers = torch.split(used, BUFFER_NBYTES)
        self.release = prepare(used)


_rings: Shelf[torch.device, DeviceRing] = Shelf()


def borrowed_device_ring(device: torch.device, prepare: Prepare) -> AbstractContextManager[DeviceRing]:
    """A ring for the length of one transfer. No buffer may be in use any more when the block is left."""
    return _rings.borrowed(device, partial(DeviceRing, device, prepare))
