"""``fastensor.inspect``: what a checkpoint holds, as a record."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from fastensor.checkpoint.catalog import TensorInfo, overlapping, read_catalog
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.opened import opened
from fastensor.stitch.containers import Container


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds."""

    path: str
    container: Container
    nbytes: int
    """Size of the file."""
    checked: bool
    """Whether it carries checksums of its tensors. :func:`fastensor.verify` compares them."""
    tensors: tuple[TensorInfo, ...]
    others: Mapping[str, str]
    """What it holds beside tensors: names, and values in words."""
    metadata: Mapping[str, str]
    """Of a safetensors file."""
    refused: tuple[str, ...]
    """Classes and functions that it needs and ``weights_only=True`` refuses. The reason, if it refuses the pickle."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of tensors that share bytes."""

    @property
    def tensor_nbytes(self) -> int:
        """Of all tensors together; ties are counted each."""
        return sum(tensor.nbytes for tensor in self.tensors)


def inspect(path: Location) -> Inspection:
    """Find out what a checkpoint holds, without reading a tensor.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`.

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
    """What torch's restricted unpickler refuses of a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    try:
        return tuple(torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file)))
    except Exception as error:  # noqa: BLE001  # torch's reader knows fewer pickles than ours
        return (f"the pickle ({error})",)
