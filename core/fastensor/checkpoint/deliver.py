"""Bringing a planned file to where it is to be: a path of this machine, a URL, or an open file."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, NamedTuple

from fastensor.backends import posix, registry, stream
from fastensor.backends.torch import file_for_torch
from fastensor.checkpoint.fallback import use_first
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.opened import can
from fastensor.checkpoint.publish import (
    Target,
    Temporary,
    copy_ownership,
    publish,
    resolve_target,
    temporary_for,
    wait_for_space,
)
from fastensor.checkpoint.remote import replacing
from fastensor.checkpoint.report import Fallback, SaveReport
from fastensor.errors import CheckpointWriteError, FastensorError
from fastensor.select.rule import choose_writer
from fastensor.stitch.source import Source

_PREALLOCATION_UNIT = posix.ASSUMED_ALIGNMENT


def deliver(
    path: Location,
    plan: Callable[[list[Fallback]], Source | None],
    let_torch_write: Callable[[BinaryIO], None],
    *,
    backend: str,
    durable: bool,
    follow_symlinks: bool,
) -> SaveReport:
    """Plan a file and bring it there.

    Args:
        path: where to.
        plan: called once the target has been looked at; None if torch has to write the file by itself. It may add to
            the fallbacks.
        let_torch_write: does so.
        backend, durable, follow_symlinks: as for :func:`fastensor.save`.

    Raises:
        CheckpointWriteError: it could not be written; the message says what is there now.
        Exception: whatever ``plan`` raises; then nothing has been written.
    """
    started = time.perf_counter()
    if backend != registry.AUTO:
        registry.get(backend)
    found = locate(path)
    target = resolve_target(found, follow_symlinks=follow_symlinks) if isinstance(found, str) else found
    delivery = _Delivery(let_torch_write, name_of(path), backend, durable)
    with delivery.timed("plan"):
        delivery.source = plan(delivery.fallbacks)
    written = _write_to(target, delivery)
    return SaveReport(
        path=written.path,
        nbytes=written.nbytes,
        backend=written.backend,
        durable=written.durable,
        plan_seconds=delivery.seconds["plan"],
        write_seconds=delivery.seconds["write"],
        sync_seconds=delivery.seconds.get("sync", 0.0),
        publish_seconds=delivery.seconds.get("publish", 0.0),
        seconds=time.perf_counter() - started,
        fallbacks=tuple(delivery.fallbacks),
    )


@dataclass(slots=True)
class _Delivery:
    """What is to be delivered, and how it went so far."""

    let_torch_write: Callable[[BinaryIO], None]
    where: str
    """The target's name, for messages."""
    backend: str
    durable: bool
    source: Source | None = None
    """None if torch has to write the file by itself."""
    fallbacks: list[Fallback] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


class _Written(NamedTuple):
    path: str
    nbytes: int
    backend: str
    durable: bool


def _write_to(target: Target | RemotePath | BinaryIO, delivery: _Delivery) -> _Written:
    if isinstance(target, Target):
        return _to_disk(delivery, target)
    used = stream.NAME if delivery.source else "torch"
    if isinstance(target, RemotePath):
        kept = "what was there before is kept"
        with delivery.timed("write"), _refusals_explained(delivery.where, kept), replacing(target) as file:
            nbytes = _to_stream(delivery, file)
        return _Written(target.url, nbytes, used, False)
    _check_writable(target, delivery.where)
    with delivery.timed("write"), _refusals_explained(delivery.where, "the open file holds a part of it"):
        nbytes = _to_stream(delivery, target)
        if hasattr(target, "flush"):
            target.flush()
    return _Written(delivery.where, nbytes, used, False)


def _to_disk(delivery: _Delivery, target: Target) -> _Written:
    """Write to a temporary, sync it, publish it."""
    with temporary_for(target) as temporary, _explained(temporary, target.path):
        with delivery.timed("write"):
            used = _write(delivery, temporary.fd)
            nbytes = os.fstat(temporary.fd).st_size
        copy_ownership(temporary, target)
        if delivery.durable:
            with delivery.timed("sync"):
                posix.sync_file(temporary.fd)
        with delivery.timed("publish"):
            publish(temporary, target, durable=delivery.durable)
    return _Written(target.path, nbytes, used, delivery.durable)


def _write(delivery: _Delivery, fd: int) -> str:
    """Move the image with the wanted backend or else with the next one that can; returns its name."""
    source = delivery.source
    if source is None:
        with file_for_torch(partial(posix.write_fully, fd)) as file:
            delivery.let_torch_write(file)
        return "torch"
    nbytes = source.image.nbytes
    wait_for_space()
    posix.preallocate(fd, -(-nbytes // _PREALLOCATION_UNIT) * _PREALLOCATION_UNIT)
    automatic = delivery.backend == registry.AUTO
    wanted = choose_writer(nbytes) if automatic else registry.get(delivery.backend).name
    used, checksums = use_first(wanted, lambda candidate: candidate.write(source, fd), delivery.fallbacks)
    if source.checksums_first:
        posix.write_fully(fd, memoryview(source.head(checksums)), 0)
    return used


def _to_stream(delivery: _Delivery, file: BinaryIO) -> int:
    """Write to a file from its position on; returns how much."""
    counted = _Counted(file)
    if delivery.source is not None:
        stream.write_stream(delivery.source, counted.write)
        return counted.nbytes
    with file_for_torch(lambda data, offset: counted.write(data)) as own:
        delivery.let_torch_write(own)
    return counted.nbytes


class _Counted:
    """Passes everything on to a file, and counts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = 0

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            written: int | None = self._file.write(data)
            if written is None and not isinstance(self._file, io.RawIOBase):
                written = data.nbytes  # not what the protocol asks for, but torch.save takes it, too
            if not written:
                raise OSError(errno.EIO, "the file accepts no more bytes")
            self.nbytes += written
            data = data[written:]


def _check_writable(file: BinaryIO, where: str) -> None:
    if isinstance(file, io.TextIOBase) or not can(file, "writable", "write"):
        raise CheckpointWriteError(
            errno.EINVAL, "cannot save: expected a file opened in mode 'wb', found something else", where
        )


@contextmanager
def _explained(temporary: Temporary, path: str) -> Iterator[None]:
    try:
        yield
    except FastensorError:
        raise
    except OSError as error:
        outcome = (
            "the new file is in place, but a power failure may bring back what was there before"
            if temporary.published
            else "what was there before is kept"
        )
        raise CheckpointWriteError(error.errno, f"the save failed ({error.strerror}); {outcome}", path) from error


@contextmanager
def _refusals_explained(where: str, outcome: str) -> Iterator[None]:
    try:
        yield
    except FastensorError:
        raise
    except OSError as error:
        raise CheckpointWriteError(
            error.errno or errno.EIO, f"the save failed ({error.strerror or error}); {outcome}", where
        ) from error
