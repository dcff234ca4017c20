"""Writing one planned file to its target: a path of this machine, a URL, or an open file."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, TypeAlias

from fastensor.backends import registry, stream
from fastensor.backends.numpy import NumpyBackend  # here, since a signal handler may interrupt a later import
from fastensor.backends.registry import Fallback, can_write, record_fallback
from fastensor.checkpoint.location import Location, RemotePath, Target, locate, name_of
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.ordering import drop_replaced, wait_to_replace
from fastensor.checkpoint.writing.freeing import make_room
from fastensor.checkpoint.writing.outputs import InPlace, Link, OpenFile, Output, Replacement, StreamOutput
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.target import open_output, resolve_target
from fastensor.errors import BackendUnavailableError, CheckpointWriteError, FastensorError
from fastensor.files import posix
from fastensor.files.arguments import did_you_mean
from fastensor.files.atomic import NewFile
from fastensor.files.os_errors import write_errors
from fastensor.select.context import Context
from fastensor.select.transfer import BackendChoice, Transfer, check_choice
from fastensor.stitch.source import Plan, Source

if TYPE_CHECKING:
    from fastensor.checkpoint.writing.shared_blocks import SharedBlocks

_ONLY_TORCH = "it could not be laid out without torch"
_FAILED = "the save failed"
_NESTED = "a signal handler or a callback saves inside of other work of Fastensor"
_NEEDS_NO_THREAD = NumpyBackend.name
"""The backend of nested saves."""


class ByTorch(NamedTuple):
    """A file that torch has to write by itself."""

    write: Callable[[BinaryIO], None]


Planner: TypeAlias = Callable[[list[Fallback]], Plan | ByTorch]
"""Plans a file. If torch has to write it, the reason is added to the list."""
Writer: TypeAlias = Callable[[Source, NewFile, list[Fallback]], tuple[Transfer, Sequence[int]]]
"""Writes the contents of a new file as :func:`write_by_backend` does."""


_REPLACES = (0, 8)
"""The first version of safetensors whose ``save_file`` replaces a file, and does not overwrite it."""
ShareUnchanged: TypeAlias = bool | Literal["trust"]
"""Whether a new file shares blocks with earlier ones. ``"trust"`` takes the version counters of tensors for true, and
compares samples only."""
ShareOrLink: TypeAlias = ShareUnchanged | Literal["link"]
"""With ``"link"``, a file in which nothing has changed is a hard link to the earlier one. Others share blocks."""


def check_share_unchanged(value: object, *others: str) -> None:
    """
    Raises:
        ValueError: the value is no :data:`ShareUnchanged`, and none of the ``others``; or it is ``"link"``, and the
            installed safetensors overwrites files in place, and with them all checkpoints that have these files.
    """
    if not isinstance(value, bool) and value not in (words := ("trust", *others)):
        *first, last = ("True", "False", *map(repr, words))
        hint = did_you_mean(str(value), words)
        raise ValueError(f"share_unchanged is {', '.join(first)} or {last}, found {value!r}{hint}")
    if value == "link" and tuple(map(int, (found := version("safetensors")).split(".")[:2])) < _REPLACES:
        raise ValueError(
            f"share_unchanged='link' needs safetensors 0.8, found {found}, whose save_file overwrites a file in place, "
            f"and so every checkpoint that has it; install a newer one, or choose True"
        )


class SaveTransaction:
    """One save of one file: planned, opened, written, published. Use it in one thread at a time.

    The last step of :meth:`move` replaces the target, or nothing does, unless the target has to be written in place.

    Args:
        path: the target.
        backend, durable, follow_symlinks: as for :func:`fastensor.save`.
        write_shared: writes the contents of a new file, if other processes take part, for which the file has a hidden
            name from the start. Such a file shares no blocks.
        share_unchanged: as for :func:`fastensor.save`.

    Raises:
        CheckpointWriteError: the target must not be replaced.
        UnknownBackendError: no backend has that name.
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
    """

    def __init__(
        self,
        path: Location,
        *,
        backend: BackendChoice,
        durable: bool,
        follow_symlinks: bool,
        write_shared: Writer | None = None,
        share_unchanged: ShareOrLink = False,
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
        self._durable = durable
        self._fallbacks: list[Fallback] = []
        self._output: Replacement | InPlace | None = None
        self._nested = is_nested()
        if self._nested:
            if isinstance(backend, str) and backend not in (registry.AUTO, _NEEDS_NO_THREAD):
                record_fallback(self._fallbacks, backend, _NESTED)
            backend = _NEEDS_NO_THREAD
        self._hidden = write_shared is not None
        self._share_unchanged = share_unchanged if write_shared is None and not self._nested else False
        self._blocks: SharedBlocks | None = None
        """The blocks that the new file shares."""
        self._choose_and_write = write_shared or partial(write_by_backend, backend=backend, durable=durable)

    def run(self, plan: Planner) -> SaveReport:
        """Plan the file, and :meth:`finish`.

        Raises:
            Exception: whatever ``plan`` raises; then nothing has been written. Or as :meth:`finish`.
        """
        return self.finish(self.plan(plan))

    def finish(self, planned: Plan | ByTorch) -> SaveReport:
        """Write a planned file in this thread, behind everything that this process has accepted for the target.

        A nested save (see :mod:`fastensor.checkpoint.nested`) waits for nothing. What is pending for the target
        is dropped when the nested save is about to replace it.

        Raises:
            CheckpointWriteError: the file could not be written; the message says what is there now.
        """
        with closing(self):
            if not self._nested:
                wait_to_replace(self.target)
            self.open()
            return self.move(self.share(planned) if isinstance(planned, Plan) else planned)

    def plan(self, plan: Planner) -> Plan | ByTorch:
        """Plan the file."""
        with self._at("plan"):
            return plan(self._fallbacks)

    def open(self) -> None:
        """Open the output for a local target; other targets need none. From now on, the transaction
        has to be closed.

        Raises:
            CheckpointWriteError: the target can neither be replaced nor written in place.
        """
        if isinstance(self.target, Target) and self._output is None:
            self._output = open_output(self.target, hidden=self._hidden)
            if isinstance(self._output, InPlace) and self._output.is_synced and self._output.nbytes:
                fallback = Fallback("atomic replacement", f"{self.where}: {self._output.why_not_replaced}")
                if fallback not in self._fallbacks:
                    record_fallback(self._fallbacks, fallback.backend, fallback.reason)

    def is_in_place(self) -> bool:
        """True if the target has to be written in place. Opens the target, as :meth:`open`. A regular file is closed,
        and opened again when writing begins, because earlier saves of this process may have to write it before."""
        self.open()
        output = self._output
        if isinstance(output, InPlace) and output.is_synced:
            self._output = None
            output.close()
        return isinstance(output, InPlace)

    def share(self, plan: Plan) -> Plan:
        """Let the opened file share blocks with earlier ones, once. Returns what is left to be written.

        Raises:
            CheckpointWriteError: the filesystem cannot be asked.
            StateChangedError: as :func:`~fastensor.checkpoint.writing.shared_blocks.share_blocks`.
        """
        new = self._output
        if self._share_unchanged and self._blocks is None and isinstance(new, Replacement):
            with _saying_what_is_left(new), self._at("write"):
                if self._share_unchanged == "link" or posix.may_share_blocks(new.fd):
                    from fastensor.checkpoint.writing.shared_blocks import share_blocks  # which few filesystems need

                    plan, self._blocks = share_blocks(plan, new, self._share_unchanged)
                    if (link := self._blocks.file) is not new:
                        self._output = link
                        new.close()
        return plan

    def close(self) -> None:
        """Close the output, and remove a new file that was not published. Calling this again does nothing.

        Raises:
            CheckpointWriteError: the file could not be closed.
        """
        output, self._output = self._output, None
        if output is not None:
            with write_errors(self.where, "closing the file that was written failed", output.left):
                output.close()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor of the parent's output, and leave the file as it is."""
        if self._output is not None:
            os.close(self._output.fd)
        self._output = None

    def move(self, source: Source | ByTorch) -> SaveReport:
        """Write the file, sync it, and let it take the target's place.

        Raises:
            CheckpointWriteError: the file could not be written; the message says what is at the target now.
        """
        with self._opened() as output, _saying_what_is_left(output):
            if not output.atomic:
                self._commit()
            with self._at("write"):
                transfer, checksums, backend, reason = self._write(source, output)
                nbytes = output.end()
            durable = self._durable and output.is_synced and self._synced(output.fd)
            taken = time.perf_counter() - transfer.started if transfer is not None else 0.0
            if output.atomic:
                self._commit()
            with self._at("publish"):
                freeing = output.replace(durable=self._durable, free_later=not self._nested)
        if self._blocks is not None:
            self._blocks.remember(checksums)
        if transfer is not None:
            transfer.done(taken)
        seconds = time.perf_counter() - self._started
        return SaveReport(
            path=output.path,
            nbytes=nbytes,
            backend=backend,
            reason=reason,
            durable=durable,
            atomic=output.atomic,
            plan_seconds=self.seconds["plan"],
            write_seconds=self.seconds["write"],
            sync_seconds=self.seconds.get("sync", 0.0),
            publish_seconds=self.seconds["publish"],
            seconds=seconds,
            stall_seconds=seconds,
            fallbacks=tuple(self._fallbacks),
            wait_seconds=self.seconds.get("wait", 0.0),
            freeing=freeing,
            shared_nbytes=self._blocks.nbytes if self._blocks is not None else 0,
        )

    def _commit(self) -> None:
        """The target is replaced next."""
        self.before_publishing()
        if self._nested:
            drop_replaced(self.target)

    @contextmanager
    def _opened(self) -> Iterator[Output]:
        """The output, in a block at whose end it is closed; a local one only if the block has not raised."""
        self.open()
        with closing(self._opened_elsewhere()) if self._output is None else nullcontext(self._output) as output:
            yield output
        self.close()

    def _opened_elsewhere(self) -> StreamOutput:
        if not isinstance(self.target, RemotePath):
            assert not isinstance(self.target, Target)
            return OpenFile(self.target, self.where)
        from fastensor.checkpoint.remote import Upload  # which saves on this machine do not need

        return Upload(self.target)

    @contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        self.stage = stage
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def _synced(self, fd: int) -> bool:
        """Sync the file. Returns whether its contents survive a power failure then."""
        with self._at("sync"):
            posix.sync_file(fd)
        return posix.memory_filesystem(fd) is None

    def _write(self, source: Source | ByTorch, output: Output) -> tuple[Transfer | None, Sequence[int], str, str]:
        """Write the contents. Returns the transfer, if a backend was chosen, and the CRC32s that it has found; the name
        of who has written, and why."""
        if isinstance(source, ByTorch):
            output.begin(0)
            from fastensor.backends.torch import file_for_torch  # few files are written so

            with file_for_torch(output.write_at) as file:
                source.write(file)
            return None, (), "torch", _ONLY_TORCH
        if isinstance(output, Link):
            return None, (), "link", output.why
        if isinstance(output, Replacement) and not self._nested:
            started = time.perf_counter()
            make_room(output.fd, 0 if self._blocks is not None else source.nbytes)
            self.seconds["wait"] = time.perf_counter() - started
        if isinstance(output, StreamOutput):
            output.begin(source.nbytes)
            stream.write_stream(source, output.write)
            return None, (), stream.NAME, output.why
        with nullcontext(output) if self._blocks is None else self._blocks.writing() as new:
            transfer, checksums = write_contents(source, new, self._fallbacks, self._choose_and_write)
        return transfer, checksums, transfer.used, _NESTED if self._nested else transfer.reason


@contextmanager
def _saying_what_is_left(output: Output) -> Iterator[None]:
    """Say in errors of the block what is at the target; also in those that are not the operating system's, such as a
    storage that was resized, if the target was overwritten."""
    try:
        with write_errors(output.path, _FAILED, output.left):
            yield
    except FastensorError as error:
        if not (output.atomic or isinstance(error, CheckpointWriteError)):
            error.add_note(output.left())
        raise


def write_contents(
    source: Source, new: Replacement, fallbacks: list[Fallback], write: Writer
) -> tuple[Transfer, Sequence[int]]:
    """Reserve the space of a new file, and write its contents and its head, as :func:`write_by_backend`.

    Args:
        source, new, fallbacks: as there.
        write: writes the contents.
    """
    new.begin(source.nbytes)
    transfer, checksums = write(source, new, fallbacks)
    if source.checksums_first:
        new.write_at(memoryview(source.head(checksums)), 0)
    return transfer, checksums


def write_by_backend(
    source: Source, new: NewFile, fallbacks: list[Fallback], *, backend: BackendChoice, durable: bool
) -> tuple[Transfer, Sequence[int]]:
    """Write the contents of a new file by the chosen backend, or by the next one that can. Syncs nothing.

    Args:
        source: the contents.
        new: the file, which is empty; its space is reserved.
        fallbacks: backends that could not be used are added here.
        backend: the choice.
        durable: whether the caller syncs the file afterwards.

    Returns:
        The transfer, whose time the caller reports, and the CRC32 of each storage's payload.

    Raises:
        OSError: no backend could write the file.
        StateChangedError: a storage was resized meanwhile.
    """
    try:
        transfer = Transfer.of_file(
            backend,
            os.path.dirname(new.path),
            source.nbytes,
            Context("write", source.device, warm=not durable),
            registry.names,
            learn=durable and not source.throttled,  # an unsynced write ends in the page cache
            can=partial(can_write, source=source),
        )
        checksums = transfer.run(lambda one: one.write(source, new.fd), partial(record_fallback, fallbacks))
    except BackendUnavailableError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return transfer, checksums
