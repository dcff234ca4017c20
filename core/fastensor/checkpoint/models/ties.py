"""The tensors of a state, and which of them share memory. Nothing of them is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch

from fastensor.errors import UnsupportedContentError
from fastensor.stitch.areas import Area, overlapping
from fastensor.stitch.safetensors import has_own_memory

_SHOWN = 5


def dense_tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All dense tensors in nested dicts, lists, tuples and deques, and in those of their subclasses, in order.

    >>> weight = torch.ones(4)
    >>> [tensor.nbytes for tensor in dense_tensors_in([{"a": weight, "b": weight.to_sparse()}, (weight[:2], "text")])]
    [16, 8]
    """
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, dict | list | tuple | deque):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from dense_tensors_in(inner)


def area_of(tensor: torch.Tensor) -> Area | None:
    """The memory from the first to the last byte of a tensor. None if it has no elements, or no memory of its own."""
    if not tensor.numel() or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    if not has_own_memory(tensor):
        return None
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return Area(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize)


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of names whose tensors share memory, directly or by others between them, each in the order of ``tensors``.
    A tensor that shows no memory, such as a DTensor, shares it with itself.

    >>> weight = torch.ones(4)
    >>> sharing({"a": weight[:3], "b": torch.ones(4), "c": weight[2:]})
    [['a', 'c']]
    """
    areas = {name: area for name, tensor in tensors.items() if (area := area_of(tensor)) is not None}
    hidden: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if name not in areas and tensor.numel():
            hidden.setdefault(id(tensor), []).append(name)
    rank = {name: at for at, name in enumerate(tensors)}
    groups = [*overlapping(areas), *(names for names in hidden.values() if len(names) > 1)]
    return [sorted(names, key=rank.__getitem__) for names in groups]


def copies_of(tensors: Mapping[str, torch.Tensor], *, keep: Literal["first", "least"]) -> dict[str, str]:
    """The names to leave out so that no bytes are stored twice, and for each the name that has them.

    Args:
        tensors: the tensors by name.
        keep: of tensors that are the same memory, the one to keep: the first one, or, as ``safetensors`` does, the one
            whose name is the least.

    Raises:
        UnsupportedContentError: tensors overlap, and none of them has the bytes of the others.

    >>> weight = torch.ones(4)
    >>> copies_of({"b": weight, "a": weight, "half": weight[:2], "c": torch.ones(4)}, keep="least")
    {'b': 'a', 'half': 'a'}
    """
    areas = {name: area for name, tensor in tensors.items() if (area := area_of(tensor)) is not None}
    left_out: dict[str, str] = {}
    for names in overlapping(areas):
        whole = Area(areas[names[0]].within, areas[names[0]].begin, max(areas[name].end for name in names))
        complete = [name for name in tensors if name in names and areas[name].contains(whole)]
        if not complete:
            raise UnsupportedContentError(
                f"tensors overlap in memory, and none of them holds the bytes of the others: {sorted(names)[:_SHOWN]}; "
                f"a .safetensors file cannot express that: .clone() them, or save a .ckpt, which keeps it"
            )
        kept = complete[0] if keep == "first" else min(complete)
        left_out.update((name, kept) for name in sorted(names) if name != kept)
    return left_out


def frozen_among(tensors: Mapping[str, torch.Tensor], parameters: Iterable[torch.nn.Parameter]) -> set[str]:
    """The names of tensors whose memory is of parameters that do not train, and of none that does.

    >>> frozen, trained = torch.nn.Parameter(torch.ones(1), requires_grad=False), torch.nn.Parameter(torch.ones(1))
    >>> frozen_among({"a": frozen.detach(), "b": trained, "c": torch.ones(1)}, [frozen, trained])
    {'a'}
    """
    storages: dict[bool, set[int]] = {True: set(), False: set()}
    for one in filter(has_own_memory, parameters):
        storages[one.requires_grad].add(one.untyped_storage()._cdata)
    frozen = storages[False] - storages[True]
    return {name for name, one in tensors.items() if has_own_memory(one) and one.untyped_storage()._cdata in frozen}


def covered_by(names: Iterable[str], written: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of tensors that lie within the memory of a tensor which is written.

    >>> weight = torch.ones(4)
    >>> covered_by({"half", "c"}, {"a"}, {"a": weight, "half": weight[:2], "c": torch.ones(4)})
    {'half'}
    """
    areas = [area for name in written if name in tensors and (area := area_of(tensors[name])) is not None]
    wanted = {name: area for name in names if name in tensors and (area := area_of(tensors[name])) is not None}
    return {name for name, area in wanted.items() if any(one.contains(area) for one in areas)}
