"""The call that makes a plain tensor, as torch's pickler writes it: most of a pickle consists of such calls. An
unpickler that meets one runs it in one step, which is many times faster than opcode by opcode. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from fastensor.stitch.plain_tensors import NotAsTorchWritesError
from fastensor.stitch.shape import is_shape

_GET, _PUT, _INT = rb"(?:h.|j....)", rb"(?:q.|r....)", rb"(?:K.|M..|J...[\x00-\x7f])"
_INTS = rb"(?:\)|%(i)b\x85|%(i)b{2}\x86|%(i)b{3}\x87|\(%(i)b{4,25}t)" % {b"i": _INT}
PLAIN_CALL = re.compile(
    rb"\(\((?P<word>%(get)b)(?P<kind>%(get)b)X(?P<length>[\x01-\x09])\0\0\0(?P<key>[0-9]{1,9})(?P<put_key>%(put)b)"
    rb"(?P<location>%(get)b)(?P<numel>%(int)b)t(?P<put_id>%(put)b)Q"
    rb"(?P<offset>%(int)b)(?P<size>%(ints)b)(?P<put_size>%(put)b)?(?P<stride>%(ints)b)(?P<put_stride>%(put)b)?"
    rb"(?P<grad>[\x88\x89])(?P<hooks>%(get)b)\)R(?P<put_hooks>%(put)b)t(?P<put_arguments>%(put)b)R"
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
)
"""The arguments of ``torch._utils._rebuild_tensor_v2``, and its call, behind the first tensor of a kind: the persistent
id of a storage (the word, class, key, location, number of elements), the offset, the size, the strides,
``requires_grad``, an empty dict of hooks. An empty tuple is not put into the memo."""
_INTEGER_NBYTES = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_MARK = b"("
_from_bytes = int.from_bytes
"""Looked up once: there may be a million tensors."""
_TRUE = b"\x88"


class PlainCall(NamedTuple):
    """A call that makes a plain tensor."""

    source: Any
    """What the opcodes before the key and behind it take from the memo. See :class:`Memo`."""
    key: str
    """The key of the storage."""
    key_number: int
    """Where the key is in the memo."""
    numel: int
    """Number of elements of the storage."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    end: int
    """End of the call in the pickle."""


class Memo(dict[int, Any]):
    """The memo of an unpickler that recognizes plain calls.

    Numbers only grow in it, as in what Python's picklers write. So a call's own values, which nothing takes again, need
    not be in it, and what has been taken from it once stays what it is.

    Args:
        data: the pickle.
        source_of: makes a source of the memo, and of the numbers at which a call takes from it the word ``storage``,
            the class of the storage, its location, and the class of the hooks; None if torch would not take these.

    ``memo[number]`` raises :class:`NotAsTorchWritesError` where nothing is, and ``memo[number] = value`` where numbers
    do not grow. ``memo.get`` raises nothing.
    """

    def __init__(self, data: bytes, source_of: Callable[[Memo, list[int]], Any]) -> None:
        super().__init__()
        self._data = data
        self._source_of = source_of
        self._sources: dict[tuple[bytes, ...], Any] = {}
        """Sources by the opcodes that take them from the memo."""
        self._end = 0
        """All numbers are below this."""

    def __setitem__(self, number: int, value: Any) -> None:
        if number < self._end:
            raise NotAsTorchWritesError("a number in the memo that is not above those before it")
        self._end = number + 1
        dict.__setitem__(self, number, value)

    def __missing__(self, number: int) -> Any:
        raise NotAsTorchWritesError("a value of the memo that is not there, or that torch never takes")

    def call_at(self, begin: int) -> PlainCall | None:
        """The call whose arguments begin there, behind the function. The key of its storage is put into the memo. None
        if anything is out of the ordinary; then the call has to be run opcode by opcode, or refused."""
        found = PLAIN_CALL.match(self._data, begin)
        if found is None:
            return None
        (word, kind, length, key, put_key, location, numel, put_id, offset, size, put_size, stride, put_stride, grad,
         hooks, put_hooks, put_arguments) = found.groups()  # fmt: skip
        gets = (word, kind, location, hooks)
        source = self._sources.get(gets) or self._find_source(gets)
        geometry = geometry_of(size, stride)
        if source is None or geometry is None or length[0] != len(key):
            return None
        text, key_number, end = key.decode(), number_in(put_key), self._end
        for put in (put_key, put_id, put_size, put_stride, put_hooks, put_arguments):
            if put is not None:
                if (number := _from_bytes(put, "little") >> 8) < end:  # number_in, inline: there may be a million
                    raise NotAsTorchWritesError("a number in the memo that is not above those before it")
                end = number + 1
        dict.__setitem__(self, key_number, text)
        self._end = end
        return PlainCall(
            source, text, key_number, number_in(numel), number_in(offset), *geometry, grad == _TRUE, found.end()
        )

    def _find_source(self, gets: tuple[bytes, ...]) -> Any:
        source = self._source_of(self, [number_in(get) for get in gets])
        if source is not None:
            self._sources[gets] = source
        return source


def number_in(operation: bytes) -> int:
    """The number behind an opcode."""
    return _from_bytes(operation, "little") >> 8


@lru_cache(maxsize=4096)
def geometry_of(size: bytes, stride: bytes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape and the strides that opcodes make; None if no tensor has them."""
    shape, steps = _tuple_of(size), _tuple_of(stride)
    return (shape, steps) if len(shape) == len(steps) and is_shape(shape) else None


def _tuple_of(operations: bytes) -> tuple[int, ...]:
    """The tuple that opcodes make: integers, and then what puts them together."""
    found = []
    at = int(operations.startswith(_MARK))
    while (nbytes := _INTEGER_NBYTES.get(operations[at])) is not None:
        found.append(int.from_bytes(operations[at + 1 : at + 1 + nbytes], "little"))
        at += 1 + nbytes
    return tuple(found)
