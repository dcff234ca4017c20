"""``fastensor.inspect``: the contents of a checkpoint, as a record."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from fastensor.checkpoint.catalog import TensorInfo, overlapping, read_catalog
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import opened
from fastensor.stitch.containers import Container


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    path: str
    container: Container | Literal["dcp"]
    """``dcp`` is a distributed checkpoint, whose parts are files."""
    nbytes: int
    """Size of the file, or of all files."""
    checked: bool
    """Whether the file carries checksums of its tensors. :func:`fastensor.verify` compares them."""
    tensors: tuple[TensorInfo, ...]
    others: Mapping[str, str]
    """Everything that is not a tensor: names, and values in words."""
    metadata: Mapping[str, str]
    """The ``__metadata__`` of a safetensors file, without our checksums. Of a distributed checkpoint, how many files it
    has, and the version and the identity of its save."""
    refused: tuple[str, ...]
    """Classes and functions that the file needs and ``weights_only=True`` refuses. If it refuses the pickle as a whole,
    the reason."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of tensors that share bytes."""

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together. Tied tensors count once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors)


def inspect(path: Location) -> Inspection:
    """List what a checkpoint holds, without reading a tensor.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`; or the
            directory of a checkpoint of ``torch.distributed.checkpoint``.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged, cut off, or not a checkpoint.
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
            refused=_refused(catalog.globals) if catalog.container == "torch" else (),
            ties=tuple(map(tuple, overlapping(catalog.located))),
        )


def _refused(pickled: bytes) -> tuple[str, ...]:
    """The globals of a pickle that torch's restricted unpickler refuses; or why it refuses the pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    try:
        return tuple(torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file)))
    except Exception as error:  # noqa: BLE001  # torch's reader knows fewer pickles than ours
        return (f"the pickle ({error})",)
