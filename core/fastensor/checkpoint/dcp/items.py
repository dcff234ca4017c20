"""Reading the items of a file of a distributed checkpoint, and comparing them with their CRC32s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from fastensor.backends import registry, stream
from fastensor.backends.base import Extent
from fastensor.backends.registry import Fallback
from fastensor.backends.window import SMALL_NBYTES, joined
from fastensor.checkpoint.containers import recognize, start_of
from fastensor.checkpoint.location import NO_LOCAL_FILE
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, OpenedReader, ReadOptions
from fastensor.checkpoint.reading.reader import Memory, PartReader, new_array
from fastensor.checkpoint.tools.comparing import DamagedCheckpointError, VerifyReport, verify_opened
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.stitch.damage import Damage
from fastensor.stitch.image import CHECKSUM_NBYTES
from fastensor.stitch.parts import Part
from fastensor.stitch.shards import TensorArchive, archive_of
from fastensor.stitch.signatures import refuse_foreign

_ZIP = b"PK\3\4"


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a file: one chunk of a tensor, or another object."""

    fqn: str
    """The name of the tensor or object."""
    chunk_offset: tuple[int, ...]
    """Offset of the chunk in the tensor; empty for another object."""
    file: str
    """The name of the file."""
    offset: int
    nbytes: int
    crc32: int | None
    """The CRC32 of the item in the metadata; None in files of torch's writers."""
    transforms: tuple[str, ...]
    """Transforms of the writer's extensions."""
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    """Dtype and shape of the chunk. Both are None if the item is another object."""
    archive: TensorArchive | None
    """The layout of the item as our writer and torch's make it; None if that is not known or cannot be right."""

    @classmethod
    def of(cls, index: MetadataIndex, info: _StorageInfo, geometry: tuple[torch.dtype, tuple[int, ...]] | None) -> Self:
        """The item at ``index`` of the metadata.

        Args:
            index: its name and offset.
            info: where it is.
            geometry: dtype and shape of the chunk; None for another object.
        """
        transforms = tuple(info.transform_descriptors or ())
        dtype, shape = geometry or (None, None)
        archive = None
        if dtype is not None and shape is not None and not transforms:
            archive = archive_of(dtype, shape)
        if archive is not None and archive.nbytes != info.length:
            archive = None
        crc32 = getattr(info, "crc32", None)
        at = tuple(index.offset or ())
        return cls(
            index.fqn, at, info.relative_path, info.offset, info.length, crc32, transforms, dtype, shape, archive
        )

    @property
    def title(self) -> str:
        """The item in messages."""
        return f"item {self.fqn!r} ({self.nbytes} bytes at offset {self.offset})"

    def check_is_in(self, file: OpenedFile) -> None:
        """
        Raises:
            CorruptCheckpointError: the item ends behind the end of its file.
            NotACheckpointError: it is known that the file is something else.
        """
        if self.offset + self.nbytes > file.nbytes:
            if not self.transforms:
                refuse_foreign(start_of(file), file.where, "a file of a distributed checkpoint")
            raise CorruptCheckpointError(
                f"{file.where}: {self.title} ends behind the end of the file at {file.nbytes}: the file was cut off, "
                f"or the metadata are those of another save"
            )

    @property
    def is_small(self) -> bool:
        """True if the item is read together with its neighbours."""
        return self.nbytes <= SMALL_NBYTES

    @property
    def part(self) -> Part:
        """The item as a part of its file."""
        return _ItemPart(self.fqn, self.nbytes, self.crc32, self.offset, self.offset + self.nbytes)


def items_by_file(items: Iterable[Item]) -> dict[str, list[Item]]:
    """The items of each file, in the order of the file."""
    found: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda one: (one.file, one.offset, one.nbytes)):
        found.setdefault(item.file, []).append(item)
    return found


def is_safetensors(file: OpenedFile) -> bool:
    """True if a file of a distributed checkpoint is one of safetensors, which has no items."""
    return recognize(start_of(file), file.nbytes) == "safetensors"


class _ItemPart(Part):
    """An item as a part of its file."""

    __slots__ = ()

    @property
    def title(self) -> str:
        return f"item {self.name!r}"

    @property
    def likely_cause(self) -> str:
        return f"{super().likely_cause}, or the metadata are those of another save"


class ItemReader:
    """Reads items of one file, fast in their order. Used by one thread, in a ``with`` block.

    Args:
        file: the file. It stays open.
        items: what will be read, in this order.
        options: how the file is read.
        verify: whether CRC32s are compared.

    Raises:
        UnsupportedContentError: the file is one of ``SerializationFormat.SAFETENSORS``.
        CorruptCheckpointError: the file is cut off, or the metadata are damaged.
        NotACheckpointError: the file is too short, and known to be something else.

    Methods raise :class:`~fastensor.errors.CorruptCheckpointError` for a damaged item, and
    :class:`~fastensor.errors.CheckpointReadError` if the operating system fails to deliver bytes.
    """

    def __init__(self, file: OpenedFile, items: Sequence[Item], options: ReadOptions, *, verify: bool) -> None:
        self.where = file.where
        self.verify = verify
        self._file = file
        if is_safetensors(file):
            raise UnsupportedContentError(
                f"{self.where}: the file was written with SerializationFormat.SAFETENSORS, and metadata do not say "
                f"where in it tensors are; load it by itself with fastensor.load"
            )
        end = 0
        for item in items:
            if item.offset < end:
                raise CorruptCheckpointError(
                    f"{self.where}: {item.title} begins before the item in front of it ends at {end}: the metadata are "
                    f"damaged"
                )
            end = item.offset + item.nbytes
            item.check_is_in(file)
        order = joined(part for item in items for part in _parts(item))
        self._reader = PartReader(file, order, options, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._reader.close(completed=kind is None)

    def read(self, item: Item) -> bytes:
        """All bytes of an item, compared."""
        if not item.nbytes:
            return b""
        if item.is_small:
            self._reader.read_small(item.part)
            data = bytes(self._reader.window.part(item.offset, item.nbytes))
        else:
            buffer = bytearray(item.nbytes)
            self._reader.read(item.part, memoryview(buffer))
            data = bytes(buffer)
        if self.verify and item.crc32 is None and data.startswith(_ZIP):
            try:
                self.verify_records(item)
            except DamagedCheckpointError as error:
                raise CorruptCheckpointError(f"{self.where}: {item.title}: {error}") from error
        return data

    def read_into(self, item: Item, target: torch.Tensor) -> bool:
        """Read a large tensor into its place. Returns False, and changes nothing, if the place needs a copy."""
        if item.archive is None or item.is_small or not _is_place(target, item):
            return False
        storage = target.untyped_storage()
        if storage.nbytes() == target.nbytes and target.device.type in ("cpu", "cuda"):
            filled = self._fill(item, storage)
        elif target.device.type == "cpu":
            filled = self._fill(item, target.view(-1).view(torch.uint8).numpy().data)
        else:
            return False
        if filled and not target.is_inference():
            torch.autograd.graph.increment_version(target)
        return filled

    def read_tensor(self, item: Item) -> torch.Tensor:
        """The tensor of an item, in new memory of the host."""
        if item.archive is not None and item.dtype is not None and item.shape is not None:
            array = new_array(item.archive.payload_nbytes)
            if self._fill(item, array.data):
                found = torch.from_numpy(array).view(item.dtype) if array.nbytes else torch.empty(0, dtype=item.dtype)
                return found.view(item.shape)
        self._reader.check(item.part)
        file = cast(BinaryIO, FileView(_Slice(self._file, item)))  # it is read past this reader
        return unpickled(file, f"{self.where}: {item.title}", verify=self.verify and item.crc32 is None)

    def _fill(self, item: Item, target: Memory) -> bool:
        """Read the bytes of a tensor, compared. Returns False, and reads none of them, if the item is no contiguous
        tensor as our writer and torch's write it. A small item is read with its neighbours."""
        archive, window = item.archive, self._reader.window
        assert archive is not None
        head = archive.head
        if window.part(item.offset, item.nbytes if item.is_small else len(head))[: len(head)] != head:
            return False
        begin = item.offset + len(head)
        if item.is_small and isinstance(target, memoryview):
            target[:] = window.part(begin, target.nbytes)
            found = int(isal_zlib.crc32(target)) if self.verify else 0
        else:
            found = self._reader.read_range(item.part, len(head), target, checksum=self.verify)
        self._check(item, found, window.part(begin + archive.payload_nbytes, len(archive.tail)))
        return True

    def _check(self, item: Item, payload_crc32: int, tail: memoryview) -> None:
        """Compare an item whose tensor has been read: all of it, or the tensor with the CRC32s in a file of torch's."""
        archive, part = item.archive, item.part
        assert archive is not None
        if part.crc32 is not None:
            self._reader.check_read(part, archive.crc32_around(payload_crc32, tail))
            return
        for at in archive.blanks:
            expected = int.from_bytes(tail[at : at + CHECKSUM_NBYTES], "little")
            self._reader.check_read(part._replace(crc32=expected), payload_crc32)

    def find_damage(self, item: Item, progress: Callable[[int], object]) -> Damage | None:
        """See :meth:`~fastensor.checkpoint.reading.reader.PartReader.find_damage`."""
        return self._reader.find_damage(item.part, progress)

    def verify_records(self, item: Item) -> VerifyReport | None:
        """Compare the records of an item of torch's writers. None if the item is no zip archive.

        Raises:
            DamagedCheckpointError: records are damaged.
            CorruptCheckpointError: the archive is damaged.
        """
        file = _Slice(self._file, item)
        if start_of(file)[: len(_ZIP)] != _ZIP:
            return None
        try:
            return verify_opened(file, registry.AUTO, lambda done, total: None)
        except NotACheckpointError:  # an archive that a planner of the user's has made
            return None
        except DamagedCheckpointError:
            raise
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self.where}: {item.title}: {error}") from error


class _Slice:
    """An item as an opened file. See :class:`fastensor.checkpoint.reading.opened.OpenedFile`."""

    path = None
    resident_fraction = 0.0
    borrowed = None

    def __init__(self, file: OpenedFile, item: Item) -> None:
        self._file = file
        self._begin = item.offset
        self.where = file.where
        self.nbytes = item.nbytes

    def readinto(self, offset: int, buffer: memoryview) -> int:
        room = max(self.nbytes - offset, 0)
        return self._file.readinto(self._begin + offset, buffer[:room])

    def open_reader(self, order: Sequence[Extent], options: ReadOptions, fallbacks: list[Fallback]) -> OpenedReader:
        return OpenedReader(stream.NAME, NO_LOCAL_FILE, stream.StreamReader(cast(BinaryIO, FileView(self)), 0))


def unpickled(file: BinaryIO, where: str, *, verify: bool) -> torch.Tensor:
    """The tensor in an item of any layout.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or hold something else than a tensor.
        UnsafeCheckpointError: they name a global that is not allow-listed.
    """
    try:
        found: Any = load(file, "cpu", weights_only=True, verify=verify)
    except (CorruptCheckpointError, NotACheckpointError) as error:  # the metadata say that it is a tensor
        raise CorruptCheckpointError(f"{where}: {error}") from error
    if not isinstance(found, torch.Tensor):
        raise CorruptCheckpointError(f"{where}: expected a tensor, found {type(found).__name__}")
    return found


def _is_place(target: torch.Tensor, item: Item) -> bool:
    """True if the bytes of an item's tensor are those of a tensor in memory."""
    return (
        type(target) is torch.Tensor
        and target.dtype == item.dtype
        and tuple(target.size()) == item.shape
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _parts(item: Item) -> Iterable[tuple[int, int, bool]]:
    """The parts of an item that are read at once: begin, end, and whether the part is read with its neighbours."""
    end = item.offset + item.nbytes
    if item.archive is None and item.dtype is not None:
        return []  # it is read as a file of its own
    if item.is_small or item.archive is None:
        return [(item.offset, end, item.is_small)]
    begin = item.offset + len(item.archive.head)
    behind = begin + item.archive.payload_nbytes
    return [(item.offset, begin, True), (begin, behind, False), (behind, end, True)]
