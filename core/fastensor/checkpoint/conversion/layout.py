"""The layout of a file whose tensors are elsewhere. Stand-ins take their places while it is planned."""

from __future__ import annotations

import math
import mmap
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

import torch

from fastensor.checkpoint.save import DEFAULT_PROTOCOL, SavedContainer
from fastensor.errors import LayoutError
from fastensor.stitch import safetensors, torch_zip
from fastensor.stitch.shape import row_major
from fastensor.stitch.source import Plan

_MAP_NORESERVE = 0x4000
"""A flag of Linux that Python has no name for."""


def plan_stand_ins(
    state: Any,
    stand_ins: Mapping[str, torch.Tensor],
    kind: SavedContainer,
    texts: Mapping[str, str] | None,
    checksums: bool,
) -> tuple[Plan, list[str | None]]:
    """Lay out a file in which some tensors are stand-ins, whose memory is never touched: only their sizes count.

    Args:
        state: what is saved; a dict of tensors for safetensors.
        stand_ins: the stand-ins in it, by names.
        kind: the container.
        texts: for the metadata of safetensors.
        checksums: as for :func:`fastensor.save`.

    Returns:
        The plan; and for each of its storages the name of the stand-in whose it is, or None.
    """
    if kind == "safetensors":
        planned: Plan = safetensors.plan(state, metadata=texts, checksums=checksums)
    else:
        whole = torch_zip.plan(state, pickle_module=pickle, pickle_protocol=DEFAULT_PROTOCOL)
        planned = Plan(whole.image, whole.storages)  # torch could only write the memory of the stand-ins
    names = {stand_in.untyped_storage()._cdata: name for name, stand_in in stand_ins.items()}
    return planned, [names.get(_identity(storage)) for storage in planned.storages]


def _identity(storage: Any) -> int:
    identity: int = storage._cdata
    return identity


def untouched(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor that takes no memory until it is touched: it may be larger than the machine's."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), 0, shape, row_major(shape))


def refuse(file: BinaryIO) -> NoReturn:
    """In place of ``torch.save``, if a file cannot be planned."""
    raise LayoutError("torch cannot write a file whose tensors are in other files")
