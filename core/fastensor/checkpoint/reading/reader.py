"""The verifying reader: all data that are loaded, opened, verified or converted are read here.

Every CRC32 of a part is compared here. :meth:`PartReader.read`, :meth:`PartReader.read_array`,
:meth:`PartReader.read_bytes` and :meth:`PartReader.read_small` compare the part that they give.
:meth:`PartReader.check` and :meth:`PartReader.find_damage` compare a part without giving it.
:meth:`PartReader.check_read` compares a part that was read by ranges.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, TypeVar, cast

import torch
from isal import isal_zlib

from fastensor.backends.base import BatchReader, Extent
from fastensor.backends.memory import Bytes, fill, storage_on
from fastensor.backends.registry import Fallback
from fastensor.backends.window import SMALL_NBYTES, ReadWindow, joined
from fastensor.checkpoint.reading.opened import OpenedFile, ReadOptions
from fastensor.checkpoint.reading.request import LoadRequest
from fastensor.errors import CheckpointReadError, FastensorError
from fastensor.files.os_errors import read_errors
from fastensor.select.transfer import is_to_blame
from fastensor.stitch.parts import LOCAL_HEADER, Part, check_crc32, find_damage, find_data, likely_begin

if TYPE_CHECKING:
    from fastensor.checkpoint.progress import Meter
    from fastensor.stitch.damage import Damage

_BLOCK_NBYTES = 4 << 20
BATCH_NBYTES = 128 << 20
"""Bytes of a file that are read at a time, unless a single part is larger."""
_METERED_NBYTES = 32 << 20
"""Read at a time where somebody wants to know how far a read has come."""
_PAD_NBYTES = 512
"""The largest size of a local header, alignment to 64 bytes and a data descriptor together, for ordinary names."""
T = TypeVar("T")
Memory: TypeAlias = memoryview | torch.UntypedStorage
"""Memory that a read fills: of the host, or a storage on any device."""


def is_joined(part: Part) -> bool:
    """True if a part is read together with its neighbours: its space is small, and most of the space is data."""
    return part.nbytes <= SMALL_NBYTES and part.end - part.begin <= 2 * part.nbytes + _PAD_NBYTES


def extents_of(parts: Iterable[Part]) -> list[Extent]:
    """The order of reading for a :class:`PartReader` that reads these parts in this order."""
    return joined((part.begin, part.end, is_joined(part)) for part in parts)


class MeasuredReader:
    """A backend reader whose time is reported to the selector, and whose errors are ours. Used by one thread.

    Args:
        file: the checkpoint.
        order: the extents that will be read, in this order, as far as they are known.
        options: how the file is read.
        fallbacks: backends that could not be used are added here.
        meter: counts what is read, every few MiB.
    """

    def __init__(
        self,
        file: OpenedFile,
        order: Sequence[Extent],
        options: ReadOptions,
        fallbacks: list[Fallback],
        meter: Meter | None = None,
    ) -> None:
        self.where = file.where
        self._meter = meter
        with read_errors(file.where):
            self.backend, self.reason, self._reader, self._transfer = file.open_reader(order, options, fallbacks)
        self.batches = hasattr(self._reader, "read_batch")  # isinstance of a protocol takes 20 us
        self._last = order[-1].begin if order else 0
        self._seconds = time.perf_counter() - self._transfer.started if self._transfer else 0.0
        self._reached_last = self._compared = self._failed = False

    def read(self, offset: int, target: Memory, *, checksum: bool) -> int:
        """Fill ``target`` from an offset of the file. Returns the CRC32 of its bytes, or 0 without ``checksum``.

        Raises:
            CorruptCheckpointError: the file ends before.
            CheckpointReadError: the operating system, or the backend, fails.
        """
        if self._meter is None:
            return self._read(offset, target, checksum=checksum)
        crc32 = 0
        nbytes = target.nbytes if isinstance(target, memoryview) else target.nbytes()
        for at in range(0, nbytes, _METERED_NBYTES):
            piece = target[at : min(at + _METERED_NBYTES, nbytes)]
            found = self._read(offset + at, piece, checksum=checksum)
            count = min(_METERED_NBYTES, nbytes - at)
            crc32 = isal_zlib.crc32_combine(crc32, found, count) if checksum else 0
            self._meter.add(count)
        return crc32

    def _read(self, offset: int, target: Memory, *, checksum: bool) -> int:
        if isinstance(target, memoryview):
            return self._measured(
                offset + target.nbytes, checksum, lambda: self._reader.readinto(offset, target, checksum=checksum)
            )
        return self._measured(
            offset + target.nbytes(), checksum, lambda: fill(self._reader, target, offset, checksum=checksum)
        )

    def read_batch(self, pieces: Sequence[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        """:meth:`read` for several pieces: offsets and what is filled from there. Returns the CRC32 of each. Use this
        only if :attr:`batches`."""
        reader = cast(BatchReader, self._reader)
        end = max(offset + target.nbytes for offset, target in pieces)
        crc32s = self._measured(end, checksum, lambda: reader.read_batch(pieces, checksum=checksum))
        if self._meter is not None:
            self._meter.add(sum(target.nbytes for _, target in pieces))
        return crc32s

    def _measured(self, end: int, checksum: bool, read: Callable[[], T]) -> T:
        """Read up to an offset of the file, and note how long that takes."""
        started = time.perf_counter()
        try:
            found = read()
        except BaseException as error:
            self._failed = True  # a read that ended early must not count as a fast one
            if isinstance(error, Exception):
                self._explain(error)
            raise
        self._seconds += time.perf_counter() - started
        self._compared |= checksum
        self._reached_last |= end > self._last
        return found

    def close(self, *, completed: bool) -> None:
        """Stop reading ahead and give back memory. If the whole file was read and verified, report the time to the
        selector. Calling this again does nothing.

        Args:
            completed: whether what was read has come to where it was wanted. The time of anything else is not reported.
        """
        self._reader.close()
        transfer, self._transfer = self._transfer, None
        if completed and transfer is not None and self._reached_last and self._compared and not self._failed:
            transfer.done(self._seconds)

    def _explain(self, error: Exception) -> None:
        """Raise our error for one of the operating system or of the backend. Return if the error is to be passed on."""
        if self._transfer is not None and is_to_blame(error):
            self._transfer.failed(f"it raised {error!r}")
        if isinstance(error, OSError):
            with read_errors(self.where):
                raise error
        if not isinstance(error, FastensorError | MemoryError | torch.OutOfMemoryError) and self._transfer is not None:
            reason = f"the backend {self.backend} has raised {error!r}; backend='numpy' always works"
            raise CheckpointReadError(errno.EIO, reason, self.where) from error


class _ReadAhead(NamedTuple):
    """Data of a part that was read ahead."""

    begin: int
    """Offset of the data in the file."""
    array: Bytes
    crc32: int
    """The CRC32 of the data; 0 if it was not computed."""


def new_array(nbytes: int) -> Bytes:
    """Memory of a fixed size, as ``torch.load`` makes it. torch refuses a tensor that reaches beyond it; an ordinary
    storage would grow."""
    memory: Bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memory


def empty_storage() -> torch.UntypedStorage:
    """An empty storage of fixed size, without an address: ``torch.save`` takes two storages at one address for one, and
    refuses it with two dtypes."""
    growing: torch.UntypedStorage = storage_on(torch.device("cpu"), 0)
    fixed: torch.UntypedStorage = growing[:0]
    return fixed


class PartReader:
    """Reads parts of one checkpoint and compares them with their CRC32s. Used by one thread, in a ``with`` block.

    Args:
        file: the checkpoint. It stays open.
        order: the extents that will be read, in this order, as far as they are known.
        options: how the file is read.
        verify: whether CRC32s are compared.
        fallbacks: backends that could not be used are added here.
        parts: the parts that :meth:`read_array` will read, in this order, as far as they are known.
        keep: whether the memory of the window stays valid. If not, it is valid until the next
            :meth:`read_small` or :meth:`read_bytes`.
        meter: counts what is read.

    Every method raises :class:`~fastensor.errors.CorruptCheckpointError` where the file ends too early, where a local
    header contradicts the directory, and, unless it says something else, where a CRC32 differs; and
    :class:`~fastensor.errors.CheckpointReadError` where the operating system fails to deliver the bytes.
    """

    def __init__(
        self,
        file: OpenedFile,
        order: Sequence[Extent],
        options: ReadOptions,
        *,
        verify: bool,
        fallbacks: list[Fallback] | None = None,
        parts: Sequence[Part] = (),
        keep: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self.where = file.where
        self.verify = verify
        self._reader = MeasuredReader(file, order, options, [] if fallbacks is None else fallbacks, meter)
        # The window's CRC32s are computed only so that the time of this load compares with that of others.
        # The partial refers to the inner reader: with a reference cycle, memory would wait for the garbage collector.
        self.window = ReadWindow(partial(self._reader.read, checksum=verify), order, kept=keep)
        self._data: dict[int, int] = {}
        """Offset of the data of records, by the offset of their local headers."""
        self._sound: set[tuple[int, int]] = set()
        """Where the parts begin and end whose CRC32 has been compared by :meth:`check` or :meth:`check_read`."""
        self._unread = OrderedDict((part.begin, part) for part in parts if part.nbytes)
        """The parts that :meth:`read_array` has not read yet, by where they begin."""
        self._is_unlike_torch = False
        """True if data were not where torch puts them: local headers are read before the data from then on."""
        self._ahead: dict[int, _ReadAhead] = {}
        """Parts that were read and not asked for yet, by where they begin."""

    @property
    def backend(self) -> str:
        """The backend that reads."""
        return self._reader.backend

    @property
    def reason(self) -> str:
        """Reason for the choice of the backend."""
        return self._reader.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(completed=kind is None)

    def close(self, *, completed: bool) -> None:
        """As :meth:`MeasuredReader.close`."""
        self._reader.close(completed=completed)

    def data_begin(self, part: Part, header: memoryview | None = None) -> int:
        """Offset of the data of a part in the file: behind its local header, if it has one.

        Args:
            part: the part.
            header: memory that is filled with the local header. None if the caller does not need the header.
        """
        if header is None:
            if not part.header_nbytes:
                return part.begin
            if part.begin in self._data:
                return self._data[part.begin]
            header = memoryview(bytearray(LOCAL_HEADER.size))
        self.read_raw(part.begin, header)
        self._data[part.begin] = begin = find_data(part, header, self.where)
        return begin

    def read(self, part: Part, target: Memory) -> None:
        """Read all data of a part into memory of its size, and compare it."""
        begin = self.data_begin(part)
        compare = self.verify and part.crc32 is not None
        found = self._reader.read(begin, target, checksum=compare)
        if compare:
            check_crc32(part, begin, found, self.where)

    def read_array(self, part: Part) -> Bytes:
        """Read all data of a part into new memory of the host, and compare it.

        Parts that are asked for in the order that was announced are read several at a time where the backend can do
        that, ahead by up to ``BATCH_NBYTES``.
        """
        if part.begin not in self._ahead:
            self._read_ahead(part)
        begin, array, crc32 = self._ahead.pop(part.begin)
        if self.verify and part.crc32 is not None:
            check_crc32(part, begin, crc32, self.where)
        return array

    def _read_ahead(self, first: Part) -> None:
        """Read a part; and, if parts are asked for in the order that was announced, those behind it."""
        in_order = first.begin == next(iter(self._unread), None) and not self._ahead
        self._unread.pop(first.begin, None)
        batch = [first]
        room = BATCH_NBYTES - first.nbytes
        while self._reader.batches and in_order and self._unread:
            following = next(iter(self._unread.values()))
            room -= following.nbytes
            if room < 0:
                break
            batch.append(self._unread.pop(following.begin))
        checksum = self.verify and any(part.crc32 is not None for part in batch)
        if self._reader.batches:
            begin_of = self.data_begin if self._is_unlike_torch else likely_begin
            pieces = [(begin_of(part), new_array(part.nbytes)) for part in batch]
            crc32s = self._reader.read_batch([(begin, array.data) for begin, array in pieces], checksum=checksum)
            for number, (part, (likely, array)) in enumerate(zip(batch, pieces, strict=True)):
                if (begin := self.data_begin(part)) != likely:
                    self._is_unlike_torch = True
                    crc32s[number] = self._reader.read(begin, array.data, checksum=checksum)
                    pieces[number] = begin, array
        else:
            pieces = [(self.data_begin(part), new_array(part.nbytes)) for part in batch]
            crc32s = [self._reader.read(begin, array.data, checksum=checksum) for begin, array in pieces]
        for part, (begin, array), crc32 in zip(batch, pieces, crc32s, strict=True):
            self._ahead[part.begin] = _ReadAhead(begin, array, crc32)

    def read_small(self, part: Part) -> int:
        """Read a small part, and those that follow it in the file, into :attr:`window`, and compare it.

        Returns where the data of the part begins in the file; the window says where that is in memory.
        """
        begin = part.begin
        data = self.window.part(begin, part.end - begin)
        if part.header_nbytes:
            at = find_data(part, data, self.where) - begin
            data = data[at : at + part.nbytes]
            begin += at
        if self.verify and part.crc32 is not None and (crc32 := isal_zlib.crc32(data)) != part.crc32:
            check_crc32(part, begin, crc32, self.where)
        return begin

    def read_bytes(self, part: Part) -> tuple[int, bytes]:
        """Offset of the data of a part, and the data, compared. A small part is read as by :meth:`read_small`."""
        if not is_joined(part):
            data = self.read_array(part).tobytes()
            return self.data_begin(part), data
        begin = self.read_small(part)
        return begin, self.window.array(begin, part.nbytes).tobytes()

    def read_range(self, part: Part, offset: int, target: Memory, *, checksum: bool = True) -> int:
        """Fill ``target`` from an offset in the data of a part. The part is not compared: use :meth:`check` before, or
        :meth:`check_read` afterwards. Returns the CRC32 of the range, or 0 without ``checksum``."""
        return self._reader.read(self.data_begin(part) + offset, target, checksum=checksum)

    def read_raw(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from an offset in the file. Nothing is compared."""
        self._reader.read(offset, buffer, checksum=False)

    def check(self, part: Part) -> None:
        """Read all of a part in bounded memory and compare it, once in the life of this reader."""
        if self.must_check(part):
            check_crc32(part, self.data_begin(part), self._crc32_of(part), self.where)
            self._sound.add((part.begin, part.end))

    def check_read(self, part: Part, crc32: int) -> None:
        """Compare a part that was read by ranges, or elsewhere: ``crc32`` is that of all its data."""
        if self.verify:
            check_crc32(part, self.data_begin(part), crc32, self.where)
            self._sound.add((part.begin, part.end))

    def must_check(self, part: Part) -> bool:
        """True if a part has a CRC32 that neither :meth:`check` nor :meth:`check_read` has compared."""
        return self.verify and part.crc32 is not None and (part.begin, part.end) not in self._sound

    def find_damage(self, part: Part, progress: Callable[[int], object]) -> Damage | None:
        """Read all of a part in bounded memory and compare it. A CRC32 that differs is returned, not raised.

        Args:
            part: has a CRC32.
            progress: called with the bytes of the part that have been read, after every few MiB.
        """
        return find_damage(part, self.data_begin(part), self._crc32_of(part, progress))

    def _crc32_of(self, part: Part, progress: Callable[[int], object] = lambda done: None) -> int:
        block = memoryview(bytearray(min(part.nbytes, _BLOCK_NBYTES)))
        crc32 = 0
        for at in range(0, part.nbytes, _BLOCK_NBYTES):
            piece = block[: part.nbytes - at]
            crc32 = isal_zlib.crc32_combine(crc32, self.read_range(part, at, piece), piece.nbytes)
            progress(at + piece.nbytes)
        return crc32


def open_reader(file: OpenedFile, parts: Sequence[Part], request: LoadRequest, *, keep: bool = False) -> PartReader:
    """A reader for a load.

    Args:
        file: the checkpoint.
        parts: what the load will read, in this order.
        request: the load.
        keep: as for :class:`PartReader`.
    """
    order = extents_of(parts)
    if request.meter is not None:
        request.meter.begin(sum(extent.end - extent.begin for extent in order))
    return PartReader(
        file,
        order,
        request.options,
        verify=request.checked,
        fallbacks=request.fallbacks,
        parts=[part for part in parts if not is_joined(part)],
        keep=keep,
        meter=request.meter,
    )
