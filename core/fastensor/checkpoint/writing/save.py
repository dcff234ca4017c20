"""``fastensor.save``: plan the file, then write it in a transaction."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

import torch

from fastensor.backends import registry
from fastensor.backends.registry import Fallback, record_fallback
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save_transaction import (
    ByTorch,
    Planner,
    SaveTransaction,
    ShareOrLink,
    Writer,
    check_share_unchanged,
)
from fastensor.errors import LayoutError
from fastensor.files.arguments import check_flags, checks_keywords, did_you_mean
from fastensor.select.transfer import BackendChoice
from fastensor.stitch import safetensors, torch_zip  # here, since a signal handler may interrupt a later import
from fastensor.stitch.signatures import is_safetensors_name
from fastensor.stitch.source import Plan

if TYPE_CHECKING:
    from fastensor.checkpoint.progress import Progress
else:
    Progress = Any  # for get_type_hints; the module is imported when progress is reported

DEFAULT_PROTOCOL = 2
"""The pickle protocol that ``torch.save`` uses."""
SavedContainer: TypeAlias = Literal["torch", "safetensors"]


@checks_keywords
def save(
    obj: object,
    path: Location,
    *,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    container: SavedContainer | None = None,
    backend: BackendChoice = registry.AUTO,
    durable: bool = True,
    follow_symlinks: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    share_unchanged: ShareOrLink = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Save an object as ``torch.save`` does, atomically, durably, with checksums, at the speed of the disk.

    The file is the one that ``torch.save`` would have written, or ``safetensors.torch.save_file`` for a name that ends
    in ``.safetensors`` (see ``FORMAT.md``): plain ``torch.load`` and ``safetensors`` read it.

    Args:
        obj: anything that ``torch.save`` takes. The object is pickled exactly once, unless the report says that this
            torch lays out files in a way that Fastensor does not know, and that torch wrote the file. For safetensors,
            a dict of dense, contiguous tensors that share no memory. The tensors are borrowed: they must not change
            until this returns. CUDA work that was queued on the current streams is waited for.
        path: the file to create or replace: a path, whose directory must exist and which is taken as ``torch.save``
            takes it (``~`` is a name like any other), or a URL that ``fsspec`` knows; or an open binary file, which is
            written from its position on. A new file's mode follows the umask, and ACLs of the directory. A replaced
            file's owner, mode, ACLs, SELinux label and ``user.*`` attributes are kept; other hard links to it keep the
            old contents. The disk needs room for both files at a time.
            Some files are written in place, from front to back, as by ``torch.save``: then the report says that the
            save was not ``atomic``. A save that is killed leaves a file that is cut off, which every reader notices;
            after a power failure any part may be missing, which the checksums show. Written in place are pipes, devices
            and open files given by their descriptors (``/dev/fd/3``); empty files, in which there is nothing to lose,
            so that programs that have the file open find the checkpoint in it (``tempfile.NamedTemporaryFile``); and,
            with a warning in the log, files whose place, owner or rights a new file cannot have: a file that is mounted
            by itself, a file in a directory that may not be written, a file of another user. A file that may not be
            written is not replaced, and one that has contents and other hard links is not written in place.
        metadata: texts for the ``__metadata__`` of a safetensors file.
        checksums: whether a safetensors file carries CRC32s, in an additional entry of ``__metadata__`` that other
            readers ignore. As some of them refuse metadata that name no format, ``{"format": "pt"}`` is added then,
            unless ``metadata`` name one. Without checksums the file is byte for byte that of ``safetensors``. Files of
            torch always carry CRC32s.
        container: ``"torch"`` or ``"safetensors"``; None decides by the name.
        backend: ``"auto"`` for the backend that size and circumstances recommend, until another one was measured to be
            faster for such files on this machine; the name of a backend; or a :class:`~fastensor.Selector` that
            chooses. A backend that cannot write this file, or not on this machine, is replaced by another one; the
            report says which and why.
        durable: sync file and directory, so that a power failure after the return does not undo the save. Without
            ``durable`` the replacement is still atomic for every process on this machine. The durability of a file that
            is not local is up to its filesystem, and a file in memory (tmpfs) is lost: then the report says False.
        follow_symlinks: whether a symlink's target is replaced, or the link itself by a file.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.
        share_unchanged: whether tensors that have not changed since this process has saved them last are not written
            again: on XFS, btrfs and bcachefs, the new file shares their blocks with the old one, if that is still as it
            was written. Other filesystems are not affected. A tensor may only be shared if its storage is the same
            object and torch counts no change of it (``Tensor._version``). Since nobody counts what is written through
            ``.data``, or by other libraries, the tensor is compared with the CRC32 in the old file, which reads its
            bytes once. ``"trust"`` compares only one in sixteen bytes, others each time, and tensors of which torch has
            counted nothing yet (``.data``); it is for programs that write no tensor in such a way. ``"link"`` is for
            safetensors, on local filesystems with hard links: a file in which no tensor has changed at all is a hard
            link to the earlier one, others are as with True. :func:`fastensor.save_sharded` says what that is for.
            False writes everything.
        progress: called after every few MiB with the bytes that are on their way to the disk and the bytes of the file.
            The sync comes after that. What it raises ends the save, and the old file is kept as after any failure.

    Returns:
        What was done, and how long it took.

    Raises:
        CheckpointWriteError: the operating system or the remote filesystem refused an operation. The old file is still
            at ``path``, unless the message says that the new file is in place but may not survive a power failure. An
            open file, or a file that is written in place, holds a part of the new contents.
        StateChangedError: a storage was resized meanwhile; or with ``share_unchanged="trust"``, a tensor was changed
            and torch has not counted that. The old file is still at ``path``, unless it is written in place.
        UnsupportedContentError: a safetensors file cannot hold the object.
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        UnknownBackendError: no backend has that name.
        Exception: whatever pickling the object raises.

    May be called from several threads at once, and by signal handlers and callbacks. One that interrupts a save waits
    for nothing, and saves in a simpler way: without threads, through the page cache. What it has interrupted goes on
    afterwards; only asynchronous saves to the same path are dropped. Two saves to one path at a time leave one of both
    files, whole: that of the interrupted save, say. A file that is being written in place is locked, and refuses the
    second save. A ``torch.save`` that was wrapped or mocked is called once, and writes the file. So does torch's own
    under ``torch.serialization.skip_data``: then the file has no values.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> report = fastensor.save({"weight": torch.ones(2, 3)}, path)
    >>> report.nbytes == os.path.getsize(path), report.atomic
    (True, True)
    >>> torch.load(path)["weight"].shape
    torch.Size([2, 3])
    """
    settings = SaveSettings(
        metadata, checksums, container, backend, durable, follow_symlinks, pickle_module, pickle_protocol,
        share_unchanged,
    )  # fmt: skip
    transaction, plan = settings.prepare(obj, path)
    if progress is None:
        return transaction.run(plan)
    from fastensor.checkpoint.progress import reporting  # few programs want to know

    with reporting(progress) as report:
        return transaction.run(_watched(plan, report))


def _watched(planner: Planner, progress: Progress) -> Planner:
    """A planner of the same file, whose writing is reported."""

    def plan(fallbacks: list[Fallback]) -> Plan | ByTorch:
        planned = planner(fallbacks)
        if isinstance(planned, ByTorch):
            return planned
        return replace(planned, progress=lambda done: progress(done, planned.nbytes))

    return plan


class SaveOptions(TypedDict, total=False):
    """The keywords of :func:`fastensor.save`."""

    metadata: Mapping[str, str] | None
    checksums: bool
    container: SavedContainer | None
    backend: BackendChoice
    durable: bool
    follow_symlinks: bool
    pickle_module: Any
    pickle_protocol: int
    share_unchanged: ShareOrLink


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """The keywords of :func:`save`."""

    metadata: Mapping[str, str] | None = None
    checksums: bool = True
    container: SavedContainer | None = None
    backend: BackendChoice = registry.AUTO
    durable: bool = True
    follow_symlinks: bool = True
    pickle_module: Any = pickle
    pickle_protocol: int = DEFAULT_PROTOCOL
    share_unchanged: ShareOrLink = True

    def __post_init__(self) -> None:
        check_flags(checksums=self.checksums, durable=self.durable, follow_symlinks=self.follow_symlinks)
        check_share_unchanged(self.share_unchanged, "link")

    def prepare(
        self, obj: object, path: Location, *, write_shared: Writer | None = None
    ) -> tuple[SaveTransaction, Planner]:
        """A transaction for the target, and the planner of the file. Nothing is written yet.

        Args:
            obj, path: as for :func:`save`.
            write_shared: as for :class:`~fastensor.checkpoint.writing.save_transaction.SaveTransaction`.

        Raises:
            Exception: as :func:`save`, for every wrong argument but the object.
        """
        planner = self.planner(obj, path)
        transaction = SaveTransaction(
            path,
            backend=self.backend,
            durable=self.durable,
            follow_symlinks=self.follow_symlinks,
            write_shared=write_shared,
            share_unchanged=self.share_unchanged,
        )
        return transaction, planner

    def planner(self, obj: object, path: Location) -> Planner:
        """The planner of the file.

        Raises:
            ValueError: arguments contradict each other.
        """
        kind = choose_container(self.container, name_of(path), self.metadata, self.checksums)
        if self.share_unchanged == "link" and (kind == "torch" or not self.checksums):
            raise ValueError(
                f"share_unchanged='link' is for safetensors files with checksums, found {kind!r} and "
                f"checksums={self.checksums}: choose True"
            )
        return self._torch_planner(obj) if kind == "torch" else lambda fallbacks: self.plan(obj, kind)

    def _torch_planner(self, obj: object) -> Planner:
        def plan(fallbacks: list[Fallback]) -> Plan | ByTorch:
            try:
                if replaced := torch_zip.replaced_save():  # a wrapper or mock, which is to be called
                    raise LayoutError(f"torch.save is {replaced}, which is called once, and writes the file")
                return self.plan(obj, "torch")
            except LayoutError as error:
                record_fallback(fallbacks, "stitching", str(error))
                pickling = {"pickle_module": self.pickle_module, "pickle_protocol": self.pickle_protocol}
                return ByTorch(lambda file: torch.save(obj, file, **pickling))

        return plan

    def plan(self, obj: object, kind: SavedContainer) -> Plan:
        """The layout of the file of an object.

        Raises:
            LayoutError: torch writes files otherwise than is known here.
            Exception: as :func:`save`, for the object.
        """
        if kind == "torch":
            return torch_zip.plan(obj, pickle_module=self.pickle_module, pickle_protocol=self.pickle_protocol)
        return safetensors.plan(obj, metadata=self.metadata, checksums=self.checksums)


def choose_container(
    wanted: SavedContainer | None, name: str, metadata: Mapping[str, str] | None, checksums: bool
) -> SavedContainer:
    """The container to write.

    Raises:
        ValueError: there is no such container; or metadata, or no checksums, were asked for a file of torch.
    """
    if wanted not in (None, "torch", "safetensors"):
        hint = did_you_mean(str(wanted), get_args(SavedContainer))
        raise ValueError(f"container is 'torch', 'safetensors' or None, found {wanted!r}{hint}")
    kind = wanted or ("safetensors" if is_safetensors_name(name) else "torch")
    if kind == "torch" and (metadata is not None or not checksums):
        raise ValueError(f"metadata and checksums=False are for safetensors, but {name} is to be a file of torch's")
    return kind
