"""What the pickle of a torch checkpoint says that it holds, without running it.

A pickle is a program. This one is interpreted symbolically: no global that it names is imported, no class of it is
instantiated, no tensor is made. Tensors become records that say which storage they lie in and how; objects of unknown
classes become records of their names and parts. So it is safe for any file, also where ``weights_only=True`` refuses.

A file may use what it has once as a key a thousand times, and compare it with its like: so what takes long to hash or
to compare is equal to itself only, and equal texts are one object. What remains are the numbers of 64 bits and the
floats, of which some fifty have the same hash, and the texts, whose hashes can be foreseen where ``PYTHONHASHSEED``
says so.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.shape import MAX_SIZE, is_shape

_LONGEST_NAME = 300
"""In bytes of UTF-8. A pickle may have a text once, and name a thousand globals with it."""
_LONGEST_REASON = 300
"""In characters. What Python says of a defect may repeat all of the pickle."""
_MOST_BITS = 64
"""Of integers that are hashed by their value: few of them have the same hash."""
_SPARE_ELEMENTS = 100_000
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
    nbytes: int = field(default=0, compare=False)
    """How many bytes it had."""


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
        self.parts += (key, item)


Range: TypeAlias = tuple[int, int]
"""Begin and end of bytes."""


@dataclass(frozen=True, slots=True)
class Program:
    """A pickle, and which of its bytes make what."""

    data: bytes
    structure: Any
    """What it makes, symbolically."""
    made: Mapping[int, Range]
    """What makes a tensor, or an object of an unknown class, and leaves it on the stack, by its identity."""
    puts: Mapping[int, int]
    """Where things are put into the memo, by their number in it."""
    atoms: Mapping[int, int]
    """Texts and globals: where they begin, by where they end."""
    named: Sequence[Range]
    """The globals among them."""
    gets: Sequence[int]
    """Where things are taken from the memo, in order."""
    got: Sequence[int]
    """Their numbers."""
    can_be_cut: bool
    """Whether it consists of what protocol 2 has, and numbers nothing in the memo twice."""


class Structure(NamedTuple):
    """What a pickle describes."""

    value: Any
    """Dicts, lists and plain values as they are, the rest as records."""
    rest: bytes
    """The pickle without the calls that make plain tensors, which name no global: it names those that the pickle does.
    """


def read_structure(data: bytes, *, where: str) -> Structure:
    """The object that the pickle describes.

    Raises:
        CorruptCheckpointError: it is not a pickle of torch's.
    """
    interpreter = _Interpreter(data, recognizes=True)
    try:
        return Structure(_run(interpreter, where), interpreter.rest())
    except _ForgottenError:
        return Structure(_run(_Interpreter(data), where), data)


def read_program(data: bytes, *, where: str) -> Program:
    """The same, and which of its bytes make what.

    Raises:
        CorruptCheckpointError: as :func:`read_structure`.
    """
    interpreter = _Interpreter(data)
    return interpreter.program(_run(interpreter, where))


def _run(interpreter: _Interpreter, where: str) -> Any:
    try:
        return interpreter.load()
    except (MemoryError, _ForgottenError):
        raise
    except RecursionError as error:
        raise CorruptCheckpointError(f"{where}: the pickle is nested too deeply to be one of torch's") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        raise CorruptCheckpointError(f"{where}: the pickle is damaged or not one of torch's ({reason})") from error


def storages_in(value: Any) -> Iterator[StorageRef]:
    """Yield every storage that a part of the structure needs."""
    return (one for one in all_in(value) if isinstance(one, StorageRef))


def all_in(value: Any) -> Iterator[Any]:
    """Yield a part of the structure and all that is in it, once each."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            stack += _inside(value)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, TensorRef):
        return (value.storage, *value.parts)
    if isinstance(value, Opaque):
        return value.parts
    if isinstance(value, dict):
        return (*dict.keys(value), *dict.values(value), *getattr(value, "__dict__", {}).values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


class _EqualToItself:
    """Hashing a tuple that is nested a million times would exhaust the stack; hashing one whose two elements are the
    same tuple, 30 times over, or comparing such frozensets, the user's patience. Integers of many bits and complex
    numbers can be chosen so that all have the same hash."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class PickledTuple(_EqualToItself, tuple[Any, ...]):
    """A tuple."""

    __slots__ = ()


class _Size(_EqualToItself, tuple[int, ...]):
    __slots__ = ()


class _Frozenset(_EqualToItself, frozenset[Any]):
    __slots__ = ()


class _Integer(_EqualToItself, int):
    __slots__ = ()


class _Complex(_EqualToItself, complex):
    __slots__ = ()


_EQUAL_TO_THEMSELVES: dict[type, Callable[[Any], Any]] = {
    tuple: PickledTuple,
    torch.Size: _Size,
    frozenset: _Frozenset,
    int: _Integer,
    complex: _Complex,
}
_STANDS_FOR: dict[Any, type] = {ours: plain for plain, ours in _EQUAL_TO_THEMSELVES.items()}


def plain_type(value: Any) -> type:
    """The type of a value; of one that is equal to itself only, the type that it would have if it were not."""
    return _STANDS_FOR.get(type(value), type(value))


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
    if isinstance(data, TensorRef):
        return replace(data, kind="Parameter", parts=(data, rest))
    return Opaque("Parameter", [data, rest])


def _rebuild_quantized(storage: Any, offset: Any, size: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError("a quantized tensor without a storage")
    return TensorRef("quantized", storage.dtype, _shape(size), None, parts=(storage, rest), plain=False)


def _rebuild_on_meta(dtype: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    return TensorRef("meta", _dtype(dtype), _shape(size), None, stride=_numbers(stride), plain=False)


def _rebuild_wrapper(kind: Any, dtype: Any, size: Any, *rest: Any) -> TensorRef:
    return TensorRef(_name_of(kind), _dtype(dtype), _shape(size), None, parts=rest, plain=False)


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
    """Of a class, without its module."""
    if isinstance(kind, GlobalRef):
        return kind.name.rpartition(".")[2]
    return kind.__name__ if isinstance(kind, type) else type(kind).__name__


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes that are not in the encoding latin1")
    return text.encode(encoding)


def _empty_bytes(*arguments: Any) -> Any:
    """How protocol 2 writes bytes without contents."""
    return Opaque("builtins.bytes", list(arguments)) if arguments else b""


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
    "builtins.complex": complex,
    "__builtin__.complex": complex,
    "builtins.bytes": _empty_bytes,
    "__builtin__.bytes": _empty_bytes,
    "_codecs.encode": _encode,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_on_meta,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper,
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_WITH_LENGTHS = (tuple, list, dict, set, frozenset, str, bytes, bytearray)
_LOADS = pickle._Unpickler.dispatch
_PUTS = {pickle.BINPUT: 1, pickle.LONG_BINPUT: 4}
_GETS = {pickle.BINGET: 1, pickle.LONG_BINGET: 4}
"""Opcodes, and how many bytes of a number follow."""
_MAKES = frozenset(
    (pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS)
)
"""Opcodes behind which there may be another object on the stack, or the same with something in it."""
_OTHERS = {
    *(pickle.PROTO, pickle.BINPERSID, pickle.EMPTY_DICT, pickle.EMPTY_LIST),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NONE, pickle.NEWTRUE),
    *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT),
    *(pickle.SHORT_BINSTRING, pickle.BINSTRING),
}
"""The other opcodes of protocol 2 that do nothing to what is below their arguments on the stack."""


def _then_light(load: Callable[[Any], None]) -> Callable[[_Interpreter], None]:
    """What an opcode does, and then something about what it leaves on the stack."""

    def load_light(interpreter: _Interpreter) -> None:
        load(interpreter)
        interpreter.stack[-1] = interpreter.light(interpreter.stack[-1])

    return load_light


_GET, _PUT, _INT = rb"(?:h.|j....)", rb"(?:q.|r....)", rb"(?:K.|M..|J...[\x00-\x7f])"
_INTS = rb"(?:\)|%(i)b\x85|%(i)b{2}\x86|%(i)b{3}\x87|\(%(i)b{4,}t)" % {b"i": _INT}
_PLAIN_TENSOR = re.compile(
    rb"\(\((?P<word>%(get)b)(?P<kind>%(get)b)X(?P<length>[\x01-\x09])\0\0\0(?P<key>[0-9]{1,9})(?P<put_key>%(put)b)"
    rb"(?P<location>%(get)b)(?P<numel>%(int)b)t(?P<put_id>%(put)b)Q"
    rb"(?P<offset>%(int)b)(?P<size>%(ints)b)(?P<put_size>%(put)b)?(?P<stride>%(ints)b)(?P<put_stride>%(put)b)?"
    rb"[\x88\x89](?P<hooks>%(get)b)\)R(?P<put_hooks>%(put)b)t(?P<put_arguments>%(put)b)R(?P<tensor>%(put)b)"
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
)
"""The arguments of ``torch._utils._rebuild_tensor_v2`` for a plain tensor, and its call, as torch's pickler writes them
behind the first tensor of a kind: the persistent id of a storage (the word, class, key, location, number of elements),
the offset, the size, the strides, ``requires_grad``, an empty dict of hooks."""
_FORGOTTEN: Any = object()
"""In the memo, what was not made because torch never takes it from there."""


class _ForgottenError(Exception):
    """A pickle takes from the memo what was forgotten: it has to be run step by step."""


def _number(operation: bytes) -> int:
    """The number behind an opcode."""
    return int.from_bytes(operation[1:], "little")


@lru_cache(maxsize=4096)
def _run_of_numbers(operations: bytes) -> tuple[int, ...]:
    """The tuple that opcodes make: integers, and then what puts them together."""
    found = []
    at = 1 if operations[:1] == pickle.MARK else 0
    while (nbytes := _INTEGER_NBYTES.get(operations[at : at + 1])) is not None:
        found.append(int.from_bytes(operations[at + 1 : at + 1 + nbytes], "little"))
        at += 1 + nbytes
    return tuple(found)


_INTEGER_NBYTES = {pickle.BININT1: 1, pickle.BININT2: 2, pickle.BININT: 4}


class _Interpreter(pickle._Unpickler):
    """The pure Python one: the memo of the one in C takes 64 GiB if a pickle of ten bytes asks it to."""

    dispatch: ClassVar[dict[int, Any]] = {
        **_LOADS,
        **{
            opcode[0]: _then_light(_LOADS[opcode[0]])
            for opcode in (
                *(pickle.INT, pickle.LONG, pickle.LONG1, pickle.LONG4, pickle.FROZENSET),
                *(pickle.TUPLE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
                *(pickle.UNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.STRING, pickle.BINSTRING),
                *(pickle.BINBYTES, pickle.BINBYTES8),
            )
        },
    }
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]

    def __init__(self, data: bytes, *, recognizes: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._data = data
        self._recognizes = recognizes
        """Whether the calls that make plain tensors are run in one go. Then there is no account of them."""
        self._recognized: list[Range] = []
        """What of the data they are."""
        self._made: dict[int, tuple[int, int]] = {}
        self._puts: dict[int, int] = {}
        self._atoms: dict[int, int] = {}
        self._named: list[Range] = []
        self._alive: list[Any] = []
        """What has been made, so that nothing else gets its identity."""
        self._gets: list[int] = []
        self._got: list[int] = []
        self._can_be_cut = True
        self._globals: dict[str, GlobalRef] = {}
        self._texts: dict[type, dict[Any, Any]] = {str: {}, bytes: {}}
        self._left = 2 * len(data) + _SPARE_ELEMENTS
        """How many elements calls may still copy. A pickle may have a list once, and make set after set of it."""

    def load(self) -> Any:
        """Run the program, and keep account of which of its bytes have made what is on the stack."""
        file = io.BytesIO(self._data)
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto
        self.metastack, self.stack, self.proto = [], [], 0
        self.append = self.stack.append
        begins: list[int] = []
        """Where the making of what is on the stack begins."""
        outer: list[tuple[list[int], int]] = []
        """The same of the stacks below, and where the marks between them are."""
        read, tell, dispatch, memo, puts, stack = file.read, file.tell, self.dispatch, self.memo, self._puts, self.stack
        while True:
            at = tell()
            key = read(1)
            if key in _PUTS:  # nearly half of the opcodes are, most others are what comes next
                number = int.from_bytes(read(_PUTS[key]), "little")
                if number in puts:
                    self._can_be_cut = False
                memo[number] = stack[-1]
                puts[number] = at
                continue
            if key in _GETS:
                number = int.from_bytes(read(_GETS[key]), "little")
                stack.append(memo[number])
                if stack[-1] is _FORGOTTEN:
                    raise _ForgottenError
                begins.append(at)
                if self._recognizes and stack[-1] is _rebuild_tensor and (tensor := self._plain_tensor(tell())):
                    stack[-1] = tensor
                    file.seek(self._recognized[-1][1])
                    continue
                self._gets.append(at)
                self._got.append(number)
                continue
            if key == pickle.MARK:
                self.metastack.append(stack)
                self.stack = stack = []
                self.append = stack.append
                outer.append((begins, at))
                begins = []
                continue
            if key == pickle.STOP:
                return stack.pop()
            if not key:
                raise EOFError("the pickle has no end")
            dispatch[key[0]](self)
            if self.stack is stack:
                if len(stack) > len(begins):
                    begins.append(at)
                else:
                    del begins[len(stack) :]
            else:
                stack = self.stack
                begins, mark = outer.pop()
                if len(stack) > len(begins):
                    begins.append(mark)
            if key in _MAKES:
                if type(stack[-1]) in (TensorRef, Opaque):
                    self._made[id(stack[-1])] = (begins[-1], tell())
                    self._alive.append(stack[-1])
            elif key == pickle.BINUNICODE:
                self._atoms[tell()] = at
            elif key == pickle.GLOBAL:
                self._atoms[tell()] = at
                self._named.append((at, tell()))
            elif key not in _OTHERS:
                self._can_be_cut = False

    def _plain_tensor(self, at: int) -> TensorRef | None:
        """Run the call of ``_rebuild_tensor`` that begins with its arguments at an offset, if it is an ordinary one.

        The key and the tensor are put into the memo; what torch never takes from there is forgotten. What is out of the
        ordinary in any way is left to be run step by step, or to be refused.
        """
        found = _PLAIN_TENSOR.match(self._data, at)
        if found is None:
            return None
        memo = self.memo
        word, kind, length, key, put_key, location, numel, offset, size, stride, hooks, put_tensor = found.group(
            "word",
            "kind",
            "length",
            "key",
            "put_key",
            "location",
            "numel",
            "offset",
            "size",
            "stride",
            "hooks",
            "tensor",
        )
        of_kind, of_location = memo[_number(kind)], memo[_number(location)]
        shape, steps = _run_of_numbers(size), _run_of_numbers(stride)
        if (
            memo[_number(word)] != "storage"
            or type(of_kind) is not _StorageKind
            or length[0] != len(key)
            or type(of_location) is not str
            or memo[_number(hooks)] is not OrderedDict
            or len(shape) != len(steps)
            or not is_shape(shape)
        ):
            return None
        memo[_number(put_key)] = text = self.light(key.decode())
        for put in found.group("put_id", "put_size", "put_stride", "put_hooks", "put_arguments"):
            if put is not None:  # an empty tuple is not put into the memo
                memo[_number(put)] = _FORGOTTEN
        storage = StorageRef(text, of_kind.dtype, of_location, _number(numel) * of_kind.dtype.itemsize)
        tensor = TensorRef("Tensor", of_kind.dtype, shape, storage, _number(offset), steps)
        memo[_number(put_tensor)] = tensor
        self._recognized.append((at, found.end()))
        return tensor

    def rest(self) -> bytes:
        """The program without the arguments of the calls that were run in one go."""
        ends = [0, *(end for _, end in self._recognized)]
        begins = [*(begin for begin, _ in self._recognized), len(self._data)]
        return b"".join([self._data[end:begin] for end, begin in zip(ends, begins, strict=True)])

    def program(self, structure: Any) -> Program:
        """What has been run, and made that."""
        return Program(
            self._data,
            structure,
            made=self._made,
            puts=self._puts,
            atoms=self._atoms,
            named=self._named,
            gets=self._gets,
            got=self._got,
            can_be_cut=self._can_be_cut,
        )

    def find_class(self, module: str, name: str) -> Any:
        short = len(module) + len(name) <= _LONGEST_NAME
        full = f"{module}.{name}" if short else ""
        if not short or len(full.encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise ValueError(f"a global whose name has more than {_LONGEST_NAME} bytes")
        if full == _FROM_TYPE:
            return self._rebuild_from_type
        if full == _SPARSE:
            return self._rebuild_sparse
        if full in _KNOWN:
            return _KNOWN[full]
        if module in ("torch", "torch.storage") and (known := _dtype_or_storage(name)) is not None:
            return known
        return self._globals.setdefault(full, GlobalRef(full))

    def get_extension(self, code: int) -> None:
        raise ValueError("a global that is a number: torch writes names")

    def persistent_load(self, pid: Any) -> StorageRef:
        word, kind, key, location, numel = pid
        texts = isinstance(key, str) and isinstance(location, str)
        if word != "storage" or not texts or not isinstance(kind, _StorageKind) or not isinstance(numel, int):
            raise ValueError("a persistent id that is not one of a storage")
        return StorageRef(key, kind.dtype, location, numel * kind.dtype.itemsize)

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        data = self.read(nbytes)  # no more than there is, unlike what this replaces
        if len(data) != nbytes:
            raise EOFError("a bytearray is cut off")
        self.stack.append(bytearray(data))

    def load_buffer(self) -> None:
        raise ValueError("a buffer out of band: torch writes none")

    def load_frame(self) -> None:
        """What is in a frame is behind it, as if there was none."""
        self.read(8)

    def light(self, value: Any) -> Any:
        """The same, such that it is hashed and compared quickly, however often a file does that."""
        kind = type(value)
        if kind in self._texts:
            return self._texts[kind].setdefault(value, value)
        if kind is int and value.bit_length() <= _MOST_BITS:
            return value
        return _EQUAL_TO_THEMSELVES[kind](value) if kind in _EQUAL_TO_THEMSELVES else value

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
        if isinstance(function, GlobalRef | Opaque):
            parts = [function, arguments, options] if options else [function, arguments]
            return Opaque(function.name, parts)
        if options:
            raise ValueError("a call with names for its arguments: torch makes none to what is known here")
        self._spend(arguments, *arguments)
        return self.light(function(*arguments))

    def _spend(self, *copied: Any) -> None:
        self._left -= sum([len(value) for value in copied if isinstance(value, _WITH_LENGTHS)])
        if self._left < 0:
            raise ValueError("its calls copy more than the file holds")

    def _rebuild_sparse(self, layout: Any, data: Any) -> TensorRef:
        """The data are the parts (indices, values, ...), then the size, and whether it is coalesced."""
        values = [part for part in data if isinstance(part, TensorRef)][-1]
        size = next(part for part in reversed(data) if isinstance(part, _Size))
        self._spend(size)
        return TensorRef("sparse", values.dtype, _shape(size), None, parts=(layout, *data), plain=False)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """A subclass of tensors, or a tensor with attributes; the arguments are those of its base."""
        base = self._call(function, arguments)
        if not isinstance(base, TensorRef):
            return Opaque(_name_of(kind), [base, state])
        return replace(base, kind=_name_of(kind), parts=(base.parts, state))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.NEXT_BUFFER[0]] = load_buffer
    dispatch[pickle.READONLY_BUFFER[0]] = load_buffer
    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex


@dataclass(frozen=True, slots=True)
class _StorageKind:
    dtype: torch.dtype


def _dtype_or_storage(name: str) -> torch.dtype | _StorageKind | None:
    word = _STORAGES.get(name)
    value = vars(torch).get(word or name)  # getattr would import modules
    if isinstance(value, torch.dtype):
        return _StorageKind(value) if word else value
    return None
