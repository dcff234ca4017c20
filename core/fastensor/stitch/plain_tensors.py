"""Reducing plain tensors and naming their storages as torch does for the pickler, in less than half of the time.

A save of thousands of small tensors spends most of its time in ``torch.Tensor.__reduce_ex__`` and in the persistent ids
of ``torch.save``, which test each object for all its special cases. The functions here test for the common case first.
They give the results of the releases of torch that are known here; with any other release, torch itself is asked.
"""

from __future__ import annotations

import copyreg
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch

NO_VALUES = "torch.serialization.skip_data is active, which asks torch.save for a file without values"
"""The reason, for reports and the log, for which torch itself writes a file."""
_KNOWN_TORCH = re.compile(r"2\.1[0-5]\.\d+(\+.*)?")
"""Releases of torch whose ``Tensor.__reduce_ex__``, ``torch.serialization`` and unpickler have been read."""
_reduce_ex = torch.Tensor.__reduce_ex__
_has_names: Callable[[torch.Tensor], bool] | None = getattr(torch.Tensor, "has_names", None)
"""Tells if a tensor's dimensions have names, which torch cannot pickle. From torch 2.13 on no dimension has one."""
_PLAIN_DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip
"""Dtypes that have a class of storages, by which torch names them in a pickle."""
_TYPED = torch.storage.TypedStorage
_HOST = torch.device("cpu")
"""Compared with, since the type of a device takes ten times as long to ask for."""


class NotAsTorchWritesError(Exception):
    """The pickle uses the memo as torch never does. No call may be recognized in it: each opcode has to be run."""


def release_is_known() -> bool:
    """True if the private parts of this release of torch are known here."""
    return _KNOWN_TORCH.fullmatch(torch.__version__) is not None


def torch_is_known() -> bool:
    """True if tensors are pickled by torch's own method, of a release that is known here."""
    return (
        release_is_known()
        and torch.Tensor.__reduce_ex__ is _reduce_ex
        and getattr(_reduce_ex, "__module__", "") == "torch._tensor"
        and torch.Tensor not in copyreg.dispatch_table
    )


class ShownStorage(NamedTuple):
    """A storage as :func:`reduce_plain` shows it to :class:`StorageIds`. torch shows a ``TypedStorage``, which takes
    longer to make."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


def reduce_plain(obj: Any) -> Any:
    """The result of ``__reduce_ex__`` for a plain tensor or its dict of hooks; ``NotImplemented`` for any other object.

    Used as ``Pickler.reducer_override``, with :class:`StorageIds` for ``persistent_id``. A plain tensor is a dense one
    of no subclass and of an ordinary dtype, on the host or a CUDA device, without attributes, hooks, names of
    dimensions, or a conjugation or negation that is still to be done.
    """
    if type(obj) is OrderedDict and not obj and not obj.__dict__:
        return OrderedDict, ()
    if (
        type(obj) is not torch.Tensor
        or obj.dtype not in _PLAIN_DTYPES
        or obj.layout is not torch.strided
        or not (obj.is_cpu or obj.is_cuda)
        or obj.is_nested
        or (_has_names is not None and _has_names(obj))
        or obj.__dict__
        or obj._backward_hooks
        or lazy_state(obj)
    ):
        return NotImplemented
    storage = ShownStorage(obj.untyped_storage(), obj.dtype)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    arguments = (storage, obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad, hooks)
    return torch._utils._rebuild_tensor_v2, arguments


def lazy_state(tensor: torch.Tensor) -> dict[str, bool]:
    """State that torch pickles with a tensor that is still to be conjugated or negated; empty for any other tensor."""
    found: dict[str, bool] = torch._utils.get_tensor_metadata(tensor)  # type: ignore[no-untyped-call]  # torch gives it no types
    return found


def storage_class(dtype: torch.dtype) -> Any:
    """The class by which torch names storages of a dtype in a pickle; None if it pickles such storages untyped."""
    return None if dtype in torch.storage._new_dtypes() else _class_of(dtype)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """A storage as torch shows it to the pickler."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]  # torch gives it no types


StorageId: TypeAlias = tuple[str, Any, str, str, int]
"""The persistent id of a storage: "storage", its class, its key, its location, its number of elements."""


class StorageIds:
    """The persistent ids of one pickle, as ``torch.save`` gives them."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        """Each storage once, in the order of the keys, which are numbers."""
        self.dtypes: list[torch.dtype | None] = []
        """The dtype of the first object that had each storage; None if that was an untyped storage."""
        self._keys: dict[int, str] = {}
        """Keys by the storages' identities in C++."""
        self._dtypes_at: dict[int, torch.dtype] = {}
        """Dtypes by the addresses of the storages."""
        self._host_location = _host_location()
        """torch's name for the location of all storages of the host; None if torch has to be asked for each."""

    def of(self, obj: Any) -> StorageId | None:
        """The persistent id of a storage; None for any other object.

        Raises:
            RuntimeError: two storages view the same memory with different dtypes.
        """
        storage: torch.UntypedStorage
        dtype: torch.dtype | None
        if type(obj) is ShownStorage:
            storage, dtype = obj
            kind, numel = _class_of(dtype), storage.nbytes() // dtype.itemsize
        elif isinstance(obj, _TYPED):
            storage, dtype = obj._untyped_storage, obj.dtype
            kind, numel = _class_of(dtype), storage.nbytes() // dtype.itemsize
        elif torch.is_storage(obj):
            storage, dtype = cast(torch.UntypedStorage, obj), None
            kind, numel = getattr(torch, type(obj).__name__), obj.nbytes()
        else:
            return None
        on_host = storage.device == _HOST
        if (on_host or storage.device.type != "meta") and (address := storage.data_ptr()):
            seen_as = dtype or torch.uint8
            if self._dtypes_at.setdefault(address, seen_as) != seen_as:
                raise RuntimeError(
                    "Cannot save multiple tensors or storages that view the same data as different types"
                )
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self._keys))
            self.storages.append(storage)
            self.dtypes.append(dtype)
        location = self._host_location if on_host else None
        return "storage", kind, key, location or torch.serialization.location_tag(storage), numel


@cache
def _class_of(dtype: torch.dtype) -> Any:
    """The class by which torch names storages of a dtype in a pickle."""
    return getattr(torch, typed_storage(torch.empty(0).untyped_storage(), dtype)._pickle_storage_type())


def _host_location() -> str | None:
    """Location that torch's pickle names for storages of the host, if torch asks for that before anything else."""
    serialization = torch.serialization
    return "cpu" if torch_is_known() and serialization._package_registry[0][1] is serialization._cpu_tag else None


def skips_values() -> bool:
    """True if ``torch.serialization.skip_data`` is active in this thread."""
    options = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(options, "skip_data", False))


@contextmanager
def values_kept() -> Iterator[None]:
    """Have torch read and write values in this thread, whether ``torch.serialization.skip_data`` is active or not."""
    skipped = skips_values()
    options: Any = getattr(torch.serialization, "_serialization_tls", None)
    try:
        if skipped:
            options.skip_data = False
        yield
    finally:
        if skipped:
            options.skip_data = True
