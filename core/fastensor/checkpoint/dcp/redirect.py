"""Frameworks that call ``torch.distributed.checkpoint`` save and load by Fastensor for the length of a block.

They choose torch's own storage themselves: by a path, or by a plain ``FileSystemWriter`` or ``FileSystemReader``. So
the public functions that they call are replaced meanwhile, for the calling thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import optimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from fastensor.checkpoint.dcp.reader import FastensorStorageReader
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter
from fastensor.checkpoint.writing.save_transaction import ShareUnchanged
from fastensor.errors import CheckpointReadError, CheckpointWriteError, CorruptCheckpointError, NotACheckpointError
from fastensor.files.replacing import replacing, wrap_method
from fastensor.select.transfer import BackendChoice


@dataclass(slots=True)
class Redirected:
    """Counts of the calls that went through Fastensor."""

    saves: int = 0
    loads: int = 0


@contextmanager
def redirected(
    *,
    save: Callable[..., Metadata | None] | None = None,
    reader: Callable[[str | os.PathLike[str]], FastensorStorageReader] | None = None,
) -> Iterator[Redirected]:
    """In the block, what this thread saves and loads by ``torch.distributed.checkpoint`` goes through Fastensor.

    These are calls of ``dcp.save`` and ``dcp.load`` with a path or with torch's own storage, and of
    ``load_sharded_optimizer_state_dict``. Calls with another storage, and those of other threads, go to torch. Blocks
    of several threads follow one another.

    Args:
        save: takes the place of ``dcp.save``: gets the state dict, the path, and as keywords what else its caller gave.
            None leaves that to torch.
        reader: makes the reader for a path; None leaves loads to torch. What its loads fail with is raised as an
            ``Exception``, on all ranks: CorruptCheckpointError or CheckpointReadError.

    Yields:
        The number of calls so far. Look at it after the block: a framework that saves in another way leaves it 0.

    Raises:
        AttributeError: this version of torch lacks one of the functions.
    """
    found = Redirected()
    thread = threading.get_ident()

    def as_reader(options: dict[str, Any]) -> FastensorStorageReader | None:
        path = _path_in(options, "storage_reader", FileSystemReader)
        if path is None or reader is None:
            return None
        found.loads += 1
        return reader(path)

    def save_redirected(original: Callable[..., Any], state_dict: dict[str, Any], **options: Any) -> Any:
        path = _path_in(options, "storage_writer", FileSystemWriter)
        if path is None or save is None:
            return original(state_dict, **options)
        found.saves += 1
        return save(state_dict, path, **_without(options, "checkpoint_id", "storage_writer"))

    def load_redirected(original: Callable[..., Any], state_dict: dict[str, Any], **options: Any) -> Any:
        ours = as_reader(options)
        if ours is None:
            return original(state_dict, **options)
        options = {**_without(options, "checkpoint_id"), "storage_reader": ours}
        with _read_failures(ours):
            return original(state_dict, **options)

    def load_optimizer_redirected(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        ours = as_reader(options)
        if ours is None:
            return original(*arguments, **options)
        with _read_failures(ours):
            return original(*arguments, **{**options, "storage_reader": ours})

    with replacing() as undo:
        for module, name, function in (
            (dcp, "save", save_redirected),
            (dcp, "load", load_redirected),
            (optimizer, "load_sharded_optimizer_state_dict", load_optimizer_redirected),
        ):
            undo.callback(wrap_method(module, name, _for_thread(thread, function)))
        yield found


def save_now(state_dict: dict[str, Any], storage: FastensorStorageWriter, **options: Any) -> Metadata:
    """``dcp.save``, also inside of :func:`redirected`, with an error that is an ``Exception`` and names who has failed.

    Raises:
        CheckpointWriteError: any rank has failed. All ranks raise it.
    """
    try:
        metadata: Metadata = torch_save(state_dict, storage_writer=storage, **options)
    except CheckpointException as failed:
        raise CheckpointWriteError(f"{storage.path}: the save failed: {_described(failed)}") from failed
    return metadata


def save_shards(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    storage: FastensorStorageWriter | None,
    later: list[Callable[[], object]] | None,
    *,
    durable: bool,
    backend: BackendChoice,
    share_unchanged: ShareUnchanged,
    **options: Any,
) -> FastensorStorageWriter:
    """:func:`save_now` with a storage that was used before, or copy the shards for a save to come.

    Args:
        state_dict: as for ``dcp.save``.
        path: the directory.
        storage: what an earlier call has returned, so that its memory for copies is used again; None for the first one.
        later: gets a function that writes the copies; None writes the shards themselves, now.
        durable, backend, share_unchanged: as for the storage.
        options: as for ``dcp.save``.

    Returns:
        The storage.

    Raises:
        CheckpointWriteError: as :func:`save_now`.
    """
    storage = storage or FastensorStorageWriter(path)
    storage.sync_files, storage.backend, storage.share_unchanged = durable, backend, share_unchanged
    storage.reset(path)
    if later is None:
        save_now(state_dict, storage, **options)
    else:
        later.append(partial(save_now, storage.stage(state_dict), storage, **options))
    return storage


@contextmanager
def _read_failures(storage: FastensorStorageReader) -> Iterator[None]:
    """Raise what any rank has failed with as an ``Exception``, on all ranks.

    Raises:
        CorruptCheckpointError: a rank has found damage.
        NotACheckpointError: a rank has found something else than a file of a checkpoint.
        CheckpointReadError: a rank has failed otherwise.
    """
    try:
        yield
    except CheckpointException as failed:
        text = f"{storage.path}: the load failed: {_described(failed)}"
        for kind in (CorruptCheckpointError, NotACheckpointError):
            if any(isinstance(error, kind) for error, _ in failed.failures.values()):
                raise kind(text) from failed
        raise CheckpointReadError(text) from failed


def _described(failed: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failed.failures.items())


def _for_thread(thread: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*arguments, **options)
        return function(original, *arguments, **options)

    return call


def _path_in(options: dict[str, Any], name: str, plain: type[Any]) -> str | os.PathLike[str] | None:
    """Path that a call of torch's functions saves to or loads from; None unless that is torch's own storage of a
    path."""
    storage = options.get(name)
    if storage is not None and type(storage) is not plain:
        return None
    path: str | os.PathLike[str] | None = options.get("checkpoint_id")
    return path or (None if storage is None else storage.path)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
