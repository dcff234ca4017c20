"""The storage writer for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from isal import isal_zlib
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    SerializationFormat,
    _split_by_size_and_type,
    _StorageInfo,
    _StoragePrefix,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastensor.backends import registry, stream
from fastensor.backends.registry import announce
from fastensor.backends.threads import run_each
from fastensor.checkpoint.dcp.metadata import file_names, sealed
from fastensor.checkpoint.dcp.staging import OtherStructureError, staged_again
from fastensor.checkpoint.dcp.storage import Directory, InDirectory
from fastensor.checkpoint.directories import METADATA_NAME, SHARD_NAMES, is_metadata_name
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.checkpoint.writing.outputs import Output, StreamOutput
from fastensor.checkpoint.writing.save_transaction import (
    ShareUnchanged,
    check_share_unchanged,
    write_by_backend,
    write_contents,
)
from fastensor.checkpoint.writing.shared_blocks import share_blocks
from fastensor.errors import CheckpointWriteError, UnsupportedContentError
from fastensor.files import posix
from fastensor.files.arguments import check_flags, check_whole, checks_keywords
from fastensor.files.os_errors import kept_at, write_errors
from fastensor.files.shown import shown
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch import safetensors, shards
from fastensor.stitch.plain_tensors import NO_VALUES, skips_values
from fastensor.stitch.source import Plan

_FAILED = "the save failed"
_TOKEN_NBYTES = 4
_OUR_NAME = re.compile(r"__\d+_[0-9a-f]{16}_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save that this rank coordinates and has not completed yet."""

    directory: Directory
    metadata_name: str
    token: str
    """In the names of all files of the save."""


class _Staged(dict[str, Any]):
    """A staged state dict. It is alive as long as a save uses it."""


@checks_keywords
class FastensorStorageWriter(InDirectory, FileSystemWriter):
    """Writes a distributed checkpoint: takes the place of torch's ``FileSystemWriter`` and ``FsspecWriter``.

    The files are those that torch's writer makes, and torch's ``FileSystemReader`` reads them. What differs:

    - The files are moved by the backends of Fastensor, and the metadata has a CRC32 for each item, which
      :class:`FastensorStorageReader` and ``fastensor verify`` compare.
    - A save into a directory that holds a checkpoint replaces the checkpoint at once, and not file by file: files of
      each save have names of their own, ``.metadata`` takes the place of the old one when all ranks have written, and
      the old files are removed afterwards. A process that is killed at any instant leaves the old checkpoint or the
      new one, whole.
    - With ``sync_files``, a checkpoint whose save has returned survives a power failure: files and directories are
      synced before ``.metadata`` appears, and ``.metadata`` afterwards.

    Args:
        path: the directory, which is created; or a URL that ``fsspec`` knows.
        single_file_per_rank: one file per rank and thread; else one file per tensor.
        sync_files: sync files and directories.
        thread_count: how many files each rank writes at the same time. Each file is written by several threads anyway,
            so 1 is best on most disks.
        per_thread_copy_ahead: accepted as torch's writer does. Copies from devices overlap with writing in any case.
        cache_staged_state_dict: whether ``dcp.async_save`` without a stager of its own copies the state to the same
            memory each time. A save that begins while an earlier one still uses that memory gets memory of its own.
        overwrite: whether a checkpoint in the directory may be replaced.
        _extensions: as for torch's writer. Items are transformed one at a time, in memory.
        serialization_format: as for torch's writer. Files of ``SAFETENSORS`` hold tensors only, and no reader of
            ``torch.distributed.checkpoint`` reads them through ``.metadata``.
        backend: as for :func:`fastensor.save`.
        storage_options: what ``fsspec`` needs besides the URL.
        share_unchanged: as for :func:`fastensor.save`, for saves in the main thread. Others, as those of
            ``dcp.async_save``, write everything: torch does not count the changes of memory for staging.

    Raises:
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        UnknownBackendError: no backend has that name.

    Use a writer for one save at a time, except that ``dcp.async_save`` may stage a state while the one before is
    written. A save that is still being written when another one begins fails, and changes no checkpoint. A writer may
    be pickled, for saves in another process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = True,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        backend: BackendChoice = registry.AUTO,
        storage_options: Mapping[str, Any] | None = None,
        share_unchanged: ShareUnchanged = True,
    ) -> None:
        check_choice(backend)
        check_share_unchanged(share_unchanged)
        check_flags(
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        check_whole(thread_count, "thread_count", at_least=1)
        super().__init__(
            os.fspath(path),
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            serialization_format,
        )
        self.backend = backend
        self.share_unchanged = share_unchanged
        self._storage_options = storage_options
        self._begun: _Begun | None = None
        self._shared: list[int] = []
        """Bytes that each file of the latest save shares."""
        self._thread = 0
        """The thread of the save that began last. Each save calls the writer from one thread."""
        self._stager: StateDictStager | None = None
        self._copies: dict[str, Any] | None = None
        """Copies that were staged last."""
        self._in_use: weakref.ref[_Staged] | None = None
        """The state dict that was staged last."""
        self._move_to(path)

    @shown
    def __repr__(self) -> str:
        return f" of {self._directory.path!r}: backend {self.backend!r}"

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the latest save that this rank has not written, because they have not changed."""
        return sum(self._shared)

    def _move_to(self, path: str | os.PathLike[str]) -> None:
        super()._move_to(path)
        self._replaced: set[str] = set()
        """Files of replaced checkpoints in the directory that have not been removed yet."""

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process: memory for staging, blocks to be shared, and connections, which are
        opened anew."""
        state = dict(vars(self))
        del state["fs"], state["_directory"]
        state.update(_stager=None, _copies=None, _in_use=None, _begun=None, share_unchanged=False)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._move_to(cast(str, self.path))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to memory of the host, so that training may change it while it is saved."""
        if not self.cache_staged_state_dict:
            return super().stage(state_dict)
        self.per_thread_copy_ahead = 0
        if self._in_use is not None and self._in_use() is not None:
            self.close()
        staged = _Staged(self._copy_of(dict(state_dict)))
        self._copies, self._in_use = dict(staged), weakref.ref(staged)
        return staged

    def _copy_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy in the memory of the last copy, if there is one."""
        if self._copies is not None:
            with suppress(OtherStructureError):
                return cast(dict[str, Any], staged_again(self._copies, state_dict))
        if self._stager is None:
            self._stager = StateDictStager(pin_memory=torch.cuda.is_available(), share_memory=False)
        return cast(dict[str, Any], self._stager.stage(state_dict, non_blocking=False))

    def close(self) -> None:
        """Give back the memory for staging. The writer can still be used."""
        self._stager = self._in_use = self._copies = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory. Refuse to replace a checkpoint unless ``overwrite``.

        Raises:
            RuntimeError: the directory holds a checkpoint, and ``overwrite`` is False.
            UnsupportedContentError: this rank saves without the others, and the directory holds a checkpoint of all
                ranks, which every load would take instead.
        """
        self._thread = threading.get_ident()
        self._remove_failed()
        self._directory.make()
        if self._is_alone and self.fs.exists(self._get_metadata_path()):
            raise UnsupportedContentError(
                f"{self._directory.path}: expected no {METADATA_NAME} in the directory of a save with "
                f"use_collectives=False, found one: it is of a save of all ranks, and every load would read that "
                f"instead; choose another directory, or remove that checkpoint"
            )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of each rank, so that this rank can remove them if the save fails."""
        token = secrets.token_hex(_TOKEN_NBYTES)
        self._begun = _Begun(self._directory, self._metadata_name, token)
        return [
            replace(plan, storage_data=_StoragePrefix(f"{plan.storage_data.prefix}{token}"))
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank. With ``sync_files``, they and their names are durable afterwards.

        Raises:
            CheckpointWriteError: a file could not be written. What the directory held before is kept.
            StateChangedError: a tensor was resized meanwhile.
            RuntimeError: another save has begun with this writer.
        """
        directory = self._directory
        files = self._files(plan)
        self._shared = []
        wait_for_space()
        write = partial(self._write_file, planner)
        try:
            written = run_each(write, files, most=self.thread_count)
            if self.sync_files:
                with write_errors(self._directory.path, _FAILED, self._kept):
                    self._directory.sync()
            self._check_nothing_has_begun()
        except BaseException as error:
            try:
                directory.remove(name for name, _ in files)
            except CheckpointWriteError as another:
                error.add_note(str(another))
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint the one that the directory holds, and remove the files of the one before.

        Raises:
            CheckpointWriteError: the metadata could not be written, or an old file could not be removed; the message
                says which checkpoint is there.
            RuntimeError: another save has begun with this writer. What the directory held before is kept.
        """
        self._check_nothing_has_begun()
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        metadata.storage_meta = self.storage_meta()
        self._replaced |= self._existing()
        data = sealed(metadata)
        with self._created(self._metadata_name, durable=self.sync_files) as output:
            output.begin(0)  # space is reserved in whole blocks, which a backend would cut off
            output.write_at(memoryview(data), 0)
        self._begun = None
        self._remove_old({self._metadata_name, *file_names(metadata)})

    @property
    def _is_alone(self) -> bool:
        """True if this rank saves without the others, and has metadata of its own."""
        return not self.use_collectives and self.rank is not None

    @property
    def _metadata_name(self) -> str:
        return f"__{self.rank}{METADATA_NAME}" if self._is_alone else METADATA_NAME

    def _files(self, plan: SavePlan) -> list[tuple[str, list[WriteItem]]]:
        """The names of the files that this rank writes, and the items of each."""
        if not plan.items:
            return []
        if self.single_file_per_rank:
            split = _split_by_size_and_type(self.thread_count, list(plan.items))
        else:
            split = [[item] for item in plan.items]
        # a planner that caches plans may give a prefix, and the token in it, to several saves
        prefix = f"{plan.storage_data.prefix}{secrets.token_hex(_TOKEN_NBYTES)}"
        return [(f"{prefix}_{number}{DEFAULT_SUFFIX}", items) for number, items in enumerate(filter(None, split))]

    def _write_file(self, planner: SavePlanner, file: tuple[str, list[WriteItem]]) -> list[WriteResult]:
        name, items = file
        if self.transforms.extensions:
            return self._write_transformed(planner, name, items)
        ordered = [item for item in items if item.type == WriteItemType.BYTE_IO]
        ordered += [item for item in items if item.type != WriteItemType.BYTE_IO]
        if self.serialization_format == SerializationFormat.SAFETENSORS:
            return self._write_safetensors(planner, name, ordered)
        if skips_values():
            announce("stitching", NO_VALUES)
        plan = shards.plan(_content(planner, item) for item in ordered)
        names = {found.storage: item.index.fqn for item, found in zip(ordered, plan.items, strict=True)}
        checksums = self._write_plan(name, plan, names.__getitem__)
        results = []
        for item, found in zip(ordered, plan.items, strict=True):
            crc32 = found.crc32(checksums) if checksums is not None else None
            results.append(_result(item, name, found.offset, found.nbytes, crc32))
        return results

    def _kept(self) -> str:
        """Words for the checkpoint that the save was to replace, before its metadata are replaced."""
        return kept_at(self._directory.name_of(self._metadata_name))

    @contextmanager
    def _created(self, name: str, *, durable: bool = False) -> Iterator[Output]:
        """A file, which gets its name at the end of the block, durably on request."""
        where = self._directory.name_of(name)
        with write_errors(where, _FAILED, self._kept):
            output = self._directory.create(name)
        left = output.left if name == self._metadata_name else self._kept
        with write_errors(where, _FAILED, left), closing(output):
            yield output
            output.end()
            if self.sync_files and output.is_synced:
                posix.sync_file(output.fd)
            output.replace(durable=durable)

    def _write_plan(self, name: str, plan: Plan, name_of: Callable[[int], str] | None = None) -> Sequence[int] | None:
        """Write a planned file. Returns the CRC32s of its storages; None if they are not known.

        Args:
            name: of the file.
            plan: of the file.
            name_of: as for :func:`~fastensor.checkpoint.writing.shared_blocks.share_blocks`.
        """
        write = partial(write_by_backend, backend=self.backend, durable=self.sync_files)
        with self._created(name) as output:
            if isinstance(output, StreamOutput):
                output.begin(plan.nbytes)
                return stream.write_stream(plan, output.write)
            how = self.share_unchanged if self._thread == threading.main_thread().ident else False
            rest, blocks = share_blocks(plan, output, how, name_of)
            with blocks.writing() as new:
                transfer, checksums = write_contents(rest, new, [], write)
        transfer.done(time.perf_counter() - transfer.started)
        self._shared.append(blocks.nbytes)
        checksums = blocks.remember(checksums)
        return checksums if len(checksums) == len(plan.storages) else None

    def _write_safetensors(self, planner: SavePlanner, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Write the file that torch's writer makes of ``safetensors``. Its items have no offsets."""
        tensors: dict[str, torch.Tensor] = {}
        offsets = {}
        for item in items:
            content = _content(planner, item)
            if not isinstance(content, torch.Tensor) or item.tensor_data is None:
                raise UnsupportedContentError(
                    f"a file of safetensors holds tensors only, found {item.index.fqn!r}, which is another object; "
                    f"save it apart, or with SerializationFormat.TORCH_SAVE"
                )
            tensors[item.index.fqn] = content
            offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        metadata = {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
        self._write_plan(name, safetensors.plan(tensors, metadata=metadata, checksums=True))
        return [_result(item, name, 0, tensors[item.index.fqn].nbytes, None) for item in items]

    def _write_transformed(self, planner: SavePlanner, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Write a file whose items pass through extensions, by torch's own function, one item at a time."""
        with self._created(name) as output:
            output.begin(0)
            return self._transform_all(planner, name, items, output)

    def _transform_all(
        self, planner: SavePlanner, name: str, items: Sequence[WriteItem], output: Output
    ) -> list[WriteResult]:
        results = []
        offset = 0
        for item in items:
            content = planner.resolve_data(item)
            if isinstance(content, torch.Tensor):
                content = shards.on_host(content.detach())
            file = io.BytesIO()
            found = _write_item(self.transforms, file, content, item, name, self.serialization_format)
            data = file.getbuffer()
            output.write_at(data, offset)
            result = _result(item, name, offset, data.nbytes, isal_zlib.crc32(data))
            result.storage_data.transform_descriptors = found.storage_data.transform_descriptors
            results.append(result)
            offset += data.nbytes
        return results

    def _existing(self) -> set[str]:
        """The files of the checkpoints that are about to be replaced, ours or torch's, and their metadata files."""
        if self._is_alone:
            metadata = [self._metadata_name]
        else:
            metadata = [name for name in self._directory.names() if is_metadata_name(name)]
        found = set(metadata)
        for name in metadata:
            with suppress(FileNotFoundError):
                found |= {one.decode() for one in re.findall(SHARD_NAMES, self._directory.read(name))}
        return found

    def _remove_old(self, current: set[str]) -> None:
        """Remove the files of checkpoints that were replaced, and what killed processes have left long ago."""
        old = self._replaced - current
        if not self._is_alone:
            old.update(
                name for name in self._directory.names()
                if _OUR_NAME.fullmatch(name) and name not in old | current
                and self._directory.is_left_over(name, self._metadata_name)
            )  # fmt: skip
        self._directory.remove(sorted(old))
        self._replaced.clear()

    def _remove_failed(self) -> None:
        """Remove the files of all ranks that the last save has left, if this rank coordinated it and it failed."""
        last, self._begun = self._begun, None
        if last is None:
            return
        with suppress(FileNotFoundError):
            if last.token.encode() in last.directory.read(last.metadata_name):
                return  # it failed when all was in place
        last.directory.remove(
            name for name in last.directory.names() if _OUR_NAME.fullmatch(name) and last.token in name
        )

    def _check_nothing_has_begun(self) -> None:
        """Raise if another thread has begun a save with this writer, whose directory and names are now those of that.

        Raises:
            RuntimeError: it has.
        """
        if self._thread != threading.get_ident():
            raise RuntimeError(
                f"{self._directory.path}: another save began with this writer before this one had ended, so this one "
                f"is given up; wait for the future of dcp.async_save before the next one, or use a writer for each"
            )


def _content(planner: SavePlanner, item: WriteItem) -> torch.Tensor | bytes:
    """The value of an item."""
    found = planner.resolve_data(item)
    if isinstance(found, io.BytesIO):
        return found.getvalue()
    return found.detach()


def _result(item: WriteItem, name: str, offset: int, nbytes: int, crc32: int | None) -> WriteResult:
    """Entry of an item in the metadata. The attribute ``crc32`` is ours, and other readers pass over it."""
    info = _StorageInfo(name, offset, nbytes)
    if crc32 is not None:
        info.crc32 = crc32  # type: ignore[attr-defined]  # torch's own class, so that its readers need no Fastensor
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=info)
