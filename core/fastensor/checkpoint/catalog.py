"""The contents of a checkpoint and where they are, in one form for all containers. No tensor is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fastensor.checkpoint.archive import read_archive, read_pickle
from fastensor.checkpoint.names import nodes, walk
from fastensor.checkpoint.opened import OpenedFile, container_of
from fastensor.checkpoint.safetensors_file import read_header
from fastensor.errors import CorruptCheckpointError, UnsupportedContentError
from fastensor.files.words import human_size
from fastensor.stitch.areas import Area, overlapping
from fastensor.stitch.containers import Container
from fastensor.stitch.parts import Part
from fastensor.stitch.pickle_records import PickledStorage, PickledTensor, UnknownObject
from fastensor.stitch.safetensors import torch_dtype
from fastensor.stitch.shape import row_major
from fastensor.stitch.torch_pickle import read_program

_SHOWN = 60
"""How many characters of a value are shown."""
_SHOWN_ROOTS = 5


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of one tensor of a checkpoint."""

    name: str
    """The way to the tensor, as for ``keys`` of :func:`fastensor.load`. A second one of that name has ``#2`` added."""
    kind: str
    """``Tensor``, ``Parameter``, the name of a subclass; ``sparse``, ``quantized``, ``meta``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: str
    """The part of the file that holds its bytes: a record, or the tensor itself. Tied tensors have the same part. Empty
    for a tensor that is made of several others, and for one that the file has no bytes of."""
    crc32: int | None
    """The CRC32 of that part; None if the file carries none."""

    def __str__(self) -> str:
        dtype, what = str(self.dtype).removeprefix("torch."), "" if self.kind == "Tensor" else f"{self.kind} of "
        return f"{self.name}: {what}{dtype} {self.shape}, {human_size(self.nbytes)}"

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Located(NamedTuple):
    """A dense tensor, and where its elements are."""

    info: TensorInfo
    part: Part
    offset: int
    """Offset in the part, in elements."""
    stride: tuple[int, ...]

    def on_meta(self) -> torch.Tensor:
        """A tensor of the same geometry, without memory. Its storage is the part."""
        numel = self.part.nbytes // self.info.dtype.itemsize
        base = torch.empty(numel, dtype=self.info.dtype, device="meta")
        return base.as_strided(self.info.shape, self.stride, self.offset)

    @property
    def span(self) -> tuple[int, int]:
        """Begin and end of its bytes in the part."""
        steps = sum((size - 1) * step for size, step in zip(self.info.shape, self.stride, strict=True))
        itemsize = self.info.dtype.itemsize
        return self.offset * itemsize, (self.offset + steps + 1) * itemsize if self.info.nbytes else 0


@dataclass(frozen=True, slots=True)
class Catalog:
    """The contents of a checkpoint."""

    container: Container
    tensors: Mapping[str, TensorInfo]
    located: Mapping[str, Located]
    """The tensors that are dense and plain."""
    values: Mapping[str, Any]
    """Everything that is not a tensor. Objects that are not plain are records: they are not made."""
    metadata: Mapping[str, str]
    """The ``__metadata__`` of a safetensors file, without our checksums."""
    checked: bool
    """True if the file carries checksums."""
    unchecked: str = ""
    """Reason for which ``checked`` is False, if there is more to say than that the file carries no checksums."""
    structure: Any = None
    """What the pickle of a torch file makes: see :mod:`fastensor.stitch.pickle_records`."""
    by_identity: Mapping[int, Located] = field(default_factory=dict)
    """The located tensors by the identities of their records in the structure: two may have one name."""
    globals: bytes = b""
    """A pickle that names the same globals as the pickle of a torch file. It is not to be run."""

    @property
    def others(self) -> dict[str, str]:
        """The values in words."""
        return {name: in_words(value) for name, value in self.values.items()}


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    """Read what a checkpoint holds. No code of it is run, and nothing that it names is imported.

    Args:
        file: the checkpoint.
        verify: whether to compare the header or the pickle with its checksum.

    Raises:
        CorruptCheckpointError: the file is damaged.
        NotACheckpointError: it is something else than a checkpoint.
        UnsupportedContentError: only torch can read the file, and only whole.
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
    program = read_program(read_pickle(file, archive, verify=verify), where=file.where)
    tensors: dict[str, TensorInfo] = {}
    located: dict[str, Located] = {}
    values: dict[str, Any] = {}
    by_identity: dict[int, Located] = {}
    seen: dict[str, int] = {}
    is_swapped = archive.swapped
    for path, value in walk(program.structure, file.where):
        seen[path] = count = seen.get(path, 0) + 1
        name = path if count == 1 else f"{path}#{count}"
        if not isinstance(value, PickledTensor):
            values[name] = value
            continue
        part = _part_of(value, name, archive.storages, file.where)
        crc32 = part.crc32 if part else None
        info = TensorInfo(name, value.kind, value.dtype, value.shape, part.name if part else "", crc32)
        tensors[name] = info
        if part is not None and value.plain and not is_swapped:
            located[name] = by_identity[id(value)] = Located(info, part, value.offset, value.stride)
    return Catalog(
        "torch",
        tensors,
        located,
        values,
        {},
        archive.checked,
        "",
        program.structure,
        by_identity,
        program.naming_globals(),
    )


def check_root(catalog: Catalog, root: str | None, where: str) -> None:
    """
    Raises:
        UnsupportedContentError: ``root`` names a dict within a safetensors file, which has none.
    """
    if catalog.container == "safetensors" and root is not None:
        raise UnsupportedContentError(f"{where}: a safetensors file has no inner dicts, so leave root={root!r} out")


def dict_in(tree: Any, root: str | None, where: str) -> dict[Any, Any]:
    """The dict called ``root`` in what a pickle makes, loaded or only read; all of it if that is None.

    Raises:
        UnsupportedContentError: there is none.
    """
    branch = tree if root is None else branches_of(tree, where).get(root)
    if not isinstance(branch, dict):
        what = "a dict of tensors" if root is None else f"a dict of tensors called {root!r}"
        advice = roots_in_words(branches_of(tree, where))
        raise UnsupportedContentError(f"{where}: expected {what}, found none; {advice}")
    return branch


def branches_of(tree: Any, where: str) -> dict[str, dict[Any, Any]]:
    """The dicts in a tree by their names. The tree itself is none of them."""
    return {node.name: node.value for node in nodes(tree, where) if isinstance(node.value, dict)}


def roots_in_words(branches: Mapping[str, Any]) -> str:
    """The end of a message: which of some dicts hold nothing but tensors.

    Args:
        branches: dicts by their names, of a pickle that was loaded or only read.
    """
    roots = [
        repr(name)
        for name, value in branches.items()
        if value and all(isinstance(one, PickledTensor | torch.Tensor) for one in value.values())
    ]
    return (
        f"choose one of its dicts of tensors with root: {', '.join(roots[:_SHOWN_ROOTS])}"
        if roots
        else "it holds no such dict"
    )


_EMPTY = Part("", 0, None, 0, 0)


def _part_of(tensor: PickledTensor, name: str, parts: Mapping[str, Part], where: str) -> Part | None:
    """The record that a tensor lies in; None if the tensor is not a view of one storage.

    Raises:
        CorruptCheckpointError: there is no such record, or the tensor reaches beyond it.
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
    """How many elements a tensor has, and how many its storage has from its first to its last one."""
    return torch.Size(shape).numel(), sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def ties_in(tensors: Mapping[str, Located]) -> list[list[str]]:
    """Groups of names of tensors that share bytes."""
    tenants = Counter([one.part.name for one in tensors.values() if one.part.nbytes])
    areas = {
        name: Area(one.part.name, *one.span)
        for name, one in tensors.items()
        if tenants[one.part.name] > 1 and one.info.nbytes
    }
    return [sorted(group) for group in overlapping(areas)]


def in_words(value: Any) -> str:
    """A short text for a value. Of a container, only the size is shown: it may be its own element."""
    if isinstance(value, UnknownObject):
        return f"<{value.name[:_SHOWN]}>"
    if isinstance(value, PickledStorage):
        return f"<storage of {value.dtype}>"
    if isinstance(value, dict | list | tuple | set | frozenset) and value:
        return f"<{type(value).__name__} of {len(value)}>"
    if isinstance(value, int) and value.bit_length() > _SHOWN:
        return f"<int of {value.bit_length()} bits>"
    if isinstance(value, str | bytes | bytearray):
        value = value[:_SHOWN]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
