"""Planning the image of a torch checkpoint: the file that ``torch.save`` would have written, without its payload.

torch itself produces every byte but the storages', in two passes over public interfaces:

1. ``torch.save`` pickles the object once through a pickle module of ours, which records the pickle's bytes and, from
   what torch's ``persistent_id`` returns, which storage has which key. Recording tensors instead gives silent wrong
   values (a DTensor adds a storage that is not in the file, raw storages go unseen).
2. ``torch.save`` runs again at the alignment that was chosen, replaying the recorded pickle, under
   ``torch.serialization.skip_data``, into a sink that keeps the headers and notes the holes.

The object is pickled exactly once. ``skip_data`` is never active while user code runs: an object whose ``__reduce__``
calls ``torch.save`` would come back as zeros.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch.utils.serialization import config as torch_config

from fastensor.errors import CorruptCheckpointError, LayoutError
from fastensor.stitch.image import Checksum, Header, Image, Payload, Segment
from fastensor.stitch.zip_directory import (
    DESCRIPTOR_CRC_OFFSET,
    DESCRIPTOR_SIGNATURE,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    Record,
    ZipDirectory,
    parse_directory,
)

PAGE_ALIGNMENT = 4096
TORCH_ALIGNMENT = 64
_PADDING_LIMIT = 0.01
_ARCHIVE = "archive"

_config_lock = threading.RLock()
"""Held while torch's saving options are changed: before torch 2.13 they are shared by all threads."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One pickling of an object by torch: what it takes to write the file again without the object."""

    data: bytes
    """The contents of ``data.pkl``."""
    references: tuple[tuple[Any, tuple[Any, ...]], ...]
    """The first storage object met for each key, and torch's persistent id for it, in the order of the keys."""

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        return tuple(_untyped(storage) for storage, _ in self.references)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(pid[2] for _, pid in self.references)


@dataclass(frozen=True, slots=True)
class TorchZip:
    """The planned image of one object, with the storages whose bytes it is made of.

    The storages are borrowed: they must be neither resized nor written until the image has been moved.
    """

    image: Image
    storages: tuple[torch.UntypedStorage, ...]
    """Payload segment ``i`` of the image is ``storages[i]``. Empty storages are in no segment."""
    recording: Recording
    alignment: int

    def write_with_torch(self, file: BinaryIO) -> None:
        """Let ``torch.save`` write the same file, moving the storages itself."""
        with _saving_options(self.alignment):
            torch.save(None, file, pickle_module=_Replay(self.recording))


def plan(obj: object, *, pickle_module: Any, pickle_protocol: int) -> TorchZip:
    """Lay out the file that ``torch.save(obj, ...)`` would write.

    Args:
        obj: anything that ``torch.save`` takes.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.

    Raises:
        LayoutError: torch wrote something that this module does not understand.
        Exception: whatever pickling the object raises, as from ``torch.save``.
    """
    recording = _Recorder(pickle_module).record(obj, pickle_protocol)
    storages = recording.storages
    for storage in storages:
        if storage.device.type == "meta" and storage.nbytes():
            raise LayoutError("the object holds a storage on the meta device, which has no bytes to save")
    sizes = tuple(storage.nbytes() for storage in storages)
    alignment = choose_alignment(sizes)
    skeleton = _Skeleton()
    with _saving_options(alignment), torch.serialization.skip_data():
        torch.save(None, cast(BinaryIO, skeleton), pickle_module=_Replay(recording))
    return TorchZip(_to_image(skeleton, recording.keys, sizes), storages, recording, alignment)


def choose_alignment(storage_nbytes: Sequence[int]) -> int:
    """4096 when padding to it costs less than 1 % of the payload, else torch's 64.

    >>> choose_alignment([1 << 20] * 8), choose_alignment([100, 200])
    (4096, 64)
    """
    padding = PAGE_ALIGNMENT * sum(1 for nbytes in storage_nbytes if nbytes)
    return PAGE_ALIGNMENT if padding < _PADDING_LIMIT * sum(storage_nbytes) else TORCH_ALIGNMENT


@contextmanager
def _saving_options(alignment: int) -> Iterator[None]:
    """torch's options for saving: CRC32s on, whatever the user chose for ``torch.save``, and this alignment."""
    with (
        _config_lock,
        torch_config.patch({"save.compute_crc32": True, "save.storage_alignment": alignment}),  # type: ignore[attr-defined]  # torch installs it at run time
    ):
        yield


def _untyped(storage: Any) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, getattr(storage, "_untyped_storage", storage))


class _Recorder:
    """Stands in for the user's pickle module and records what its Pickler does for torch.

    Classes live in reference cycles, so this object must not keep storages alive: :meth:`take` empties it.
    """

    def __init__(self, pickle_module: Any) -> None:
        self._module = pickle_module
        self._data: bytes | None = None
        self._references: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._skipping = ExitStack()
        recorder = self

        class RecordingPickler(pickle_module.Pickler):  # type: ignore[misc]  # its base is known at run time only
            def __init__(self, file: io.BytesIO, *args: Any, **kwargs: Any) -> None:
                super().__init__(file, *args, **kwargs)
                self._fastensor_file = file

            def __init_subclass__(cls, **kwargs: Any) -> None:
                super().__init_subclass__(**kwargs)
                by_torch = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    pid = by_torch(self, obj)
                    if pid is not None:
                        recorder._references.setdefault(pid[2], (obj, pid))
                    return pid

                cls.persistent_id = persistent_id

            def dump(self, obj: Any) -> None:
                super().dump(obj)
                recorder._data = self._fastensor_file.getvalue()
                recorder._skipping.enter_context(torch.serialization.skip_data())

        self.Pickler = RecordingPickler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def record(self, obj: object, pickle_protocol: int) -> Recording:
        # torch goes on to write a file, which nobody wants: it cannot be stopped without leaving its closures,
        # and with them every storage, to the garbage collector.
        with self._skipping:
            torch.save(obj, cast(BinaryIO, _Discard()), pickle_module=self, pickle_protocol=pickle_protocol)
        data, references = self._data, tuple(self._references.values())
        self._data, self._references = None, {}
        if data is None:
            raise LayoutError("torch.save did not pickle through the pickle module that it was given")
        return Recording(data, references)


class _Replay:
    """A pickle module whose Pickler writes a recorded pickle and shows torch the recorded storages."""

    def __init__(self, recording: Recording) -> None:
        class ReplayPickler:
            def __init__(self, file: BinaryIO, protocol: int) -> None:
                self._file = file

            def persistent_id(self, obj: Any) -> Any:
                raise NotImplementedError("torch overrides this")

            def dump(self, obj: object) -> None:
                for storage, pid in recording.references:
                    if self.persistent_id(storage) != pid:
                        raise LayoutError(f"torch names storage {pid[2]!r} differently on its second pass")
                self._file.write(recording.data)

        self.Pickler = ReplayPickler
        self.__name__ = "fastensor_replay"


class _Discard:
    """A file that forgets what is written to it."""

    def write(self, data: memoryview) -> int:
        return data.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0

    def flush(self) -> None:
        pass


class _Skeleton:
    """A file that keeps what is written to it and notes the holes that are seeked over."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, bytearray]] = [(0, bytearray())]
        """Offset and contents of the written parts; holes lie between them."""

    @property
    def nbytes(self) -> int:
        offset, data = self.runs[-1]
        return offset + len(data)

    def write(self, data: memoryview) -> int:
        self.runs[-1][1].extend(data)
        return data.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != io.SEEK_CUR or offset <= 0:
            raise LayoutError(f"torch seeked to {offset} (whence {whence}) while writing; expected a hole")
        self.runs.append((self.nbytes + offset, bytearray()))
        return self.nbytes

    def flush(self) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``.

        Raises:
            LayoutError: they are not all in one written part.
        """
        start, data = self.runs[bisect_right(self.runs, offset, key=lambda run: run[0]) - 1]
        found = bytes(data[offset - start : offset - start + nbytes])
        if len(found) != nbytes:
            raise LayoutError(f"expected {nbytes} header bytes at offset {offset}, found {len(found)}")
        return found


def _to_image(skeleton: _Skeleton, keys: Sequence[str], sizes: Sequence[int]) -> Image:
    directory = _read_directory(skeleton)
    holes: list[Payload] = []
    checksums: list[Checksum] = []
    by_name = {record.name: record for record in directory.records}
    for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        record = by_name.get(f"{_ARCHIVE}/data/{key}")
        if record is None or record.nbytes != nbytes or record.compressed:
            raise LayoutError(f"no record of {nbytes} bytes for storage {key!r}: found {record!r}")
        if nbytes:
            begin = _data_offset(skeleton, record)
            holes.append(Payload(begin, nbytes, index))
            checksums.append(Checksum(_descriptor_crc_offset(skeleton, begin + nbytes, key), index))
            checksums.append(Checksum(record.crc_offset, index))
    expected = [(start + len(data)) for start, data in skeleton.runs[:-1]]
    if [hole.offset for hole in holes] != expected:
        raise LayoutError("the holes that torch left do not lie where its directory says the storages are")
    return Image(_tile(skeleton, sorted([*holes, *checksums], key=lambda segment: segment.offset)))


def _tile(skeleton: _Skeleton, variable: Sequence[Segment]) -> list[Segment]:
    """Fill the spaces between the variable segments with header bytes."""
    segments: list[Segment] = []
    position = 0
    for segment in [*variable, Header(skeleton.nbytes, b"")]:
        if segment.offset > position:
            segments.append(Header(position, skeleton.read(position, segment.offset - position)))
        if segment.nbytes:
            segments.append(segment)
        position = segment.offset + segment.nbytes
    return segments


def _read_directory(skeleton: _Skeleton) -> ZipDirectory:
    def read(offset: int, nbytes: int) -> bytes:
        start, _ = skeleton.runs[-1]
        missing = max(start - offset, 0)  # the search for the end record may reach back over a storage
        return bytes(min(missing, nbytes)) + skeleton.read(offset + missing, nbytes - min(missing, nbytes))

    try:
        return parse_directory(read, skeleton.nbytes, where="the planned file")
    except CorruptCheckpointError as error:
        raise LayoutError(str(error)) from error


def _data_offset(skeleton: _Skeleton, record: Record) -> int:
    fields = LOCAL_HEADER.unpack(skeleton.read(record.header_offset, LOCAL_HEADER.size))
    signature, name_nbytes, extra_nbytes = fields[0], fields[-2], fields[-1]
    if signature != LOCAL_SIGNATURE:
        raise LayoutError(f"no local header of {record.name!r} at offset {record.header_offset}")
    return int(record.header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes)


def _descriptor_crc_offset(skeleton: _Skeleton, offset: int, key: str) -> int:
    if skeleton.read(offset, len(DESCRIPTOR_SIGNATURE)) != DESCRIPTOR_SIGNATURE:
        raise LayoutError(f"no data descriptor behind storage {key!r}, at offset {offset}")
    return offset + DESCRIPTOR_CRC_OFFSET
