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
from fastensor.backends.window import SMALL_NBYTES, ReadWindow, joined
from fastensor.checkpoint.containers import recognize, start_of
from fastensor.checkpoint.location import NO_LOCAL_FILE
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, OpenedReader, ReadOptions
from fastensor.checkpoint.reading.reader import MeasuredReader, Memory, new_array
from fastensor.checkpoint.tools.comparing import DamagedCheckpointError, VerifyReport, verify_opened
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.stitch.image import CHECKSUM_NBYTES
from fastensor.stitch.shards import TensorArchive, archive_of
from fastensor.stitch.signatures import refuse_foreign

_BLOCK_NBYTES = 4 << 20
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
    def payload_offset(self) -> int:
        """Offset of the tensor's bytes in the file, if the layout is known."""
        assert self.archive is not None
        return self.offset + len(self.archive.head)


def items_by_file(items: Iterable[Item]) -> dict[str, list[Item]]:
    """The items of each file, in the order of the file."""
    found: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda one: (one.file, one.offset, one.nbytes)):
        found.setdefault(item.file, []).append(item)
    return found


def is_safetensors(file: OpenedFile) -> bool:
    """True if a file of a distributed checkpoint is one of safetensors, which has no items."""
    return recognize(start_of(file), file.nbytes) == "safetensors"


class ItemReader:
    """Reads items of one file, fast in their order. Used by one thread, in a ``with`` block.

    Args:
        file: the file. It stays open.
        items: what will be read, in this order.
        options: how the file is read.
        verify: whether CRC32s are compared.
        order: what of the items will be read, if not all of them whole.

    Raises:
        UnsupportedContentError: the file is one of ``SerializationFormat.SAFETENSORS``.
        CorruptCheckpointError: the file is cut off, or the metadata are damaged.
        NotACheckpointError: the file is too short, and known to be something else.

    Methods raise :class:`~fastensor.errors.CorruptCheckpointError` for a damaged item, and
    :class:`~fastensor.errors.CheckpointReadError` if the operating system fails to deliver bytes.
    """

    def __init__(
        self,
        file: OpenedFile,
        items: Sequence[Item],
        options: ReadOptions,
        *,
        verify: bool,
        order: Sequence[Extent] | None = None,
    ) -> None:
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
        if order is None:
            order = joined(part for item in items for part in _parts(item))
        self._reader = MeasuredReader(file, order, options, [])
        self._window = ReadWindow(self._read_small, order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._reader.close(completed=kind is None)

    def _read_small(self, offset: int, target: memoryview) -> None:
        self._reader.read(offset, target, checksum=self.verify)

    def read(self, item: Item) -> bytes:
        """All bytes of an item, compared."""
        if item.is_small:
            data = bytes(self._window.part(item.offset, item.nbytes)) if item.nbytes else b""
            found = isal_zlib.crc32(data) if self.verify else 0
        else:
            buffer = bytearray(item.nbytes)
            found = self._reader.read(item.offset, memoryview(buffer), checksum=self.verify)
            data = bytes(buffer)
        if self.verify:
            self._compare(item, found)
            if item.crc32 is None and data.startswith(_ZIP):
                try:
                    self.verify_records(item)
                except DamagedCheckpointError as error:
                    raise CorruptCheckpointError(f"{self.where}: {item.title}: {error}") from error
        return data

    def as_file(self, item: Item) -> BinaryIO:
        """The bytes of an item as a file, which is read past this reader."""
        return cast(BinaryIO, FileView(_Slice(self._file, item)))

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
        self.compare(item)
        return unpickled(self.as_file(item), f"{self.where}: {item.title}", verify=self.verify and item.crc32 is None)

    def _fill(self, item: Item, target: Memory) -> bool:
        """Read the bytes of a tensor, compared. Returns False, and reads none of them, if the layout is another one."""
        if not self.has_known_layout(item):
            return False
        self.compare_payload(item, self.read_payload(item, 0, target))
        return True

    def has_known_layout(self, item: Item) -> bool:
        """True if an item is a contiguous tensor as our writer and torch's write it, so that parts can be read. A small
        item is read with its neighbours."""
        head = b"" if item.archive is None else item.archive.head
        nbytes = item.nbytes if item.is_small else len(head)
        return bool(head) and self._window.part(item.offset, nbytes)[: len(head)] == head

    def read_payload(self, item: Item, begin: int, target: Memory) -> int:
        """Fill ``target`` from an offset in the bytes of a tensor whose layout is known. Returns their CRC32, which is
        for :meth:`compare_payload`; 0 if nothing is compared."""
        offset = item.payload_offset + begin
        if not (item.is_small and isinstance(target, memoryview)):
            return self._reader.read(offset, target, checksum=self.verify)
        target[:] = self._window.part(offset, target.nbytes)
        return int(isal_zlib.crc32(target)) if self.verify else 0

    def compare_payload(self, item: Item, crc32: int) -> None:
        """Compare a tensor whose layout is known, all of which has been read by :meth:`read_payload`."""
        archive = item.archive
        assert archive is not None
        tail = self._window.part(item.payload_offset + archive.payload_nbytes, len(archive.tail))
        if not self.verify:
            return
        if item.crc32 is not None:
            self._compare(item, archive.crc32_around(crc32, tail))
            return
        for at in archive.blanks:
            expected = int.from_bytes(tail[at : at + CHECKSUM_NBYTES], "little")
            if expected != crc32:
                raise self._damaged(item, crc32, expected)

    def compare(self, item: Item) -> None:
        """Read an item in bounded memory, and compare it with its CRC32 in the metadata, if it has one."""
        if self.verify and item.crc32 is not None:
            self._compare(item, self.crc32_of(item))

    def _compare(self, item: Item, found: int) -> None:
        if item.crc32 is not None and found != item.crc32:
            raise self._damaged(item, found, item.crc32)

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

    def _damaged(self, item: Item, found: int, expected: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.where}: {item.title} has CRC32 {found:08x}, expected {expected:08x}: the file was damaged after it "
            f"was written, or the metadata are those of another save. Load an older checkpoint, or pass verify=False "
            f"to get the damaged values"
        )

    def crc32_of(self, item: Item, progress: Callable[[int], object] = lambda done: None) -> int:
        """The CRC32 of an item, read in bounded memory. ``progress`` is called with the bytes read so far."""
        block = memoryview(bytearray(min(item.nbytes, _BLOCK_NBYTES)))
        crc32 = 0
        for at in range(0, item.nbytes, _BLOCK_NBYTES):
            piece = block[: item.nbytes - at]
            found = self._reader.read(item.offset + at, piece, checksum=True)
            crc32 = isal_zlib.crc32_combine(crc32, found, piece.nbytes)
            progress(at + piece.nbytes)
        return int(crc32)


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
    begin = item.payload_offset
    behind = begin + item.archive.payload_nbytes
    return [(item.offset, begin, True), (begin, behind, False), (behind, end, True)]
