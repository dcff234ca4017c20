"""Files that torch wrote before 1.6, for what reads tensor by tensor: they are written anew, as zip archives."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from fastensor.backends.fallback import Fallback, announce
from fastensor.backends.torch import file_for_torch
from fastensor.checkpoint.catalog import Catalog, read_catalog
from fastensor.checkpoint.opened import LocalFile, OpenedFile, container_of
from fastensor.checkpoint.request import LoadRequest
from fastensor.checkpoint.torch_file import load_legacy
from fastensor.files import posix
from fastensor.files.os_errors import write_errors
from fastensor.stitch.source import values_kept
from fastensor.stitch.torch_zip import write_values


def read_catalog_of_any(file: OpenedFile, stack: ExitStack, *, verify: bool) -> tuple[OpenedFile, Catalog]:
    """What a checkpoint holds, and the file that has it: the checkpoint itself, or, if torch wrote it before 1.6, a
    nameless copy in ``$TMPDIR``.

    To make the copy, torch's restricted unpickler (``weights_only=True``) loads the file into memory for a while.

    Args:
        file: the checkpoint.
        stack: closes the copy, which then is gone.
        verify: whether to compare the header or the pickle with its checksum.

    Raises:
        UnsafeCheckpointError: the restricted unpickler refuses the file.
        CheckpointWriteError: there is no room for the copy.
        Exception: as :func:`~fastensor.checkpoint.catalog.read_catalog`.
    """
    if container_of(file) != "legacy":
        return file, read_catalog(file, verify=verify)
    why = Fallback("reading tensor by tensor", f"{file.where} is written anew in $TMPDIR: torch wrote it before 1.6")
    announce(why.backend, why.reason)
    with values_kept():
        loaded = load_legacy(file, LoadRequest("cpu", weights_only=True, checked=verify))
    copy = stack.enter_context(tempfile.TemporaryFile(prefix="fastensor-"))  # noqa: SIM115  # the stack closes it
    what = "writing a copy to $TMPDIR, as a zip archive, failed"
    with write_errors(file.where, what), file_for_torch(partial(posix.write_fully, copy.fileno())) as written:
        write_values(loaded.result, written)
    found = LocalFile(copy.fileno(), file.where, copied=why)
    return found, replace(read_catalog(found, verify=verify), checked=loaded.verified)
