"""Tensors in numbers: by dtype, and by groups of names. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fastensor.checkpoint.tools.catalog import TensorInfo
from fastensor.files.words import human_size

_MOST_GROUPS = 60
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number."""


@dataclass(slots=True)
class Totals:
    """Sums over some tensors."""

    tensors: int = 0
    parameters: int = 0
    """Elements. Those of tensors that are the same memory count once."""
    nbytes: int = 0
    """Size of the tensors, each counted."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without that of torch."""
    return str(dtype).removeprefix("torch.")


def totals(tensors: Sequence[TensorInfo], tied: Sequence[Sequence[str]]) -> Totals:
    """Sums over tensors.

    Args:
        tensors: the tensors.
        tied: groups of names that share memory. All but the largest of a group add no parameters.
    """
    found = Totals(len(tensors))
    kinds = Counter([(tensor.dtype, tensor.shape) for tensor in tensors])  # few, where there are many tensors
    for (dtype, shape), count in kinds.items():
        parameters = count * math.prod(shape)
        found.parameters += parameters
        found.nbytes += parameters * dtype.itemsize
    if tied:
        by_name = {tensor.name: tensor for tensor in tensors}
        for group in tied:
            members = sorted((by_name[name] for name in group if name in by_name), key=lambda one: -one.nbytes)
            found.parameters -= sum(math.prod(one.shape) for one in members[1:])
    return found


def grouped(
    tensors: Iterable[TensorInfo], tied: Sequence[Sequence[str]], names: Iterable[str]
) -> dict[str, tuple[Totals, str]]:
    """Sums for each group of tensors, and the dtypes in it.

    Args:
        tensors: the tensors.
        tied: as for :func:`totals`.
        names: of the group of each tensor.
    """
    groups: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor, name in zip(tensors, names, strict=True):
        groups[name].append(tensor)
    return {
        name: (totals(group, tied), ", ".join(sorted(map(dtype_name, {tensor.dtype for tensor in group}))))
        for name, group in groups.items()
    }


def prefix(name: str, depth: int) -> str:
    """The first parts of a name.

    >>> prefix("model.layers.0.weight", 2), prefix("step", 2)
    ('model.layers', 'step')
    """
    return ".".join(name.split(".")[:depth])


def patterns(tensors: Iterable[TensorInfo]) -> list[str]:
    """A pattern for ``--key`` for each tensor: names that differ only in numbers have the same one. If these are too
    many, names that begin alike are joined."""
    names = [_NUMBER.sub("*", tensor.name) for tensor in tensors]
    parts = {name: tuple(name.split(".")) for name in dict.fromkeys(names)}
    depth = max(map(len, parts.values()), default=1)
    while depth > 1 and len({one[:depth] for one in parts.values()}) > _MOST_GROUPS:
        depth -= 1
    cut = {name: ".".join([*one[:depth], *(["*"] if len(one) > depth else [])]) for name, one in parts.items()}
    return [cut[name] for name in names]


def rows(groups: Mapping[str, tuple[Totals, str]]) -> list[list[str]]:
    """A row of a table for each group: its name, tensors, parameters, dtypes and size."""
    return [
        [name, str(one.tensors), f"{one.parameters:,}", dtypes, human_size(one.nbytes)]
        for name, (one, dtypes) in groups.items()
    ]
