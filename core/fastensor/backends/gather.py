"""Producing a file window by window in the memory of a device, for transfers that go around the host.

Storages are copied into buffers on the device, on streams of this module's own, behind the work that is queued. The
device computes the CRC32s of the copies. Headers come from the host, once the checksums in them are known.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import torch

from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES
from fastensor.backends.copier import Checksums, copy_header
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.streams import Copies, Event, wait_for
from fastensor.files.forks import first_in_children
from fastensor.stitch.image import Header, Payload, Piece
from fastensor.stitch.source import Plan, check_size

ALIGNMENT = 4096
"""Alignment of the buffers and of padded lengths: the page size of a GPU, which GPUDirect Storage requires."""
Prepare: TypeAlias = Callable[[torch.Tensor], Callable[[], None]]


def gathering_device(plan: Plan) -> torch.device | None:
    """The CUDA device that holds most bytes of a plan. None if most are in host memory, or some are in a file."""
    nbytes: Counter[torch.device] = Counter()
    for storage in plan.storages:
        if not isinstance(storage, torch.UntypedStorage):
            return None
        nbytes[storage.device] += storage.nbytes()
    device = nbytes.most_common(1)[0][0] if nbytes else None
    return device if device is not None and device.type == "cuda" else None


@dataclass(slots=True)
class DeviceWindow:
    """A part of the file in a buffer of a device. Complete once :meth:`DeviceStager.finish` has returned."""

    buffer: torch.Tensor
    offset: int
    """Offset of the window in the file."""
    nbytes: int
    headers: list[tuple[Piece, Header]] = field(default_factory=list)
    payloads: list[tuple[Piece, Payload]] = field(default_factory=list)
    checksums: PendingCrc32s | None = None
    """The CRC32s of the payloads."""
    events: Sequence[Event] = ()
    """Reached when the payloads are there, and their CRC32s."""

    def padded(self, alignment: int) -> torch.Tensor:
        """The data, and zeros behind it up to a multiple of the alignment, which divides ``ALIGNMENT``."""
        return self.buffer[: -(-self.nbytes // alignment) * alignment]


class DeviceStager:
    """Copies what a plan borrows into buffers on one device. See :class:`fastensor.backends.staging.Stager`.

    No copy is in flight any more when the ``with`` block is left. Besides the buffers, the device holds eight times a
    window's bytes while their checksums are computed.

    Args:
        plan: the file; all of its bytes are in memory, of any devices.
        device: the device of the buffers.
        prepare: called with the memory of all buffers when that is allocated; returns what to call before that is
            freed.
    """

    asynchronous = True

    def __init__(self, plan: Plan, device: torch.device, *, prepare: Prepare = lambda memory: lambda: None) -> None:
        self._plan = plan
        self._prepare = prepare
        self._device = device
        self._sources: dict[int, torch.Tensor] = {}
        """Storages as tensors of bytes, by their number."""
        self._checksums = Checksums(len(plan.storages))
        self._resources = ExitStack()
        self._free: list[torch.Tensor] = []
        devices = {one.device for one in plan.storages if isinstance(one, torch.UntypedStorage)} | {device}
        self._copies = Copies(devices, "gather")
        self._later = Copies({device}, "headers")
        """Copies of headers, which would wait for the next window's payload on the stream of payloads."""

    @property
    def checksums(self) -> tuple[int, ...]:
        return self._checksums.values

    def __enter__(self) -> Self:
        buffers = self._resources.enter_context(_borrowed(self._device, self._prepare))
        self._copies.follow_current()  # also behind what has used the buffers before
        self._later.follow_current()
        self._resources.callback(self._later.synchronize)
        self._resources.callback(self._copies.synchronize)
        self._free = list(buffers.each)
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def begin(self, offset: int, nbytes: int) -> DeviceWindow:
        window = DeviceWindow(self._free.pop(), offset, nbytes)
        copies = []
        with self._copies.entered():
            for piece in self._plan.image.pieces(offset, offset + nbytes):
                segment = piece.segment
                if isinstance(segment, Header):
                    window.headers.append((piece, segment))
                    continue
                copy = window.buffer[piece.position : piece.position + piece.nbytes]
                copy.copy_(self._source(piece, segment), non_blocking=True)
                copies.append(copy)
                window.payloads.append((piece, segment))
            window.buffer[nbytes : -(-nbytes // ALIGNMENT) * ALIGNMENT].zero_()
            window.checksums = PendingCrc32s(copies)
            window.events = self._copies.events()
        return window

    def finish(self, window: DeviceWindow) -> None:
        wait_for(window.events)
        found = window.checksums.values() if window.checksums is not None else []
        for (piece, payload), crc32 in zip(window.payloads, found, strict=True):
            self._checksums.combine(payload.storage, crc32, piece.nbytes)
        window.checksums = None
        self._copy_headers(window)
        self._plan.progress(window.offset + window.nbytes)

    def release(self, window: DeviceWindow) -> None:
        self._free.append(window.buffer)

    def fail(self, failure: BaseException) -> None:
        """:meth:`begin` never waits: a buffer is free, or too many windows are held."""

    def _source(self, piece: Piece, payload: Payload) -> torch.Tensor:
        storage = self._plan.storages[payload.storage]
        assert isinstance(storage, torch.UntypedStorage)
        check_size(storage, payload)
        if payload.storage not in self._sources:
            self._sources[payload.storage] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = payload.before + piece.begin
        return self._sources[payload.storage][start : start + piece.nbytes]

    def _copy_headers(self, window: DeviceWindow) -> None:
        """Copy all headers from the host together, and then each to its place in the window."""
        together = bytearray(sum(piece.nbytes for piece, _ in window.headers))
        if not together:
            return
        at = 0
        for piece, header in window.headers:
            moved = piece._replace(position=at)
            copy_header(moved, header, memoryview(together))
            self._checksums.fill_in(moved, header, memoryview(together))
            at += piece.nbytes
        at = 0
        with self._later.entered():
            source = torch.frombuffer(together, dtype=torch.uint8).to(self._device)
            for piece, _ in window.headers:
                target = window.buffer[piece.position : piece.position + piece.nbytes]
                target.copy_(source[at : at + piece.nbytes], non_blocking=True)
                at += piece.nbytes
        self._later.synchronize()


class _DeviceBuffers:
    """The buffers of one transfer on a device. They are one allocation in a memory pool of its own, because libcufile
    registers all of what torch has got from the driver at once. So they are lent together, unlike those of a
    :class:`~fastensor.backends.buffers.BufferPool`, which are pieces of memory of the host."""

    def __init__(self, device: torch.device, prepare: Prepare) -> None:
        self.process = os.getpid()
        with torch.inference_mode(False):  # the buffers are kept for transfers in other modes
            self._pool = torch.cuda.MemPool() if device.type == "cuda" else None
            with torch.cuda.use_mem_pool(self._pool, device) if self._pool is not None else nullcontext():
                memory = torch.empty(BUFFER_COUNT * BUFFER_NBYTES + ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -memory.data_ptr() % ALIGNMENT
        used = memory[begin : begin + BUFFER_COUNT * BUFFER_NBYTES]
        self.each = torch.split(used, BUFFER_NBYTES)
        self.release = prepare(used)


_idle: dict[torch.device, _DeviceBuffers] = {}
"""The buffers of each device for its next transfer. Single operations of the dict, which are atomic, lend them and take
them back: a signal handler may save while the code that it interrupts is in here."""
_of_parent: list[_DeviceBuffers] = []
"""In a forked child: the parent's buffers, which must not be freed."""


@contextmanager
def _borrowed(device: torch.device, prepare: Prepare) -> Iterator[_DeviceBuffers]:
    """Buffers for one transfer. None may be in use any more when the block is left."""
    buffers = _idle.pop(device, None) or _DeviceBuffers(device, prepare)
    try:
        yield buffers
    finally:
        if buffers.process != os.getpid():  # this thread has forked in the block
            _of_parent.append(buffers)
        elif _idle.setdefault(device, buffers) is not buffers:
            buffers.release()


def _forget_parent() -> None:
    _of_parent.extend(_idle.values())
    _idle.clear()


first_in_children(_forget_parent)
