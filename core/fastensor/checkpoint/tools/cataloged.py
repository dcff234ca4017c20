"""The files of a checkpoint, open, with what each holds: one, or those of a model in several files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fastensor.backends.registry import Fallback, announce
from fastensor.checkpoint.containers import container_in, container_of
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.models.sharded import check_holds
from fastensor.checkpoint.reading.opened import LocalFile, OpenedFile, opened
from fastensor.checkpoint.reading.request import LoadRequest
from fastensor.checkpoint.tools.catalog import Catalog, read_catalog
from fastensor.files import posix
from fastensor.files.os_errors import write_errors
from fastensor.stitch.plain_tensors import values_kept


class CatalogedFile(NamedTuple):
    """An open file of a checkpoint, and what it holds."""

    location: Location
    file: OpenedFile
    catalog: Catalog
    expected: Set[str] | None
    """The names of the tensors that count, because an index expects them; None for all."""

    def counts(self, name: str) -> bool:
        """True if a tensor of the file is one of the checkpoint."""
        return self.expected is None or name in self.expected


def open_files(
    files: Mapping[Location, Set[str] | None], stack: ExitStack, *, verify: bool, rewrite: bool = False
) -> list[CatalogedFile]:
    """Open the files of a checkpoint. Only directories are read.

    Args:
        files: the files, and the names of the tensors that an index expects in each.
        stack: closes them.
        verify: whether to compare headers and pickles with their checksums.
        rewrite: whether files that torch wrote before 1.6 are written anew, as nameless zip archives in ``$TMPDIR``.
            Torch's restricted unpickler (``weights_only=True``) loads each into memory for a while.

    Raises:
        UnsafeCheckpointError: the restricted unpickler refuses a file.
        CheckpointWriteError: there is no room for a copy.
        CorruptCheckpointError: a file is damaged, or lacks a tensor that its index expects in it.
        Exception: as :func:`~fastensor.checkpoint.tools.catalog.read_catalog`.
    """
    found = []
    for location, expected in files.items():
        file = stack.enter_context(opened(location))
        if rewrite and container_of(file) == "legacy":
            file, catalog = _rewritten(file, stack, verify=verify)
        else:
            catalog = read_catalog(file, verify=verify)
        if expected is not None:
            check_holds(file.where, catalog.tensors, expected)
        found.append(CatalogedFile(location, file, catalog, expected))
    return found


def _rewritten(file: OpenedFile, stack: ExitStack, *, verify: bool) -> tuple[OpenedFile, Catalog]:
    from fastensor.backends.torch import file_for_torch  # few files are that old
    from fastensor.stitch.torch_zip import write_values

    why = Fallback("reading tensor by tensor", f"{file.where} is written anew in $TMPDIR: torch wrote it before 1.6")
    announce(why.backend, why.reason)
    with values_kept():
        loaded = container_in(file).load(file, LoadRequest([], "cpu", weights_only=True, checked=verify))
    copy = stack.enter_context(tempfile.TemporaryFile(prefix="fastensor-"))  # noqa: SIM115  # the stack closes it
    what = "writing a copy to $TMPDIR, as a zip archive, failed"
    with write_errors(file.where, what), file_for_torch(partial(posix.write_fully, copy.fileno())) as written:
        write_values(loaded.result, written)
    found = LocalFile(copy.fileno(), file.where, copied=why)
    return found, replace(read_catalog(found, verify=verify), checked=loaded.verified)
