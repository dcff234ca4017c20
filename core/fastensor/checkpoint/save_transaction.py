"""Writing one planned file to its target: a path of this machine, a URL, or an open file."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, NamedTuple, Self, TypeAlias

from fastensor.backends import registry, stream
from fastensor.backends.fallback import Fallback, can_write, record_fallback
from fastensor.backends.torch import file_for_torch
from fastensor.checkpoint.freeing import Freeing, wait_for_space
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.opened import can
from fastensor.checkpoint.ordering import drop_replaced, wait_to_replace
from fastensor.checkpoint.publish import InPlace, Target, open_output, publish, resolve_target
from fastensor.checkpoint.read_options import NO_LOCAL_FILE
from fastensor.checkpoint.remote import replacing
from fastensor.checkpoint.report import SaveReport
from fastensor.errors import BackendUnavailableError, CheckpointWriteError, FastensorError, caught_as
from fastensor.files import posix
from fastensor.files.atomic import NewFile
from fastensor.files.os_errors import kept_at, write_errors
from fastensor.files.words import human_size
from fastensor.select.context import Context
from fastensor.select.rule import choose_writer
from fastensor.select.transfer import BackendChoice, Transfer, check_choice
from fastensor.stitch.source import Plan, Source

_PREALLOCATION_UNIT = posix.ASSUMED_ALIGNMENT
_GAP_NBYTES = 1 << 20
"""How many zeros are written at a time to fill a gap."""
_ONLY_TORCH = "it could not be laid out without torch"
_FAILED = "the save failed"
_STREAMED = (("torch", _ONLY_TORCH), (stream.NAME, NO_LOCAL_FILE))
_NESTED = "a signal handler or a callback saves inside of other work of Fastensor"
_NEEDS_NO_THREAD = "numpy"
"""The backend of nested saves."""


Planner: TypeAlias = Callable[[list[Fallback]], Plan | None]
"""Plans a file. Returns None, and adds the reason to the list, if torch has to write the file by itself."""
Writer: TypeAlias = Callable[[Source, NewFile, list[Fallback]], tuple[Transfer, Sequence[int]]]
"""Writes the contents of a new file as :func:`write_by_backend` does."""


class _Written(NamedTuple):
    path: str
    nbytes: int
    backend: str
    reason: str
    durable: bool
    atomic: bool


class SaveTransaction:
    """One save of one file: planned, opened, written, published. Use it in one thread at a time.

    The last step of :meth:`move` replaces the target, or nothing does, unless the target has to be written in place.

    Args:
        path: the target.
        let_torch_write: writes the file if the file cannot be planned.
        backend, durable, follow_symlinks: as for :func:`fastensor.save`.
        write_shared: writes the contents of a new file, if other processes take part, for which the file has a hidden
            name from the start.

    Raises:
        CheckpointWriteError: the target must not be replaced.
        UnknownBackendError: no backend has that name.
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
    """

    def __init__(
        self,
        path: Location,
        let_torch_write: Callable[[BinaryIO], None],
        *,
        backend: BackendChoice,
        durable: bool,
        follow_symlinks: bool,
        write_shared: Writer | None = None,
    ) -> None:
        self._started = time.perf_counter()
        check_choice(backend)
        found = locate(path)
        self.target = resolve_target(found, follow_symlinks=follow_symlinks) if isinstance(found, str) else found
        self.where = name_of(path)
        """The target's name, for messages."""
        self.stage = "plan"
        """The current stage, or the stage that failed: ``plan``, ``write``, ``sync`` or ``publish``."""
        self.seconds: dict[str, float] = {}
        """Time by stage, and the time that the save waited for space."""
        self.before_publishing: Callable[[], None] = lambda: None
        """Called before the target is replaced or overwritten. If this raises, the target is kept."""
        self._let_torch_write = let_torch_write
        self._backend = backend
        self._durable = durable
        self._write_shared = write_shared
        self._fallbacks: list[Fallback] = []
        self._freeing = Freeing()
        self._output: NewFile | InPlace | None = None
        self._nested = is_nested()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, plan: Planner) -> SaveReport:
        """Plan the file, and :meth:`finish`.

        Raises:
            Exception: whatever ``plan`` raises; then nothing has been written. Or as :meth:`finish`.
        """
        return self.finish(self.plan(plan))

    def finish(self, planned: Plan | None) -> SaveReport:
        """Write a planned file in this thread, behind everything that this process has accepted for the target.

        A nested save (see :mod:`fastensor.checkpoint.nested`) waits for nothing. Asynchronous saves to the target are
        dropped when it has succeeded.

        Raises:
            CheckpointWriteError: the file could not be written; the message says what is there now.
        """
        with self:
            if not self._nested:
                wait_to_replace(self.target)
            report = self.move(planned)
            if self._nested:
                drop_replaced(self.target)
            return report

    def plan(self, plan: Planner) -> Plan | None:
        """Plan the file. None if torch has to write it."""
        planned = None
        try:
            with self._at("plan"):
                planned = plan(self._fallbacks)
        except BaseException:
            self.close()
            raise
        if planned is not None:
            self._let_torch_write = _refuse  # the function refers to the object that is saved
        return planned

    def open(self) -> None:
        """Open the output for a local target; other targets need none. From now on, use the transaction in ``with``.

        Raises:
            CheckpointWriteError: the target can neither be replaced nor written in place.
        """
        if isinstance(self.target, Target) and self._output is None:
            self._output = open_output(self.target, hidden=self._write_shared is not None)
            if isinstance(self._output, InPlace) and self._output.is_file and self._output.nbytes:
                fallback = Fallback("atomic replacement", f"{self.where}: {self._output.why}")
                if fallback not in self._fallbacks:
                    record_fallback(self._fallbacks, fallback.backend, fallback.reason)

    def is_in_place(self) -> bool:
        """True if the target has to be written in place. Opens the target, as :meth:`open`. A regular file is closed,
        and opened again when writing begins, because earlier saves of this process may have to write it before."""
        self.open()
        if not isinstance(self._output, InPlace):
            return False
        if self._output.is_file:
            output, self._output = self._output, None
            output.close()
        return True

    def close(self) -> None:
        """Close the output, and remove a new file that was not published. Drop the reference to the saved object.
        Calling this again does nothing.

        Raises:
            CheckpointWriteError: the file could not be closed.
        """
        self._let_torch_write = _refuse
        output, self._output = self._output, None
        if output is None:
            return
        with write_errors(self.where, "closing the file that was written failed", partial(_left, output)):
            output.close()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor of the parent's output, and leave the file as it is."""
        if self._output is not None:
            os.close(self._output.fd)
        self._output = None

    def move(self, source: Source | None) -> SaveReport:
        """Write the file, sync it, and let it take the target's place.

        Args:
            source: the contents; None if torch has to write the file.

        Raises:
            CheckpointWriteError: the file could not be written; the message says what is at the target now.
        """
        written = self._move(source)
        seconds = time.perf_counter() - self._started
        return SaveReport(
            path=written.path,
            nbytes=written.nbytes,
            backend=written.backend,
            reason=written.reason,
            durable=written.durable,
            atomic=written.atomic,
            plan_seconds=self.seconds["plan"],
            write_seconds=self.seconds["write"],
            sync_seconds=self.seconds.get("sync", 0.0),
            publish_seconds=self.seconds.get("publish", 0.0),
            seconds=seconds,
            stall_seconds=seconds,
            fallbacks=tuple(self._fallbacks),
            wait_seconds=self.seconds.get("wait", 0.0),
            freeing=self._freeing,
        )

    def _move(self, source: Source | None) -> _Written:
        self.open()
        if isinstance(self._output, NewFile):
            return self._to_disk(source, self._output)
        if isinstance(self._output, InPlace):
            return self._in_place(source, self._output)
        if isinstance(self.target, RemotePath):
            return self._to_url(source, self.target)
        assert not isinstance(self.target, Target)
        return self._to_file(source, self.target)

    @contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        self.stage = stage
        with self._timed(stage):
            yield

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - started

    def _to_disk(self, source: Source | None, new: NewFile) -> _Written:
        """Write a new file, sync it, publish it."""
        transfer = None
        with write_errors(new.path, _FAILED, partial(_left, new)):
            with self._at("write"):
                if source is None:
                    self._write_with_torch(new.fd)
                else:
                    transfer, checksums = self._write(source, new)
                    if source.checksums_first:
                        posix.write_fully(new.fd, memoryview(source.head(checksums)), 0)
                nbytes = os.fstat(new.fd).st_size
                durable = self._durable and posix.memory_filesystem(new.fd) is None
            if self._durable:
                with self._at("sync"):
                    posix.sync_file(new.fd)
            taken = time.perf_counter() - transfer.started if transfer is not None else 0.0
            self.before_publishing()
            with self._at("publish"):
                self._freeing = publish(new, durable=self._durable, free_later=not self._nested)
            self.close()
        if source is None:
            return _Written(new.path, nbytes, "torch", _ONLY_TORCH, durable, True)
        if transfer is None:
            return _Written(new.path, nbytes, _NEEDS_NO_THREAD, _NESTED, durable, True)
        transfer.done(taken)
        return _Written(new.path, nbytes, transfer.used, transfer.reason, durable, True)

    def _in_place(self, source: Source | None, existing: InPlace) -> _Written:
        """Write from front to back, so that readers see that the file is cut off until the end is written."""
        durable = False
        with _noting_what_is_left(existing), write_errors(existing.path, _FAILED, partial(_left, existing)):
            self.before_publishing()
            with self._at("write"):
                existing.begin(source.nbytes if source is not None else 0)
                nbytes = self._to_stream(source, existing)
                existing.finish()
            if existing.is_file and self._durable:
                with self._at("sync"):
                    posix.sync_file(existing.fd)
                durable = posix.memory_filesystem(existing.fd) is None
            self.close()
        backend, reason = ("torch", _ONLY_TORCH) if source is None else (stream.NAME, "it is written in place")
        return _Written(existing.path, nbytes, backend, reason, durable, False)

    def _to_url(self, source: Source | None, target: RemotePath) -> _Written:
        with self._at("write"), write_errors(self.where, _FAILED, kept_at(self.where)), replacing(target) as file:
            nbytes = self._to_stream(source, file)
            self.before_publishing()
        return _Written(target.url, nbytes, *_STREAMED[source is not None], False, True)

    def _to_file(self, source: Source | None, file: BinaryIO) -> _Written:
        _check_writable(file, self.where)
        with self._at("write"), write_errors(self.where, _FAILED, "the open file holds a part of it"):
            nbytes = self._to_stream(source, file)
            if hasattr(file, "flush"):
                file.flush()
        return _Written(self.where, nbytes, *_STREAMED[source is not None], False, False)

    def _write_with_torch(self, fd: int) -> None:
        with file_for_torch(partial(posix.write_fully, fd)) as file:
            self._let_torch_write(file)

    def _write(self, source: Source, new: NewFile) -> tuple[Transfer | None, Sequence[int]]:
        """Write the contents by the chosen backend, or by the next one that can. A nested save chooses nothing.

        Returns the transfer and the checksums.
        """
        fd = new.fd
        if self._nested:
            reserve(new, source.nbytes)
            if self._backend not in (registry.AUTO, _NEEDS_NO_THREAD) and isinstance(self._backend, str):
                record_fallback(self._fallbacks, self._backend, _NESTED)
            return None, registry.get(_NEEDS_NO_THREAD).write(source, fd)
        with self._timed("wait"):
            wait_for_space()
        if self._write_shared is not None:
            return self._write_shared(source, new, self._fallbacks)
        return write_by_backend(source, new, backend=self._backend, durable=self._durable, fallbacks=self._fallbacks)

    def _to_stream(self, source: Source | None, file: BinaryIO | InPlace) -> int:
        """Write to a file from its position on; returns the number of bytes."""
        counted = _Counted(file)
        if source is not None:
            stream.write_stream(source, counted.write)
            return counted.nbytes
        with file_for_torch(counted.write_at) as own:
            self._let_torch_write(own)
        return counted.nbytes


def write_by_backend(
    source: Source, new: NewFile, *, backend: BackendChoice, durable: bool, fallbacks: list[Fallback]
) -> tuple[Transfer, Sequence[int]]:
    """Write the contents of a new file by the chosen backend, or by the next one that can. Syncs nothing.

    Args:
        source: the contents.
        new: the file, which is empty.
        backend: the choice.
        durable: whether the caller syncs the file afterwards.
        fallbacks: backends that could not be used are added here.

    Returns:
        The transfer, whose time the caller reports, and the CRC32 of each storage's payload.

    Raises:
        OSError: no backend could write the file.
        StateChangedError: a storage was resized meanwhile.
    """
    reserve(new, source.nbytes)
    try:
        transfer = Transfer.of_file(
            backend,
            os.path.dirname(new.path),
            source.nbytes,
            Context("write", source.device, warm=not durable),
            [name for name in registry.names() if can_write(name, source)],
            choose_writer(source.nbytes),
            learn=durable and not source.throttled,  # an unsynced write ends in the page cache
        )
        checksums = transfer.run(lambda one: one.write(source, new.fd), partial(record_fallback, fallbacks))
    except BackendUnavailableError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return transfer, checksums


def reserve(new: NewFile, nbytes: int) -> None:
    """Reserve space for a new file.

    Raises:
        OSError: there is not enough space.
    """
    try:
        posix.preallocate(new.fd, -(-nbytes // _PREALLOCATION_UNIT) * _PREALLOCATION_UNIT)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            beside = " beside the old one" if os.path.lexists(new.path) else ""
            needed = f"{error.strerror}: the new file needs {human_size(nbytes)}{beside}"
            raise OSError(error.errno, needed) from error
        raise


def _refuse(file: BinaryIO) -> None:
    raise AssertionError("torch was asked to write a file that was planned")


class _Counted:
    """Passes all data on to a file, and counts the bytes."""

    def __init__(self, file: BinaryIO | InPlace) -> None:
        self._file = file
        self.nbytes = 0

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write data that may leave a gap behind what was written before. Zeros fill the gap."""
        while gap := offset - self.nbytes:
            self.write(memoryview(bytes(min(gap, _GAP_NBYTES))))
        self.write(data)

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            written: int | None = self._file.write(data)
            if written is None and not isinstance(self._file, io.RawIOBase):
                written = data.nbytes  # against the protocol, but torch.save accepts such files, too
            if not written:
                raise OSError(errno.EIO, "the file accepts no more bytes")
            self.nbytes += written
            data = data[written:]


def _check_writable(file: BinaryIO, where: str) -> None:
    if isinstance(file, io.TextIOBase) or not can(file, "writable", "write"):
        error = CheckpointWriteError(
            errno.EINVAL, "cannot save: expected a file opened in mode 'wb', found something else", where
        )
        raise caught_as(error, TypeError if isinstance(file, io.TextIOBase) else io.UnsupportedOperation)


@contextmanager
def _noting_what_is_left(output: InPlace) -> Iterator[None]:
    """Add to errors that are not the operating system's, such as a storage that was resized, what is at the target."""
    try:
        yield
    except FastensorError as error:
        if output.begun and not isinstance(error, CheckpointWriteError):
            error.add_note(_left(output))
        raise


def _left(output: NewFile | InPlace) -> str:
    """What is at the target after a failure."""
    if isinstance(output, NewFile):
        if output.published:
            return "the new file is in place, but a power failure may bring back what was there before"
        return kept_at(output.path)
    if output.finished:
        return "all of it was written in place, but a power failure may cut it off"
    if not output.begun or (output.is_file and not output.nbytes):
        return kept_at(output.path)
    return "the file was written in place and holds a part of the new contents"
