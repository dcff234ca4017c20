"""Planning a file of a ``torch.distributed.checkpoint``: the one that torch's ``FileSystemWriter`` would have written.

Such a file is a row of items without gaps. A tensor's item is a whole file of ``torch.save`` with one storage, a zip
archive whose offsets count from the item's start. An item of any other object is the bytes that the planner gives.
``core/FORMAT.md`` has the details. The bytes of tensors stay where they are until the file is written.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from isal import isal_zlib

from fastensor.errors import LayoutError
from fastensor.stitch.image import CHECKSUM_NBYTES, Blank, Header, Image, Payload, Segment
from fastensor.stitch.plain_tensors import lazy_state, skips_values, storage_class
from fastensor.stitch.shape import is_dense, row_major
from fastensor.stitch.source import FileBytes, Plan
from fastensor.stitch.torch_zip import TORCH_ALIGNMENT, pickle_of, small_records_of_torch

_PROTOCOL = 2
"""The pickle protocol that ``torch.save`` uses."""
_MOST_ARCHIVES = 4096
"""Kinds of tensors that are remembered. A model has tens."""
_DIRECT_DEVICES = frozenset({"cpu", "cuda"})


class TensorArchive(NamedTuple):
    """The item of one tensor, without the tensor's bytes."""

    head: bytes
    """The bytes in front of the tensor's."""
    payload_nbytes: int
    tail: bytes
    """The bytes behind the tensor's, with zeros for its CRC32."""
    blanks: tuple[int, ...]
    """Offsets of the CRC32 of the tensor's bytes in the tail."""

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.payload_nbytes + len(self.tail)

    def filled_tail(self, crc32: int) -> bytes:
        """The tail with the CRC32 of the tensor's bytes."""
        tail = bytearray(self.tail)
        for at in self.blanks:
            tail[at : at + CHECKSUM_NBYTES] = crc32.to_bytes(CHECKSUM_NBYTES, "little")
        return bytes(tail)

    def crc32_around(self, payload_crc32: int, tail: bytes | memoryview) -> int:
        """The CRC32 of the whole item, from that of the tensor's bytes and the filled tail."""
        found = isal_zlib.crc32_combine(isal_zlib.crc32(self.head), payload_crc32, self.payload_nbytes)
        return int(isal_zlib.crc32(tail, found))


class ShardItem(NamedTuple):
    """One item of a planned file."""

    offset: int
    nbytes: int
    archive: TensorArchive | None
    """None if the item's bytes are known when it is planned."""
    storage: int
    """The number of the tensor's storage in the plan; -1 if there is none."""
    known_crc32: int
    """The CRC32 of an item whose bytes are known."""

    def crc32(self, checksums: Sequence[int]) -> int:
        """The CRC32 of the item.

        Args:
            checksums: the CRC32s of the storages, as a backend returns them.
        """
        if self.archive is None:
            return self.known_crc32
        payload = checksums[self.storage] if self.storage >= 0 else 0
        return self.archive.crc32_around(payload, self.archive.filled_tail(payload))


@dataclass(frozen=True, slots=True)
class ShardPlan(Plan):
    """The planned file."""

    items: tuple[ShardItem, ...]
    """In the order in which they were given."""


def plan(contents: Iterable[torch.Tensor | bytes]) -> ShardPlan:
    """Lay out the file with these items.

    Args:
        contents: tensors, which are borrowed and must not change until the file has been written; and bytes of other
            objects.

    Raises:
        Exception: what ``torch.save`` raises for a tensor.
    """
    builder = _ShardBuilder()
    for one in contents:
        builder.add(one)
    return builder.plan()


def archive_of(dtype: torch.dtype, size: Sequence[int]) -> TensorArchive | None:
    """The item that a contiguous tensor has, without its bytes. None if it is not known how torch writes this dtype."""
    shape = tuple(size)
    return _archive(dtype, shape, row_major(shape), 0, math.prod(shape) * dtype.itemsize)


class _ShardBuilder:
    """A file that grows item by item. Use it no more after :meth:`plan`."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._offsets: list[int] = []
        self._storages: list[torch.UntypedStorage | FileBytes] = []
        self._items: list[ShardItem] = []
        self._tensors: list[torch.Tensor] = []
        self._end = 0
        """Offset of the next item."""
        self._pending: list[bytes] = []
        """Known bytes in front of the next storage that are in no segment yet."""
        self._pending_nbytes = 0
        self._blanks: list[Blank] = []
        """Blanks in these bytes."""

    def add(self, content: torch.Tensor | bytes) -> None:
        """Add an item."""
        if isinstance(content, torch.Tensor):
            found = _borrowed(content)
            if found is not None:
                self._tensors.append(content)
                self._add_archive(*found)
                return
            content = _saved_by_torch(content)
        self._items.append(ShardItem(self._end, len(content), None, -1, isal_zlib.crc32(content)))
        self._append(content)

    def _add_archive(self, archive: TensorArchive, source: torch.UntypedStorage | FileBytes, before: int) -> None:
        number = len(self._storages) if archive.payload_nbytes else -1
        self._items.append(ShardItem(self._end, archive.nbytes, archive, number, 0))
        self._append(archive.head)
        if number >= 0:
            self._flush()
            behind = source.nbytes() - before - archive.payload_nbytes
            self._add_segment(Payload(self._end, archive.payload_nbytes, number, before, behind))
            self._end += archive.payload_nbytes
            self._storages.append(source)
        self._blanks += [(self._pending_nbytes + at, number) for at in archive.blanks]
        self._append(archive.tail)

    def _append(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_nbytes += len(data)
        self._end += len(data)

    def _flush(self) -> None:
        if self._pending_nbytes:
            self._add_segment(
                Header(self._end - self._pending_nbytes, b"".join(self._pending), tuple(sorted(self._blanks)))
            )
        self._pending, self._pending_nbytes, self._blanks = [], 0, []

    def _add_segment(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._offsets.append(segment.offset)

    def plan(self) -> ShardPlan:
        """The plan of the whole file."""
        self._flush()
        image = Image.tiled(tuple(self._segments), [*self._offsets, self._end])
        return ShardPlan(image, tuple(self._storages), tuple(self._items), tensors=tuple(self._tensors))


class _Compacted:
    """The bytes of a tensor that has to be copied before they can be written: it is on a device that backends do not
    read, or has gaps. See :class:`fastensor.stitch.source.FileBytes`. The copy lives only while it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._nbytes = tensor.nbytes
        self._copy: torch.Tensor | None = None

    def nbytes(self) -> int:
        return self._nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        if self._copy is None:
            self._copy = torch.empty(0, dtype=torch.uint8).set_(on_host(self._tensor).untyped_storage())
        end = begin + buffer.nbytes
        buffer[:] = self._copy[begin:end].numpy().data
        if end >= self._nbytes:
            self._copy = None
        return int(isal_zlib.crc32(buffer))

    def check(self, crc32: int) -> None:
        """There is nothing to compare with."""


def _borrowed(tensor: torch.Tensor) -> tuple[TensorArchive, torch.UntypedStorage | FileBytes, int] | None:
    """The archive of a tensor, the memory that has its bytes, and where in that memory they begin.

    As torch's writer does, a tensor that is a part of its storage is saved as its clone, whose storage has no more.
    None if ``torch.save`` has to write the tensor.
    """
    if (
        skips_values()
        or type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.__dict__
        or lazy_state(tensor)
        or tensor.device.type == "meta"
    ):
        return None
    dtype, shape, stride = tensor.dtype, tuple(tensor.size()), tensor.stride()
    nbytes = tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.nbytes() == nbytes:
        archive = _archive(dtype, shape, stride, tensor.storage_offset(), nbytes)
        before = 0
        is_whole = True
    else:
        clone_stride = torch.empty_like(tensor, device="meta").stride()
        archive = _archive(dtype, shape, clone_stride, 0, nbytes)
        before = int(tensor.storage_offset()) * dtype.itemsize
        is_whole = 0 in shape or (clone_stride == stride and is_dense(shape, stride))
    if archive is None:
        return None
    if is_whole and storage.device.type in _DIRECT_DEVICES:
        return archive, storage, before
    return archive, _Compacted(tensor), 0


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as torch's writer gives it to ``torch.save``: on the host, in a storage that holds nothing else."""
    copied = tensor.cpu()
    return copied.clone() if copied.untyped_storage().size() != copied.nbytes else copied


def _saved_by_torch(tensor: torch.Tensor) -> bytes:
    """The item of a tensor that is laid out by torch."""
    file = io.BytesIO()
    torch.save(on_host(tensor), file)
    return file.getvalue()


@lru_cache(maxsize=_MOST_ARCHIVES)
def _archive(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, nbytes: int
) -> TensorArchive | None:
    """The file of ``torch.save`` for a plain tensor of the host whose storage has ``nbytes`` bytes. None if torch is
    not known to write it so."""
    if not _pickles_as_expected(dtype):
        return None
    image = small_records_of_torch(TORCH_ALIGNMENT).lay_out(
        _pickled(dtype, shape, stride, offset, nbytes), [nbytes], TORCH_ALIGNMENT
    )
    head, tail = bytearray(), bytearray()
    part = head
    blanks: list[int] = []
    for segment in image.segments:
        if isinstance(segment, Payload):
            part = tail
        else:
            blanks += [len(tail) + at for at, _ in segment.blanks]
            part += segment.data
    return TensorArchive(bytes(head), nbytes, bytes(tail), tuple(blanks))


@cache
def _pickles_as_expected(dtype: torch.dtype) -> bool:
    """True if :func:`_pickled` gives the bytes that torch does for this dtype."""
    try:
        sample = torch.empty((2, 3), dtype=dtype)
        small_records_of_torch(TORCH_ALIGNMENT)
        return pickle_of(sample, _PROTOCOL) == _pickled(dtype, (2, 3), (3, 1), 0, sample.nbytes)
    except (LayoutError, KeyError, RuntimeError):  # torch refuses to pickle what has quantized elements and no scale
        return False


class _Stored(NamedTuple):
    """Stands for a tensor's storage in :func:`_pickled`."""

    kind: Any
    numel: int


class _Rebuilt:
    """Stands for a tensor in :func:`_pickled`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.numel) if type(obj) is _Stored else None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, nbytes: int) -> bytes:
    """The pickle of a plain tensor of the host, made without the tensor, which may be larger than the memory."""
    kind = storage_class(dtype)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    more: tuple[torch.dtype, ...] = ()
    function: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2
    if kind is None:
        kind, more, function = torch.storage.UntypedStorage, (dtype,), torch._utils._rebuild_tensor_v3
    stored = _Stored(kind, nbytes // (1 if more else dtype.itemsize))
    file = io.BytesIO()
    _TensorPickler(file, _PROTOCOL).dump(_Rebuilt(function, (stored, offset, shape, stride, False, hooks, *more)))
    return file.getvalue()
