"""Descriptions of samples: JSON, and the buffers of their tensors, arrays and bytes.

In a description None, booleans, numbers and strings are themselves. All else is a list that begins with a letter:

====================================  ==================================================================================
``["t", dtype, sizes]``               a tensor, in one buffer
``["a", dtype, sizes]``               an array, in one buffer
``["n", dtype, text]``                a NumPy scalar, whose bytes are the characters of the text
``["b", nbytes]``                     bytes, in one buffer
``["l", items…]``, ``["u", items…]``  a list, a tuple
``["L", [items…]]``                   a list of nothing but None, booleans, numbers and strings
``["d", key, value, …]``              a dict
``["m", module, class, items…]``      a named tuple
====================================  ==================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from fastensor.errors import UnsupportedSampleError

Node: TypeAlias = Any
"""A part of a description, as the JSON parser gives it."""
PLAIN = frozenset((type(None), bool, int, float, str))
"""The types of what a description has as it is."""
DEEPEST = 100
"""Values are nested in each other so deeply at most. It bounds recursion."""

_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUVmM][1-9]\d{0,8}(\[\d{0,9}[A-Za-z]{1,2}\])?", re.ASCII)
_encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


def described(value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
    """The description of a value, and its buffers. See :func:`fastensor.provision.encoding.encode`."""
    describer = _Describer()
    node = describer.node_of(value, "the sample")
    try:
        text = _encoder.encode(node)
    except ValueError as error:  # Python limits the digits of integers
        raise UnsupportedSampleError(f"the sample has a number that cannot be described: {error}") from error
    return text.encode("utf-8", "surrogatepass"), tuple(describer.buffers)


def is_named(dtype: np.dtype[Any]) -> bool:
    """True if a dtype is known by its name: it has no objects, no fields, and is of no other package."""
    return is_name(dtype.str) and np.dtype(dtype.str) == dtype


def is_name(text: Any) -> bool:
    """True if a text may be the name of a dtype of NumPy."""
    return isinstance(text, str) and _NUMPY_DTYPE.fullmatch(text) is not None


@dataclass(slots=True)
class _Describer:
    """Describes a value, and collects its buffers."""

    buffers: list[memoryview] = field(default_factory=list)

    def node_of(self, value: Any, path: str, depth: int = 0) -> Node:
        """The description of a value, which is in ``depth`` other ones. Errors name the ``path`` to it."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if depth == DEEPEST:
            raise UnsupportedSampleError(f"{path} is nested more than {DEEPEST} levels deep, or contains itself")
        if kind is dict:
            return ["d", *self._items_of_dict(value, path, depth)]
        if kind is list and PLAIN.issuperset(map(type, value)):
            return ["L", value]
        if kind in (list, tuple):
            return ["l" if kind is list else "u", *self._items_of(value, path, depth)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["m", _module_of(kind), kind.__qualname__, *self._items_of(value, path, depth)]
        leaf = self.leaf_of(value)
        if leaf is None:
            raise UnsupportedSampleError(
                f"{path} is {_in_words(value)}. Only tensors of the CPU that need no gradient, arrays and plain data "
                f"are passed on, nothing is pickled: convert it, in a data service by before_cache or after_cache"
            )
        return leaf

    def leaf_of(self, value: Any) -> Node:
        """The description of a tensor, an array, a NumPy scalar or bytes; None if it is something else."""
        kind = type(value)
        if kind is bytes:
            self.buffers.append(memoryview(value))
            return ["b", len(value)]
        if kind is torch.Tensor and _is_simple(value):
            self.buffers.append(_bytes_of_tensor(value))
            return ["t", str(value.dtype).removeprefix("torch."), list(value.shape)]
        if kind in (np.ndarray, np.memmap) and is_named(value.dtype):
            flat = np.ascontiguousarray(value).reshape(-1)
            self.buffers.append(flat.view(np.uint8).data if len(flat) else memoryview(b""))
            return ["a", value.dtype.str, list(value.shape)]
        if isinstance(value, np.generic) and is_named(value.dtype):
            return ["n", value.dtype.str, value.tobytes().decode("latin-1")]
        return None

    def _items_of(self, values: Any, path: str, depth: int) -> list[Node]:
        return [self.node_of(value, f"{path}[{number}]", depth + 1) for number, value in enumerate(values)]

    def _items_of_dict(self, values: dict[Any, Any], path: str, depth: int) -> Iterator[Node]:
        for key, value in values.items():
            yield self.node_of(key, f"a key of {path}", depth + 1)
            yield self.node_of(value, f"{path}[{key!r}]", depth + 1)


def _is_simple(tensor: torch.Tensor) -> bool:
    """True if dtype, shape and bytes describe a tensor."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return dense and not tensor.requires_grad and not tensor.is_quantized


def _bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.unsqueeze(-1).view(torch.uint8).reshape(-1).numpy().data  # the stride of one element may be any


def _module_of(kind: type) -> str:
    """Module in which others find a class. In processes that ``multiprocessing`` has started, the script has another
    name."""
    return "__main__" if kind.__module__ == "__mp_main__" else kind.__module__


def _in_words(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        gradient = ", requires_grad" if value.requires_grad else ""
        return f"a {kind} ({value.layout}, {value.device}{gradient})"
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"of the type {kind}"
