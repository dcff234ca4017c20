"""Whole tensors of a distributed checkpoint, each put together of its chunks, in bounded memory."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Self, cast

import torch
from isal import isal_zlib
from torch.distributed._shard._utils import narrow_tensor_by_index

from fastensor.checkpoint.dcp.catalog import Contents, describe
from fastensor.checkpoint.dcp.items import Item, ItemReader, items_by_file
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions, opened
from fastensor.checkpoint.tools.catalog import Inspection, in_words, read_catalog
from fastensor.checkpoint.tools.conversion.copying import PiecewiseBytes
from fastensor.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
    UnsupportedContentError,
)
from fastensor.select.transfer import BackendChoice

_MOST_OPEN = 64
"""Files that are kept open, because the next tensor is likely to need them again."""


class DirectoryTensors:
    """An open distributed checkpoint. Used by one thread, in a ``with`` block. See
    :class:`~fastensor.checkpoint.tools.contents.OpenCheckpoint`.

    Args:
        contents: the checkpoint.
        backend: as for :func:`fastensor.load`.
        verify: whether chunks are compared with their CRC32s.

    Methods that read compare the metadata first, and raise what :meth:`check` raises.
    """

    def __init__(self, contents: Contents, backend: BackendChoice, *, verify: bool) -> None:
        self._contents = contents
        self._directory = contents.directory
        self.where = contents.directory.path
        self._options = ReadOptions(backend)
        self._verify = verify
        self._open: dict[str, tuple[OpenedFile, ExitStack]] = {}
        self._found = describe(contents)
        self.tensors = {info.name: info for info in self._found.tensors}
        self.others = self._found.others

    def describe(self) -> Inspection:
        return self._found

    def check(self) -> None:
        """Compare the metadata with themselves, and with the files.

        Raises:
            UnsupportedContentError: each rank has metadata of its own.
            CorruptCheckpointError: the items of a tensor are not as many bytes as it has, or files are cut off.
            CheckpointReadError: a file is missing.
        """
        if self._contents.metadata_count > 1:
            raise UnsupportedContentError(
                f"{self.where}: each rank has saved without the others ({self._contents.metadata_count} metadata "
                f"files), so what they hold cannot be joined; load it with as many ranks"
            )
        for file, items in self._contents.files.items():
            for item in items:
                item.check_is_in(self._file(file))  # so that memory is in proportion to files
        for name in self.tensors:
            self._check(name)
        self.close()

    @cached_property
    def _items(self) -> Mapping[str, list[Item]]:
        """The items of each tensor and object, after a :meth:`check`."""
        self.check()
        return self._contents.items

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
                file = stack.enter_context(self._directory.open(name))
                self._open[name] = file, stack.pop_all()
        return self._open[name][0]

    def _check(self, name: str) -> None:
        """Compare the chunks of a tensor with its size, and with the items that hold them."""
        tensor, numel = self.tensors[name], 0
        for item in self._contents.items.get(name, []):
            if item.shape is None:
                raise CorruptCheckpointError(
                    f"{self._directory.name_of(item.file)}: {item.title} is of no chunk of its tensor: the metadata "
                    f"are damaged"
                )
            chunk_numel = math.prod(item.shape)
            if not item.transforms and chunk_numel * tensor.dtype.itemsize > item.nbytes:
                raise CorruptCheckpointError(
                    f"{self._directory.name_of(item.file)}: {item.title} is smaller than its chunk of {chunk_numel} "
                    f"elements of {tensor.dtype}: the metadata are damaged"
                )
            numel += chunk_numel
        if numel != math.prod(tensor.shape):
            raise CorruptCheckpointError(
                f"{self.where}: the chunks of {name!r} have {numel} elements, expected "
                f"{math.prod(tensor.shape)}: the metadata are damaged, or not all ranks have saved"
            )

    def read(self, name: str) -> torch.Tensor:
        """A tensor in new memory of the host. Chunks that cannot be read into their place take memory, too, one at a
        time.

        Raises:
            CorruptCheckpointError: a chunk is damaged.
            CheckpointReadError: the operating system failed to deliver bytes.
        """
        info, of_tensor = self.tensors[name], self._items.get(name, [])
        tensor = torch.zeros(info.shape, dtype=info.dtype)  # chunks that overlap would leave gaps
        for file, items in items_by_file(of_tensor).items():
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
            raise UnsafeCheckpointError(f"{self.where}: {name!r}: {error}") from error

    def read_bytes(self, name: str) -> bytes:
        """The bytes of another object than a tensor.

        Raises:
            CorruptCheckpointError: they are damaged, or missing.
        """
        items = self._items.get(name, [])
        if len(items) != 1:
            raise CorruptCheckpointError(
                f"{self.where}: {name!r} is an object of {len(items)} items, expected 1: the metadata are damaged"
            )
        with ItemReader(self._file(items[0].file), items, self._options, verify=True) as reader:
            return reader.read(items[0])

    def in_words(self, name: str) -> str:
        data = self.read_bytes(name)
        try:
            with opened(io.BytesIO(data)) as file:
                return in_words(read_catalog(file, verify=False).structure)
        except (CorruptCheckpointError, NotACheckpointError):
            # a planner of the user's has made the bytes; they are as they were saved
            return f"<{len(data)} bytes with CRC32 {isal_zlib.crc32(data):08x}>"

    def memory_for(self, name: str) -> int:
        """The bytes that :meth:`read` takes at most: a tensor, and one of its chunks."""
        return self.tensors[name].nbytes + max((item.nbytes for item in self._items.get(name, [])), default=0)


def tensor_bytes(tensors: DirectoryTensors, name: str, report: Callable[[int], object]) -> PiecewiseBytes:
    """The bytes of one tensor, which is in memory while they are asked for. Chunks are compared when they are read.

    Args:
        tensors: the checkpoint.
        name: the name of the tensor.
        report: called with the number of bytes of the tensor that have been given out.
    """

    def begin() -> Iterator[memoryview]:
        yield tensors.read(name).view(-1).view(torch.uint8).numpy().data

    return PiecewiseBytes(tensors.tensors[name].nbytes, begin, report)
