"""Settings of a conversion."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.writing.save import SavedContainer, choose_container
from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import as_nbytes, check_flags
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.safetensors import with_format

WrittenContainer: TypeAlias = SavedContainer | Literal["dcp", "huggingface"]
MIN_MEMORY_NBYTES = 1 << 20
CAST_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes between which tensors are cast. Others are kept: integers, and floats of 8 bits, which have scales."""


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """Keywords of :func:`fastensor.convert`."""

    root: str | None
    metadata: Mapping[str, str] | None
    checksums: bool
    copy_ties: bool
    container: WrittenContainer | None
    verify: bool
    backend: BackendChoice
    durable: bool
    shard_nbytes: int
    memory_nbytes: int | None
    dtype: torch.dtype | None
    rename: Mapping[str, str]
    drop: bool

    def checked(self, target: Location) -> ConvertSettings:
        """The settings, with the container of the target if they name none. Refuses those that mean nothing, or do not
        fit each other or the target.

        Raises:
            ValueError, UnsupportedContentError: the message says which.
        """
        as_nbytes(self.shard_nbytes, "shard_nbytes", at_least=1)
        if self.memory_nbytes is not None:
            as_nbytes(self.memory_nbytes, "memory_nbytes", at_least=MIN_MEMORY_NBYTES)
        check_choice(self.backend)
        check_flags(
            checksums=self.checksums, copy_ties=self.copy_ties, verify=self.verify, durable=self.durable, drop=self.drop
        )
        if self.dtype is not None and self.dtype not in CAST_DTYPES:
            raise ValueError(f"dtype is one of {', '.join(map(str, CAST_DTYPES))}, found {self.dtype}")
        if self.container == "dcp" or self.container == "huggingface":
            self._check_directory(target)
            return self
        chosen = choose_container(self.container, name_of(target), self.metadata, self.checksums)
        return replace(self, container=chosen)

    def _check_directory(self, target: Location) -> None:
        if not isinstance(target, str | os.PathLike):
            raise UnsupportedContentError(f"{name_of(target)}: expected the path of a directory, found an open file")
        if self.container == "dcp":
            if self.metadata is not None or not self.checksums:
                raise ValueError("metadata and checksums=False are for safetensors, not for a distributed checkpoint")
            if self.dtype is not None or self.rename:
                raise ValueError(
                    "dtype and rename are for files and models in several files, not for a distributed checkpoint: "
                    "convert to a file first, and that to a distributed checkpoint"
                )
        elif isinstance(locate(target), RemotePath):
            raise UnsupportedContentError(
                f"{name_of(target)}: a model in several files can only be written into a directory of this machine, "
                f"found a URL; convert into a directory, and copy it"
            )

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that tensors of a dtype get."""
        return self.dtype if self.dtype is not None and dtype in CAST_DTYPES else dtype

    def texts(self, found: Mapping[str, str]) -> Mapping[str, str] | None:
        """The metadata to write to safetensors files. Those of a model name a format; to others, the writer adds it,
        with the checksums.

        Args:
            found: the metadata of the source, which are kept if none are given.
        """
        texts = (found or None) if self.metadata is None else self.metadata
        return with_format(texts or {}) if self.container == "huggingface" else texts
