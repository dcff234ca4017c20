"""Bringing a planned file to where it is to be: a path of this machine, a URL, or an open file."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from fastensor.backends import posix, registry, stream
from fastensor.checkpoint.fallback import use_first
from fastensor.checkpoint.location import RemotePath
from fastensor.checkpoint.publish import (
    Target,
    Temporary,
    copy_ownership,
    publish,
    temporary_for,
    wait_for_space,
)
from fastensor.checkpoint.remote import replacing
from fastensor.checkpoint.report import Fallback
from fastensor.errors import CheckpointWriteError
from fastensor.select.rule import choose_writer
from fastensor.stitch.source import Source

_PREALLOCATION_UNIT = posix.ASSUMED_ALIGNMENT


@dataclass(slots=True)
class Delivery:
    """What is to be delivered, and how it went so far."""

    source: Source | None
    """None if torch has to write the file by itself."""
    let_torch_write: Callable[[BinaryIO], None]
    where: str
    """The target's name, for messages."""
    backend: str
    durable: bool
    fallbacks: list[Fallback] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Written:
    """What was delivered."""

    path: str
    nbytes: int
    backend: str
    durable: bool


def deliver(delivery: Delivery, target: Target | RemotePath | BinaryIO) -> Written:
    """Write the file.

    Raises:
        CheckpointWriteError: it could not be written; the message says what is there now.
    """
    if isinstance(target, Target):
        return _to_disk(delivery, target)
    if isinstance(target, RemotePath):
        kept = "what was there before is kept"
        with delivery.timed("write"), _refusals_explained(delivery.where, kept), replacing(target) as file:
            nbytes = _to_stream(delivery, file)
        return Written(target.url, nbytes, stream.NAME if delivery.source else "torch", False)
    _check_writable(target, delivery.where)
    with delivery.timed("write"), _refusals_explained(delivery.where, "the open file holds a part of it"):
        nbytes = _to_stream(delivery, target)
        target.flush()
    return Written(delivery.where, nbytes, stream.NAME if delivery.source else "torch", False)


def _to_disk(delivery: Delivery, target: Target) -> Written:
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
    return Written(target.path, nbytes, used, delivery.durable)


def _write(delivery: Delivery, fd: int) -> str:
    """Move the image with the wanted backend or else with the next one that can; returns its name."""
    source = delivery.source
    if source is None:
        with os.fdopen(fd, "wb", closefd=False) as file:
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


def _to_stream(delivery: Delivery, file: BinaryIO) -> int:
    """Write to a file from its position on; returns how much."""
    counted = _Counted(file)
    if delivery.source is None:
        delivery.let_torch_write(cast(BinaryIO, counted))
    else:
        stream.write_stream(delivery.source, counted.write)
    return counted.nbytes


class _Counted:
    """Passes everything on to a file, and counts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = 0

    def write(self, data: memoryview) -> int:
        total = memoryview(data).nbytes
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            written = self._file.write(rest)
            if not written:
                raise OSError(errno.EIO, "the file accepts no more bytes")
            rest = rest[written:]
        self.nbytes += total
        return total

    def flush(self) -> None:
        self._file.flush()


def _check_writable(file: BinaryIO, where: str) -> None:
    if isinstance(file, io.TextIOBase) or not (hasattr(file, "write") and file.writable()):
        raise CheckpointWriteError(
            errno.EINVAL, "cannot save: expected a file opened in mode 'wb', found something else", where
        )


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


@contextmanager
def _refusals_explained(where: str, outcome: str) -> Iterator[None]:
    try:
        yield
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise CheckpointWriteError(
            error.errno or errno.EIO, f"the save failed ({error.strerror or error}); {outcome}", where
        ) from error
