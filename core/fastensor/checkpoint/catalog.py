"""What a checkpoint holds and where, without reading tensors: the same for every container."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fastensor.checkpoint.archive import read_archive, read_pickle
from fastensor.checkpoint.names import walk
from fastensor.checkpoint.opened import OpenedFile, container_of
from fastensor.checkpoint.safetensors_file import read_header
from fastensor.errors import CorruptCheckpointError, UnsupportedContentError
from fastensor.stitch.containers import Container
from fastensor.stitch.parts import Part
from fastensor.stitch.safetensors import torch_dtype
from fastensor.stitch.shape import row_major
from fastensor.stitch.torch_pickle import Opaque, StorageRef, TensorRef, plain_type, read_structure

_SHOWN = 60
"""Characters of a value."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says about one of its tensors."""

    name: str
    """The way to it, as for ``keys`` of :func:`fastensor.load`. A second tensor of the same name has ``#2`` added."""
    kind: str
    """``Tensor``, ``Parameter``, the name of a subclass; ``sparse``, ``quantized``, ``meta``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: str
    """The part of the file that holds its bytes: a record, or the tensor itself. Tied tensors have the same. Empty for
    tensors that are made of several others, and those without bytes."""
    crc32: int | None
    """Of that part; None without checksums."""

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Located(NamedTuple):
    """A dense tensor, and where it is."""

    info: TensorInfo
    part: Part
    offset: int
    """In the part, in elements."""
    stride: tuple[int, ...]

    def on_meta(self) -> torch.Tensor:
        """A tensor of the same geometry, without memory. Its storage is the part."""
        numel = self.part.nbytes // self.info.dtype.itemsize
        base = torch.empty(numel, dtype=self.info.dtype, device="meta")
        return base.as_strided(self.info.shape, self.stride, self.offset)

    @property
    def span(self) -> tuple[int, int]:
        """First byte in the part, and the one behind the last."""
        steps = sum((size - 1) * step for size, step in zip(self.info.shape, self.stride, strict=True))
        itemsize = self.info.dtype.itemsize
        return self.offset * itemsize, (self.offset + steps + 1) * itemsize if self.info.nbytes else 0


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a checkpoint holds."""

    container: Container
    tensors: Mapping[str, TensorInfo]
    located: Mapping[str, Located]
    """Those of the tensors that are dense and plain."""
    others: Mapping[str, str]
    """What else there is: names, and values in words."""
    metadata: Mapping[str, str]
    """Of a safetensors file."""
    checked: bool
    """Whether the file carries checksums."""
    unchecked: str = ""
    """Why it does not, where there is more to be said."""
    structure: Any = None
    """What the pickle of a torch file describes, symbolically."""
    by_identity: Mapping[int, Located] = field(default_factory=dict)
    """The located tensors by the identity of what the structure has for them: names may be ambiguous."""
    globals: bytes = b""
    """A pickle that names the globals that the pickle of a torch file does. It is not to be run."""


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    """Find out what a checkpoint holds. Nothing of it is run or imported.

    Args:
        file: the checkpoint.
        verify: compare what is read, a header or a pickle, with its checksum.

    Raises:
        CorruptCheckpointError: the file is damaged or not a checkpoint.
        UnsupportedContentError: it is one that only torch can read, and only whole.
    """
    container = container_of(file)
    if container == "safetensors":
        return _of_safetensors(file, verify)
    if container == "torch":
        return _of_torch(file, verify)
    raise UnsupportedContentError(
        f"{file.where}: not a zip archive (torch wrote such files before 1.6, which say nothing about themselves "
        f"without being run) and not safetensors; load it whole, and save it again"
    )


def _of_safetensors(file: OpenedFile, verify: bool) -> Catalog:
    header = read_header(file, verify=verify)
    located = {}
    for part in header.tensors:
        info = TensorInfo(part.name, "Tensor", torch_dtype(part, file.where), part.shape, part.name, part.crc32)
        located[part.name] = Located(info, part, 0, row_major(part.shape))
    infos = {name: one.info for name, one in located.items()}
    return Catalog("safetensors", infos, located, {}, header.metadata, header.checked, header.unchecked)


def _of_torch(file: OpenedFile, verify: bool) -> Catalog:
    archive = read_archive(file)
    if archive.why_torch:
        raise UnsupportedContentError(f"{file.where}: {archive.why_torch}; load it whole")
    structure, rest = read_structure(read_pickle(file, archive, verify=verify), where=file.where)
    tensors: dict[str, TensorInfo] = {}
    located: dict[str, Located] = {}
    others: dict[str, str] = {}
    by_identity: dict[int, Located] = {}
    seen: Counter[str] = Counter()
    is_swapped = archive.swapped
    for path, value in walk(structure, file.where):
        seen[path] += 1
        name = path if seen[path] == 1 else f"{path}#{seen[path]}"
        if not isinstance(value, TensorRef):
            others[name] = _in_words(value)
            continue
        part = _part_of(value, name, archive.storages, file.where)
        crc32 = part.crc32 if part else None
        info = TensorInfo(name, value.kind, value.dtype, value.shape, part.name if part else "", crc32)
        tensors[name] = info
        if part is not None and value.plain and not is_swapped:
            located[name] = by_identity[id(value)] = Located(info, part, value.offset, value.stride)
    return Catalog("torch", tensors, located, others, {}, archive.checked, "", structure, by_identity, rest)


_EMPTY = Part("", 0, None, 0, 0)


def _part_of(tensor: TensorRef, name: str, parts: Mapping[str, Part], where: str) -> Part | None:
    """The record that a tensor lies in; None if it does not lie in one.

    Raises:
        CorruptCheckpointError: there is no such record, or the tensor is not inside.
        UnsupportedContentError: the tensor had no memory any more when it was saved.
    """
    if tensor.storage is None:
        return None
    numel, reach = _numel_and_reach(tensor.shape, tensor.stride)
    end = tensor.offset + reach
    part = parts.get(tensor.storage.key, _EMPTY)
    if numel and part.nbytes == tensor.storage.nbytes == 0:
        raise UnsupportedContentError(
            f"{where}: tensor {name!r} was saved without its values: it needs {end * tensor.dtype.itemsize} bytes, and "
            f"its storage, which had been freed, has 0. Load the others by their keys"
        )
    if numel and end * tensor.dtype.itemsize > part.nbytes:
        raise CorruptCheckpointError(
            f"{where}: tensor {name!r} needs {end * tensor.dtype.itemsize} bytes of record {tensor.storage.key!r}, "
            f"which has {part.nbytes}; the file was damaged, or is not one of torch's"
        )
    return part


@lru_cache(maxsize=4096)
def _numel_and_reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int]:
    """How many elements a tensor has, and how many lie between its first and behind its last one."""
    return torch.Size(shape).numel(), sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def overlapping(tensors: Mapping[str, Located]) -> list[list[str]]:
    """Groups of names of tensors that share bytes."""
    within: dict[str, list[tuple[str, Located]]] = {}
    for name, one in tensors.items():
        if one.part.nbytes:
            within.setdefault(one.part.name, []).append((name, one))
    groups: list[list[str]] = []
    for _, shared in sorted((part, some) for part, some in within.items() if len(some) > 1):
        reached = 0
        for begin, end, name in sorted((*one.span, name) for name, one in shared if one.info.nbytes):
            if begin < reached:
                groups[-1].append(name)
            else:
                groups.append([name])
            reached = max(reached, end)
    return [sorted(group) for group in groups if len(group) > 1]


def _in_words(value: Any) -> str:
    """A short text. Containers are not looked into: they may be their own elements."""
    if isinstance(value, Opaque):
        return f"<{value.name[:_SHOWN]}>"
    if isinstance(value, StorageRef):
        return f"<storage of {value.dtype}>"
    kind = plain_type(value)
    if isinstance(value, dict | list | tuple | set | frozenset) and value:
        return f"<{kind.__name__} of {len(value)}>"
    if isinstance(value, int) and value.bit_length() > _SHOWN:
        return f"<int of {value.bit_length()} bits>"
    if isinstance(value, str | bytes | bytearray):
        value = value[:_SHOWN]
    text = repr(value if kind is type(value) else kind(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
