"""``fastensor.save``: plan the file, move it to a temporary, sync it, publish it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fastensor.backends import posix, registry
from fastensor.checkpoint.fallback import give_up, use_first
from fastensor.checkpoint.publish import (
    Temporary,
    copy_ownership,
    publish,
    resolve_target,
    temporary_for,
    wait_for_space,
)
from fastensor.checkpoint.report import Fallback, SaveReport
from fastensor.errors import CheckpointWriteError, LayoutError
from fastensor.select.rule import choose_writer
from fastensor.stitch.torch_zip import TorchZip, plan

DEFAULT_PROTOCOL = 2
"""The pickle protocol that ``torch.save`` uses."""
_PREALLOCATION_UNIT = posix.ASSUMED_ALIGNMENT


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    backend: str = registry.AUTO,
    durable: bool = True,
    follow_symlinks: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
) -> SaveReport:
    """Save an object as ``torch.save`` does, atomically, durably, with checksums, at the speed of the disk.

    The file is the one that ``torch.save`` would have written (see ``FORMAT.md``): plain ``torch.load`` reads it.

    Args:
        obj: anything that ``torch.save`` takes. It is pickled exactly once, unless the report says that this torch
            lays out files in a way that Fastensor does not know, and that torch wrote the file. Its tensors are
            borrowed: they must not change until this returns. CUDA work that was queued on the current streams is
            waited for.
        path: the file to create or replace. Its directory must exist. A replaced file's mode is kept, a new file's
            mode follows the umask.
        backend: ``"auto"``, or the name of the backend that shall move the bytes. One that cannot, on this file or
            machine, is replaced by another; the report says so and why.
        durable: sync file and directory, so that a power failure after the return does not undo the save. Without
            it the replacement is still atomic for every process on this machine.
        follow_symlinks: whether a symlink's target is replaced, or the link itself by a file.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.

    Returns:
        What was done, and how long it took.

    Raises:
        CheckpointWriteError: the operating system refused something. What was at ``path`` before is still there,
            unless the message says that the new file is in place but may not survive a power failure.
        UnknownBackendError: no backend has that name.
        Exception: whatever pickling the object raises.

    May be called from several threads at once. Two saves to one path at a time leave one of both files, whole.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> report = fastensor.save({"weight": torch.ones(2, 3)}, path)
    >>> report.nbytes == os.path.getsize(path), report.durable
    (True, True)
    >>> torch.load(path)["weight"].shape
    torch.Size([2, 3])
    """
    started = time.perf_counter()
    if backend != registry.AUTO:
        registry.get(backend)
    target = resolve_target(path, follow_symlinks=follow_symlinks)
    stages = _Stages()
    fallbacks: list[Fallback] = []
    with stages.timed("plan"):
        source = _plan(obj, pickle_module, pickle_protocol, fallbacks)
    with temporary_for(target) as temporary, _explained(temporary, target.path):
        fd = temporary.fd
        with stages.timed("write"):
            if source is not None:
                used = _write(source, fd, backend, fallbacks)
            else:
                used = "torch"
                with os.fdopen(fd, "wb", closefd=False) as file:
                    torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
            nbytes = os.fstat(fd).st_size
        copy_ownership(temporary, target)
        if durable:
            with stages.timed("sync"):
                posix.sync_file(fd)
        with stages.timed("publish"):
            publish(temporary, target, durable=durable)
    return SaveReport(
        path=target.path,
        nbytes=nbytes,
        backend=used,
        durable=durable,
        plan_seconds=stages.seconds["plan"],
        write_seconds=stages.seconds["write"],
        sync_seconds=stages.seconds.get("sync", 0.0),
        publish_seconds=stages.seconds["publish"],
        seconds=time.perf_counter() - started,
        fallbacks=tuple(fallbacks),
    )


@dataclass(slots=True)
class _Stages:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


@contextmanager
def _explained(temporary: Temporary, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        outcome = (
            "the new file is in place, but a power failure may bring back what was there before"
            if temporary.published
            else "what was there before is kept"
        )
        raise CheckpointWriteError(error.errno, f"the save failed ({error.strerror}); {outcome}", path) from error


def _plan(obj: object, pickle_module: Any, pickle_protocol: int, fallbacks: list[Fallback]) -> TorchZip | None:
    try:
        return plan(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
    except LayoutError as error:
        give_up("stitching", str(error), fallbacks)
        return None


def _write(source: TorchZip, fd: int, backend: str, fallbacks: list[Fallback]) -> str:
    """Move the image with the wanted backend or else with the next one that can; returns its name."""
    nbytes = source.image.nbytes
    wait_for_space()
    posix.preallocate(fd, -(-nbytes // _PREALLOCATION_UNIT) * _PREALLOCATION_UNIT)
    wanted = choose_writer(nbytes) if backend == registry.AUTO else registry.get(backend).name
    used, _ = use_first(wanted, lambda candidate: candidate.write(source, fd), fallbacks)
    return used
