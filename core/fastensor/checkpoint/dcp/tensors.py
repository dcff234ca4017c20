"""Whole tensors of a distributed checkpoint, each put together of its chunks, in bounded memory."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, Self, cast

import torch
from isal import isal_zlib
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fastensor.backends.base import Extent
from fastensor.checkpoint.dcp.catalog import Contents, check_single, describe, read_contents
from fastensor.checkpoint.dcp.items import Item, ItemReader, items_by_file
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions, opened
from fastensor.checkpoint.reading.reader import new_array
from fastensor.checkpoint.tools.catalog import Inspection, TensorInfo, in_words, read_catalog
from fastensor.checkpoint.tools.conversion.copying import PiecewiseBytes
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
    UnsupportedContentError,
)
from fastensor.files.words import human_size
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.shape import row_major

_MOST_OPEN = 64
"""Files that are kept open, because the next tensor is likely to need them again."""


class DirectoryTensors:
    """Reads tensors of a distributed checkpoint. Used by one thread, in a ``with`` block.

    Args:
        contents: the checkpoint.
        backend: as for :func:`fastensor.load`.
        verify: whether chunks are compared with their CRC32s.

    Raises:
        UnsupportedContentError: each rank has metadata of its own.
        CorruptCheckpointError: the items of a tensor are not as many bytes as it has, or files are cut off.
        CheckpointReadError: a file is missing.
    """

    def __init__(self, contents: Contents, backend: BackendChoice, *, verify: bool) -> None:
        check_single(contents)
        self._directory = contents.directory
        self._options = ReadOptions(backend)
        self._verify = verify
        self._open: dict[str, tuple[OpenedFile, ExitStack]] = {}
        self.entries = {
            name: entry
            for name, entry in contents.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """The tensors by name."""
        self.infos = {
            name: TensorInfo(name, "Tensor", entry.properties.dtype, tuple(entry.size), "", None)
            for name, entry in self.entries.items()
        }
        self._items: dict[str, list[Item]] = {}
        for file, items in contents.files.items():
            for item in items:
                item.check_is_in(self._file(file))  # so that memory is in proportion to files
                self._items.setdefault(item.fqn, []).append(item)
        for name in self.entries:
            self._check(name)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. They are opened again if a tensor is read."""
        while self._open:
            self._open.popitem()[1][1].close()

    def _file(self, name: str) -> OpenedFile:
        """A file of the checkpoint, which stays open for a while."""
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))[1].close()
            with ExitStack() as stack:
                try:
                    file = stack.enter_context(self._directory.open(name))
                except FileNotFoundError as error:
                    where = self._directory.name_of(name)
                    message = "the metadata name this file, which is missing"
                    raise CheckpointReadError(error.errno, message, where) from error
                self._open[name] = file, stack.pop_all()
        return self._open[name][0]

    def _check(self, name: str) -> None:
        """Compare the chunks of a tensor with its size, and with the items that hold them."""
        entry = self.entries[name]
        numel = 0
        for item in self._items.get(name, []):
            if item.shape is None:
                raise CorruptCheckpointError(
                    f"{self._directory.name_of(item.file)}: {item.title} is of no chunk of its tensor: the metadata "
                    f"are damaged"
                )
            chunk_numel = math.prod(item.shape)
            if not item.transforms and chunk_numel * entry.properties.dtype.itemsize > item.nbytes:
                raise CorruptCheckpointError(
                    f"{self._directory.name_of(item.file)}: {item.title} is smaller than its chunk of {chunk_numel} "
                    f"elements of {entry.properties.dtype}: the metadata are damaged"
                )
            numel += chunk_numel
        if numel != math.prod(entry.size):
            raise CorruptCheckpointError(
                f"{self._directory.path}: the chunks of {name!r} have {numel} elements, expected "
                f"{math.prod(entry.size)}: the metadata are damaged, or not all ranks have saved"
            )

    def read(self, name: str) -> torch.Tensor:
        """A tensor in new memory of the host. Chunks that cannot be read into their place take memory, too, one at a
        time.

        Raises:
            CorruptCheckpointError: a chunk is damaged.
            CheckpointReadError: the operating system failed to deliver bytes.
        """
        entry = self.entries[name]
        tensor = torch.zeros(entry.size, dtype=entry.properties.dtype)  # chunks that overlap would leave gaps
        for file, items in items_by_file(self._items.get(name, [])).items():
            with ItemReader(self._file(file), items, self._options, verify=self._verify) as reader:
                for item in items:
                    place = narrow_tensor_by_index(tensor, item.chunk_offset, cast(tuple[int, ...], item.shape))
                    if not reader.read_into(item, place):
                        place.copy_(reader.read_tensor(item))
        return tensor

    def read_object(self, name: str) -> Any:
        """Another object than a tensor.

        Raises:
            UnsafeCheckpointError: it needs a class that is not allow-listed.
            CorruptCheckpointError: its bytes are damaged, or missing.
        """
        try:
            return load(io.BytesIO(self.read_bytes(name)), "cpu", weights_only=True)
        except UnsafeCheckpointError as error:
            raise UnsafeCheckpointError(f"{self._directory.path}: {name!r}: {error}") from error

    def read_bytes(self, name: str) -> bytes:
        """The bytes of another object than a tensor.

        Raises:
            CorruptCheckpointError: they are damaged, or missing.
        """
        items = self._items.get(name, [])
        if len(items) != 1:
            raise CorruptCheckpointError(
                f"{self._directory.path}: {name!r} is an object of {len(items)} items, expected 1: the metadata are "
                f"damaged"
            )
        with ItemReader(self._file(items[0].file), items, self._options, verify=True) as reader:
            return reader.read(items[0])

    def pieces(self, name: str, limit: int) -> Iterator[memoryview]:
        """The bytes of a tensor, row by row, in pieces of at most ``limit`` bytes. Each piece is new memory; as much
        again is in use while it is read.

        Raises:
            CorruptCheckpointError: a chunk is damaged. This may be raised after its bytes have been given out.
            CheckpointReadError: the operating system failed to deliver bytes.
            UnsupportedContentError: a chunk of more than ``limit`` bytes can only be read whole.
        """
        if self.infos[name].nbytes <= limit:
            yield self.read(name).view(-1).view(torch.uint8).numpy().data
            return
        entry = self.entries[name]
        itemsize = entry.properties.dtype.itemsize
        chunks = [_Chunk(self, item, itemsize, limit) for item in self._items[name] if item.nbytes]
        for offsets, sizes in slabs(entry.size, itemsize, limit):
            array = new_array(math.prod(sizes) * itemsize)
            array.fill(0)
            slab = torch.from_numpy(array).view(*sizes, itemsize)
            for chunk in chunks:
                chunk.copy_to(slab, offsets)
            yield array.data
            del array, slab
        for chunk in chunks:
            chunk.compare()

    def reader(self, item: Item, order: Sequence[Extent] | None = None) -> ItemReader:
        """A reader of one item, or of parts of it."""
        return ItemReader(self._file(item.file), [item], self._options, verify=self._verify, order=order)


class _Chunk:
    """A chunk that is read piece by piece, from front to back.

    Args:
        tensors: the checkpoint.
        item: the item of the chunk.
        itemsize: bytes of an element.
        limit: how many bytes may be read at once.
    """

    def __init__(self, tensors: DirectoryTensors, item: Item, itemsize: int, limit: int) -> None:
        assert item.shape is not None
        self._tensors = tensors
        self._item = item
        self._shape = item.shape
        self._itemsize = itemsize
        self._crc32 = 0
        """The CRC32 of the bytes that have been read: the slabs of a tensor come in the order of a chunk's bytes."""
        with tensors.reader(item, []) as reader:
            self._is_known = reader.has_known_layout(item)
            if not self._is_known:
                reader.compare(item)
        if not self._is_known and item.nbytes > limit:
            raise UnsupportedContentError(
                f"{reader.where}: {item.title} can only be read whole, because it went through an extension or was not "
                f"contiguous when it was saved; allow for more memory than {human_size(2 * limit)}"
            )

    def copy_to(self, slab: torch.Tensor, offsets: Sequence[int]) -> None:
        """Copy the part of the chunk that lies in a slab of the tensor. The last dimension of the slab are bytes."""
        begins = [max(one, two) for one, two in zip(offsets, self._item.chunk_offset, strict=True)]
        ends = [
            min(one + size, two + length)
            for one, size, two, length in zip(offsets, slab.shape, self._item.chunk_offset, self._shape, strict=False)
        ]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if min(sizes) <= 0:
            return
        inner = [begin - offset for begin, offset in zip(begins, self._item.chunk_offset, strict=True)]
        place = narrow_tensor_by_index(
            slab,
            (*(begin - offset for begin, offset in zip(begins, offsets, strict=True)), 0),
            (*sizes, self._itemsize),
        )
        if self._is_known:
            place.copy_(self._piece(inner, sizes).view(place.shape))
        else:
            with self._tensors.reader(self._item) as reader:
                found = reader.read_tensor(self._item).contiguous().unsqueeze(-1).view(torch.uint8)
            place.copy_(narrow_tensor_by_index(found, (*inner, 0), (*sizes, self._itemsize)))

    def _piece(self, inner: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The bytes of a part of the chunk that lie next to each other in the file."""
        at = sum(begin * step for begin, step in zip(inner, row_major(self._shape), strict=True)) * self._itemsize
        array = new_array(math.prod(sizes) * self._itemsize)
        begin = self._item.payload_offset + at
        with self._tensors.reader(self._item, [Extent(begin, begin + array.nbytes)]) as reader:
            crc32 = reader.read_payload(self._item, at, array.data)
        self._crc32 = isal_zlib.crc32_combine(self._crc32, crc32, array.nbytes)
        return torch.from_numpy(array)

    def compare(self) -> None:
        """Compare the chunk, all of which has been read."""
        if self._is_known:
            with self._tensors.reader(self._item, []) as reader:
                reader.compare_payload(self._item, self._crc32)


def slabs(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offsets and sizes of parts of a tensor, in the order of its bytes, each of at most ``limit`` bytes that lie
    next to each other when the tensor is contiguous.

    Args:
        shape: the tensor's.
        itemsize: bytes of an element.
        limit: at least ``itemsize``.

    >>> list(slabs((2, 3), 4, 8))
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    >>> list(slabs((5, 3), 4, 24))
    [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (1, 3))]
    """
    steps = row_major(shape)
    cut = next(number for number, step in enumerate(steps) if step * itemsize <= limit)
    rows = limit // (steps[cut] * itemsize)
    rest = tuple(shape[cut + 1 :])
    for lead in itertools.product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], rows):
            size = min(rows, shape[cut] - begin)
            yield (*lead, begin, *(0 for _ in rest)), (*(1 for _ in lead), size, *rest)


def tensor_bytes(tensors: DirectoryTensors, name: str, limit: int, report: Callable[[int], object]) -> PiecewiseBytes:
    """The bytes of one tensor. Chunks are compared when they are read.

    Args:
        tensors: the checkpoint.
        name: the name of the tensor.
        limit: as for :meth:`DirectoryTensors.pieces`.
        report: called with the number of bytes of the tensor that have been read.
    """
    return PiecewiseBytes(tensors.infos[name].nbytes, partial(tensors.pieces, name, limit), report)


class OpenDirectory:
    """A distributed checkpoint. See :class:`~fastensor.checkpoint.tools.contents.OpenCheckpoint`."""

    def __init__(self, location: Location, stack: ExitStack, backend: BackendChoice) -> None:
        self._contents = read_contents(cast(str, location))
        self._found = describe(self._contents)
        self._stack = stack
        self._backend = backend
        self.tensors = {info.name: info for info in self._found.tensors}
        self.others = self._found.others

    def describe(self) -> Inspection:
        return self._found

    def in_words(self, name: str) -> str:
        data = self._tensors.read_bytes(name)
        try:
            with opened(io.BytesIO(data)) as file:
                return in_words(read_catalog(file, verify=False).structure)
        except (CorruptCheckpointError, NotACheckpointError):
            # a planner of the user's has made the bytes; they are as they were saved
            return f"<{len(data)} bytes with CRC32 {isal_zlib.crc32(data):08x}>"

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(name)

    @cached_property
    def _tensors(self) -> DirectoryTensors:
        return self._stack.enter_context(DirectoryTensors(self._contents, self._backend, verify=True))
