"""Planning the image of a torch checkpoint: the file that ``torch.save`` would have written, without its payload.

torch itself produces every byte but the storages', through public interfaces:

1. ``torch.save`` pickles the object through a pickle module of ours, which records the pickle's bytes and, from what
   torch's ``persistent_id`` returns, which storage has which key. Recording tensors instead gives silent wrong values
   (a DTensor adds a storage that is not in the file, raw storages go unseen).
2. Once the object is pickled, ``torch.serialization.skip_data`` makes torch leave holes for the storages, and the file
   is a sink that keeps the headers and notes the holes.
3. If the sizes, known now, ask for another alignment than the one that was right the last time, ``torch.save`` runs
   again, replaying the recorded pickle.

The object is pickled exactly once. ``skip_data`` is never active while user code runs: an object whose ``__reduce__``
calls ``torch.save`` would come back as zeros.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, BinaryIO, cast

import torch
from torch.utils.serialization import config as torch_config

from fastensor.errors import CorruptCheckpointError, LayoutError
from fastensor.stitch.image import Blank, Header, Image, Payload, Segment
from fastensor.stitch.source import Plan
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

_NEVER_STORAGES = frozenset(
    {str, int, float, bool, bytes, type(None), tuple, list, dict, OrderedDict, type, FunctionType, BuiltinFunctionType}
)
"""Nineteen in twenty of the objects in a state dict: torch need not be asked about them, which takes it a millisecond
per thousand."""

_config_lock = threading.RLock()
"""Held while torch's saving options are changed: before torch 2.13 they are shared by all threads."""
_OPTIONS_ARE_PER_THREAD = torch.__version__ >= "2.13"
_likely_alignment = TORCH_ALIGNMENT
"""The next object is probably of the kind of the last one: a checkpoint of the same training."""


def _renew_lock() -> None:
    global _config_lock
    _config_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # whoever holds it does not live in the child


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
class TorchZip(Plan):
    """The planned image of one object. Every payload segment is a whole storage; empty ones are in no segment."""

    storages: tuple[torch.UntypedStorage, ...]
    recording: Recording
    alignment: int

    def released(self) -> Plan:
        return Plan(self.image, ())

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
    global _likely_alignment
    skeleton = _Skeleton()
    recorder = _Recorder(pickle_module)
    guessed = _likely_alignment if _OPTIONS_ARE_PER_THREAD else None
    with nullcontext() if guessed is None else _saving_options(guessed):
        recording = recorder.record(obj, pickle_protocol, skeleton)
    storages = recording.storages
    for storage in storages:
        if storage.device.type == "meta" and storage.nbytes():
            raise LayoutError("the object holds a storage on the meta device, which has no bytes to save")
    sizes = tuple(storage.nbytes() for storage in storages)
    alignment = choose_alignment(sizes)
    if alignment != guessed:
        _likely_alignment = alignment
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
        nullcontext() if _OPTIONS_ARE_PER_THREAD else _config_lock,
        torch_config.patch({"save.compute_crc32": True, "save.storage_alignment": alignment}),  # type: ignore[attr-defined]  # torch installs it at run time
    ):
        yield


def _untyped(storage: Any) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, getattr(storage, "_untyped_storage", storage))


class _Recorder:
    """Stands in for the user's pickle module and records what its Pickler does for torch.

    Classes live in reference cycles, so this object must not keep storages alive: :meth:`record` empties it.
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
                    if type(obj) in _NEVER_STORAGES:
                        return None
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

    def record(self, obj: object, pickle_protocol: int, skeleton: _Skeleton) -> Recording:
        try:
            with self._skipping:
                torch.save(obj, cast(BinaryIO, skeleton), pickle_module=self, pickle_protocol=pickle_protocol)
            data, references = self._data, tuple(self._references.values())
        finally:
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


def _to_image(skeleton: _Skeleton, keys: Sequence[str], sizes: Sequence[int]) -> Image:
    """Put storages into the holes, and blanks for their checksums behind them and into the directory.

    Raises:
        LayoutError: a hole is not where the directory says that the storage is.
    """
    filled = [index for index, nbytes in enumerate(sizes) if nbytes]
    if len(skeleton.runs) != len(filled) + 1:
        raise LayoutError(f"torch left {len(skeleton.runs) - 1} holes for {len(filled)} storages")
    records = {record.name: record for record in _read_directory(skeleton).records}
    segments: list[Segment] = []
    entries: list[Blank] = []
    blanks: tuple[Blank, ...] = ()
    tail, _ = skeleton.runs[-1]
    for index, run, (end, behind) in zip(filled, skeleton.runs, skeleton.runs[1:], strict=False):
        start, data = run
        record = records.get(f"{_ARCHIVE}/data/{keys[index]}")
        hole = Payload(start + len(data), sizes[index], index)
        if record is None or record.nbytes != hole.nbytes or _data_offset(run, record) != hole.offset:
            raise LayoutError(f"storage {keys[index]!r} is not at offset {hole.offset}: its record is {record}")
        if hole.offset + hole.nbytes != end:
            raise LayoutError(f"the hole for storage {keys[index]!r} ends at {end}, not after {hole.nbytes} bytes")
        if not behind.startswith(DESCRIPTOR_SIGNATURE):
            raise LayoutError(f"no data descriptor behind storage {keys[index]!r}, at offset {end}")
        segments += (Header(start, bytes(data), blanks), hole)
        blanks = (Blank(DESCRIPTOR_CRC_OFFSET, index),)
        entries.append(Blank(record.crc_offset - tail, index))
    return Image([*segments, Header(tail, bytes(skeleton.runs[-1][1]), (*blanks, *sorted(entries)))])


def _data_offset(run: tuple[int, bytearray], record: Record) -> int:
    """Where the data of a record begins whose local header ends the run."""
    start, data = run
    at = record.header_offset - start
    if at < 0 or not data.startswith(LOCAL_SIGNATURE, at):
        raise LayoutError(f"no local header of {record.name!r} at offset {record.header_offset}")
    name_nbytes, extra_nbytes = LOCAL_HEADER.unpack_from(data, at)[-2:]
    return int(record.header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes)


def _read_directory(skeleton: _Skeleton) -> ZipDirectory:
    start, data = skeleton.runs[-1]

    def read(offset: int, nbytes: int) -> bytes:
        before = min(max(start - offset, 0), nbytes)  # the search for the directory's end may reach into a storage
        at = offset + before - start
        return bytes(before) + bytes(data[at : at + nbytes - before])

    try:
        return parse_directory(read, skeleton.nbytes, where="the planned file")
    except CorruptCheckpointError as error:
        raise LayoutError(str(error)) from error
