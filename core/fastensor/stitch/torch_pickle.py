"""What the pickle of a torch checkpoint says that it holds, without running it.

A pickle is a program. This one is interpreted symbolically: no global that it names is imported, no class of it is
instantiated, no tensor is made. Tensors become records that say which storage they lie in and how; objects of unknown
classes become records of their names and parts. So it is safe for any file, also where ``weights_only=True`` refuses.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.shape import MAX_SIZE, is_shape

_LONGEST_NAME = 1_000
"""A pickle may have a text once, and name a thousand globals with it."""
_LONGEST_INTEGER = 1_000
"""In bytes. Whoever looks at one looks at all of it, and a pickle may use one as a key a thousand times."""
_SPARE_ELEMENTS = 100_000
_MOST_DIMENSIONS = 64
"""A pickle may have a list of sizes once, and refer to it from each of its tensors."""
_STATE = "pickled state"
"""Where the attributes of an OrderedDict are kept. Not as its attributes: one may be called ``items``."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of the checkpoint."""

    key: str
    """Its record is ``data/<key>`` in the archive's folder."""
    dtype: torch.dtype
    """uint8 for untyped ones."""
    location: str
    """The device that it was saved from, such as ``cuda:0``."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor of the checkpoint."""

    kind: str
    """``Tensor``, ``Parameter``, the name of a subclass, or what else it is: ``sparse``, ``quantized``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: StorageRef | None
    """What it is a view of, if it is a dense tensor that is one; else None."""
    offset: int = 0
    """Where in the storage it begins, in elements."""
    stride: tuple[int, ...] = ()
    plain: bool = True
    """Whether storage, offset and stride are all that there is to its values: not so for lazy conjugates, say."""
    parts: tuple[Any, ...] = ()
    """What it is made of, if it is not a dense tensor, and what hangs on it."""


@dataclass(frozen=True, slots=True, eq=False)
class GlobalRef:
    """A class or function that is not known here."""

    name: str
    """With its module's."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(slots=True, eq=False, repr=False)
class Opaque:
    """An object of a class, or the result of a function, that is not known here."""

    name: str
    """Full name of the class or function."""
    parts: list[Any] = field(default_factory=list)
    """Arguments, state and items, for the storages in them."""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def append(self, item: Any) -> None:
        self.parts.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        self.parts.extend(items)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.parts.append(item)


def read_structure(data: bytes, *, where: str) -> Any:
    """The object that the pickle describes: dicts, lists and plain values as they are, the rest as records.

    Raises:
        CorruptCheckpointError: it is not a pickle of torch's.
    """
    try:
        return _Interpreter(data).load()
    except RecursionError as error:
        raise CorruptCheckpointError(f"{where}: the pickle is nested too deeply to be one of torch's") from error
    except Exception as error:
        raise CorruptCheckpointError(f"{where}: the pickle is damaged or not one of torch's ({error!r})") from error


def storages_in(value: Any) -> Iterator[StorageRef]:
    """Yield every storage that a part of the structure needs, each container being looked into once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, StorageRef):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack += _inside(value)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, TensorRef):
        return (value.storage, *value.parts)
    if isinstance(value, Opaque):
        return value.parts
    if isinstance(value, dict):
        return (*dict.keys(value), *dict.values(value), *getattr(value, "__dict__", {}).values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


class PickledTuple(tuple[Any, ...]):
    """A tuple that is equal to itself only: hashing one that is nested a million times would exhaust the stack, and one
    whose two elements are the same tuple, 30 times over, the user's patience."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: Any = None) -> TensorRef:
    """``torch._utils._rebuild_tensor_v2``; rest: requires_grad, hooks, and what is special about it (conjugation)."""
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    shape, steps = _numbers(size), _numbers(stride)
    if len(shape) != len(steps):
        raise ValueError("a tensor with more sizes than strides, or fewer")
    (start,) = _numbers((offset,))
    return TensorRef("Tensor", dtype or storage.dtype, _shape(size), storage, start, steps, not any(rest[2:3]))


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> TensorRef:
    return _rebuild_tensor(storage, offset, size, stride, grad, hooks, *rest, dtype=_dtype(dtype))


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return replace(data, kind="Parameter", parts=(data.parts, rest)) if isinstance(data, TensorRef) else data


def _rebuild_quantized(storage: Any, offset: Any, size: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError("a quantized tensor without a storage")
    return TensorRef("quantized", storage.dtype, _shape(size), None, parts=(storage, rest), plain=False)


def _rebuild_sparse(layout: Any, data: Any) -> TensorRef:
    """The data are the parts (indices, values, ...), then the size, and whether it is coalesced."""
    values = [part for part in data if isinstance(part, TensorRef)][-1]
    size = next(part for part in reversed(data) if isinstance(part, torch.Size))
    return TensorRef("sparse", values.dtype, _shape(size), None, parts=tuple(data), plain=False)


def _rebuild_on_meta(dtype: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    return TensorRef("meta", _dtype(dtype), _shape(size), None, stride=_numbers(stride), plain=False)


def _rebuild_wrapper(kind: Any, dtype: Any, size: Any, *rest: Any) -> TensorRef:
    return TensorRef(_name_of(kind), _dtype(dtype), _shape(size), None, parts=rest, plain=False)


def _numbers(values: Any) -> tuple[int, ...]:
    if len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(values)} dimensions")
    numbers = tuple(values)
    if not all(type(number) is int and 0 <= number <= MAX_SIZE for number in numbers):
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
    """Of a class, without its module."""
    if isinstance(kind, GlobalRef):
        return kind.name.rpartition(".")[2]
    return kind.__name__ if isinstance(kind, type) else type(kind).__name__


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes that are not in the encoding latin1")
    return text.encode(encoding)


_STORAGES = {
    "UntypedStorage": "uint8", "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
    "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
"""What torch calls the storages of its dtypes in pickles."""
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "__builtin__.set": set,
    "_codecs.encode": _encode,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_on_meta,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper,
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


class _Interpreter(pickle._Unpickler):
    """The pure Python one: the memo of the one in C takes 64 GiB if a pickle of ten bytes asks it to."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._globals: dict[str, GlobalRef] = {}
        self._left = 2 * len(data) + _SPARE_ELEMENTS
        """How many elements calls may still copy. A pickle may have a list once, and make set after set of it."""

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _LONGEST_NAME:
            raise ValueError(f"a global whose name has more than {_LONGEST_NAME} characters")
        full = f"{module}.{name}"
        if full == _FROM_TYPE:
            return self._rebuild_from_type
        if full in _KNOWN:
            return _KNOWN[full]
        if module in ("torch", "torch.storage") and (known := _dtype_or_storage(name)) is not None:
            return known
        return self._globals.setdefault(full, GlobalRef(full))

    def get_extension(self, code: int) -> None:
        raise ValueError("a global that is a number: torch writes names")

    def persistent_load(self, pid: Any) -> StorageRef:
        word, kind, key, location, _ = pid
        texts = isinstance(key, str) and isinstance(location, str)
        if word != "storage" or not texts or not isinstance(kind, _StorageKind):
            raise ValueError("a persistent id that is not one of a storage")
        return StorageRef(key, kind.dtype, location)

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]  # set by load()
        data = self.read(nbytes)  # type: ignore[attr-defined]  # no more than there is, unlike what this replaces
        if len(data) != nbytes:
            raise EOFError("a bytearray is cut off")
        self.stack.append(bytearray(data))

    def load_long4(self) -> None:
        (nbytes,) = struct.unpack("<i", self.read(4))  # type: ignore[attr-defined]
        data = self.read(nbytes) if nbytes >= 0 else b""  # type: ignore[attr-defined]
        if len(data) != nbytes:
            raise EOFError("an integer is cut off")
        long = nbytes > _LONGEST_INTEGER
        self.stack.append(Opaque(f"int of {nbytes} bytes") if long else pickle.decode_long(data))

    def load_build(self) -> None:
        """Give an object its state. Nothing else than an object of the file is changed."""
        state = self.stack.pop()
        found = self.stack[-1]
        if isinstance(found, Opaque):
            found.parts.append(state)
        elif isinstance(found, TensorRef):
            self.stack[-1] = replace(found, parts=(found.parts, state))
        elif type(found) is OrderedDict:
            found.__dict__[_STATE] = state
        else:
            raise ValueError(f"a state for an object of type {type(found).__name__}")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        options = self.stack.pop()
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments, options)

    def _instantiate(self, kind: Any, arguments: list[Any]) -> None:
        """For protocol 0."""
        self.stack.append(self._call(kind, arguments))

    def _call(self, function: Any, arguments: Any, options: Any = None) -> Any:
        """Call a function. One that is not known keeps its arguments as they are: a pickle may have them but once."""
        parts = [arguments, options] if options else [arguments]
        if isinstance(function, GlobalRef):
            return Opaque(function.name, parts)
        if isinstance(function, Opaque):
            return Opaque(function.name.removesuffix("(...)") + "(...)", [function, *parts])
        if options:
            raise ValueError("a call with names for its arguments: torch makes none to what is known here")
        self._left -= sum(map(_length, (arguments, *arguments)))
        if self._left < 0:
            raise ValueError("its calls copy more than the file holds")
        return function(*arguments)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """A subclass of tensors, or a tensor with attributes; the arguments are those of its base."""
        base = self._call(function, arguments)
        if not isinstance(base, TensorRef):
            return Opaque(_name_of(kind), [base, state])
        return replace(base, kind=_name_of(kind), parts=(base.parts, state))

    def load_tuple(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack.append(PickledTuple(items))

    def load_empty_tuple(self) -> None:
        self.stack.append(PickledTuple())

    def load_tuple1(self) -> None:
        self.stack[-1:] = [PickledTuple(self.stack[-1:])]

    def load_tuple2(self) -> None:
        self.stack[-2:] = [PickledTuple(self.stack[-2:])]

    def load_tuple3(self) -> None:
        self.stack[-3:] = [PickledTuple(self.stack[-3:])]

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.LONG4[0]] = load_long4
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.TUPLE[0]] = load_tuple
    dispatch[pickle.EMPTY_TUPLE[0]] = load_empty_tuple
    dispatch[pickle.TUPLE1[0]] = load_tuple1
    dispatch[pickle.TUPLE2[0]] = load_tuple2
    dispatch[pickle.TUPLE3[0]] = load_tuple3


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset | str | bytes | bytearray) else 0


@dataclass(frozen=True, slots=True)
class _StorageKind:
    dtype: torch.dtype


def _dtype_or_storage(name: str) -> torch.dtype | _StorageKind | None:
    word = _STORAGES.get(name)
    value = vars(torch).get(word or name)  # getattr would import modules
    if isinstance(value, torch.dtype):
        return _StorageKind(value) if word else value
    return None
