"""The contents of a checkpoint and where they are, in one form for all containers. No tensor is read."""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from fastensor.checkpoint.containers import Container, container_in
from fastensor.checkpoint.models.names import nodes
from fastensor.checkpoint.reading.opened import OpenedFile
from fastensor.errors import UnsupportedContentError
from fastensor.files.garbage import without_collection
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import counted, human_size, some_of
from fastensor.stitch.areas import Area, overlapping
from fastensor.stitch.parts import Part
from fastensor.stitch.pickle_records import PickledStorage, PickledTensor, UnknownObject

if TYPE_CHECKING:
    from fastensor.checkpoint.tools.folders import OtherKind

_SHOWN = 60
"""Characters of a value that are shown."""
_SHOWN_NAMES = 5


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
    """Structure of the file. Records take the places of tensors and objects: see
    :mod:`fastensor.stitch.pickle_records`.
    """
    by_identity: Mapping[int, Located] = field(default_factory=dict)
    """The located tensors by the identities of their records in the structure: two may have one name."""
    globals: bytes = b""
    """A pickle that names the same globals as that of the file; empty if there is none. It is not to be run."""
    is_flat: bool = False
    """True if the container holds nothing but one dict of tensors."""

    @property
    def others(self) -> dict[str, str]:
        """The values in words."""
        return {name: in_words(value) for name, value in self.values.items()}


@without_collection()
def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    """Catalog of a checkpoint. No code of it is run, and nothing that it names is imported.

    Args:
        file: the checkpoint.
        verify: whether to compare the header or the pickle with its checksum.

    Raises:
        CorruptCheckpointError: the file is damaged.
        NotACheckpointError: it is something else than a checkpoint.
        UnsupportedContentError: only torch can read the file, and only whole.
    """
    return container_in(file).read_catalog(file, verify=verify)


def refused_globals(pickled: bytes) -> tuple[str, ...]:
    """The globals of a pickle that torch's restricted unpickler refuses; or why it refuses the pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    try:
        return tuple(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file))))
    except Exception as error:  # noqa: BLE001  # torch's reader knows fewer pickles than ours
        return (f"the pickle ({error})",)


def check_root(catalog: Catalog, root: str | None, where: str) -> None:
    """
    Raises:
        UnsupportedContentError: ``root`` names a dict within a file that has none.
    """
    if catalog.is_flat and root is not None:
        raise UnsupportedContentError(
            f"{where}: a {catalog.container} file has no inner dicts, so leave root={root!r} out"
        )


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
        f"choose one of its dicts of tensors with root: {', '.join(roots[:_SHOWN_NAMES])}"
        if roots
        else "it holds no such dict"
    )


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


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    path: str
    container: Container | Literal["dcp", "huggingface", "folder"] | OtherKind
    """``dcp`` is a distributed checkpoint, ``huggingface`` a model in several files: their parts are files. ``folder``
    is any other folder of several checkpoints. In a folder, names stand behind the path of their file
    (``optimizer.bin: state.0.step``), but for those of the distributed checkpoint that it is, or of the model that
    :func:`fastensor.load_sharded` finds there."""
    nbytes: int
    """Size of the file, or of all files."""
    checked: bool
    """True if the file carries checksums of its tensors. :func:`fastensor.verify` compares them."""
    tensors: tuple[TensorInfo, ...]
    others: Mapping[str, str]
    """Everything that is not a tensor: names, and values in words."""
    metadata: Mapping[str, str]
    """The ``__metadata__`` of a safetensors file, without our checksums. Of a model in several files, what its index
    says. Of a distributed checkpoint, how many files it has, and the version and the identity of its save."""
    refused: tuple[str, ...]
    """Classes and functions that the file needs and ``weights_only=True`` refuses. If it refuses the pickle as a whole,
    the reason."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of tensors that share bytes."""
    memory_bytes: int
    """Memory of the loaded tensors: those that share memory count once, views with all that they are views of."""
    files: Mapping[str, Inspection] = field(default_factory=dict)
    """Contents of each file in a folder, by its path in the folder; empty if there is but one. Files that are no
    checkpoints are among them (``text``, ``pickle``, ``link``, ``other``). Of those that can only be loaded whole,
    ``metadata`` says so."""

    __repr__ = record_repr

    def __str__(self) -> str:
        """Summary for people, in a few lines; ``fastensor inspect`` shows all of it."""
        checked = "with checksums" if self.checked else "without checksums"
        lines = [
            f"{without_secrets(self.path)}: {self.container}, {human_size(self.nbytes)}, {checked}",
            f"{counted(len(self.tensors), 'tensors')} of {human_size(self.tensor_bytes)}, "
            f"{human_size(self.memory_bytes)} in memory; {counted(len(self.others), 'other values')}",
        ]
        if self.files:
            lines.append(f"{counted(len(self.files), 'files')}: {some_of([*self.files], _SHOWN_NAMES)}")
        if self.refused:
            lines.append(f"weights_only=True refuses: {some_of(self.refused, _SHOWN_NAMES)}")
        return "\n".join(lines)

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together. Tied tensors count once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors)
