"""Contents of a checkpoint of any kind, open for reading: a file, a model in several files, a distributed
checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fastensor.backends import registry
from fastensor.checkpoint.containers import container_at
from fastensor.checkpoint.models.sharded import files_in, located, read_json
from fastensor.checkpoint.reading.lazy import LazyCheckpoint, lazily
from fastensor.checkpoint.tools.catalog import Catalog, Inspection, TensorInfo, refused_globals, ties_in
from fastensor.checkpoint.tools.cataloged import CatalogedFile, open_files
from fastensor.checkpoint.tools.folders import FolderEntry, name_behind, name_in
from fastensor.files.garbage import without_collection
from fastensor.select.transfer import BackendChoice


class OpenCheckpoint(Protocol):
    """A checkpoint of which no tensor has been read yet."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""

    @property
    def others(self) -> Mapping[str, str]:
        """Everything else by name, in words, as far as they are known without reading it."""

    def describe(self) -> Inspection:
        """All that is known without reading a tensor."""

    def in_words(self, name: str) -> str:
        """One of the others in words, read if need be."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the host, compared with its checksum."""


def open_checkpoint(entry: FolderEntry, stack: ExitStack, backend: BackendChoice) -> OpenCheckpoint:
    """Open a checkpoint. Its headers and pickles are compared with their checksums.

    Args:
        entry: a checkpoint, or the index of a model.
        stack: closes it.
        backend: as for :func:`fastensor.load`.

    Raises:
        Exception: as :func:`fastensor.inspect`.
    """
    container = None if entry.kind == "index" else container_at(entry.path)
    if container is not None:
        return container.open_checkpoint(entry.path, stack, backend)
    return _OpenFiles(entry, stack, backend)


@without_collection()
def describe(entry: FolderEntry) -> Inspection:
    """All that is known of a checkpoint without reading a tensor. A model may have more files than may be open: one of
    them is open at a time.

    Raises:
        Exception: as :func:`fastensor.inspect`.
    """
    with ExitStack() as stack:
        if entry.kind == "index":
            return _OpenFiles(entry, stack, registry.AUTO, keep=False).describe()
        return open_checkpoint(entry, stack, registry.AUTO).describe()


class _OpenFiles:
    """A file, or the files of a model. See :class:`OpenCheckpoint`.

    Args:
        entry, stack, backend: as for :func:`open_checkpoint`.
        keep: keep the files open until ``stack`` closes them. If False, each is closed before the next one is opened,
            and no tensor can be read.
    """

    def __init__(self, entry: FolderEntry, stack: ExitStack, backend: BackendChoice, *, keep: bool = True) -> None:
        self._index = Path(str(entry.path)) if entry.kind == "index" else None
        self._about = {} if self._index is None else read_json(self._index)
        files = {entry.path: None} if self._index is None else located(files_in(self._index, self._about))
        self._files: list[CatalogedFile] = []
        for location, expected in files.items():
            with ExitStack() as closing:
                self._files += open_files({location: expected}, stack if keep else closing, verify=True)
        self._stack = stack
        self._backend = backend
        self._readers: dict[str, LazyCheckpoint] = {}
        self._homes: dict[str, CatalogedFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.others: dict[str, str] = {}
        for one in self._files:
            self._add(one, None if self._index is None else name_in(self._index.parent, one.location))

    def _add(self, one: CatalogedFile, shard: str | None) -> None:
        """Add what a file holds, which is that shard of a model, if not None."""
        found = {name: info for name, info in one.catalog.tensors.items() if one.counts(name)}
        self._homes |= dict.fromkeys(found, one)
        if shard is None:
            self.tensors, self.others = found, one.catalog.others
            return
        self.tensors |= {name: replace(info, part=shard) for name, info in found.items()}
        self.others |= {name_behind(shard, name): text for name, text in one.catalog.others.items()}

    def in_words(self, name: str) -> str:
        return self.others[name]

    def read(self, name: str) -> torch.Tensor:
        one = self._homes[name]
        if one.file.where not in self._readers:
            self._readers[one.file.where] = lazily(one.file, one.catalog, self._stack, self._backend)
        return self._readers[one.file.where][name]

    def describe(self) -> Inspection:
        files, catalogs = [one.file for one in self._files], [one.catalog for one in self._files]
        refused = (name for one in catalogs if one.globals for name in refused_globals(one.globals))
        return Inspection(
            path=files[0].where if self._index is None else str(self._index),
            container=catalogs[0].container if self._index is None else "huggingface",
            nbytes=sum(one.nbytes for one in files),
            checked=all(one.checked for one in catalogs),
            tensors=tuple(self.tensors.values()),
            others=self.others,
            metadata=catalogs[0].metadata if self._index is None else _metadata_in(self._about, len(files)),
            refused=tuple(dict.fromkeys(refused)),
            ties=tuple(tuple(group) for one in catalogs for group in ties_in(one.located)),
            memory_bytes=sum(map(_memory_bytes, catalogs)),
        )


def _memory_bytes(catalog: Catalog) -> int:
    storages = {one.part.name: one.part.nbytes for one in catalog.located.values()}
    others = (info.nbytes for name, info in catalog.tensors.items() if name not in catalog.located)
    return sum(storages.values()) + sum(others)


def _metadata_in(index: Mapping[str, Any], files: int) -> dict[str, str]:
    found = index.get("metadata")
    texts = {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}
    return {"files": str(files), **texts}
