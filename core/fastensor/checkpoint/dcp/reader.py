"""The storage reader for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fastensor.backends import registry
from fastensor.checkpoint.dcp.items import Item, ItemReader, items_by_file, unpickled
from fastensor.checkpoint.dcp.metadata import check_planner_data, check_seal, chunks_in, read_metadata
from fastensor.checkpoint.dcp.storage import InDirectory
from fastensor.checkpoint.directories import METADATA_NAME
from fastensor.checkpoint.models.ties import sharing
from fastensor.checkpoint.reading.opened import ReadOptions
from fastensor.files.arguments import check_flags, checks_keywords
from fastensor.files.shown import shown
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.safetensors import has_own_memory

_Requests: TypeAlias = dict[tuple[str, tuple[int, ...]], list[ReadItem]]
"""Requests for each item, by its name and the offset of its chunk."""


@checks_keywords
class FastensorStorageReader(InDirectory, FileSystemReader):
    """Reads a distributed checkpoint: takes the place of torch's ``FileSystemReader`` and ``FsspecReader``.

    It reads what :class:`FastensorStorageWriter` or torch's writers have written in the format
    ``SerializationFormat.TORCH_SAVE``, with any planner. Every item that a load needs is compared with the CRC32 that
    the metadata has for it; in files of torch's writers, with those of the item's own records.

    Args:
        path: the directory, or a URL that ``fsspec`` knows.
        _extension_registry: as for torch's reader.
        verify: whether items are compared with their CRC32s.
        backend: as for :func:`fastensor.load`.
        weights_only: whether ``.metadata`` is read without running code that it names. Objects other than tensors are
            unpickled by the planner: torch's own runs what they name.
        storage_options: what ``fsspec`` needs besides the URL.

    Raises:
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        UnknownBackendError: no backend has that name.

    A tensor is read into its place if the place is contiguous, of the dtype that was saved, and takes the whole item.
    Otherwise memory beyond the state is one item. After a failure, places may hold values of the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        verify: bool = True,
        backend: BackendChoice = registry.AUTO,
        weights_only: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice(backend)
        check_flags(verify=verify, weights_only=weights_only)
        super().__init__(os.fspath(path), _extension_registry)
        self.verify = verify
        self.backend = backend
        self.weights_only = weights_only
        self._storage_options = storage_options
        self._metadata: Metadata | None = None
        self._move_to(path)

    @shown
    def __repr__(self) -> str:
        return f" of {self._directory.path!r}: verify {self.verify}, backend {self.backend!r}"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of all ranks, or those of ``rank`` if ranks have saved without collectives.

        Raises:
            FileNotFoundError: there is no complete checkpoint in the directory.
            CorruptCheckpointError: the file is damaged.
            UnsafeCheckpointError: the file needs ``weights_only=False``.
        """
        rank = kwargs.get("rank")
        name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
        where = self._directory.name_of(name)
        data = self._directory.read(name)
        if self.weights_only:
            metadata = read_metadata(data, where=where)
            check_planner_data(metadata, where)
        else:
            check_seal(data, where)
            metadata = cast(Metadata, pickle.loads(data))  # the user trusts the file
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata for :meth:`read_data`."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a plan, file by file, from front to back. Those of tied tensors come last, in the order of
        torch's reader, so that the same one of two values stays.

        Raises:
            CorruptCheckpointError: an item is damaged; the message names it.
            UnsupportedContentError: a file was written with ``SerializationFormat.SAFETENSORS``.
            CheckpointReadError: a file is missing, or the operating system could not read it.
        """
        chunks = {} if self._metadata is None else chunks_in(self._metadata)
        requests: _Requests = {}
        items: list[Item] = []
        for request in plan.items:
            index = request.storage_index
            key = index.fqn, tuple(index.offset or ())
            if key not in requests:
                requests[key] = []
                items.append(Item.of(index, self.storage_data[index], chunks.get((index.fqn, index.offset))))
            requests[key].append(request)
        tied = _tied_in(planner)
        for name, ordered in items_by_file(item for item in items if item.fqn not in tied).items():
            self._read_file(name, ordered, requests, planner)
        for item in _by_first_use_of_file(items):
            if item.fqn in tied:
                self._read_file(item.file, [item], requests, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, items: list[Item], requests: _Requests, planner: LoadPlanner) -> None:
        options = ReadOptions(self.backend)
        with self._directory.open(name) as file, ItemReader(file, items, options, verify=self.verify) as reader:
            for item in items:
                self._read_item(reader, item, requests[item.fqn, item.chunk_offset], planner)

    def _read_item(self, reader: ItemReader, item: Item, requests: list[ReadItem], planner: LoadPlanner) -> None:
        if requests[0].type == LoadItemType.BYTE_IO:
            data = self._transformed(item, requests[0], reader.read(item))
            for request in requests:
                planner.load_bytes(request, io.BytesIO(data))
            return
        if item.transforms:
            data = self._transformed(item, requests[0], reader.read(item))
            tensor = unpickled(io.BytesIO(data), f"{reader.where}: {item.title}", verify=self.verify)
        else:
            targets = [planner.resolve_tensor(request).detach() for request in requests]
            request = requests[0]
            takes_all = not any(request.storage_offsets) and tuple(request.lengths) == item.shape
            if len(requests) == 1 and takes_all and reader.read_into(item, targets[0]):
                planner.commit_tensor(request, targets[0])
                return
            tensor = reader.read_tensor(item)
        for request in requests:
            found = narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
            target = planner.resolve_tensor(request).detach()
            if target.size() != found.size():
                raise ValueError(
                    f"{item.fqn!r}: the state has a tensor of shape {tuple(target.size())} for a part of shape "
                    f"{tuple(found.size())}; load into a state of the same shapes"
                )
            target.copy_(found)
            planner.commit_tensor(request, target)

    def _transformed(self, item: Item, request: ReadItem, data: bytes) -> bytes:
        """The bytes of an item as they were before the writer's extensions."""
        if not item.transforms:
            return data
        stream = self.transforms.transform_load_stream(request, item.transforms, io.BytesIO(data))
        return stream.read(-1)


def _tied_in(planner: LoadPlanner) -> set[str]:
    """The names of the tensors that share memory with others, of the state that torch's planners fill."""
    state = getattr(planner, "state_dict", None)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)} if state else {}
    local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors.items()}
    # others, such as ShardedTensor, may not even say how many elements they have
    shown = {name: one for name, one in local.items() if has_own_memory(one)}
    return {name for names in sharing(shown) for name in names}


def _by_first_use_of_file(items: Iterable[Item]) -> list[Item]:
    """The items of a plan in the order in which torch reads them."""
    files: dict[str, list[Item]] = {}
    for item in items:
        files.setdefault(item.file, []).append(item)
    return [item for of_file in files.values() for item in of_file]
