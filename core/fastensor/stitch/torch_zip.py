"""Planning the image of a torch checkpoint: the file that ``torch.save`` would have written, without its payload.

1. ``torch.save`` pickles the object through a pickle module of ours. That records the pickle's bytes, and which storage
   has which key. Recording tensors instead would give wrong values without an error: a DTensor adds a storage that is
   not in the file, and raw storages go unseen. Then torch is stopped. With a release of torch that is known here, and
   Python's own pickler, a pickler of ours does the same without torch.
2. The records are laid out as torch's writer does (:mod:`fastensor.stitch.torch_layout`). Which small records torch
   writes beside the storages is seen in a small file that torch writes, once per process and alignment. If our layout
   gives another file for the same contents, torch has changed, and no file is planned.

The object is pickled exactly once. This module calls torch's own ``torch.save``, also where a library has wrapped it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, BinaryIO, NamedTuple

import torch
from isal import isal_zlib
from torch.utils.serialization import config as torch_config

from fastensor.errors import CorruptCheckpointError, LayoutError
from fastensor.files.forks import lock_of
from fastensor.stitch.image import Header, Image, Payload
from fastensor.stitch.parts import LOCAL_HEADER
from fastensor.stitch.plain_tensors import (
    NO_VALUES,
    StorageId,
    StorageIds,
    reduce_plain,
    skips_values,
    torch_is_known,
    typed_storage,
    values_kept,
)
from fastensor.stitch.source import FileBytes, Plan, check_size
from fastensor.stitch.torch_layout import ARCHIVE, SmallRecord, lay_out, storage_name, without_headers
from fastensor.stitch.zip_directory import parse_directory

_save = torch.serialization.save
PAGE_ALIGNMENT = 4096
TORCH_ALIGNMENT = 64
_PADDING_LIMIT = 0.01
_PICKLE = "data.pkl"
_SAMPLE_SIZES = (3, 0, 70)
"""Sizes of the storages in the file that shows how torch writes, in bytes."""

_NEVER_STORAGES = frozenset(
    {
        str, int, float, bool, bytes, type(None), tuple, list, dict, OrderedDict, type, FunctionType,
        BuiltinFunctionType, type(torch.FloatStorage),
    }
)  # fmt: skip
"""Types of nine in ten objects of a state dict, none of them a storage or a tensor. Asking torch about a thousand
objects takes a millisecond."""

_lock = lock_of(sys.modules[__name__])
"""Held while torch's saving options are changed: before torch 2.13 they are shared by all threads."""
_OPTIONS_ARE_PER_THREAD = torch.__version__ >= "2.13"


class Recording(NamedTuple):
    """One pickling of an object by torch, from which the file can be written without the object."""

    data: bytes
    """The contents of ``data.pkl``."""
    storages: tuple[torch.UntypedStorage, ...]
    """Each storage once, in the order of the keys that torch has given them, which are numbers."""
    dtypes: tuple[torch.dtype | None, ...]
    """The dtype of the first object that had each storage; None if that was an untyped storage."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors in the object."""


@dataclass(frozen=True, slots=True)
class TorchZip(Plan):
    """The planned image of one object. Every payload segment is a whole storage; empty ones are in no segment."""

    storages: tuple[torch.UntypedStorage, ...]
    recording: Recording
    alignment: int

    def released(self) -> Plan:
        return Plan(without_headers(self.image), ())

    def with_storages(self, storages: Sequence[torch.UntypedStorage | FileBytes]) -> Plan:
        return Plan(self.image, tuple(storages))  # torch could only write the memory that it has pickled

    def write_with_torch(self, file: BinaryIO) -> None:
        """Let ``torch.save`` write the same file, moving the storages itself.

        Raises:
            StateChangedError: a storage has another size than when the file was planned.
        """
        for segment in self.image.segments:
            if isinstance(segment, Payload):
                check_size(self.storages[segment.storage], segment)
        with _saving_options(self.alignment):
            _save(None, file, pickle_module=_Replay(self.recording))


def replaced_save() -> str:
    """The function that a library has put in the place of ``torch.save``, in words; empty if it is torch's own."""
    is_own = getattr(torch.save, "__globals__", None) is vars(torch.serialization)
    return "" if is_own else repr(torch.save)


def plan(obj: object, *, pickle_module: Any, pickle_protocol: int) -> TorchZip:
    """Lay out the file that ``torch.save(obj, ...)`` would write.

    Args:
        obj: anything that ``torch.save`` takes.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.

    Raises:
        LayoutError: torch wrote something that this module does not understand, or
            ``torch.serialization.skip_data`` is active.
        Exception: whatever pickling the object raises, as from ``torch.save``.
    """
    if skips_values():
        raise LayoutError(NO_VALUES)
    recording = _record(obj, pickle_module, pickle_protocol)
    sizes = [storage.nbytes() for storage in recording.storages]
    devices = {storage.device for storage, nbytes in zip(recording.storages, sizes, strict=True) if nbytes}
    if any(device.type == "meta" for device in devices):
        raise LayoutError("the object holds a storage on the meta device, which has no bytes to save")
    alignment = choose_alignment(sizes)
    image = small_records_of_torch(alignment).lay_out(recording.data, sizes, alignment)
    return TorchZip(image, recording.storages, recording, alignment, tensors=recording.tensors)


def write_values(obj: object, file: BinaryIO) -> None:
    """Write what ``torch.save`` writes, with its values, whatever a library has put in its place, and whether
    ``torch.serialization.skip_data`` is active or not."""
    with _saving_options(TORCH_ALIGNMENT), values_kept():
        _save(obj, file)


def pickle_of(obj: object, pickle_protocol: int) -> bytes:
    """The contents of ``data.pkl`` in the file that ``torch.save`` would write.

    Raises:
        LayoutError: torch wrote something that this module does not understand.
    """
    return _record(obj, pickle, pickle_protocol).data


def choose_alignment(storage_nbytes: Sequence[int]) -> int:
    """4096 when padding to it costs less than 1 % of the payload, else torch's 64.

    >>> choose_alignment([1 << 20] * 8), choose_alignment([100, 200])
    (4096, 64)
    """
    padding = PAGE_ALIGNMENT * sum(1 for nbytes in storage_nbytes if nbytes)
    return PAGE_ALIGNMENT if padding < _PADDING_LIMIT * sum(storage_nbytes) else TORCH_ALIGNMENT


class SmallRecords(NamedTuple):
    """The records that torch writes beside the pickle and the storages."""

    before: tuple[SmallRecord, ...]
    """Records between the pickle and the storages."""
    behind: tuple[SmallRecord, ...]
    """Records behind the storages. The last one is the serialization id, by which torch's logs tell files apart."""

    def lay_out(self, data: bytes, sizes: Sequence[int], alignment: int) -> Image:
        """The image of a file.

        torch makes the second half of the serialization id of all CRC32s. Those of the storages are not known yet, so
        ours is the CRC32 of the pickle alone.

        Args:
            data: the pickle.
            sizes: sizes of the storages, in bytes.
            alignment: the alignment of these records.
        """
        before = (SmallRecord(_PICKLE, data), *self.before)
        *behind, identity = self.behind
        names = hash_of_names(tuple(record.name for record in before), len(sizes))
        of_pickle = b"%0*d" % (len(identity.data) - len(names), isal_zlib.crc32(data))
        return lay_out(before, sizes, (*behind, identity._replace(data=names + of_pickle)), alignment)


@cache
def small_records_of_torch(alignment: int) -> SmallRecords:
    """The small records of torch's files with an alignment.

    Raises:
        LayoutError: torch lays out files otherwise than :mod:`fastensor.stitch.torch_layout`.
    """
    storages = [torch.arange(count, dtype=torch.uint8).untyped_storage() for count in _SAMPLE_SIZES]
    file = io.BytesIO()
    with _saving_options(alignment):
        _save(storages, file)
    try:
        return _found_in(file.getvalue(), [bytes(list(storage)) for storage in storages], alignment)
    except (CorruptCheckpointError, ValueError) as error:
        raise LayoutError(f"torch {torch.__version__} writes what is no zip archive: {error}") from error


def _found_in(sample: bytes, contents: Sequence[bytes], alignment: int) -> SmallRecords:
    """The small records of a file whose storages have these contents. Raises if it is not laid out as expected."""
    records = []
    for one in parse_directory(lambda at, count: sample[at : at + count], len(sample), where="a sample").parts:
        begin = one.begin + sum(LOCAL_HEADER.unpack_from(sample, one.begin)[-2:], LOCAL_HEADER.size)
        records.append(SmallRecord(one.name.removeprefix(f"{ARCHIVE}/"), sample[begin : begin + one.nbytes]))
    names = [record.name for record in records]
    of_storages = [storage_name(index) for index in range(len(contents))]
    first = names.index(of_storages[0]) if of_storages[0] in names else 0
    before, behind = records[:first], records[first + len(contents) :]
    if (
        names[:1] != [_PICKLE]
        or names[first : first + len(contents)] != of_storages
        or not behind
        or not behind[-1].data.startswith(hash_of_names(tuple(names[:first]), len(contents)))
        or _assembled(lay_out(before, [len(data) for data in contents], behind, alignment), contents) != sample
    ):
        raise LayoutError(f"torch {torch.__version__} lays out its files otherwise than expected")
    return SmallRecords(tuple(before[1:]), tuple(behind))


def _assembled(image: Image, contents: Sequence[bytes]) -> bytes:
    """The bytes of a file whose storages have these contents."""
    crc32s = [isal_zlib.crc32(data) for data in contents]
    return b"".join(one.filled(crc32s) if isinstance(one, Header) else contents[one.storage] for one in image.segments)


@lru_cache(maxsize=16)
def hash_of_names(first: tuple[str, ...], storages: int) -> bytes:
    """The first half of torch's serialization id: a hash of the names of the records.

    Args:
        first: names of the records in front of the storages.
        storages: how many storages there are.

    Raises:
        LayoutError: torch's writer does not give an id.
    """
    try:
        writer = torch._C.PyTorchFileWriter(os.devnull)
        for name in (*first, *map(storage_name, range(storages))):
            writer.write_record(name, b"", 0)
        writer.write_end_of_file()
        identity: str = writer.serialization_id()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise LayoutError(f"torch's writer of archives cannot be asked for an id ({error!r})") from error
    return identity[: len(identity) // 2].encode()


@contextmanager
def _saving_options(alignment: int) -> Iterator[None]:
    """torch's options for saving: CRC32s on, whatever the user chose for ``torch.save``, and this alignment."""
    with (
        nullcontext() if _OPTIONS_ARE_PER_THREAD else _lock,
        torch_config.patch({"save.compute_crc32": True, "save.storage_alignment": alignment}),  # type: ignore[attr-defined]  # torch installs it at run time
    ):
        yield


def _record(obj: object, pickle_module: Any, pickle_protocol: int) -> Recording:
    """Pickle an object as ``torch.save`` does.

    A release of torch that is known here need not run for that, which takes as long as to pickle a dozen tensors.
    """
    if not torch_is_known() or getattr(pickle_module, "Pickler", None) is not _PlainPickler.__base__:
        return _Recorder(pickle_module).record(obj, pickle_protocol)
    seen = _Seen()
    file = io.BytesIO()
    _PlainPickler(file, pickle_protocol, seen).dump(obj)
    return seen.recording(file.getvalue())


class _Seen:
    """The storages and tensors that a pickler has met."""

    def __init__(self) -> None:
        self._ids = StorageIds()
        self._tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> StorageId | None:
        """The persistent id of an object that the pickler meets."""
        kind = type(obj)
        if kind in _NEVER_STORAGES:
            return None
        pid = None if kind is torch.Tensor else self._ids.of(obj)
        if pid is None and issubclass(kind, torch.Tensor):
            self._tensors.append(obj)
        return pid

    def recording(self, data: bytes) -> Recording:
        return Recording(data, tuple(self._ids.storages), tuple(self._ids.dtypes), tuple(self._tensors))


class _PlainPickler(pickle.Pickler):
    """Writes what torch's own pickler writes, for a release of torch that is known here."""

    reducer_override = staticmethod(reduce_plain)

    def __init__(self, file: io.BytesIO, protocol: int, seen: _Seen) -> None:
        super().__init__(file, protocol)
        self.persistent_id = seen.persistent_id  # type: ignore[method-assign]  # one call in place of two


class _Pickled(Exception):
    """Ends ``torch.save`` when it has pickled, before it writes."""


class _Recorder:
    """A pickle module for torch that records what the Pickler of the user's module writes.

    Classes live in reference cycles, so this object must not keep storages alive: :meth:`record` empties it.

    Args:
        pickle_module: the user's.
    """

    def __init__(self, pickle_module: Any) -> None:
        self._module = pickle_module
        self._data: bytes | None = None
        self._seen = _Seen()
        recorder = self

        class RecordingPickler(pickle_module.Pickler):  # type: ignore[misc]  # its base is known at run time only
            def __init__(self, file: io.BytesIO, *args: Any, **kwargs: Any) -> None:
                super().__init__(file, *args, **kwargs)
                self._fastensor_file = file

            def __init_subclass__(cls, **kwargs: Any) -> None:
                super().__init_subclass__(**kwargs)
                by_torch = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    pid = recorder._seen.persistent_id(obj)
                    if type(obj) not in _NEVER_STORAGES and pid != (of_torch := by_torch(self, obj)):
                        raise LayoutError(f"torch {torch.__version__} names a storage {of_torch}, expected {pid}")
                    return pid

                cls.persistent_id = persistent_id

            def dump(self, obj: Any) -> None:
                try:
                    super().dump(obj)
                finally:
                    type(self).persistent_id = _no_more
                    if hasattr(self, "clear_memo"):
                        self.clear_memo()  # it holds what large arrays were turned into on the way
                recorder._data = self._fastensor_file.getvalue()
                raise _Pickled

        self.Pickler = RecordingPickler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def record(self, obj: object, pickle_protocol: int) -> Recording:
        """Let torch pickle an object."""
        try:
            with suppress(_Pickled):
                _save(obj, io.BytesIO(), pickle_module=self, pickle_protocol=pickle_protocol)
            if self._data is None:
                raise LayoutError("torch.save did not pickle through the pickle module that it was given")
            return self._seen.recording(self._data)
        finally:
            self._data, self._seen = None, _Seen()


def _no_more(self: Any, obj: Any) -> None:
    """Replaces ``persistent_id`` of a pickler that has done its work. torch's own would live on with the class, which
    is in a cycle, and would keep all storages alive."""


class _Replay:
    """A pickle module whose Pickler writes a recorded pickle and shows torch the recorded storages."""

    def __init__(self, recording: Recording) -> None:
        to_show = [recording]  # taken out: the class is in a cycle

        class ReplayPickler:
            def __init__(self, file: BinaryIO, protocol: int) -> None:
                self._file = file

            def persistent_id(self, obj: Any) -> Any:
                raise NotImplementedError("torch overrides this")

            def dump(self, obj: object) -> None:
                recording = to_show.pop()
                for index, (storage, dtype) in enumerate(zip(recording.storages, recording.dtypes, strict=True)):
                    shown = storage if dtype is None else typed_storage(storage, dtype)
                    if self.persistent_id(shown)[2] != str(index):
                        raise LayoutError(f"torch names storage {index} differently on its second pass")
                type(self).persistent_id = _no_more  # type: ignore[method-assign]  # as torch has done
                self._file.write(recording.data)

        self.Pickler = ReplayPickler
        self.__name__ = "fastensor_replay"
