"""Records for the tensors, storages and unknown objects that a pickle describes. Pure.

Dicts, lists, tuples, sets and plain values need no record: they are what the pickle makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Range: TypeAlias = tuple[int, int]
"""Begin and end of bytes."""
NOWHERE: Range = (0, 0)
"""The range of a value that no bytes of its own make."""
_LONGEST_KEY = 100_000
"""In characters or bytes. Comparing two equal keys of this length takes a few microseconds."""
_MOST_ELEMENTS = 10
"""The most elements of a tuple that is a key."""
_MOST_BITS = 64
"""The largest size of an integer that is a key. Few integers of this size have the same hash."""


@dataclass(slots=True, eq=False)
class PickledStorage:
    """A storage of the checkpoint."""

    key: str
    """Its record is ``data/<key>`` in the archive's folder."""
    dtype: torch.dtype
    """uint8 for untyped storages."""
    location: str
    """The device that it was saved from, such as ``cuda:0``."""
    nbytes: int = 0
    """Size of the storage when it was saved."""


@dataclass(slots=True, eq=False)
class PickledTensor:
    """A tensor of the checkpoint."""

    kind: str
    """``Tensor``, ``Parameter``, the name of a subclass, ``sparse``, ``quantized`` or ``meta``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: PickledStorage | None
    """The storage that the tensor is a view of, if it is dense; else None."""
    offset: int = 0
    """Offset in the storage, in elements."""
    stride: tuple[int, ...] = ()
    plain: bool = True
    """True if storage, offset and stride give its values: not so for lazy conjugates, say."""
    parts: tuple[Any, ...] = ()
    """Parts of a tensor that is not dense, and attributes."""
    made_by: Range = NOWHERE
    """The bytes of the pickle that make it, and leave it on the stack."""


@dataclass(frozen=True, slots=True, eq=False)
class UnknownGlobal:
    """A class or function that is not known here."""

    name: str
    """The name of the class or function, with its module's."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(slots=True, eq=False, repr=False)
class UnknownObject:
    """An object of a class, or the result of a function, that is not known here."""

    name: str
    """Full name of the class or function."""
    parts: list[Any] = field(default_factory=list)
    """Arguments, state and items, for the storages in them."""
    made_by: Range = NOWHERE
    """The bytes of the pickle that make it, and leave it on the stack."""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def append(self, item: Any) -> None:
        self.parts.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        self.parts.extend(items)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.parts += (key, item)


def storages_in(value: Any) -> Iterator[PickledStorage]:
    """Yield every storage that a part of the structure needs."""
    return (one for one in all_in(value) if isinstance(one, PickledStorage))


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
    if isinstance(value, PickledTensor):
        return (value.storage, *value.parts)
    if isinstance(value, UnknownObject):
        return value.parts
    if isinstance(value, dict):
        return (*dict.keys(value), *dict.values(value), *getattr(value, "__dict__", {}).values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def as_key(value: Any) -> Any:
    """A value as a key of a dict, or an element of a set: itself, or a record if hashing or comparing could take long.

    A file may hold a value once, and use it as a key a thousand times. A tuple of the same tuple, twice, 30 levels
    deep, has a billion elements; a tuple nested a million times exhausts the stack; long integers and complex numbers
    can be chosen so that all have the same hash. A record is equal to itself only. What remains are integers of 64 bits
    and floats, of which some fifty have the same hash, and texts, whose hashes can be foreseen where ``PYTHONHASHSEED``
    says so.
    """
    if _is_light(value):
        return value
    if isinstance(value, tuple):
        is_light = len(value) <= _MOST_ELEMENTS and all(map(_is_light, value))
        return tuple(value) if is_light else UnknownObject(f"tuple of {len(value)}", [value])
    if isinstance(value, frozenset):
        return UnknownObject(f"frozenset of {len(value)}", [value])
    if isinstance(value, int | str | bytes | complex):
        return UnknownObject(f"long {type(value).__name__}", [value])
    return value


def _is_light(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value) <= _LONGEST_KEY
    return kind in (bool, float, type(None)) or (kind is int and value.bit_length() <= _MOST_BITS)
