"""Planning the image of a torch checkpoint: the file that ``torch.save`` would have written, without its payload.

torch itself produces every byte but the storages', through public interfaces:

1. ``torch.save`` pickles the object through a pickle module of ours, which records the pickle's bytes and, from what
   torch's ``persistent_id`` returns, which storage has which key. Recording tensors instead gives silent wrong values
   (a DTensor adds a storage that is not in the file, raw storages go unseen).
2. Once the object is pickled, ``torch.serialization.skip_data`` makes torch leave holes for the storages, and the file
   is a sink that keeps the headers and notes the holes.
3. If the sizes, known now, ask for another alignment than the one that was right the last time, ``torch.save`` runs
   again, replaying the recorded pickle.

When the object has the structure of the last one, the pickle has its size, and all else stands where it stood: then
torch is stopped as soon as it has pickled, and the last layout gets the new pickle.

The object is pickled exactly once. ``torch.save`` is called as torch has it, not as somebody may have wrapped it: a
wrapper would be called for each of these steps. ``skip_data`` is never active while user code runs: an object whose
``__reduce__`` calls ``torch.save`` would come back as zeros.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, BinaryIO, cast

import torch
from torch.utils.serialization import config as torch_config

from fastensor.errors import LayoutError
from fastensor.stitch.source import Plan, check_values_are_wanted
from fastensor.stitch.torch_layout import Layout, Skeleton, Structure

_save = torch.serialization.save
PAGE_ALIGNMENT = 4096
TORCH_ALIGNMENT = 64
_PADDING_LIMIT = 0.01

_NEVER_STORAGES = frozenset(
    {str, int, float, bool, bytes, type(None), tuple, list, dict, OrderedDict, type, FunctionType, BuiltinFunctionType}
)
"""Nineteen in twenty of the objects in a state dict: torch need not be asked about them, which takes it a millisecond
per thousand."""

_config_lock = threading.RLock()
"""Held while torch's saving options are changed: before torch 2.13 they are shared by all threads."""
_OPTIONS_ARE_PER_THREAD = torch.__version__ >= "2.13"
_MOST_KEPT_NBYTES = 16 << 20
_likely_alignment = TORCH_ALIGNMENT
"""The next object is probably of the kind of the last one: a checkpoint of the same training."""
_likely_layout: Layout | None = None
"""For the same reason. Not kept if it is large."""


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

    storages: tuple[torch.UntypedStorage, ...]
    """Theirs."""
    structure: Structure
    """What decides where things stand in the file."""

    @classmethod
    def of(cls, data: bytes, references: Sequence[tuple[Any, tuple[Any, ...]]]) -> Recording:
        storages = tuple(_untyped(storage) for storage, _ in references)
        sizes = tuple(storage.nbytes() for storage in storages)
        keys = tuple(pid[2] for _, pid in references)
        return cls(data, tuple(references), storages, Structure(len(data), keys, sizes, choose_alignment(sizes)))


@dataclass(frozen=True, slots=True)
class TorchZip(Plan):
    """The planned image of one object. Every payload segment is a whole storage; empty ones are in no segment."""

    storages: tuple[torch.UntypedStorage, ...]
    recording: Recording
    alignment: int

    def released(self) -> Plan:
        return Plan(self.image.without_headers(), ())

    def write_with_torch(self, file: BinaryIO) -> None:
        """Let ``torch.save`` write the same file, moving the storages itself."""
        with _saving_options(self.alignment):
            _save(None, file, pickle_module=_Replay(self.recording))


def replaced_save() -> str:
    """What somebody has put in the place of ``torch.save``; empty if it is torch's own."""
    is_own = getattr(torch.save, "__globals__", None) is vars(torch.serialization)
    return "" if is_own else repr(torch.save)


def plan(obj: object, *, pickle_module: Any, pickle_protocol: int) -> TorchZip:
    """Lay out the file that ``torch.save(obj, ...)`` would write.

    Args:
        obj: anything that ``torch.save`` takes.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.

    Raises:
        LayoutError: torch wrote something that this module does not understand.
        UnsupportedContentError: ``torch.serialization.skip_data`` is active.
        Exception: whatever pickling the object raises, as from ``torch.save``.
    """
    global _likely_alignment, _likely_layout
    check_values_are_wanted()
    skeleton, layout = Skeleton(), _likely_layout
    recorder = _Recorder(pickle_module, None if layout is None else layout.structure)
    guessed = _likely_alignment if _OPTIONS_ARE_PER_THREAD else None
    with nullcontext() if guessed is None else _saving_options(guessed):
        recording = recorder.record(obj, pickle_protocol, skeleton)
    structure = recording.structure
    for storage, nbytes in zip(recording.storages, structure.sizes, strict=True):
        if nbytes and storage.device.type == "meta":
            raise LayoutError("the object holds a storage on the meta device, which has no bytes to save")
    if layout is None or layout.structure != structure:
        if structure.alignment != guessed:
            skeleton = Skeleton()
            skeleton.expect(recording.data)
            with _saving_options(structure.alignment), torch.serialization.skip_data():
                _save(None, cast(BinaryIO, skeleton), pickle_module=_Replay(recording))
        layout = Layout.of(skeleton, structure)
        image = layout.image
        _likely_alignment = structure.alignment
        _likely_layout = layout if layout.headers_nbytes <= _MOST_KEPT_NBYTES else None
    else:
        image = layout.with_pickle(recording.data)
    return TorchZip(image, recording.storages, recording, structure.alignment)


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


class _StructureIsKnown(Exception):
    """torch need not write what it has pickled."""


class _Recorder:
    """Stands in for the user's pickle module and records what its Pickler does for torch.

    Classes live in reference cycles, so this object must not keep storages alive: :meth:`record` empties it.

    Args:
        pickle_module: the user's.
        known: the structure of objects that torch is to pickle, but not to write.
    """

    def __init__(self, pickle_module: Any, known: Structure | None) -> None:
        self._module = pickle_module
        self._known = known
        self._recorded: Recording | None = None
        self._references: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._skipping = ExitStack()
        self._skeleton: Skeleton | None = None
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
                type(self).persistent_id = _no_more
                if hasattr(self, "clear_memo"):
                    self.clear_memo()  # it holds what large arrays were turned into on the way
                recorded = Recording.of(self._fastensor_file.getvalue(), tuple(recorder._references.values()))
                recorder._recorded = recorded
                if recorded.structure == recorder._known:
                    raise _StructureIsKnown
                if recorder._skeleton is not None:
                    recorder._skeleton.expect(recorded.data)
                recorder._skipping.enter_context(torch.serialization.skip_data())

        self.Pickler = RecordingPickler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def record(self, obj: object, pickle_protocol: int, skeleton: Skeleton) -> Recording:
        """Have the object pickled, and written to the skeleton unless its structure is known."""
        self._skeleton = skeleton
        try:
            with self._skipping, suppress(_StructureIsKnown):
                _save(obj, cast(BinaryIO, skeleton), pickle_module=self, pickle_protocol=pickle_protocol)
            recorded = self._recorded
        finally:
            self._recorded, self._references, self._skeleton = None, {}, None
        if recorded is None:
            raise LayoutError("torch.save did not pickle through the pickle module that it was given")
        return recorded


def _no_more(self: Any, obj: Any) -> None:
    """In place of ``persistent_id`` of a pickler that has done its work: torch's own would live on with the class,
    which is in a cycle, and all storages with it."""


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
                for storage, pid in recording.references:
                    if self.persistent_id(storage) != pid:
                        raise LayoutError(f"torch names storage {pid[2]!r} differently on its second pass")
                type(self).persistent_id = _no_more  # type: ignore[method-assign]  # as torch has done
                self._file.write(recording.data)

        self.Pickler = ReplayPickler
        self.__name__ = "fastensor_replay"
