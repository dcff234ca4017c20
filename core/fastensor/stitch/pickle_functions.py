"""Symbolic versions of the functions that torch's pickles call: they make records instead of tensors. Pure.

An argument may be of any type: it comes from the file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastensor.stitch.pickle_records import PickledStorage, PickledTensor, UnknownGlobal, UnknownObject, as_key
from fastensor.stitch.shape import MAX_SIZE, is_shape


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A class of storages."""

    dtype: torch.dtype


def find_known(module: str, name: str) -> Any:
    """The symbolic version of a global, None if there is none. Nothing is imported."""
    full = f"{module}.{name}"
    if full in _KNOWN:
        return _KNOWN[full]
    if module not in ("torch", "torch.storage"):
        return None
    word = _STORAGES.get(name)
    value = vars(torch).get(word or name)  # getattr would import modules
    if isinstance(value, torch.dtype):
        return StorageClass(value) if word else value
    return None


def rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: Any = None) -> PickledTensor:
    """``torch._utils._rebuild_tensor_v2``; rest: requires_grad, hooks, and metadata (whether it is conjugated)."""
    if not isinstance(storage, PickledStorage):
        raise ValueError("a tensor without a storage")
    shape, steps = _numbers(size), _numbers(stride)
    if len(shape) != len(steps):
        raise ValueError("a tensor with more sizes than strides, or fewer")
    (start,) = _numbers((offset,))
    return PickledTensor("Tensor", dtype or storage.dtype, _shape(size), storage, start, steps, not any(rest[2:3]))


def rebuild_sparse(layout: Any, data: Any) -> PickledTensor:
    """``torch._utils._rebuild_sparse_tensor``; the data are the parts (indices, values, ...), the size, and whether it
    is coalesced."""
    values = [part for part in data if isinstance(part, PickledTensor)][-1]
    size = next(part for part in reversed(data) if isinstance(part, torch.Size))
    return PickledTensor("sparse", values.dtype, _shape(size), None, parts=(layout, *data), plain=False)


def rebuild_from_type(call: Callable[[Any, Any], Any], function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2``: a subclass of tensors, or a tensor with attributes.

    Args:
        call: calls a function of the pickle.
        function: makes the tensor of the base class.
        kind: the subclass.
        arguments: the arguments of the function.
        state: the attributes.
    """
    base = call(function, arguments)
    if not isinstance(base, PickledTensor):
        return UnknownObject(_name_of(kind), [base, state, kind])
    return replace(base, kind=_name_of(kind), parts=(base.parts, state, kind))


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> PickledTensor:
    return rebuild_tensor(storage, offset, size, stride, grad, hooks, *rest, dtype=_dtype(dtype))


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    if isinstance(data, PickledTensor):
        return replace(data, kind="Parameter", parts=(data, rest))
    return UnknownObject("Parameter", [data, rest])


def _rebuild_quantized(storage: Any, offset: Any, size: Any, *rest: Any) -> PickledTensor:
    if not isinstance(storage, PickledStorage):
        raise ValueError("a quantized tensor without a storage")
    return PickledTensor("quantized", storage.dtype, _shape(size), None, parts=(storage, rest), plain=False)


def _rebuild_on_meta(dtype: Any, size: Any, stride: Any, *rest: Any) -> PickledTensor:
    return PickledTensor("meta", _dtype(dtype), _shape(size), None, stride=_numbers(stride), plain=False)


def _rebuild_wrapper(kind: Any, dtype: Any, size: Any, *rest: Any) -> PickledTensor:
    return PickledTensor(_name_of(kind), _dtype(dtype), _shape(size), None, parts=(kind, *rest), plain=False)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MAX_SIZE:
            raise ValueError("a tensor whose sizes, strides or offset are not integers from 0 to 2^63 - 1")
    return numbers


def _shape(values: Any) -> tuple[int, ...]:
    shape = _numbers(values)
    if not is_shape(shape):
        raise ValueError("a tensor of more than 2^63 - 1 elements")
    return shape


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise ValueError("a tensor without a dtype")
    return value


def _name_of(kind: Any) -> str:
    """The name of a class, without its module."""
    if isinstance(kind, UnknownGlobal):
        return kind.name.rpartition(".")[2]
    return kind.__name__ if isinstance(kind, type) else type(kind).__name__


def call_known(function: Any, arguments: Iterable[Any]) -> Any:
    """Call what :func:`find_known` has given, or whatever else a pickle calls in its place."""
    if isinstance(function, type):  # hashing anything else could take long
        function = _WITH_KEYS.get(function, function)
    return function(*arguments)


def _ordered_dict(items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> OrderedDict[Any, Any]:
    """An OrderedDict. The keys of a dict that is given have been through :func:`as_key`."""
    return OrderedDict(items if isinstance(items, dict) else [(as_key(key), value) for key, value in items])


def _counter(counts: Mapping[Any, int] | Iterable[Any] = ()) -> Counter[Any]:
    return Counter(counts if isinstance(counts, dict) else map(as_key, counts))


def _set(elements: Iterable[Any] = ()) -> set[Any]:
    return set(map(as_key, elements))


def _encode(text: str, encoding: str) -> bytes:
    """``_codecs.encode``, by which protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes that are not in the encoding latin1")
    return text.encode(encoding)


def _bytes(*arguments: Any) -> Any:
    """``bytes``, by which protocol 2 writes bytes without contents."""
    return UnknownObject("builtins.bytes", list(arguments)) if arguments else b""


_STORAGES = {
    "UntypedStorage": "uint8", "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
    "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
"""Classes of storages by which pickles name dtypes."""
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "__builtin__.set": set,
    "builtins.complex": complex,
    "__builtin__.complex": complex,
    "builtins.bytes": _bytes,
    "__builtin__.bytes": _bytes,
    "_codecs.encode": _encode,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._tensor._rebuild_from_type_v2": rebuild_from_type,
    "torch._utils._rebuild_sparse_tensor": rebuild_sparse,
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_on_meta,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper,
}
_WITH_KEYS: dict[type, Callable[..., Any]] = {OrderedDict: _ordered_dict, Counter: _counter, set: _set}
"""Classes whose instances hash what they are given, and what makes such an instance."""
