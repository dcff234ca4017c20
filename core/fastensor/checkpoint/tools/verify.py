"""``fastensor.verify``: comparing a whole checkpoint with its checksums, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from fastensor.backends import registry
from fastensor.checkpoint.containers import container_at
from fastensor.checkpoint.directories import BESIDE_SHARDS, metadata_names, nbytes_at
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.models.sharded import check_holds, files_of
from fastensor.checkpoint.progress import Progress, reporting
from fastensor.checkpoint.reading.opened import opened
from fastensor.checkpoint.tools.catalog import read_catalog
from fastensor.checkpoint.tools.comparing import FileToVerify, VerifyReport, compare_files, verify_opened
from fastensor.checkpoint.tools.folders import FolderEntry, entries_at, folder_at, main_entry, members_of, name_in
from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.select.transfer import BackendChoice, check_choice


@checks_keywords
def verify(path: Location, *, backend: BackendChoice = registry.AUTO, progress: Progress | None = None) -> VerifyReport:
    """Read a checkpoint and compare all of it with its checksums, in bounded memory and without rebuilding anything.

    Args:
        path: a file of torch or of safetensors, written by Fastensor or not, as for :func:`fastensor.load`; or
            ``*.index.json`` of a model in several files; or a folder of this machine, of which all is read, with its
            folders: models, states of Accelerate, checkpoints of a Trainer, checkpoints of
            ``torch.distributed.checkpoint``; or the directory of one of these at a URL. Links to files are
            followed, links to directories are not.
        backend: as for :func:`fastensor.load`.
        progress: called after every few MiB with the bytes done and the bytes to do.

    Returns:
        How much was compared. If ``complete`` is False, parts of the file carry no checksum: of these, only the
        structure is known to be intact, and of a legacy file not even that. It is False, too, if a file does not say
        whether it holds the tensors that the index of its model expects in it: one that can only be loaded whole, or
        has a dtype that torch lacks. ``not_compared`` names the files of a folder of which that is true, and all that
        are no checkpoints. A file that is intact is not safe for that reason: ``code`` lists what it names beyond what
        ``weights_only=True`` allows.

    Raises:
        FileNotFoundError: there is no such file, or one of the files of a model is missing.
        DamagedCheckpointError: parts do not match; the error's ``report.damage`` lists all of them. All files of a
            folder are read before any error is raised. Notes of the error (``__notes__``) say which other files could
            not be verified, and why. Damage is raised first, then what is wrong with the first file.
        CorruptCheckpointError: the structure of a file is damaged, or it lacks a tensor that the index of its model
            expects in it.
        NotACheckpointError: the file is something else than a checkpoint; or one in a folder is, whose name ends in
            ``.ckpt``, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``, and which is no pickle either.
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes; or there is
            no checkpoint in the folder.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = fastensor.save({"weight": torch.ones(5)}, path)
    >>> report = fastensor.verify(path)
    >>> report.complete, report.compared
    (True, 2)
    """
    check_choice(backend)
    with reporting(progress) as tell:
        entries = entries_at(path)
        folder = folder_at(path)
        tasks = [
            FileToVerify(
                name_in(folder, member.path),
                nbytes_at(member.path) if member.kind == "checkpoint" else 0,
                partial(verify_member, member, backend),
            )
            for member in _members_of(entries)
        ]
        return compare_files(tasks, *_whole(path, entries), tell)


def members_at(path: Location) -> list[FolderEntry]:
    """The files that :func:`verify` reads one by one, and those that it names only."""
    return _members_of(entries_at(path))


def _members_of(entries: Sequence[FolderEntry]) -> list[FolderEntry]:
    """The files of entries, but for those that are read with a distributed checkpoint."""
    if len(entries) == 1:
        return members_of(entries)
    beside = {Path(str(entry.path)) / BESIDE_SHARDS for entry in entries if metadata_names(entry.path)}
    return members_of([entry for entry in entries if entry.path not in beside])


def _whole(path: Location, entries: Sequence[FolderEntry]) -> tuple[str, Literal["dcp", "huggingface", "folder"]]:
    """The path and the container of all entries together."""
    main = main_entry(path, entries)
    if main is not None and main.kind == "index":
        return str(main.path), "huggingface"
    return name_of(path), "dcp" if metadata_names(path) else "folder"


def verify_member(member: FolderEntry, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for one of :func:`members_at`. Of an index, only that it is one is known."""
    if member.kind == "checkpoint":
        return verify_part(member.path, member.expected, backend, progress)
    where = str(member.path)
    if member.kind == "index":
        files_of(Path(where))
    uncompared = 0 if member.kind in ("index", "text", "link") else 1
    return VerifyReport(where, member.kind, member.nbytes, 0, 0, uncompared, 0.0)


def verify_part(path: Location, expected: Set[str] | None, backend: BackendChoice, progress: Progress) -> VerifyReport:
    """:func:`verify` for a file or a distributed checkpoint.

    Args:
        path: of one of :func:`members_at`.
        expected: the names of tensors that the file must hold, if not None; a distributed checkpoint is no such file.
            If the file does not say what it holds, the report is not complete.
        backend, progress: as there.
    """
    if expected is None and (container := container_at(path)):
        return container.verify(path, backend, progress)
    with opened(path) as file:
        report = verify_opened(file, backend, progress)
        if expected is not None:
            try:
                check_holds(file.where, read_catalog(file, verify=False).tensors, expected)
            except UnsupportedContentError:  # the file does not say what it holds
                report = replace(report, uncompared=max(report.uncompared, 1))
        return report
