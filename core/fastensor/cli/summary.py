"""Tensors in numbers: by dtype, and by groups of names. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastensor.checkpoint.tools.catalog import TensorInfo
from fastensor.files.words import human_size

_MOST_GROUPS = 60


@dataclass(slots=True)
class Totals:
    """Sums over some tensors."""

    tensors: int = 0
    parameters: int = 0
    """Elements. Those of tensors that are the same memory count once."""
    nbytes: int = 0
    """Size of the tensors, each counted."""


def dtype_name(tensor: TensorInfo) -> str:
    """The name of a tensor's dtype, without that of torch."""
    return str(tensor.dtype).removeprefix("torch.")


def totals(tensors: Iterable[TensorInfo], tied: Iterable[Sequence[str]]) -> Totals:
    """Sums over tensors.

    Args:
        tensors: the tensors.
        tied: groups of names that share memory. All but the largest of a group add no parameters.
    """
    found = Totals()
    chosen = {tensor.name: tensor for tensor in tensors}
    again = {name for group in tied for name in _all_but_largest([chosen[one] for one in group if one in chosen])}
    for tensor in chosen.values():
        found.tensors += 1
        found.nbytes += tensor.nbytes
        found.parameters += 0 if tensor.name in again else math.prod(tensor.shape)
    return found


def _all_but_largest(group: Sequence[TensorInfo]) -> list[str]:
    return [tensor.name for tensor in sorted(group, key=lambda tensor: -tensor.nbytes)[1:]]


def grouped(
    tensors: Iterable[TensorInfo], tied: Sequence[Sequence[str]], group_of: Callable[[TensorInfo], str]
) -> dict[str, tuple[Totals, str]]:
    """Sums for each group of tensors, and the dtypes in it."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(group_of(tensor), []).append(tensor)
    return {
        name: (totals(group, tied), ", ".join(sorted({dtype_name(tensor) for tensor in group})))
        for name, group in groups.items()
    }


def prefix(name: str, depth: int) -> str:
    """The first parts of a name.

    >>> prefix("model.layers.0.weight", 2), prefix("step", 2)
    ('model.layers', 'step')
    """
    return ".".join(name.split(".")[:depth])


def patterns(tensors: Iterable[TensorInfo]) -> Mapping[str, str]:
    """A pattern for ``--key`` for each name: names that differ only in numbers have the same one. If these are too
    many, names that begin alike are joined."""
    names = {
        tensor.name: tuple("*" if one.isdecimal() else one for one in tensor.name.split(".")) for tensor in tensors
    }
    depth = max(map(len, names.values()), default=1)
    while depth > 1 and len({parts[:depth] for parts in names.values()}) > _MOST_GROUPS:
        depth -= 1
    return {name: ".".join([*parts[:depth], *(["*"] if len(parts) > depth else [])]) for name, parts in names.items()}


def rows(groups: Mapping[str, tuple[Totals, str]]) -> list[list[str]]:
    """A row of a table for each group: its name, tensors, parameters, dtypes and size."""
    return [
        [name, str(one.tensors), f"{one.parameters:,}", dtypes, human_size(one.nbytes)]
        for name, (one, dtypes) in groups.items()
    ]
