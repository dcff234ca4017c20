"""``fastensor.inspect``: the contents of a checkpoint, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from fastensor.checkpoint.catalog import Catalog, TensorInfo, read_catalog, ties_in
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.foreign_code import refused_globals
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import opened
from fastensor.checkpoint.sharded import check_holds, files_of, is_index, read_json, weights_at
from fastensor.files.arguments import checks_keywords
from fastensor.stitch.containers import Container


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    path: str
    container: Container | Literal["dcp", "huggingface"]
    """``dcp`` is a distributed checkpoint, ``huggingface`` a model in several files: their parts are files."""
    nbytes: int
    """Size of the file, or of all files."""
    checked: bool
    """Whether the file carries checksums of its tensors. :func:`fastensor.verify` compares them."""
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
    """What the tensors take when they are loaded: those that share memory once, and of views all that they are views
    of."""

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together. Tied tensors count once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors)


@checks_keywords
def inspect(path: Location) -> Inspection:
    """List what a checkpoint holds, without reading a tensor.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`; or
            ``*.index.json`` of a model in several files, or its folder; or the directory of a checkpoint of
            ``torch.distributed.checkpoint``.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged or cut off; or not that of the index.
        NotACheckpointError: the file is something else than a checkpoint; the message says what.
        UnsupportedContentError: the file can only be loaded whole (files of torch before 1.6, TorchScript).
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.

    No code of the file is run and none of its classes is imported: this is safe for any file.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> _ = fastensor.save({"weight": torch.ones(5, 2), "epoch": 3}, path)
    >>> found = fastensor.inspect(path)
    >>> [(tensor.name, tensor.shape, tensor.nbytes) for tensor in found.tensors], found.others, found.checked
    ([('weight', (5, 2), 40)], {'epoch': '3'}, True)
    """
    if metadata_names(path):
        from fastensor.checkpoint.dcp.catalog import inspect_directory  # loads torch.distributed.checkpoint

        return inspect_directory(cast(str, path))
    found = weights_at(path)
    if found is not None and is_index(found):
        return _inspect_sharded(found)
    return _inspect_file(path if found is None else found)


def _inspect_file(path: Location) -> Inspection:
    with opened(path) as file:
        catalog = read_catalog(file, verify=True)
        return Inspection(
            path=file.where,
            container=catalog.container,
            nbytes=file.nbytes,
            checked=catalog.checked,
            tensors=tuple(catalog.tensors.values()),
            others=catalog.others,
            metadata=catalog.metadata,
            refused=refused_globals(catalog.globals) if catalog.container == "torch" else (),
            ties=tuple(map(tuple, ties_in(catalog.located))),
            memory_bytes=_memory_bytes(catalog),
        )


def _memory_bytes(catalog: Catalog) -> int:
    storages = {one.part.name: one.part.nbytes for one in catalog.located.values()}
    others = (info.nbytes for name, info in catalog.tensors.items() if name not in catalog.located)
    return sum(storages.values()) + sum(others)


def _inspect_sharded(index: Path) -> Inspection:
    """The contents of a model in several files.

    Raises:
        CorruptCheckpointError: a file does not hold what the index expects there.
    """
    expected_of = files_of(index)
    files = {path: _inspect_file(path) for path in expected_of}
    tensors: list[TensorInfo] = []
    others: dict[str, str] = {}
    for path, expected in expected_of.items():
        found = {tensor.name: tensor for tensor in files[path].tensors}
        check_holds(str(path), found, expected)
        tensors += [replace(one, part=path.name) for one in found.values() if one.name in expected]
        others |= {f"{path.name}: {name}": text for name, text in files[path].others.items()}
    return Inspection(
        path=str(index),
        container="huggingface",
        nbytes=sum(one.nbytes for one in files.values()),
        checked=all(one.checked for one in files.values()),
        tensors=tuple(tensors),
        others=others,
        metadata={"files": str(len(files)), **_metadata_of(index)},
        refused=tuple(dict.fromkeys(name for one in files.values() for name in one.refused)),
        ties=tuple(group for one in files.values() for group in one.ties),
        memory_bytes=sum(one.memory_bytes for one in files.values()),
    )


def _metadata_of(index: Path) -> dict[str, str]:
    found = read_json(index).get("metadata")
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}
