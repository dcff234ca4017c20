"""Reading the pickle of a torch checkpoint without running it.

A pickle is a program. Here it is interpreted symbolically: no global that it names is imported, no class of it is
instantiated, no tensor is made. Records stand for tensors and for objects of unknown classes
(:mod:`fastensor.stitch.pickle_records`). So it is safe for any file, also where ``weights_only=True`` refuses.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.pickle_functions import (
    StorageClass,
    call_known,
    find_known,
    rebuild_from_type,
    rebuild_sparse,
    rebuild_tensor,
)
from fastensor.stitch.pickle_records import PickledStorage, PickledTensor, Range, UnknownGlobal, UnknownObject, as_key
from fastensor.stitch.plain_call import Memo, PlainCall
from fastensor.stitch.plain_tensors import NotAsTorchWritesError

_LONGEST_NAME = 300
"""In bytes of UTF-8. A pickle may have a text once, and name a thousand globals with it."""
_LONGEST_REASON = 300
"""In characters. What Python says of a defect may repeat all of the pickle."""
_SPARE_ELEMENTS = 100_000
STATE = "pickled state"
"""The attribute that holds the attributes of an OrderedDict: one of them may be called ``items``."""


@dataclass(frozen=True, slots=True)
class Program:
    """A pickle, the structure that it makes, and the places in it that have to be known to cut something out."""

    data: bytes
    structure: Any
    """The value that the pickle makes: dicts, lists and plain values as they are, and records for the rest."""
    texts: Sequence[Range]
    """Texts and globals that are put into the memo, each with the opcode that puts it there."""
    globals: Sequence[Range]
    """All globals, without the opcode that puts them into the memo."""
    puts: Mapping[int, int]
    """Offset at which each other value is put in the memo, by its number."""
    gets: Sequence[tuple[int, int]]
    """Offsets at which values of :attr:`puts` are taken from the memo, in order, and their numbers."""
    can_be_cut: bool
    """True if all opcodes are ones that torch writes by default (protocol 2), and no memo number is used twice."""

    def naming_globals(self) -> bytes:
        """A pickle that names the same globals, and is quicker to search for them."""
        if not self.can_be_cut:
            return self.data
        names = (self.data[begin:end] for begin, end in self.globals)
        return b"".join((pickle.PROTO, b"\2", *dict.fromkeys(names), pickle.NONE, pickle.STOP))


def read_program(data: bytes, *, where: str) -> Program:
    """Interpret a pickle.

    Args:
        data: the pickle.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpointError: it is not a pickle of torch's.
    """
    try:
        return _run(_Interpreter(data, recognizes=True).run, where)
    except NotAsTorchWritesError:
        return _run(_Interpreter(data, recognizes=False).run, where)


def _run(interpret: Callable[[], _Found], where: str) -> _Found:
    try:
        return interpret()
    except (MemoryError, NotAsTorchWritesError):
        raise
    except RecursionError as error:
        raise CorruptCheckpointError(f"{where}: the pickle is nested too deeply to be one of torch's") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        raise CorruptCheckpointError(f"{where}: the pickle is damaged or not one of torch's ({reason})") from error


def read_structure(data: bytes, *, where: str) -> Any:
    """The :attr:`Program.structure` of a pickle, whose records do not say which bytes have made them. Twice as fast as
    :func:`read_program`.

    Args:
        data: the pickle.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpointError: it is not a pickle of torch's.
    """
    return _run(_Interpreter(data, recognizes=False).run_without_places, where)


_WITH_LENGTHS = (tuple, list, dict, set, frozenset, str, bytes, bytearray)
_PUTS = {pickle.BINPUT: 1, pickle.LONG_BINPUT: 4}
_GETS = {pickle.BINGET: 1, pickle.LONG_BINGET: 4}
"""Opcodes that use the memo, and how many bytes of a number follow them."""
_MAKES = frozenset(
    (pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS)
)
"""Opcodes that may leave a new object on top of the stack, or put something into the one that is there."""
_OTHERS = {
    *(pickle.PROTO, pickle.BINPERSID, pickle.EMPTY_DICT, pickle.EMPTY_LIST),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NONE, pickle.NEWTRUE),
    *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    pickle.SHORT_BINSTRING,
}
"""The other opcodes that torch's own search for globals knows."""
_Found = TypeVar("_Found")


def _source_of(puts: Container[int], memo: Memo, numbers: Sequence[int]) -> tuple[torch.dtype, str] | None:
    """The dtype and the location of a storage. See :class:`Memo`.

    Args:
        puts: as :attr:`Program.puts`. What is taken from there has to be noted.
        memo: holds the word, the class, the location and the hooks.
        numbers: where these are.
    """
    word, kind, location, hooks = map(memo.get, numbers)
    if any(number in puts for number in numbers) or word != "storage" or hooks is not OrderedDict:
        return None
    return (kind.dtype, location) if type(kind) is StorageClass and type(location) is str else None


class _Interpreter(pickle._Unpickler):
    """Runs a pickle once. The unpickler is the one in Python: the memo of the one in C takes 64 GiB if a pickle of ten
    bytes asks it to.

    Args:
        data: the pickle.
        recognizes: whether a call that makes a plain tensor is run in one step.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, *, recognizes: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._data = data
        self._texts: list[Range] = []
        self._names: list[Range] = []
        self._puts: dict[int, int] = {}
        self._gets: list[tuple[int, int]] = []
        if recognizes:
            self.memo = Memo(data, partial(_source_of, self._puts))
        self._can_be_cut = True
        self._globals: dict[str, UnknownGlobal] = {}
        self._left = 2 * len(data) + _SPARE_ELEMENTS
        """Elements that calls may still copy. A pickle may have a list once, and make set after set of it."""

    def run(self) -> Program:
        """Run the pickle."""
        structure = self.load()
        return Program(
            self._data, structure, self._texts, self._names, self._puts, self._gets, can_be_cut=self._can_be_cut
        )

    def run_without_places(self) -> Any:
        """Run the pickle, and note no places."""
        file = self._begin()
        read, dispatch, memo = file.read, self.dispatch, self.memo
        while True:
            key = read(1)
            if key == pickle.MEMOIZE:  # nearly half of the opcodes are
                memo[len(memo)] = self.stack[-1]
            elif key == pickle.STOP:
                return self.stack.pop()
            elif not key:
                raise EOFError("the pickle has no end")
            else:
                dispatch[key[0]](self)

    def _begin(self) -> io.BytesIO:
        """The file that all opcodes are read from, at its start."""
        file = io.BytesIO(self._data)
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto
        self.metastack, self.stack, self.proto = [], [], 0
        self.append = self.stack.append
        return file

    def load(self) -> Any:
        """Run all opcodes, and note which bytes make each tensor and each object of an unknown class."""
        file = self._begin()
        begins: list[int] = []
        """Offset at which the making of each value on the stack begins."""
        outer: list[tuple[list[int], int]] = []
        """``begins`` of each stack below, and where the mark above that stack is."""
        text, text_end = 0, -1
        """Begin and end of the last text or global."""
        read, tell, dispatch, memo, puts, stack = file.read, file.tell, self.dispatch, self.memo, self._puts, self.stack
        while True:
            at = tell()
            key = read(1)
            if key in _PUTS:  # nearly half of the opcodes are, most others are what comes next
                number = int.from_bytes(read(_PUTS[key]), "little")
                if number in memo:
                    self._can_be_cut = False
                memo[number] = stack[-1]
                if at == text_end:
                    self._texts.append((text, tell()))
                else:
                    puts[number] = at
            elif key in _GETS:
                number = int.from_bytes(read(_GETS[key]), "little")
                stack.append(memo[number])
                begins.append(at)
                if number in puts:
                    self._gets.append((at, number))
                if stack[-1] is rebuild_tensor and isinstance(memo, Memo) and (call := memo.call_at(tell())):
                    stack[-1] = self._plain_tensor(call, at)
                    file.seek(call.end)
            elif key == pickle.BINUNICODE:
                stack.append(str(read(int.from_bytes(read(4), "little")), "utf-8", "surrogatepass"))
                begins.append(at)
                text, text_end = at, tell()
            elif key == pickle.MARK:
                self.metastack.append(stack)
                self.stack = stack = []
                self.append = stack.append
                outer.append((begins, at))
                begins = []
            elif key == pickle.STOP:
                return stack.pop()
            elif not key:
                raise EOFError("the pickle has no end")
            else:
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
                    if type(stack[-1]) in (PickledTensor, UnknownObject):
                        stack[-1].made_by = begins[-1], tell()
                elif key == pickle.GLOBAL:
                    text, text_end = at, tell()
                    self._names.append((text, text_end))
                elif key not in _OTHERS:
                    self._can_be_cut = False

    def _plain_tensor(self, call: PlainCall, begin: int) -> PickledTensor:
        """The tensor of a call, whose function is taken from the memo at ``begin``."""
        dtype, location = call.source
        self._puts[call.key_number] = begin
        storage = PickledStorage(call.key, dtype, location, call.numel * dtype.itemsize)
        made_by = begin, call.end
        return PickledTensor("Tensor", dtype, call.shape, storage, call.offset, call.stride, True, (), made_by)

    def find_class(self, module: str, name: str) -> Any:
        short = len(module) + len(name) <= _LONGEST_NAME
        full = f"{module}.{name}" if short else ""
        if not short or len(full.encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise ValueError(f"a global whose name has more than {_LONGEST_NAME} bytes")
        known = find_known(module, name)
        return self._globals.setdefault(full, UnknownGlobal(full)) if known is None else known

    def get_extension(self, code: int) -> None:
        raise ValueError("a global that is a number: torch writes names")

    def persistent_load(self, pid: Any) -> PickledStorage:
        word, kind, key, location, numel = pid
        texts = isinstance(key, str) and isinstance(location, str)
        if word != "storage" or not texts or not isinstance(kind, StorageClass) or not isinstance(numel, int):
            raise ValueError("a persistent id that is not one of a storage")
        return PickledStorage(key, kind.dtype, location, numel * kind.dtype.itemsize)

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        data = self.read(nbytes)  # no more than there is, unlike what this replaces
        if len(data) != nbytes:
            raise EOFError("a bytearray is cut off")
        self.stack.append(bytearray(data))

    def load_buffer(self) -> None:
        raise ValueError("a buffer out of band: torch writes none")

    def load_frame(self) -> None:
        """Skip the size of a frame. The opcodes in the frame follow, as they would without it."""
        self.read(8)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set_items(items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: Sequence[Any]) -> None:
        """Set keys and values, in turn, of what is on the stack."""
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[as_key(key)] = value

    def load_frozenset(self) -> None:
        elements = self.pop_mark()
        self.stack.append(frozenset(map(as_key, elements)))

    def load_additems(self) -> None:
        elements = self.pop_mark()
        self.stack[-1].update(map(as_key, elements))

    def load_build(self) -> None:
        """Give an object its state. Nothing else than an object of the file is changed."""
        state = self.stack.pop()
        found = self.stack[-1]
        if isinstance(found, UnknownObject):
            found.parts.append(state)
        elif isinstance(found, PickledTensor):
            self.stack[-1] = replace(found, parts=(found.parts, state))
        elif type(found) is OrderedDict:
            found.__dict__[STATE] = state
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
        """Called by the opcodes INST and OBJ of protocols 0 and 1."""
        self.stack.append(self._call(kind, arguments))

    def _call(self, function: Any, arguments: Any, options: Any = None) -> Any:
        """Call a function. The record for an unknown one gets the arguments uncopied: many calls may share them."""
        if isinstance(function, UnknownGlobal | UnknownObject):
            parts = [function, arguments, options] if options else [function, arguments]
            return UnknownObject(function.name, parts)
        if options:
            raise ValueError("a call with names for its arguments: torch makes none to what is known here")
        self._spend(arguments, *arguments)
        if function is rebuild_from_type:
            return rebuild_from_type(self._call, *arguments)
        if function is rebuild_sparse:
            self._spend(*(part for part in arguments[1] if isinstance(part, torch.Size)))
        return call_known(function, arguments)

    def _spend(self, *copied: Any) -> None:
        self._left -= sum([len(value) for value in copied if isinstance(value, _WITH_LENGTHS)])
        if self._left < 0:
            raise ValueError("its calls copy more than the file holds")

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.NEXT_BUFFER[0]] = load_buffer
    dispatch[pickle.READONLY_BUFFER[0]] = load_buffer
    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.FROZENSET[0]] = load_frozenset
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
