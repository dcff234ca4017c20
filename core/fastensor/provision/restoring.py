"""Values of their descriptions and buffers. Descriptions are not trusted. See :mod:`fastensor.provision.describing`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastensor.data.ring import aligned
from fastensor.errors import CorruptSampleError, UnsupportedSampleError
from fastensor.provision.describing import DEEPEST, PLAIN, Node, is_name

_MOST_DIMENSIONS = 64
_SHORT_NBYTES = 512
"""Descriptions up to this size are kept, because those of other samples may be the same."""
_ADDRESS_ALIGNMENT = 16
"""Memory begins at a multiple of it: what ``malloc`` gives, and enough for every dtype."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, RuntimeError)
"""Errors that Python, NumPy and torch raise for descriptions that make no sense."""
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def restored(memory: memoryview, begin: int, end: int) -> Any:
    """The value in memory. See :func:`fastensor.provision.encoding.decode`.

    Args:
        memory: the bytes of the value, all of them.
        begin: where the description begins in the memory.
        end: where it ends.
    """
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    if address % _ADDRESS_ALIGNMENT:
        raise ValueError(f"memory of samples begins at a multiple of {_ADDRESS_ALIGNMENT}, found {address:#x}")
    restorer = _Restorer(memory, end)
    try:
        value = restorer.value_of(_node(bytes(memory[begin:end])))
    except (CorruptSampleError, UnsupportedSampleError):
        raise
    except _MALFORMED as error:
        raise CorruptSampleError(f"the sample in memory has a wrong description: {error}") from error
    if restorer.end != len(memory):
        raise CorruptSampleError(f"the sample in memory has {len(memory)} bytes, its buffers end at {restorer.end}")
    return value


@lru_cache(maxsize=1024)
def _node_of_short(description: bytes) -> Node:
    return json.loads(description.decode("utf-8", "surrogatepass"))


def _node(description: bytes) -> Node:
    """Parsed description. Nobody may change it: samples of one shape share it."""
    return _node_of_short(description) if len(description) <= _SHORT_NBYTES else _node_of_short.__wrapped__(description)


@dataclass(slots=True)
class _Restorer:
    """Takes one buffer after the other, as the description names them: so none is used twice."""

    memory: memoryview
    end: int
    """End of the last buffer that was taken."""

    def value_of(self, node: Node, depth: int = 0) -> Any:
        """The value of a description, which is in ``depth`` other ones."""
        if type(node) in PLAIN:
            return node
        if type(node) is not list or depth > DEEPEST:
            raise CorruptSampleError(f"the description of a sample has {str(node)[:80]} where a value was expected")
        return _RESTORES[node[0]](self, node, depth + 1)

    def take(self, nbytes: Node) -> int:
        """Offset of the next buffer."""
        begin = aligned(self.end)
        self.end = begin + _size(nbytes)
        if self.end > len(self.memory):
            raise CorruptSampleError(
                f"a buffer of {nbytes} bytes at {begin} leaves the {len(self.memory)} bytes of a sample in memory"
            )
        return begin

    def tensor(self, node: Node, _depth: int) -> torch.Tensor:
        _, name, sizes = node
        dtype, shape = _TORCH_DTYPES[name], _shape(sizes)
        count = math.prod(shape)
        begin = self.take(count * dtype.itemsize)
        if count and not self.memory.readonly:
            flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin)
            return flat if len(shape) == 1 else flat.view(shape)
        copy = torch.empty(shape, dtype=dtype)
        if count:
            copy.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(self.memory[begin : self.end], np.uint8)
        return copy

    def array(self, node: Node, _depth: int) -> npt.NDArray[Any]:
        _, name, sizes = node
        dtype, shape = _numpy_dtype(name), _shape(sizes)
        begin = self.take(math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, self.memory, begin)

    def scalar(self, node: Node, _depth: int) -> Any:
        _, name, text = node
        (value,) = np.frombuffer(text.encode("latin-1"), _numpy_dtype(name))
        return value

    def bytes_(self, node: Node, _depth: int) -> bytes:
        _, nbytes = node
        begin = self.take(nbytes)
        return bytes(self.memory[begin : self.end])

    def plain_list(self, node: Node, _depth: int) -> list[Any]:
        _, items = node
        if type(items) is not list or not PLAIN.issuperset(map(type, items)):
            raise CorruptSampleError("a list that is to hold plain data only holds something else")
        return list(items)

    def list_(self, node: Node, depth: int) -> list[Any]:
        return [self.value_of(item, depth) for item in node[1:]]

    def tuple_(self, node: Node, depth: int) -> tuple[Any, ...]:
        return tuple(self.list_(node, depth))

    def dict_(self, node: Node, depth: int) -> dict[Any, Any]:
        items = self.list_(node, depth)
        return dict(zip(items[::2], items[1::2], strict=True))

    def named_tuple(self, node: Node, depth: int) -> Any:
        _, module, name, *items = node
        kind = _class_of_named_tuples(module, name)
        return kind._make([self.value_of(item, depth) for item in items])


_RESTORES: dict[str, Callable[[_Restorer, Node, int], Any]] = {
    "t": _Restorer.tensor,
    "a": _Restorer.array,
    "n": _Restorer.scalar,
    "b": _Restorer.bytes_,
    "l": _Restorer.list_,
    "L": _Restorer.plain_list,
    "u": _Restorer.tuple_,
    "d": _Restorer.dict_,
    "m": _Restorer.named_tuple,
}


def _class_of_named_tuples(module: str, name: str) -> Any:
    """The class of this name. Its module has to be there: nothing is imported."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise UnsupportedSampleError(f"the sample has a named tuple {module}.{name}: import {module} before")
    for part in name.split("."):
        found = vars(found).get(part)  # unlike an attribute, it runs no code
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise UnsupportedSampleError(
            f"the sample has a named tuple {module}.{name}, but {found!r} has this name: define the class in a module"
        )
    return found


def _numpy_dtype(name: Node) -> np.dtype[Any]:
    if not is_name(name):
        raise CorruptSampleError(f"the description of a sample has the dtype {str(name)[:80]}")
    return np.dtype(name)


def _shape(sizes: Node) -> tuple[int, ...]:
    if type(sizes) is not list or len(sizes) > _MOST_DIMENSIONS:
        raise CorruptSampleError(f"the description of a sample has the shape {str(sizes)[:80]}")
    return tuple(map(_size, sizes))


def _size(number: Node) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise CorruptSampleError(f"the description of a sample has the size {str(number)[:80]}")
    return number
